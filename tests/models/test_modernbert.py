"""ModernBERT against figures of transformers in float64, and against itself in its other layouts.

Goldens: specs/ettin.md 6.1 (transformers 5.24.0, float64, eager; "train": the same with 65 keys).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlab
from jaxlab import lm as language_model
from jaxlab import lora
from jaxlab.attention import dense, masks
from jaxlab.decode import autoregressive, sampling
from jaxlab.io import assemble, doctor, huggingface, peft, receipt
from jaxlab.models import causal_lm, presets, zoo
from jaxlab.nn import rotary, stack, weights
from jaxlab.objectives import clm
from jaxlab.quant import fp4
from jaxlab.train import budget
from tests.models import cached
from tests.models import tiny_modernbert as tiny

KINDS = ("encoder", "decoder")
IDS = np.array([[1, 5, 9, 3, 14, 7, 11, 2]], np.int32)
FIRST = {
  "encoder": [
    -0.130451, 0.26716, -0.015179, 0.134966, 0.06393, -0.047032, 0.112804, -0.231524, 0.152767,
    -0.366358, 0.203269, -0.416036, 0.266447, -0.375713, 0.322285, -0.270971,
  ],
  "decoder": [
    -0.226034, 0.312447, -0.00868, 0.076895, 0.171664, -0.200886, 0.307718, -0.461088, 0.409432,
    -0.641683, 0.488201, -0.701204, 0.542473, -0.633521, 0.553395, -0.467785,
  ],
}  # fmt: skip
LAST = {
  "encoder": [0.27014, 0.011713, 0.086724, 0.189959],
  "decoder": [0.325525, -0.030621, 0.114614, 0.177429],
  "train": [0.32523965, -0.03042095, 0.11450581, 0.17744162],
}
SUMS = {"encoder": (-2.4191286, 0.27158313), "decoder": (-2.3613473, 0.34262538)}
CLM_LOSS, MLM_LOSS = 3.07652455, 2.85536049
MLM_LABELS = {2: 4, 5: 8}  # position: label
GOLDEN = 2e-6  # logits of size 0.5 in float32, and the goldens' last digit
SAME = 1e-4  # sums in another order, seven layers: 3e-5 was seen on logits up to 4


def load(folder, config, tensors=None):
  tiny.write_folder(folder, config, tiny.random_weights(config) if tensors is None else tensors)
  module = zoo.from_config(config)
  return module, huggingface.load_params(folder, module, jnp.float32)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
  made = {}
  for kind in KINDS:
    config = tiny.config(kind)
    folder = tmp_path_factory.mktemp(kind)
    made[kind] = load(folder, config, tiny.golden_weights(config))
  return made


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
  """Seven layers, windows of a few of the tokens."""
  made = {}
  for kind in KINDS:
    made[kind] = load(tmp_path_factory.mktemp(kind), tiny.config(kind, **tiny.WIDE))
  return made


def forward(module, params, tokens, positions=None, attend=None):
  run = jax.jit(lambda p, t, at: module.apply({"params": p}, t, at, attend))
  return np.asarray(run(params, tokens, positions))


# --- the figures of transformers


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(golden, kind):
  logits = forward(*golden[kind], IDS)[0]
  np.testing.assert_allclose(logits[0], FIRST[kind], rtol=0, atol=GOLDEN)
  np.testing.assert_allclose(logits[7, :4], LAST[kind], rtol=0, atol=GOLDEN)
  total, size = SUMS[kind]
  np.testing.assert_allclose(logits.sum(), total, rtol=0, atol=2e-5)
  np.testing.assert_allclose(np.abs(logits).mean(), size, rtol=0, atol=GOLDEN)


def test_the_window_of_training_has_a_key_more(golden):
  module, params = golden["decoder"]
  config = zoo.modernbert_config(tiny.config("decoder"), decoder_window="train")
  assert (module.config.window, config.window) == (2, 3)
  logits = forward(dataclasses.replace(module, config=config), params, IDS)[0]
  np.testing.assert_allclose(logits[7, :4], LAST["train"], rtol=0, atol=GOLDEN)


def test_losses_are_those_of_transformers(golden):
  module, params = golden["decoder"]
  batch = clm.TokenBatch(jnp.asarray(IDS), jnp.ones(IDS.shape, bool))
  loss, _ = clm.make_objective(module)(params, batch, jax.random.key(0))
  np.testing.assert_allclose(loss.mean(), CLM_LOSS, rtol=0, atol=1e-5)
  module, params = golden["encoder"]
  logp = jax.nn.log_softmax(forward(module, params, IDS)[0])
  found = -np.mean([logp[at, label] for at, label in MLM_LABELS.items()])
  np.testing.assert_allclose(found, MLM_LOSS, rtol=0, atol=1e-5)


# --- who sees whom


def sees(module, params, length: int, row: int, layers: list[bool]) -> list[int]:
  """The tokens that a hidden state depends on, in a model of the given local layers."""
  config = dataclasses.replace(module.config, local_layers=tuple(layers))
  module = dataclasses.replace(module, config=config)
  params = params | {"layers": jax.tree.map(lambda x: x[: len(layers)], params["layers"])}

  def state(embed_TD):
    variables = {"params": params | {"embed": embed_TD}}
    return module.apply(variables, jnp.arange(length)[None], method="hidden")[0][0, row]

  slope = jax.jit(jax.jacobian(state))(params["embed"][:length])
  return np.flatnonzero(np.abs(slope).sum((0, 2))).tolist()


def test_windows_by_hand(golden):
  """local_attention 4: two keys on each side of an encoder's query, two keys in all of a
  decoder's."""
  assert sees(*golden["encoder"], 10, 5, [True]) == [3, 4, 5, 6, 7]
  assert sees(*golden["decoder"], 10, 5, [True]) == [4, 5]
  assert sees(*golden["encoder"], 10, 5, [False]) == list(range(10))
  assert sees(*golden["decoder"], 10, 5, [False]) == list(range(6))


