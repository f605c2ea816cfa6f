"""`jaxlab VERB ...`, the same as `python -m launch.VERB ...`."""

import ast
import importlib
import pathlib
import sys

from launch import explain


def verbs() -> dict[str, str]:
  """Each verb and the first line of its docstring. A verb is a file here that defines `main`."""
  found = {}
  for path in sorted(pathlib.Path(__file__).parent.glob("[!_]*.py")):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
      found[path.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
  return found


def main() -> None:
  """Hands over to a verb; lists them for --help, and when the first word is not one."""
  verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
  known = verbs()
  if verb in ("--help", "-h", "help"):
    lines = [f"  {name.ljust(10)} {line}" for name, line in known.items()]
    print("\n".join(["usage: jaxlab VERB [--help] [--flag=value ...]", "", *lines]))
    return
  if verb not in known:
    print(f"error: jaxlab: no verb {verb!r}.{explain.nearest(verb, list(known))}", file=sys.stderr)
    sys.exit(2)
  importlib.import_module(f"launch.{verb}").run(sys.argv[1:])


if __name__ == "__main__":
  main()
