"""Gin at the edge: what it gives, and that nothing which gin lets pass stays silent."""

import collections.abc
import dataclasses
import pickle
import typing

import pytest

from launch import binding_text, explain, registry, signatures


@dataclasses.dataclass(frozen=True)
class Inner:
  beta: float = 0.1


@dataclasses.dataclass(frozen=True)
class Outer:
  model: str
  steps: int = 3
  rate: float = 1e-3
  kind: typing.Literal["nvfp4", "mxfp4"] = "nvfp4"
  inner: Inner = Inner()
  shape: tuple[int, ...] = (1, 2)
  last: bool = False
  reward: collections.abc.Callable | None = None

  def __post_init__(self):
    if self.steps < 1:
      raise ValueError(f"Outer: steps must be >= 1; got {self.steps}.")


def shout(text, *, mark: str = "!"):
  if not text:
    raise KeyError("text")
  return text + mark


registry.register(Inner, Outer, shout)
MODEL = "Outer.model = 'm'"


def build(*bindings, files=()):
  """Parses, builds an Outer, and insists that every binding had an effect."""
  registry.parse(list(files), list(bindings))
  outer = registry.get("Outer")()
  registry.check_unused()
  return outer


def error_of(*bindings, files=()) -> str:
  with pytest.raises(ValueError) as caught:
    build(*bindings, files=files)
  assert "\n" not in str(caught.value)
  return str(caught.value)


@pytest.fixture
def gin_file(tmp_path, monkeypatch):
  """Writes a gin file into an empty folder, which becomes the current one; returns its name."""
  monkeypatch.chdir(tmp_path)

  def write(text, name="a.gin"):
    (tmp_path / name).write_text(text)
    return name

  return write


# --- what it gives


def test_an_instance_of_the_very_class_with_scopes_macros_and_references():
  outer = build(
    MODEL, "STEPS = 4", "Outer.steps = %STEPS", "Outer.inner = @small/Inner()",
    "Inner.beta = 9.0", "small/Inner.beta = 2.0", "Outer.reward = @shout",
  )  # fmt: skip
  assert type(outer) is Outer and type(outer.inner) is Inner
  assert outer == Outer("m", steps=4, inner=Inner(2.0), reward=shout)
  assert outer.reward is shout, "a reference without bindings is the object itself"
  assert pickle.loads(pickle.dumps(outer)) == outer


def test_later_files_and_bindings_win_and_a_file_includes_its_neighbours(gin_file):
  base = "Outer.model = 'base'\nOuter.steps = 5\nOuter:\n  rate = 0.5\n  last = True\n"
  gin_file(base, "base.gin")
  top = gin_file("include 'base.gin'\nOuter.steps = 6\n")
  assert build(files=[top]) == Outer("base", steps=6, rate=0.5, last=True)
  assert build("Outer.steps = 7", files=[top]).steps == 7


def test_a_function_takes_its_settings_and_raises_its_own_errors():
  registry.parse([], ["shout.mark = '?'"])
  configured = registry.get("shout")
  registry.check_unused()
  registry.parse([], [])  # nothing of gin is read any more
  assert configured("what") == "what?"
  with pytest.raises(KeyError) as caught:
    configured("")
  assert type(caught.value) is KeyError


def test_the_operative_config_is_complete_and_gives_the_same_again(gin_file):
  scoped = ("Outer.inner = @a/Inner()", "a/Inner.beta = 2.0")
  first = build(MODEL, *scoped, "N = 4", "Outer.steps = %N")
  text = registry.operative_config()
  assert "Outer.kind = 'nvfp4'" in text.splitlines(), "defaults are part of the record"
  assert "Outer.steps = 4" in text.splitlines()
  assert build(files=[gin_file(text)]) == first
  assert registry.operative_config() == text


def test_each_parse_starts_afresh():
  build(MODEL, "Outer.steps = 9")
  assert build(MODEL).steps == 3


# --- what gin would let pass, or would explain badly


@pytest.mark.parametrize(
  "binding, message",
  [
    ("Outer.stepz = 3", "Outer has no argument 'stepz'. Did you mean steps?"),
    ("Outre.steps = 3", "nothing is called 'Outre'. Did you mean Outer?"),
    ("Outer.inner = @Iner()", "nothing is called 'Iner'. Did you mean Inner?"),
    ("Outer.steps = 'x'", "Outer.steps must be int; got 'x'."),
    ("Outer.steps = True", "Outer.steps must be int; got True."),
    ("Outer.steps = 1e3", "Outer.steps must be int; got 1000.0."),
    ("Outer.last = 1", "Outer.last must be bool; got 1."),
    ("Outer.shape = [1, 2]", "Outer.shape must be tuple[int, ...]; got [1, 2]."),
    ("Outer.shape = (1, 'b')", "Outer.shape must be tuple[int, ...]; got (1, 'b')."),
    ("Outer.reward = 'shout'", "Outer.reward must be Callable | None; got 'shout'."),
    (
      "Outer.kind = 'nvfp'",
      "Outer.kind must be 'nvfp4' or 'mxfp4'; got 'nvfp'. Did you mean nvfp4?",
    ),
    ("Outer.steps = %N", "Outer.steps uses the macro %N, which is not defined."),
    ("Outer.last = true", "a value must be Python; got true. Write True."),
    (
      "Outer.kind = nvfp4",
      "a value must be Python; got nvfp4. Write 'nvfp4', with quotes, if it is text.",
    ),
    ("Outer.shape = (1,", "( is opened and never closed."),
    ("Outer.shape = ((1,)", "( is opened and never closed."),
    ('Outer.kind = """x', "a quote is opened and never closed."),
    ("Outer.steps 3", "Couldn't parse statement, expected ':' or '='; got 'Outer.steps 3'."),
    ("import os", "a gin file must not import; got 'os'."),
    ("include 'none.gin'", "include: no such file 'none.gin'."),
    (
      "Outer.steps = %gin.REQUIRED",
      'Outer.steps must be set. Set it in a gin file or by --gin_bindings="Outer.steps = ...".',
    ),
    ("smal/Inner.beta = 1.0", "smal/Inner.beta has no effect: no such scope is in use."),
    ("shout.mark = '?'", "shout.mark has no effect: shout is not used in this run."),
    ("STEPZ = 3", "the macro STEPZ is not used."),
    ("A = %A", "A must not refer to itself."),
  ],
)
def test_one_line_says_where_what_and_what_to_do(gin_file, binding, message):
  assert f"--gin_bindings {binding}: {message}" in error_of(MODEL, binding)
  in_file = error_of(files=[gin_file(f"# header\n{MODEL}\n\n{binding}\n")])
  assert f"a.gin:4: {message}" in in_file


