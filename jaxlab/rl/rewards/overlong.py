"""The soft overlong penalty of DAPO: free up to L - c tokens, then linear down to -1 at L.

Tokens are counted, never characters. Source: arXiv 2503.14476 eq. (13).
"""

from jaxlab.eval.records import Item, Response


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
  """0 up to max_tokens - buffer_tokens, then linear, -1 from max_tokens on."""
  if not 0 < buffer_tokens <= max_tokens:
    raise ValueError(
      "overlong_penalty: needs 0 < buffer_tokens <= max_tokens; got "
      f"buffer_tokens={buffer_tokens}, max_tokens={max_tokens}."
    )
  over = num_tokens - (max_tokens - buffer_tokens)
  return -min(max(over, 0) / buffer_tokens, 1.0)


def overlong(
  item: Item, response: Response, *, max_tokens: int, buffer_tokens: int
) -> dict[str, float | None]:
  """{"overlong": penalty in [-1, 0]}; bind the limits with functools.partial to use as a reward."""
  del item
  if response.text is None:
    return {"overlong": None}
  penalty = overlong_penalty(
    response.num_tokens, max_tokens=max_tokens, buffer_tokens=buffer_tokens
  )
  return {"overlong": penalty}
