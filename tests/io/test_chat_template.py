"""Chat templates: transformers' text, and no template can hang, escape or fill the memory."""

import subprocess
import sys
import time

import pytest

from jaxlab.data import assets
from jaxlab.io import chat_template, gguf

CHATML = (
  "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
  "{{ message['content'] }}<|im_end|>\n{% endfor %}"
  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def empty_cache():
  chat_template._cache.clear()


def render(template, *conversations, add_generation_prompt=False, special_tokens=None, **kwargs):
  return chat_template.render_chat(
    template,
    conversations or [[{"role": "user", "content": "hi"}]],
    add_generation_prompt=add_generation_prompt,
    special_tokens=special_tokens or {},
    **kwargs,
  )


# --- worked by hand


def test_chatml():
  chat = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "é\ud83d"}]
  assert render(CHATML, chat[:1], chat[:1] * 2, add_generation_prompt=True) == [
    # trim_blocks eats the newline after a block tag, so the last header has none.
    "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\na\nb<|im_end|>\n" * 2 + "<|im_start|>assistant\n",
  ]
  assert render(CHATML, chat)[0].endswith("assistant\né\ud83d<|im_end|>\n")


@pytest.mark.parametrize(
  "template, want",
  [
    ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),  # trim_blocks and lstrip_blocks
    ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    ("{{ {'b': '<é>', 'a': [1, none]}|tojson }}", '{"b": "<é>", "a": [1, null]}'),
    ("{{ {'b': 1}|tojson(indent=1) }}", '{\n "b": 1\n}'),
    ("{% set n = namespace(a=1) %}{% set n.a = 5 %}{{ n.a }}", "5"),
    ("{% generation %}said{% endgeneration %}", "said"),
    ("{{ dict(a=1).a }}{{ bos_token }}{{ tools is none }}{{ nothing }}", "1<s>True"),
    ("{{ thinking_on }}", "False"),
  ],
)
def test_the_environment_of_transformers(template, want):
  got = render(template, special_tokens={"bos_token": "<s>"}, variables={"thinking_on": False})
  assert got == [want]


def test_smollm2_template_gives_the_text_of_its_training():
  path = assets.find_demo_model()
  if path is None:
    pytest.skip("the demo model is not on this machine; `make demo` fetches it")
  template = gguf.read_gguf(path).metadata["tokenizer.chat_template"]
  chat = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Largest of 54, 52, 86, 14, 79?"},
    {"role": "assistant", "content": "86"},
    {"role": "user", "content": "Largest of 14, 48, 42, 18, 82?"},
  ]
  turns = (
    "<|im_start|>user\nLargest of 54, 52, 86, 14, 79?<|im_end|>\n"
    "<|im_start|>assistant\n86<|im_end|>\n"
    "<|im_start|>user\nLargest of 14, 48, 42, 18, 82?<|im_end|>\n<|im_start|>assistant\n"
  )
  system = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
  )
  assert render(template, chat, chat[1:], add_generation_prompt=True) == [
    "<|im_start|>system\nBe brief.<|im_end|>\n" + turns,
    system + "<|im_end|>\n" + turns,
  ]


# --- hostile templates

ESCAPES = (
  "{{ ''.__class__.__mro__ }}",
  "{{ messages.__init__.__globals__ }}",
  "{{ cycler.__init__.__globals__.os.system('true') }}",
  "{{ namespace(__x=1) }}",
  "{% set n = namespace() %}{% set n.__class__ = 1 %}",
  "{{ '{0.__class__}'.format(messages) }}",
  "{{ messages.append(1) }}",
  "{{ (messages|attr('__class__')).mro() }}",
  "{% include '/etc/passwd' %}",
)


@pytest.mark.parametrize("template", ESCAPES)
def test_no_escape(template):
  try:
    (text,) = render(template)
  except ValueError as error:
    text = str(error)
    assert "render_chat: the template must render conversation 0" in text
  assert "<class" not in text and "root:" not in text and "__globals__':" not in text


