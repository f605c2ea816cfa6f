"""What every verb shares: four flags, the workdir, exit codes, one line for a user's mistake.

A verb is a file beside this one: a docstring (its --help), `FLAGS = common.define_flags()` and

    def main(run):
      config = registry.get("RLConfig")()      # 1. build everything that gin configures
      run.start()                              # 2. refuse what does not fit; write config.gin
      return {"accuracy": ...}                 # 3. the figures of result.json

    if __name__ == "__main__":
      common.run_verb(main, FLAGS)

A verb that takes words without a flag says so by `ARGUMENTS = "DIR"`, given to run_verb as well.
"""

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import logging as python_logging
import math
import os
import pathlib
import platform
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from absl import flags, logging

from jaxlab import redaction
from launch import registry

ROOT = pathlib.Path(__file__).resolve().parent.parent
OURS = tuple(f"{ROOT / name}{os.sep}" for name in ("jaxlab", "pallas_kernels", "launch"))
VERSIONED = ("jaxlab", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# What the file system says when it is the user's to mend: no file, no right, no space.
USERS_ERRNO = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST}
USERS_ERRNO |= {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


class Run:
  """One start of a verb: where it works and what it was told.

  Attributes:
    verb: "rl", "quantize", ...
    workdir: folder of everything it writes; held by a lock while the process lives.
    seed: the one source of randomness.
    arguments: what was given without a flag (`jaxlab doctor DIR`).
    flags: the verb's own flags, by attribute.
    leads: whether this process writes the files; False in all but one of several processes.
  """

  def __init__(self, verb: str, values: flags.FlagValues, arguments: list[str]):
    self.leads = True
    self.verb = verb
    self.flags = values
    self.arguments = tuple(arguments)
    self.seed: int = values.seed
    self.workdir = pathlib.Path(values.workdir or default_workdir(verb, values.gin_file))
    self._started = False

  def start(self, *, resumes: bool = True, reads_all: bool = True) -> None:
    """Call when all is built: checks bindings and workdir, writes config.gin. Once is enough.

    Args:
      resumes: the workdir belongs to one config; False for a verb whose runs are independent.
      reads_all: a binding without effect is an error; False for a verb that reads a part of other
        verbs' recipes.
    Raises: ValueError for a binding without effect, or for a workdir of another config or verb.
    """
    if self._started:
      return
    if reads_all:
      registry.check_unused()
    config = redaction.redact(f"# verb = {self.verb}\n# seed = {self.seed}\n")
    config += redaction.redact(registry.operative_config())
    path = self.workdir / "config.gin"
    if path.exists():
      both = (path.read_text(encoding="utf-8"), config)
      if not resumes:  # its own runs may differ; the files of another verb's run it leaves alone
        both = (text.partition("\n")[0] for text in both)
      refuse_other_config(path, *both)
    if self.leads:
      write_atomically(path, config)
    self._started = True


def define_flags() -> flags.FlagValues:
  """The four flags of every verb, apart from absl's global ones; a verb adds its own few."""
  values = flags.FlagValues()
  flags.DEFINE_multi_string("gin_file", [], "A gin file; repeat it, later ones win.", values)
  flags.DEFINE_multi_string("gin_bindings", [], "One more line of gin; repeat it.", values)
  flags.DEFINE_string("workdir", None, "Where to write; default runs/<config name>.", values)
  flags.DEFINE_integer("seed", 0, "The one source of randomness.", flag_values=values)
  return values


def run_verb(
  main: Callable[[Run], dict | None],
  verb_flags: flags.FlagValues,
  argv: list[str] | None = None,
  arguments: str = "",
  connect: Callable[[], bool] | None = None,
) -> NoReturn:
  """Runs a verb and exits: 0 only on success, 2 on a user's mistake, 128 + signal if interrupted.

  Args:
    main: gets the `Run`; returns the figures of result.json, or None for no such file.
    verb_flags: from `define_flags`.
    argv: program name and what follows; the process's own when None.
    arguments: what may be given without a flag, as --help shows it ("DIR"); nothing when empty.
    connect: of a verb that may run as several processes: connects them before anything else and
      says whether this one writes the files (`parallel.mesh.connect_processes`).
  """
  argv = list(sys.argv if argv is None else argv)
  sys.exit(execute(main, verb_flags, argv, arguments, connect))


def execute(
  main: Callable, verb_flags: flags.FlagValues, argv: list[str], arguments="", connect=None
) -> int:
  """`run_verb` that returns the exit code. Errors that are ours keep their traceback."""
  verb = pathlib.Path(main.__code__.co_filename).stem
  if {"--help", "-help", "-h", "--helpfull"} & set(argv[1:]):
    print(help_text(verb, sys.modules[main.__module__].__doc__, verb_flags, arguments))
    return 0
  set_up_logging()
  try:
    run = Run(verb, verb_flags, verb_flags_from(argv, verb_flags, arguments))
    with _leave_on_signals():
      run.leads = connect is None or connect()
      _main_in_workdir(main, run, argv)
  except SystemExit as leaving:
    return int(leaving.code or 0)
  except BrokenPipeError:  # `jaxlab doctor DIR | head`
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
  except Exception as error:
    if isinstance(code := getattr(error, "exit_code", None), int):
      sys.stderr.write(f"{error}\n")  # train.signals.Interrupted: all is saved
      return code
    line = users_mistake(error)
    if line is None or os.environ.get("JAXLAB_TRACEBACK"):
      sys.stderr.write(redaction.redact(traceback.format_exc()))
    if line is None:
      return 1
    sys.stderr.write(redaction.redact(f"error: {' '.join(line.split())}\n"))
    return 2
  return 0


@contextlib.contextmanager
def _leave_on_signals() -> Iterator[None]:
  """SIGTERM and SIGINT end a verb with 128 + signal; a training loop takes over (`signals`)."""

  def leave(number, frame):
    logging.info("%s: leaving.", signal.Signals(number).name)
    sys.exit(128 + number)

  before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _main_in_workdir(main: Callable, run: Run, argv: list[str]) -> None:
  """Takes the workdir, parses gin, calls `main`, writes result.json.

  Several processes of one run share the workdir: the one that writes holds it for all.
  """
  began = time.time()
  registry.parse(run.flags.gin_file, run.flags.gin_bindings)
  with hold(run.workdir) if run.leads else contextlib.nullcontext():
    logging.info("%s in %s", run.verb, run.workdir)
    result = main(run)
    run.start()
    if result is not None and run.leads:
      command = f"python -m launch.{run.verb} {shlex.join(argv[1:])}".strip()
      about = {"seconds": round(time.time() - began, 3), "command": command}
      write_result(run.workdir, {**about, **result, "versions": versions()})


# --- flags and help


def verb_flags_from(argv: list[str], values: flags.FlagValues, arguments: str) -> list[str]:
  """Parses `argv` into `values`; returns what stands without a flag.

  Raises: ValueError for an unknown flag (with the nearest), a bad value, a word too many.
  """
  flags.FLAGS.mark_as_parsed()  # absl's logging and grain read their own defaults
  values.set_gnu_getopt(True)  # flags may follow arguments
  try:
    rest = values(argv)[1:]
  except flags.Error as error:
    raise ValueError(f"{error} (--help lists the flags)") from None
  if rest and not arguments:
    raise ValueError(f"a flag must start with --; got {rest[0]!r}. --help lists the flags.")
  return rest


def help_text(verb: str, doc: str, values: flags.FlagValues, arguments: str) -> str:
  """One screen: what the verb does, in its own words, and its flags."""
  lines = [f"usage: jaxlab {verb} {arguments} [--flag=value ...]".replace("  ", " "), ""]
  lines += [doc.strip(), "", "Flags:"]
  for name in values:
    default = f" [{values[name].default}]" if values[name].default not in (None, [], "") else ""
    start = f"  --{name}".ljust(22)
    lines += textwrap.wrap(f"{start}{values[name].help}{default}", 80, subsequent_indent=" " * 22)
  return "\n".join(lines)


def default_workdir(verb: str, gin_files: list[str]) -> str:
  """runs/<config name>: the last gin file's path inside configs/, without its suffix.

  A plan reads another verb's recipe, whose run has that folder: it goes to runs/plan/<config name>.
  """
  if not gin_files:
    return f"runs/{verb}"
  path = pathlib.PurePath(gin_files[-1]).with_suffix("")
  inside = path.parts[path.parts.index("configs") + 1 :] if "configs" in path.parts else ()
  own = ["plan"] if verb == "plan" else []
  return str(pathlib.PurePath("runs", *own, *(inside or [path.name])))


# --- the workdir


@contextlib.contextmanager
def hold(workdir: pathlib.Path) -> Iterator[None]:
  """Holds a workdir against a second writer; the kernel lets it go with the process, even killed.

  Raises: ValueError naming the process that holds it.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  with (workdir / ".lock").open("a+", encoding="utf-8") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise ValueError(
        f"--workdir: one run may write {workdir} at a time; got {file.read() or 'another'} there "
        "already. Wait for it, or choose another --workdir."
      ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {platform.node()}")
    file.flush()
    yield


def refuse_other_config(path: pathlib.Path, before: str, now: str) -> None:
  """Raises ValueError naming the bindings in which two config.gin texts differ."""
  old, new = (dict(_settings(text)) for text in (before, now))
  different = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
  if different:
    shown = [f"{k} was {old.get(k, 'unset')}, is {new.get(k, 'unset')}" for k in different[:4]]
    more = f" and {len(different) - 4} more" if len(different) > 4 else ""
    raise ValueError(
      f"--workdir: {path.parent} holds another run: {'; '.join(shown)}{more}. "
      "Choose another --workdir, or give the old values to resume."
    )


def _settings(config: str) -> list[tuple[str, str]]:
  lines = [line.removeprefix("# ") for line in config.splitlines()]
  return [(key, value) for key, _, value in (line.partition(" = ") for line in lines)]


def write_result(workdir: pathlib.Path, result: Mapping[str, Any]) -> None:
  """Writes result.json whole or not at all. A figure that is not finite becomes null.

  Args:
    result: figures by name; an estimate is {value, ci_low, ci_high, n}. Arrays, numpy scalars and
      paths become plain values.
  """
  text = json.dumps(_plain(result), indent=2, allow_nan=False)
  write_atomically(pathlib.Path(workdir) / "result.json", redaction.redact(text) + "\n")


def _plain(value: Any) -> Any:
  """`value` in JSON's own types."""
  if isinstance(value, Mapping):
    return {str(k): _plain(v) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if hasattr(value, "tolist"):  # numpy and jax
    return _plain(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def write_atomically(path: pathlib.Path, text: str) -> None:
  """Replaces a file by `text` so that a reader, or a power cut, finds the old or the new one."""
  beside = path.with_name(f".{path.name}.{os.getpid()}")
  with beside.open("w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(beside, path)
  folder = os.open(path.parent, os.O_RDONLY)
  os.fsync(folder)
  os.close(folder)


def versions() -> dict[str, str]:
  """Python and the packages that decide the numbers, as installed."""
  found = {"python": platform.python_version()}
  for name in VERSIONED:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # a clone that was not installed
      found[name] = "not installed"
  return found


# --- errors and logs


def users_mistake(error: BaseException) -> str | None:
  """The line to show for a user's mistake; None for a bug, which keeps its traceback.

  A ValueError is the user's when our own code raised it; one from inside JAX or NumPy is ours.
  """
  if isinstance(error, OSError) and error.errno in USERS_ERRNO:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
  if isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED"):
    return f"out of memory: {error}. Make the batch, the lengths or the model smaller."
  if isinstance(error, (ValueError, NotImplementedError)):
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if frames and frames[-1].f_code.co_filename.startswith(OURS):
      return str(error)
  return None


def set_up_logging() -> None:
  """absl to stderr in plain, redacted lines: our own from INFO on, others' from WARNING on."""
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  logging.set_stderrthreshold(logging.INFO)
  handler = logging.get_absl_handler()
  handler.setFormatter(redaction.Formatter())
  handler.addFilter(_ours_or_serious)


def _ours_or_serious(record: python_logging.LogRecord) -> bool:
  return record.levelno >= python_logging.WARNING or record.pathname.startswith(OURS)
