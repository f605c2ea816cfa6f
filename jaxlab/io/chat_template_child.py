"""The child process in which a stranger's chat template runs; started by `chat_template.py`.

Run as a script by `python -I`, it imports jinja2 and nothing of ours. stdin: one JSON object with
template, conversations, variables and the limits; stdout: {"texts": [...]} or {"error", "index"}.
The sandbox keeps a template from Python's internals, the limits from endless work.
Source of the environment's settings: transformers 5.24 `utils/chat_template_utils.py`.
"""

import datetime
import json
import resource
import sys


def limit(cpu_seconds: int, memory_bytes: int) -> None:
  """Ends this process after cpu_seconds, and refuses memory beyond memory_bytes and any file."""
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
  resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
  if sys.platform == "linux":  # macOS refuses to limit the address space
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def environment():
  """The jinja2 environment in which transformers renders templates."""
  import jinja2.ext
  import jinja2.nodes
  import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant says; the text stays."""

    tags = {"generation"}

    def parse(self, parser):
      line = next(parser.stream).lineno
      body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
      return jinja2.nodes.Scope(body, lineno=line)

  class Namespace(jinja2.utils.Namespace):
    """jinja2's, without names that could reach Python's internals."""

    def __init__(*args, **kwargs):  # no named self: a template may write namespace(self=1)
      for name in dict(*args[1:], **kwargs):
        check_name(name)
      jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name, value):
      check_name(name)
      super().__setitem__(name, value)

  def check_name(name):
    if isinstance(name, str) and name.startswith("_"):
      raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name!r}")

  class Dict:
    """`dict` for templates: callable, and nothing else of the type can be reached."""

    def __call__(self, *args, **kwargs):
      return dict(*args, **kwargs)

    def fromkeys(self, *args):
      return dict.fromkeys(*args)

  def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)

  def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
      x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

  result = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
  )
  result.filters["tojson"] = tojson
  result.globals.update(
    raise_exception=raise_exception,
    strftime_now=lambda form: datetime.datetime.now().strftime(form),
    dict=Dict(),
    namespace=Namespace,
  )
  return result


def render(request: dict) -> dict:
  """Renders every conversation; the first failure ends the batch with its index."""
  texts: list[str] = []
  room = request["max_chars"]
  try:
    template = environment().from_string(request["template"])
    for messages in request["conversations"]:
      text = template.render(messages=messages, **request["variables"])
      room -= len(text)
      if room < 0:
        raise ValueError(f"the texts are longer than {request['max_chars']} characters")
      texts.append(text)
  except Exception as error:  # whatever a template can raise is the answer to our caller
    text = f"{type(error).__name__}: {error}".rstrip(": .")
    return {"error": text[:500], "index": len(texts)}
  return {"texts": texts}


def main() -> None:
  cpu_seconds, memory_bytes, packages = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
  limit(cpu_seconds, memory_bytes)
  sys.path.append(packages)  # where the parent found jinja2; -I may have hidden it
  answer = render(json.loads(sys.stdin.buffer.read()))
  sys.stdout.buffer.write(json.dumps(answer).encode("ascii"))


if __name__ == "__main__":
  main()