@pytest.mark.parametrize(
  "template, reason",
  [
    (
      "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
      "2 s of CPU",
    ),
    ("{{ 'a' * 3000000000 }}", "MemoryError"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{% for i in range(9999999) %}{% endfor %}", "OverflowError"),
    ("{{ 'a' * 9999 }}", "longer than 1000 characters"),
    ("{% for", "TemplateSyntaxError"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
  ],
)
def test_a_template_that_works_too_long_or_fails_gives_one_line(template, reason, monkeypatch):
  monkeypatch.setattr(chat_template, "MAX_CHARS", 1000)
  start = time.monotonic()
  with pytest.raises(ValueError, match=reason) as caught:
    render(template)
  assert "\n" not in str(caught.value)
  assert time.monotonic() - start < 60  # 2 s of CPU; the rest is for a busy machine


def test_the_failing_conversation_is_named():
  template = "{{ raise_exception('no system') if messages[0].role == 'system' }}"
  chats = [[{"role": r, "content": ""}] for r in ("user", "user", "system")]
  with pytest.raises(ValueError, match="conversation 2; it raised TemplateError: no system"):
    render(template, *chats)


def test_messages_that_are_no_json():
  with pytest.raises(ValueError, match="JSON"):
    render(CHATML, [{"role": "user", "content": object()}])
  with pytest.raises(ValueError, match="must be a mapping"):
    render(CHATML, ["hello"])


def test_the_child_imports_nothing_of_ours_and_sees_no_secrets(monkeypatch):
  code = (
    f"import sys; sys.path.insert(0, {str(chat_template.CHILD.parent)!r})\n"
    "import chat_template_child as c; c.environment()\n"
    "assert not {'jax', 'numpy', 'jaxlab'} & set(sys.modules), sorted(sys.modules)"
  )
  subprocess.run([sys.executable, "-I", "-c", code], check=True)
  seen = {}
  run = subprocess.run
  monkeypatch.setenv("HF_TOKEN", "secret")
  monkeypatch.setattr(subprocess, "run", lambda *a, **k: seen.update(k) or run(*a, **k))
  render(CHATML)
  assert set(seen["env"]) <= {"TZ"}


# --- speed: children are counted, not timed


@pytest.fixture
def children(monkeypatch):
  calls = []
  real = chat_template._run_child

  def run_child(request):
    calls.append(len(request["conversations"]))
    return real(request)

  monkeypatch.setattr(chat_template, "_run_child", run_child)
  return calls


def test_a_thousand_prompts_are_one_child_and_then_none(children):
  chats = [[{"role": "user", "content": f"question {i}"}] for i in range(1000)]
  texts = render(CHATML, *chats)
  assert texts[999] == "<|im_start|>user\nquestion 999<|im_end|>\n"
  assert children == [1000]
  assert render(CHATML, *chats) == texts
  assert children == [1000]
  assert render(CHATML, [{"role": "user", "content": "new"}], *chats)[1:] == texts
  assert children == [1000, 1]


def test_equal_conversations_are_rendered_once_and_large_batches_split(children):
  chats = [[{"role": "user", "content": str(i % 1001)}] for i in range(2002)]
  texts = render(CHATML, *chats)
  assert texts[:1001] == texts[1001:]
  assert children == [1000, 1]


def test_a_template_that_reads_the_clock_is_not_kept(children):
  assert render("{{ strftime_now('%Y') }}")[0].isdigit()
  render("{{ strftime_now('%Y') }}")
  assert children == [1, 1]


def test_the_cache_is_bounded(monkeypatch):
  monkeypatch.setattr(chat_template, "CACHE_ENTRIES", 3)
  texts = render(CHATML, *[[{"role": "user", "content": str(i)}] for i in range(5)])
  assert len(set(texts)) == 5
  assert len(chat_template._cache) == 3


# --- parity

LLAMA_LIKE = (
  "{{- bos_token }}{%- if tools is not none %}{{ tools | tojson(indent=2) }}{%- endif %}\n"
  "{%- for m in messages %}\n  {%- if m.role == 'assistant' and m.reasoning_content is defined %}\n"
  "<think>{{ m.reasoning_content }}</think>\n  {%- endif %}\n"
  "<{{ m.role }}>{{ m['content'] | trim }}{% generation %}{{ loop.index }}{% endgeneration %}\n"
  "{%- endfor %}\n{% if add_generation_prompt %}<assistant>{% endif %}\n"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"é": [1, 2.5, None]}}}]
CHATS = [
  [{"role": "user", "content": " <b>hi</b>\n"}],
  [
    {"role": "system", "content": "s", "name": None},
    {"role": "user", "content": "日本 'q' \"d\""},
    {"role": "assistant", "content": "x", "reasoning": "because"},
  ],
]


@pytest.mark.parity
@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_equals_transformers(template, tools, add_generation_prompt):
  import tokenizers
  import transformers

  theirs = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), bos_token="<s>"
  )
  want = [
    theirs.apply_chat_template(
      chat,
      chat_template=template,
      tools=tools,
      tokenize=False,
      add_generation_prompt=add_generation_prompt,
    )
    for chat in CHATS
  ]
  got = render(
    template,
    *CHATS,
    add_generation_prompt=add_generation_prompt,
    special_tokens={"bos_token": "<s>"},
    tools=tools,
  )
  assert got == want