def test_local_layers_reach_one_window_further_each(golden):
  assert sees(*golden["decoder"], 10, 8, [True] * 4) == [4, 5, 6, 7, 8]
  assert sees(*golden["encoder"], 12, 1, [True] * 3) == list(range(8))


def test_one_token_is_the_same_in_both(golden):
  """Converted, an encoder and a decoder agree on a text of one token."""
  module, params = golden["encoder"]
  other = dataclasses.replace(module, config=dataclasses.replace(module.config, causal=True))
  np.testing.assert_array_equal(
    forward(module, params, IDS[:, :1]), forward(other, params, IDS[:, :1])
  )


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_neighbours_change_nothing(wide, kind):
  module, params = wide[kind]
  tokens = tiny.tokens(2, 21)
  alone = forward(module, params, tokens[:1])
  padded = np.zeros((3, 30), np.int32)
  positions = np.full((3, 30), -1, np.int32)
  for row, start in enumerate((9, 0, 4)):  # left, right, both
    padded[row, start : start + 21] = tokens[int(row == 1)]
    positions[row, start : start + 21] = np.arange(21)
  found = forward(module, params, padded, positions)
  np.testing.assert_allclose(found[0, 9:], alone[0], rtol=0, atol=SAME)
  np.testing.assert_allclose(found[2, 4:25], alone[0], rtol=0, atol=SAME)
  assert np.isfinite(found).all()


@pytest.mark.parametrize("kind", KINDS)
def test_packed_texts_are_those_apart(wide, kind):
  module, params = wide[kind]
  first, second = tiny.tokens(1, 17), tiny.tokens(1, 14, seed=1)
  segment = jnp.asarray([[0] * 17 + [1] * 14])
  where = masks.Where(segment_q_BT=segment, segment_k_BS=segment)  # causal or not: the model knows
  tokens = np.concatenate([first, second], axis=1)
  positions = np.concatenate([np.arange(17), np.arange(14)])[None].astype(np.int32)
  found = forward(module, params, tokens, positions, dense.DenseAttention(where))
  np.testing.assert_allclose(found[:, :17], forward(module, params, first), rtol=0, atol=SAME)
  np.testing.assert_allclose(found[:, 17:], forward(module, params, second), rtol=0, atol=SAME)


