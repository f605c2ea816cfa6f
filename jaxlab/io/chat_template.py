"""Rendering chat templates, which are programs from strangers, in a limited child process.

jinja2's sandbox stops escapes but not work: two nested loops of 99,999 never end. So a batch of
conversations is rendered by one child (`chat_template_child.py`) that may use 2 s of CPU and 1 GiB,
and the texts are kept. The child's start, about 0.1 s, is the cost of a call: batch.
"""

import collections
import hashlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

CPU_SECONDS = 2
MEMORY_BYTES = 1 << 30
WALL_SECONDS = 120  # only for a machine so busy that 2 s of CPU take this long
MAX_CHARS = 1 << 26  # of all texts of one call
MAX_IN_ONE_CHILD = 1000  # conversations; they share the 2 s
CACHE_ENTRIES = 8192
CHILD = pathlib.Path(__file__).with_name("chat_template_child.py")
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing, by preference
TOO_MUCH = f"render_chat: a template must finish within {CPU_SECONDS} s of CPU and 1 GiB of memory"
WAY_OUT = " Use another chat template, or pass fewer conversations."

_cache_lock = threading.Lock()
_cache: collections.OrderedDict[bytes, str] = collections.OrderedDict()


def render_chat(
  template: str,
  conversations: Sequence[Sequence[Any]],
  *,
  add_generation_prompt: bool,
  special_tokens: Mapping[str, str],
  tools: Sequence[Mapping[str, Any]] | None = None,
  variables: Mapping[str, Any] | None = None,
) -> list[str]:
  """Renders conversations with a chat template, as transformers' `apply_chat_template` does.

  Args:
    template: jinja2 source; may be hostile.
    conversations: lists of messages, {"role": ..., "content": ...}; keys with None are dropped.
    add_generation_prompt: end with the header of an assistant's turn.
    special_tokens: such as {"bos_token": "<s>"}, visible to the template.
    tools: JSON schemas of functions, for templates that list them.
    variables: further names for the template, such as {"enable_thinking": False}.
  Returns: one text a conversation.
  Raises: ValueError if a message is not JSON, or the template raises, does not parse, or works for
    more than 2 s of CPU or in more than 1 GiB.
  """
  names = {
      **special_tokens, **(variables or {}), "tools": tools, "documents": None,
      "add_generation_prompt": add_generation_prompt,
  }  # fmt: skip
  requests = [_request(template, messages, names) for messages in conversations]
  if "strftime_now" in template:  # the text depends on the clock
    return _render_all(template, dict(enumerate(requests)), names)
  keys = [hashlib.sha256(request.encode()).digest() for request in requests]
  with _cache_lock:
    texts = {k: _cache[k] for k in keys if k in _cache}
  first: dict[bytes, int] = {}
  for i, key in enumerate(keys):
    if key not in texts:
      first.setdefault(key, i)
  fresh = _render_all(template, {i: requests[i] for i in first.values()}, names)
  texts |= zip(first, fresh, strict=True)
  with _cache_lock:
    for key, text in texts.items():
      _cache[key] = text
      _cache.move_to_end(key)
    while len(_cache) > CACHE_ENTRIES:
      _cache.popitem(last=False)
  return [texts[k] for k in keys]


def _request(template: str, messages: Sequence[Any], names: dict[str, Any]) -> str:
  """All that one text depends on, as JSON."""
  for message in messages:
    if not isinstance(message, Mapping):
      raise ValueError(
        f"render_chat: a message must be a mapping with role and content; got {message!r}. "
        "Pass a list of conversations, each a list of messages."
      )
  try:
    return json.dumps([template, [_normal(message) for message in messages], names])
  except TypeError as error:
    raise ValueError(
      f"render_chat: messages must hold JSON values only; got {error}. Convert the others."
    ) from None


def _normal(message: Mapping[str, Any]) -> dict[str, Any]:
  """Without None, and with the reasoning under the names that templates read."""
  kept = {key: value for key, value in message.items() if value is not None}
  thoughts = [kept[name] for name in REASONING if name in kept]
  if thoughts:
    kept = {"thinking": thoughts[0], **kept, "reasoning_content": thoughts[0]}
  return kept


def _render_all(template: str, requests: Mapping[int, str], names: dict[str, Any]) -> list[str]:
  """Renders requests in their order; their keys are the numbers of the conversations."""
  numbers, texts = list(requests), []
  while len(texts) < len(numbers):
    chunk = numbers[len(texts) : len(texts) + MAX_IN_ONE_CHILD]
    conversations = [json.loads(requests[i])[1] for i in chunk]
    answer = _run_child(
      {
        "template": template,
        "conversations": conversations,
        "variables": names,
        "max_chars": MAX_CHARS,
      }
    )
    if "error" in answer:
      raise ValueError(
        f"render_chat: the template must render conversation {chunk[answer['index']]}; it "
        f"raised {answer['error']}. Check the messages' roles, or the model's chat template."
      )
    texts += answer["texts"]
  return texts


def _run_child(request: dict[str, Any]) -> dict[str, Any]:
  """Sends one request to a fresh, limited interpreter."""
  jinja2_path = pathlib.Path(importlib.util.find_spec("jinja2").origin)
  # -I: no PYTHON* variables, no user site, no current folder; -B: it could write nothing anyway.
  command = [
      sys.executable, "-I", "-B", str(CHILD),
      str(CPU_SECONDS), str(MEMORY_BYTES), str(jinja2_path.parent.parent),
  ]  # fmt: skip
  # Of the environment only the time zone, for strftime_now: no secret is there to be rendered.
  env = {name: os.environ[name] for name in ("TZ",) if name in os.environ}
  try:
    done = subprocess.run(
        command, input=json.dumps(request).encode(), capture_output=True, timeout=WALL_SECONDS,
        env=env, check=False,
    )  # fmt: skip
  except subprocess.TimeoutExpired:
    raise ValueError(f"{TOO_MUCH}; got no answer in {WALL_SECONDS} s.{WAY_OUT}") from None
  if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
    raise ValueError(f"{TOO_MUCH}; it was stopped there.{WAY_OUT}")
  if done.returncode:
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    raise ValueError(f"{TOO_MUCH}; its process ended with {last[0]!r}.{WAY_OUT}")
  return json.loads(done.stdout)
