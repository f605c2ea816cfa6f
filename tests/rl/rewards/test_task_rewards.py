"""Rewards of the packaged tasks."""

import pytest

from jaxlab.data import tasks
from jaxlab.eval.records import Response
from jaxlab.rl import rewards


@pytest.mark.parametrize(
  "text, right",
  [
    ("86", 1),
    (" 86\n", 1),
    ("86.", 1),
    ("86 .", 1),
    ("86..", 0),
    ("86, 14", 0),
    ("", 0),
    ("-86", 0),
  ],
)
def test_exact_match_allows_a_final_dot(text, right):
  item = tasks.largest_of_five(1)[0]
  answer = text.replace("86", item.target)
  assert rewards.exact_match(item, Response(key="k", text=answer)) == {"exact": float(right)}
  assert rewards.exact_match(item, Response(key="k", text=None)) == {"exact": None}


def test_reasoning_gym_verifiers_accept_their_own_answers():
  pytest.importorskip("reasoning_gym", reason="reasoning-gym is optional")
  for name in ("gcd", "chain_sum", "fraction_simplification"):
    for item in tasks.reasoning_gym_items(name, 3, seed=5):
      good = rewards.reasoning_gym_score(item, Response(key="k", text=f"so <answer>{item.target}"))
      bad = rewards.reasoning_gym_score(item, Response(key="k", text="no idea"))
      assert good == {"score": 1.0}
      assert bad["score"] < 0.5
  with pytest.raises(ValueError, match="reasoning_gym_items; got 'largest_of_five/"):
    rewards.reasoning_gym_score(tasks.largest_of_five(1)[0], Response(key="k", text="1"))