# --- other layouts of the same model


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_layers_is_the_same_model(wide, kind):
  module, params = wide[kind]
  tokens = tiny.tokens(2, 19)
  stacked = forward(module, params, tokens)
  listed = forward(module, stack.unstack(params), tokens)
  np.testing.assert_allclose(listed, stacked, rtol=0, atol=SAME)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_kernels_and_adapters_go_through_the_seam(kind, tmp_path):
  """QeRL's leaf, an adapter over nvfp4, in every linear of every layer, the first included."""
  config = tiny.config(kind, hidden_size=32, intermediate_size=48, vocab_size=97)
  module, params = load(tmp_path, config)
  adapters = lora.LoRAConfig(rank=2)
  packed = lora.attach(fp4.quantize_params(params, "nvfp4"), adapters, jax.random.key(0))
  filled = lambda path, x: x + 0.1 if weights.path_str(path).endswith("/b") else x
  packed = jax.tree_util.tree_map_with_path(filled, packed)
  leaves = weights.leaf_paths(packed["layers"])
  assert all(isinstance(leaves[f"{name}/kernel"], weights.LoRA) for name in lora.TARGETS)
  tokens = tiny.tokens(2, 11)
  found = forward(module, packed, tokens)
  merged = lora.merge_adapters(packed)
  np.testing.assert_allclose(forward(module, merged, tokens), found, rtol=0, atol=SAME)
  assert np.abs(found - forward(module, params, tokens)).max() > 100 * SAME  # both did something
  with pytest.raises(ValueError, match="must be a Llama or Qwen; got one with 'head"):
    peft.save_adapter(packed, adapters, tmp_path / "adapter", "base")


@pytest.mark.parametrize("stacked", [True, False])
def test_cached_decode_is_the_full_forward(wide, stacked):
  """Far beyond the window of five, rows at positions of their own."""
  module, params = wide["decoder"]
  params = params if stacked else stack.unstack(params)
  tokens = tiny.tokens(2, 20)
  expected = forward(module, params, tokens)
  cache = causal_lm.init_cache(module.config, 2, 24, jnp.float32, stacked=stacked)
  step = cached.step(module)
  starts = np.array([14, 11])
  positions = np.where(np.arange(14)[None] < starts[:, None], np.arange(14)[None], -1)
  logits, cache = step(params, tokens[:, :14], positions, cache.at(jnp.int32(0)))
  np.testing.assert_allclose(logits[0], expected[0, :14], rtol=0, atol=SAME)
  for j in range(6):
    at, rows = starts + j, np.arange(2)
    logits, cache = step(params, tokens[rows, at][:, None], at[:, None], cache.at(jnp.asarray(at)))
    np.testing.assert_allclose(logits[:, 0], expected[rows, at], rtol=0, atol=SAME)


@pytest.mark.parametrize("kind", KINDS)
def test_init_makes_the_parameters_that_checkpoints_have(wide, kind):
  module, params = wide[kind]
  made = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert shapes(made) == shapes(params)


def test_init_has_the_deviations_of_megatron():
  config = tiny.config("decoder", **tiny.WIDE | {"vocab_size": 512, "hidden_size": 192})
  module = zoo.from_config(config)
  params = module.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  cut = 0.8796  # the deviation of a unit normal cut off at two
  inner = 0.02 / math.sqrt(2 * 7)
  stds = {"embed": 0.02, "q": 0.02, "up": 0.02, "head_dense": 0.02, "o": inner, "down": inner}
  for name, std in stds.items():
    x = params[name] if name in params else params["layers"][name]
    x = np.asarray(jax.tree.leaves(x)[0])
    assert abs(x.std() / (cut * std) - 1) < 0.02 and np.abs(x).max() <= 2 * std + 1e-7, name
  assert not np.any(params["head"]["bias"])
  gains = (params["norm"], params["head_norm"], params["layers"]["attn_norm"])
  assert all((np.asarray(gain) == 1).all() for gain in gains)