def test_a_misspelt_scope_gets_the_one_in_use():
  message = error_of(MODEL, "Outer.inner = @small/Inner()", "smal/Inner.beta = 1.0")
  assert message.endswith("no such scope is in use. Did you mean small?")


def test_what_a_replaced_binding_led_to_may_stay_unused(gin_file):
  settings = "BETA = 2.0\nOuter.inner = @small/Inner()\nsmall/Inner.beta = %BETA\n"
  gin_file(f"{MODEL}\nOuter.reward = @shout\n{settings}", "base.gin")
  top = gin_file("include 'base.gin'\nOuter.inner = @Inner()\n")
  assert build(files=[top]).inner == Inner()
  assert "%" not in registry.operative_config() and "small" not in registry.operative_config()
  message = error_of("shout.mark = '?'", "Outer.reward = None", "STEPZ = 3", files=[top])
  assert message == "--gin_bindings STEPZ = 3: the macro STEPZ is not used."


def test_an_error_in_an_included_file_is_placed_there(gin_file):
  gin_file("\nOuter.stepz = 3\n", "base.gin")
  assert error_of(files=[gin_file("include 'base.gin'\n")]).startswith("base.gin:2: ")
  gin_file("include 'a.gin'\n", "base.gin")
  assert "must not include itself" in error_of(files=["a.gin"])


def test_a_missing_gin_file_suggests_the_nearest(tmp_path, monkeypatch):
  (tmp_path / "configs" / "toy").mkdir(parents=True)
  (tmp_path / "configs" / "toy" / "small.gin").write_text(MODEL)
  monkeypatch.setattr(binding_text, "PACKAGED", tmp_path)
  assert build(files=["configs/toy/small.gin"]).model == "m", "found from any folder"
  message = error_of(files=["configs/toy/smal.gin"])
  assert message == (
    "--gin_file: no such file 'configs/toy/smal.gin'. Did you mean configs/toy/small.gin?"
  )


def test_a_requirement_that_nothing_sets():
  assert error_of("Outer.steps = 3") == (
    'Outer.model must be set. Set it in a gin file or by --gin_bindings="Outer.model = ...".'
  )


def test_a_config_that_refuses_its_values_says_where_they_were_set():
  assert error_of(MODEL, "Outer.steps = 0") == (
    "Outer: steps must be >= 1; got 0. (steps from --gin_bindings Outer.steps = 0)"
  )


def test_what_the_program_sets_is_not_for_gin():
  registry.parse([], [MODEL])
  with pytest.raises(ValueError, match=r"Outer.model is set by the program. Remove it."):
    registry.get("Outer")(model="other")
  with pytest.raises(ValueError, match=r"Outer.model is set by the program. Remove it."):
    registry.get("Outer")("other")


def test_references_in_a_circle():
  with pytest.raises(ValueError, match="must not refer to themselves"):
    registry.parse([], ["shout.mark = @shout()"])
    registry.get("shout")


def test_two_objects_cannot_share_a_name():
  with pytest.raises(ValueError, match="got a second 'Inner'"):
    registry.register(type("Inner", (), {}))


def test_every_listed_object_exists_and_names_are_unique():
  listed = [path.rpartition(".")[2] for path in registry.CONFIGURABLES]
  assert len(listed) == len(set(listed))
  for name in listed:
    assert callable(registry.get(name))


# --- signatures


@pytest.mark.parametrize(
  "value, hint, expected",
  [
    (1, float, True),
    (True, float, False),
    (None, int | None, True),
    ("a", str | int, True),
    ([1.0], list[int], False),
    ({"a": 1}, dict[str, int], True),
    ({"a": "b"}, dict[str, int], False),
    ((1, "a"), tuple[int, str], True),
    ((1,), tuple[int, str], False),
    ("ab", collections.abc.Sequence[str], True),
    (signatures.ResultOf(Inner), Outer, False),
    (signatures.ResultOf(shout), Outer, True),
    (3, typing.Any, True),
    (3, "a string annotation", True),
    (3, typing.TypeVar("T"), True),
  ],
)
def test_fits(value, hint, expected):
  assert signatures.fits(value, hint) is expected


def test_nearest_lists_a_few_names_when_none_is_near():
  assert explain.nearest("zzz", ["alpha", "beta"]) == " Known: alpha, beta."
  assert explain.nearest("zzz", [str(n) for n in range(99)]) == ""
