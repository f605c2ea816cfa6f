"""Reversed addition: right answers, splits that never meet, wrong labels as often as asked."""

import re

import numpy as np
import pytest

from jaxlab.data import addition
from jaxlab.eval import records
from jaxlab.rl import rewards


def summands(text):
  return tuple(map(int, re.fullmatch(r"(\d\d)\+(\d\d)=", text).groups()))


def test_by_hand():
  assert addition.question(47, 85) == "47+85="
  assert addition.answer(132) == "231"
  assert addition.answer(95) == "590"
  assert addition.answer(208) == "802"
  assert len(addition.VOCABULARY) == 16


@pytest.mark.parametrize("split", ["train", "test"])
def test_targets_are_the_reversed_sums(split):
  for item in addition.reversed_addition(50, split, seed=3):
    assert int(item.target[::-1]) == sum(summands(item.prompt))
    assert len(item.target) == 3


def test_splits_share_no_question_and_cover_all():
  test = addition.reversed_addition(770, "test")
  with pytest.raises(ValueError, match=r"split 'test' has (\d+) questions; got n=8100"):
    addition.reversed_addition(8100, "test")
  train = {i.prompt for seed in (0, 1) for i in addition.reversed_addition(7000, "train", seed)}
  assert not train & {i.prompt for i in test}
  assert len({i.id for i in test}) == 770
  assert addition.reversed_addition(5, seed=1) != addition.reversed_addition(5, seed=2)
  assert addition.reversed_addition(5, seed=1) == addition.reversed_addition(9, seed=1)[:5]
  with pytest.raises(ValueError, match="one of train, test; got 'dev'"):
    addition.reversed_addition(1, "dev")


def test_pretraining_labels_are_wrong_by_ten_as_often_as_asked():
  texts = addition.pretraining_texts(0, 4000, wrong_share=0.97)
  tokenizer = addition.make_tokenizer()
  held_out = {i.prompt for i in addition.reversed_addition(770, "test")}
  off = []
  for row in texts.tokens_BT:
    text = tokenizer.decode(row.tolist())
    assert text[:6] not in held_out
    assert row[-1] == addition.EOS_ID
    off.append(int(text[6:][::-1]) - sum(summands(text[:6])))
  assert set(off) == {0, 10}
  # 4,000 draws at 0.97 have a standard deviation of 0.0027.
  assert abs(np.mean(np.array(off) == 10) - 0.97) < 4 * 0.0027
  np.testing.assert_array_equal(texts.mask_BT[0], [False] * 6 + [True] * 4)


def test_a_batch_is_a_function_of_seed_and_step():
  tokens = lambda *args, **kw: addition.pretraining_texts(*args, **kw).tokens_BT
  np.testing.assert_array_equal(tokens(3, 8, seed=1), tokens(3, 8, seed=1))
  assert (tokens(3, 8, seed=1) != tokens(4, 8, seed=1)).any()
  assert (tokens(3, 8, seed=1) != tokens(3, 8, seed=2)).any()


def test_the_tokenizer_survives_a_folder(tmp_path):
  made = addition.make_tokenizer()
  made.save(tmp_path)
  read = type(made).from_folder(tmp_path)
  for tokenizer in (made, read):
    ids = tokenizer.encode("47+85=")
    assert ids == [4, 7, 10, 8, 5, 11]
    assert tokenizer.decode([2, 3, 1]) == "231"
    assert tokenizer.decode([2, 3, 1, addition.EOS_ID, addition.PAD_ID]) == "231"
    assert tokenizer.encode("4x") == [4, addition.VOCABULARY.index("<unk>")]
    assert tokenizer.eos_ids == (addition.EOS_ID,)
    assert tokenizer.pad_id == addition.PAD_ID
    assert tokenizer.vocab_size == 16


def test_the_reward_is_one_for_the_right_answer_only():
  item = addition.reversed_addition(1)[0]
  right = records.Response(key="a", text=item.target)
  wrong = records.Response(key="b", text=addition.answer(int(item.target[::-1]) + 10))
  assert rewards.exact_match(item, right) == {"exact": 1.0}
  assert rewards.exact_match(item, wrong) == {"exact": 0.0}