def test_remat_gives_the_same_gradient(wide):
  module, params = wide["decoder"]
  tokens = tiny.tokens(1, 9)
  batch = clm.TokenBatch(jnp.asarray(tokens), jnp.ones(tokens.shape, bool))

  def gradient(module):
    loss = lambda p: clm.make_objective(module)(p, batch, jax.random.key(0))[0].mean()
    return jax.jit(jax.grad(loss))(params)

  plain = gradient(module)
  remat = gradient(dataclasses.replace(module, remat=True))
  for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(a).max())
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(plain))
  each = lambda g: np.abs(g).reshape(7, -1).max(axis=1)
  assert all((each(g) > 0).all() for g in jax.tree.leaves(plain["layers"]))  # no layer is idle


def test_bfloat16_parameters_compute_in_bfloat16_and_answer_in_float32(wide):
  module, params = wide["encoder"]
  module = dataclasses.replace(module, param_dtype=jnp.bfloat16)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  tokens = jnp.asarray(tiny.tokens(1, 9))
  hidden, _ = module.apply({"params": half}, tokens, method="hidden")
  logits = module.apply({"params": half}, tokens)
  assert hidden.dtype == jnp.bfloat16 and logits.dtype == jnp.float32


def test_one_trace_runs_all_layers():
  """A program of 28 layers is no longer than one of seven."""

  def size(depth):
    module = zoo.from_config(tiny.config("decoder", num_hidden_layers=depth))
    params = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return len(str(jax.jit(module.apply).trace(params, IDS).jaxpr).splitlines())

  assert size(28) <= 1.1 * size(7)


# --- configs


COUNTS = {  # specs/ettin.md 2.1, from the classes of transformers; encoder and decoder are equal
  "17m": 16_913_600, "32m": 32_081_344, "68m": 68_457_664, "150m": 149_655_232,
  "400m": 395_881_664, "1b": 1_031_314_112,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", COUNTS)
def test_parameter_counts_of_released_models(kind, size):
  module = zoo.from_config(presets.BY_NAME[f"jhu-clsp/ettin-{kind}-{size}"]())
  counts = map(math.prod, assemble.parameter_shapes(module).values())
  assert sum(counts) == COUNTS[size]
  assert module.config.head_dim == 64
  assert module.config.window == (65 if kind == "encoder" else 64)
  local = module.config.local_layers
  assert [i for i, is_local in enumerate(local) if not is_local] == list(range(0, len(local), 3))


@pytest.mark.parametrize("kind", KINDS)
def test_both_spellings_are_one_config(kind):
  four = tiny.config(kind)
  five = {k: v for k, v in four.items() if k not in tiny.V4} | tiny.V5
  assert zoo.modernbert_config(four) == zoo.modernbert_config(five)
  half = {k: v for k, v in four.items() if k != "local_attention"} | {"sliding_window": 2}
  assert zoo.modernbert_config(four) == zoo.modernbert_config(half)
  config = zoo.modernbert_config(four)
  assert config.local_layers == (False, True, True, False)
  assert (config.global_rope.theta, config.local_rope.theta) == (160_000.0, 10_000.0)


def test_a_null_local_theta_is_that_of_global_layers():
  config = zoo.modernbert_config(tiny.config("encoder", local_rope_theta=None))
  assert config.local_rope == config.global_rope == rotary.RopeConfig(160_000.0)


REFUSED = [
  ({"hidden_activation": "silu"}, "hidden_activation = 'silu' is not supported; jaxlab has gelu"),
  ({"norm_bias": True}, "norm_bias = True is not supported; jaxlab has False"),
  ({"attention_bias": True}, "attention_bias = True"),
  ({"mlp_bias": True}, "mlp_bias = True"),
  ({"classifier_bias": True}, "classifier_bias = True"),
  ({"decoder_bias": False}, "decoder_bias = False is not supported; jaxlab has True"),
  ({"layer_types": ["chunked_attention"] * 4}, r"layer_types = \['chunked_attention'\]"),
  ({"layer_types": ["full_attention"]}, "layer_types = .* one a layer, 4 of them"),
  ({"global_attn_every_n_layers": None}, "field 'global_attn_every_n_layers' is missing"),
  ({"global_rope_theta": None}, "field 'global_rope_theta' is missing"),
  ({"local_attention": None}, "field 'local_attention' is missing"),
  ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "'sliding_attention' is missing"),
  ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
  ({"num_attention_heads": 3}, "num_heads must divide width; got 3 and 8"),
]


