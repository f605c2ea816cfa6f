"""Rewards against oracle O12 of the QeRL specification, and the bugs it lists."""

import functools
import math
import sys
import time

import pytest

from jaxlab.eval.records import Item, Response
from jaxlab.rl import rewards
from jaxlab.rl.rewards import extract
from jaxlab.rl.rewards.dapo import answer_line, normalise_answer
from jaxlab.rl.rewards.math import math_equal
from jaxlab.rl.rewards.overlong import overlong_penalty

TAGGED = "<think>x</think>\n<answer>18</answer>"


def item(target="18"):
  return Item(id="i", task="t", split="train", prompt="p", target=target)


def response(text, **fields):
  return Response(key="k", text=text, **fields)


# --- tags and hashes ------------------------------------------------------------------------------


def test_tags():
  assert extract.answer_tag(TAGGED) == "18"
  assert extract.has_think_and_answer(TAGGED)
  two = "<answer>1</answer> no, <answer> 2 </answer> done"
  assert extract.answer_tag(two) == "2"
  assert not extract.has_think_and_answer(two)
  assert extract.answer_tag("just 18") == "just 18"
  assert extract.answer_tag("<answer>18") == "18"


@pytest.mark.parametrize(
  "text, formatted",
  [
    ("<think>a\nb</think> \n <answer>\n1\n</answer>", True),
    ("pre <think></think><answer></answer> post", True),
    ("<think>a</think> so <answer>1</answer>", False),
    ("<answer>1</answer><think>a</think>", False),
    ("<think>a</think> so </think><answer>1</answer>", True),
    ("<think>a</think><answer>1", False),
    ("a</think><answer>1</answer>", False),
  ],
)
def test_format(text, formatted):
  assert extract.has_think_and_answer(text) == formatted


def test_gsm8k_tags():
  right = {"exact": 2.0, "format": 0.2}
  assert rewards.gsm8k_tags(item(), response(TAGGED)) == right
  assert rewards.gsm8k_tags(item("He has 9 * 2 = 18.\n#### 18"), response(TAGGED)) == right
  wrong = rewards.gsm8k_tags(item("19"), response(TAGGED))
  assert wrong == {"exact": 0.0, "format": 0.2}
  # A text without a tag never matches, whatever it says.
  assert rewards.gsm8k_tags(item(), response("18")) == {"exact": 0.0, "format": 0.0}
  assert rewards.gsm8k_tags(item(), response(None, finish="error"))["exact"] is None


@pytest.mark.parametrize(
  "spelling", ["18.", "18.00", "$18", "+18 dollars", " 18 ", "\\$18.0", "18%"]
)
def test_canonical_answers_match_and_strict_ones_do_not(spelling):
  answer = response(f"<think>x</think><answer>{spelling}</answer>")
  assert rewards.gsm8k_tags(item(), answer)["exact"] == 2.0
  strict = rewards.gsm8k_tags(item(), answer, strict=True)["exact"]
  assert strict == (2.0 if spelling.strip() == "18" else 0.0)


@pytest.mark.parametrize(
  "text, number",
  [
    ("so #### 1,080", "1080"),
    ("#### 5\n#### 7", "7"),
    ("####18", None),
    ("#### 18.", "18."),
    ("#### -3 apples", "-3"),
    ("#### eighteen", None),
  ],
)
def test_hash_extraction(text, number):
  assert extract.hash_answer(text) == number


def test_gsm8k_hash():
  thought = "<think>two</think>\n"
  assert rewards.gsm8k_hash(item(), response(thought + "#### 18.")) == {"exact": 1.0, "format": 0.2}
  assert rewards.gsm8k_hash(item(), response(thought + "#### 18."), strict=True)["exact"] == 0.0
  assert rewards.gsm8k_hash(item(), response("<think> </think>#### 18"))["format"] == 0.0
  assert rewards.gsm8k_hash(item(), response("18")) == {"exact": 0.0, "format": 0.0}
  # The released code leaves the commas of the gold answer alone.
  thousand = response("#### 1,000")
  assert rewards.gsm8k_hash(item("1,000"), thousand)["exact"] == 1.0
  assert rewards.gsm8k_hash(item("1,000"), thousand, strict=True)["exact"] == 0.0
  assert rewards.gsm8k_hash(item("."), response("#### .."))["exact"] == 0.0