@pytest.mark.parametrize("changes,message", REFUSED)
def test_what_we_do_not_have_is_named(changes, message):
  with pytest.raises(ValueError, match=message):
    zoo.from_config(tiny.config("decoder", **changes))


def test_a_theta_is_never_assumed():
  config = tiny.config("decoder")
  del config["local_rope_theta"]
  with pytest.raises(ValueError, match="field 'local_rope_theta' is missing"):
    zoo.from_config(config)


def test_what_cannot_be_done_is_said(golden, tmp_path):
  module, params = golden["encoder"]
  cache = causal_lm.init_cache(module.config, 1, 8, jnp.float32, stacked=True)
  with pytest.raises(ValueError, match="only a decoder continues texts; got an encoder"):
    module.apply({"params": params}, jnp.asarray(IDS), None, None, cache, method="hidden")
  with pytest.raises(ValueError, match="the model must be causal; got an encoder"):
    clm.make_objective(module)
  with pytest.raises(ValueError, match="decoder_window must be hf or train; got 'flash'"):
    zoo.modernbert_config(tiny.config("decoder"), decoder_window="flash")
  tiny.write_folder(tmp_path, tiny.config("decoder"), {})
  with pytest.raises(ValueError, match="one of llama, qwen2, qwen3; got 'modernbert-decoder'"):
    budget.check_model(tmp_path, budget.Work())


# --- folders


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_unchanged_model_comes_out_byte_equal(kind, tied, tmp_path):
  config = tiny.config(kind, tie_word_embeddings=tied)
  tiny.write_folder(tmp_path / "in", config, tiny.random_weights(config))
  lm = jaxlab.load(tmp_path / "in")
  huggingface.save_pretrained(lm, tmp_path / "out")
  for name in ("config.json", "model.safetensors"):
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
  findings = doctor.examine(tmp_path / "in")
  assert not doctor.is_broken(findings), findings


def test_a_decoder_is_loaded_saved_sampled_and_exported(tmp_path):
  config = tiny.config("decoder", **tiny.WIDE)
  tiny.write_folder(tmp_path / "in", config, tiny.random_weights(config))
  lm = jaxlab.load(tmp_path / "in")
  jaxlab.save(lm, tmp_path / "own")
  again = jaxlab.load(tmp_path / "own")
  jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
  prompts = [tiny.tokens(1, n)[0].tolist() for n in (9, 4)]
  greedy = sampling.SamplingConfig(max_new_tokens=8, temperature=0.0)
  sampler = autoregressive.Sampler(lm.module, greedy, stop_ids=())
  found = sampler(lm.params, prompts, jax.random.key(0))
  expected = receipt.greedy(lm.module, lm.params, prompts, 8)  # full forward passes
  assert [found.ids(row) for row in range(2)] == [ids for ids, _ in expected]
  language_model.export(lm, tmp_path / "out")
  assert (tmp_path / "out" / receipt.RECEIPT).exists()


def test_an_encoder_has_no_receipt(tmp_path):
  config = tiny.config("encoder")
  tiny.write_folder(tmp_path / "in", config, tiny.random_weights(config))
  with pytest.raises(ValueError, match="the model must be a decoder; got an encoder"):
    language_model.export(jaxlab.load(tmp_path / "in"), tmp_path / "out")


def test_a_fused_tensor_of_another_shape_is_named(tmp_path):
  config = tiny.config("encoder")
  tensors = tiny.random_weights(config)
  tensors["model.layers.1.mlp.Wi.weight"] = np.zeros((13, 8), np.float32)
  with pytest.raises(ValueError, match="'model.layers.1.mlp.Wi.weight#0/2' .* shape"):
    load(tmp_path, config, tensors)