@pytest.mark.parametrize(
  "text, number",
  [
    ("1,080", "1080"),
    ("$1,234,567.50", "1234567.5"),
    ("007", "7"),
    (".5", "0.5"),
    ("-0.0", "0"),
    ("- 4", "-4"),
    ("3 square meters", "3"),
    ("20 percent.", "20"),
    ("1" + "0" * 40 + "1", "1" + "0" * 40 + "1"),  # no rounding to a machine number
    ("1,2", "1,2"),
    ("nan", "nan"),
    ("1e5", "1e5"),
    ("Tuesday.", "Tuesday"),
  ],
)
def test_canonical(text, number):
  assert extract.canonical(text) == number


# --- mathematics ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "text, content",
  [
    (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{1} or \boxed{2}", "2"),
    (r"\boxed{1} then \boxed{2", "1"),
    (r"{ \boxed{5}", "5"),
    (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    (r"\boxed{a \boxed{b}}", "b"),
    ("none", None),
  ],
)
def test_last_balanced_box(text, content):
  assert extract.last_boxed(text) == content


@pytest.mark.parametrize(
  "prediction, gold",
  [
    (r"\frac12", "0.5"),
    ("1/2", r"\dfrac{1}{2}"),
    ("50%", "0.5"),
    ("50", r"50\%"),
    ("2 1/2", "2.5"),
    (r"2\frac{1}{2}", "5/2"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("1,000", "1000"),
    ("18.0", "$18$"),
    (r"x = 5", "5"),
    (r"5 \text{ cm}^2", "5"),
    (r"90^{\circ}", "90"),
    (r"\sqrt2", r"\sqrt{2}"),
    (r"\left( 0.5, 2 \right)", r"(\frac12, 2)"),
    (".333333", "1/3"),
    (r"\text{Monday}", "Monday"),
    ("x^2+2x", "x^2 + 2x"),
  ],
)
def test_equal_answers(prediction, gold):
  assert math_equal(prediction, gold)


@pytest.mark.parametrize(
  "prediction, gold",
  [("50", "5"), ("5000%", "50%"), ("1000001", "1000000"), ("[1,2)", "(1,2)"), ("12", "1,2")]
  + [("", "5"), ("1/0", "0"), ("(1,2)", "(2,1)"), ("0.33", "1/3"), ("9" * 2000, "9" * 50)],
)
def test_different_answers(prediction, gold):
  assert math_equal(prediction, gold) is False


def test_bigmath():
  good = response(r"<think>..</think><answer>\boxed{\frac{1}{2}}</answer>")
  assert rewards.bigmath(item("0.5"), good) == {"accuracy": 1.0, "format": 0.2}
  assert rewards.bigmath(item(), response(TAGGED))["accuracy"] == 1.0
  assert rewards.bigmath(item(), response("18"))["accuracy"] == 0.0
  # A gold answer that cannot be read makes the completion neither right nor wrong.
  assert rewards.bigmath(item(r"\frac{1"), response(TAGGED)) == {"accuracy": None, "format": 0.2}
  assert rewards.bigmath(item(""), response(TAGGED))["accuracy"] is None


def test_math_verify_only_when_asked_for(monkeypatch):
  monkeypatch.setitem(sys.modules, "math_verify", None)
  assert math_equal("18", "18")
  with pytest.raises(ValueError, match="pip install math-verify"):
    math_equal("18", "18", math_verify=True)


def test_math_verify_agrees_where_both_can_judge():
  pytest.importorskip("math_verify", reason="math-verify is optional")
  assert math_equal(r"2\sqrt{3}", r"\sqrt{12}", math_verify=True)
  assert math_equal(r"\frac12", "0.5", math_verify=True)
  assert math_equal("3", "4", math_verify=True) is False
  assert math_equal("3", "", math_verify=True) is None


# --- DAPO -----------------------------------------------------------------------------------------


def test_answer_line_is_the_last_one_of_the_tail():
  assert answer_line("Answer: 4\nso\nanswer:  5 \nbye") == "5"
  assert answer_line("Answer: 4" + "x" * 400) is None


@pytest.mark.parametrize(
  "text, expected",
  [
    ("x = 12", "12"),
    ("the area is $12$ square cm", "12"),
    (r"\$1,250", "1250"),
    (r"\boxed{\text{12 hours}}", "12"),
    (r"\frac12", r"\frac{1}{2}"),
    (r"\overline{AB}", "AB"),
    ("18.", "18."),
  ],
)
def test_dapo_normaliser(text, expected):
  assert normalise_answer(text) == expected


def test_dapo():
  assert rewards.dapo(item(), response("...\nAnswer: 18 dollars")) == {"accuracy": 1.0}
  assert rewards.dapo(item(), response("...\n**Answer:** $18$")) == {"accuracy": 1.0}
  assert rewards.dapo(item(), response("Answer: 18.")) == {"accuracy": 1.0}
  assert rewards.dapo(item(), response("Answer: 18."), strict=True) == {"accuracy": 0.0}
  assert rewards.dapo(item("0.5"), response(r"Answer: \frac12")) == {"accuracy": 1.0}
  assert rewards.dapo(item(), response("18"), wrong=-1.0) == {"accuracy": -1.0}


# --- length, sums, time ---------------------------------------------------------------------------


@pytest.mark.parametrize(
  "tokens, penalty", [(0, 0), (1536, 0), (1792, -0.5), (2048, -1), (3000, -1)]
)
def test_overlong(tokens, penalty):
  assert overlong_penalty(tokens, max_tokens=2048, buffer_tokens=512) == penalty


def test_overlong_counts_tokens_not_characters():
  reward = functools.partial(rewards.overlong, max_tokens=4, buffer_tokens=2)
  assert reward(item(), response("a" * 100, token_ids=(1, 2, 3))) == {"overlong": -0.5}
  with pytest.raises(ValueError, match="Characters are not tokens"):
    reward(item(), response("a" * 100))
  with pytest.raises(ValueError, match="buffer_tokens=9, max_tokens=4"):
    rewards.overlong(item(), response("", token_ids=()), max_tokens=4, buffer_tokens=9)


def test_weighted_sum():
  assert rewards.weighted_sum({"exact": 2.0, "format": 0.2}) == pytest.approx(2.2)
  assert rewards.weighted_sum({"a": 1.0, "b": 0.5}, {"b": 2.0}) == 2.0
  assert rewards.weighted_sum({"a": None, "b": 0.5, "c": math.nan}) == 0.5
  assert math.isnan(rewards.weighted_sum({"a": None}))
  with pytest.raises(ValueError, match="got exakt, the parts are exact"):
    rewards.weighted_sum({"exact": 1.0}, {"exakt": 2.0})


def test_score_all():
  penalty = functools.partial(rewards.overlong, max_tokens=4, buffer_tokens=2)
  parts = rewards.score_all([rewards.dapo, penalty], item(), response("Answer: 18", token_ids=(1,)))
  assert parts == {"accuracy": 1.0, "overlong": 0.0}
  with pytest.raises(ValueError, match="different names; got accuracy twice"):
    rewards.score_all([rewards.dapo, rewards.dapo], item(), response("Answer: 18"))


@pytest.mark.parametrize(
  "unit",
  ["<think></think><answer>", "</think> ", r"\boxed{", r"\boxed{9", "9", "#### ", "<answer>9,", "{"]
  + [r"\frac", r"\text{", "9 ", "- ", "<think>", "=", "$", "Answer:"],
)
def test_a_looping_model_does_not_stop_the_rewards(unit):
  text = unit * (40_000 // len(unit))
  start = time.perf_counter()
  for reward in (rewards.gsm8k_tags, rewards.gsm8k_hash, rewards.bigmath, rewards.dapo):
    reward(item(), response(text))
  assert time.perf_counter() - start < 2.0  # linear: a few milliseconds; quadratic: minutes
