"""Where every part of a parameter goes, what is refused, and that a mesh changes no numbers."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging
from jax.sharding import PartitionSpec as P

import jaxlab
from jaxlab import lora
from jaxlab.nn import stack, weight_specs, weights
from jaxlab.parallel import mesh as meshes
from jaxlab.parallel import rules
from jaxlab.train import guard, state, step
from tests.models import tiny as hf
from tests.parallel import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Sums of up to 512 float32 products in another order, through two layers: 2e-5 was seen on logits
# up to 4, 5e-5 of a gradient's largest entry. A sum over an axis missing or doubled: an error of 1.
LOGITS, GRADS = 1e-4, 2e-4
ROUNDING = 2.0**-23  # of a float32
FSDP, SMALL, LONG = (2, 4, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2)


def mesh_of(data=1, fsdp=1, tensor=1, sequence=1):
  config = meshes.MeshConfig(data, fsdp, tensor, sequence)
  return meshes.make_mesh(config, jax.devices()[: data * fsdp * tensor * sequence])


# --- specs by hand


def test_specs_of_every_part():
  mesh = mesh_of(*SMALL)
  specs = rules.param_specs(tiny.params("mixed"), mesh, num_kv_heads=2)
  layers = specs["layers"]
  assert specs["embed"] == P("tensor", "fsdp") and specs["head"]["kernel"] == P("fsdp", "tensor")
  assert specs["norm"] == layers["attn_norm"] == layers["mlp_norm"] == P()
  for name in ("q", "k", "v"):
    assert layers[name] == {"kernel": P(None, "fsdp", "tensor"), "bias": P(None, "tensor")}
  o = layers["o"]["kernel"]  # inputs over tensor, outputs over fsdp
  assert o.base.codes == o.base.scale == P(None, "fsdp", "tensor")
  assert o.base.tensor_scale == P() and o.base.act_scale is None
  assert o.a == P(None, "tensor") and o.b == P(None, None, "fsdp")
  up = layers["up"]["kernel"]
  assert up.base.codes == up.base.scale == P(None, "tensor", "fsdp")
  assert up.a == P(None, "fsdp") and up.b == P(None, None, "tensor")
  down = layers["down"]["kernel"].base
  assert down.codes == down.scale == P(None, "fsdp", "tensor")
  assert down.scale_step == down.scale_min == P()


def test_specs_of_other_leaves():
  down, up = jnp.ones((64, 4)), jnp.ones((4, 64))
  low = weight_specs.partition_specs(weights.LowRank(down, up), "fsdp", "tensor", mesh_of(*SMALL))
  assert low.down == P("fsdp") and low.up == P(None, "tensor")
  w4a4 = dataclasses.replace(packed("mxfp4", 64), act_scale=jnp.float32(1))
  specs = weight_specs.partition_specs(w4a4, None, "tensor", mesh_of(*SMALL))
  assert specs.codes == P("tensor") and specs.act_scale == P()
  dense = weights.LoRA(jnp.ones((64, 64)), down, up)
  specs = weight_specs.partition_specs(dense, "tensor", "fsdp", mesh_of(*SMALL))
  assert specs.base == P("tensor", "fsdp")


def test_a_list_of_layers_has_the_specs_of_the_stack():
  params = tiny.params("mixed")
  mesh = mesh_of(*SMALL)
  stacked = rules.param_specs(params, mesh, num_kv_heads=2)
  listed = rules.param_specs(stack.unstack(params), mesh, num_kv_heads=2)
  for layer in listed.pop("layers"):
    with_axis = jax.tree.map(lambda spec: P(None, *spec) if spec else spec, layer)
    assert with_axis == stacked["layers"]
  assert listed == {name: spec for name, spec in stacked.items() if name != "layers"}


def test_shapes_are_enough():
  params, mesh = tiny.params("mixed"), mesh_of(*SMALL)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
  assert rules.param_specs(shapes, mesh.abstract_mesh) == rules.param_specs(params, mesh)


def test_each_device_holds_its_share_of_the_bytes():
  params = rules.shard_params(tiny.params("nvfp4"), mesh_of(*SMALL), num_kv_heads=2)
  base = params["layers"]["down"]["kernel"].base
  for part in (base.codes, base.scale):
    assert {shard.data.nbytes for shard in part.addressable_shards} == {part.nbytes // 4}


def test_kv_heads_that_tensor_does_not_divide_stay_whole(monkeypatch):
  said = []
  monkeypatch.setattr(logging, "info", lambda text, *values: said.append(text % values))
  rules._say_whole.cache_clear()
  for _ in range(2):
    mesh = mesh_of(fsdp=2, tensor=4)
    specs = rules.param_specs(tiny.params("mixed"), mesh, num_kv_heads=2)["layers"]
  assert specs["k"] == specs["v"] == {"kernel": P(None, "fsdp"), "bias": P()}
  assert specs["q"]["kernel"] == P(None, "fsdp", "tensor")
  assert said == ["param_specs: k and v whole on every device of tensor=4 (2 KV heads)."]
  unknown = rules.param_specs(tiny.params("mixed"), mesh_of(fsdp=2, tensor=2))["layers"]
  assert unknown["k"]["kernel"] == P(None, "fsdp") and "an unknown number" in said[1]


def test_an_odd_vocabulary_stays_whole():
  odd = {"embed": jnp.ones((97, 64)), "head": {"kernel": jnp.ones((64, 97))}}
  specs = rules.param_specs(odd, mesh_of(*SMALL))
  assert specs == {"embed": P(None, "fsdp"), "head": {"kernel": P("fsdp")}}


def test_load_places_parameters(tmp_path):
  hf.write_folder(tmp_path, hf.CASES["qwen2"])
  params = jaxlab.load(tmp_path, mesh=mesh_of(*SMALL)).params
  specs = jax.tree.map(lambda x: x.sharding.spec, params)
  assert specs == rules.param_specs(params, mesh_of(*SMALL), num_kv_heads=2)
  assert specs["layers"]["k"]["kernel"] == P(None, "fsdp", "tensor")


@pytest.mark.parametrize(
  "shape, mesh, spec",
  [
    ((), SMALL, P()),
    ((16,), SMALL, P(("data", "fsdp"))),
    ((16, 12, 64), LONG, P("fsdp", "sequence")),  # axes of one device are left out
    ((16, 12), LONG, P("fsdp")),  # tokens, not positions of an activation
    ((16, 1, 64), LONG, P("fsdp")),  # a decoded token
    ((2, 12, 64), SMALL, P("data")),
    ((1, 12, 64), SMALL, P()),
    ((1, 12, 64), LONG, P(None, "sequence")),
  ],
)
def test_specs_of_activations(shape, mesh, spec):
  assert rules.activation_spec(shape, mesh_of(*mesh)) == spec


def test_specs_of_a_cache():
  mesh = mesh_of(*SMALL)
  assert rules.cache_spec((2, 16, 2, 40, 32), mesh) == P(None, ("data", "fsdp"), "tensor")
  assert rules.cache_spec((16, 2, 40, 32), mesh) == P(("data", "fsdp"), "tensor")
  assert rules.cache_spec((1, 3, 40, 32), mesh) == P()


# --- refusals


def dense(inputs, outputs=64):
  return jnp.zeros((inputs, outputs))


def packed(format, inputs, outputs=64, rotation=0):
  codes = jnp.zeros((outputs, inputs // 2), jnp.uint8)
  scalar = jnp.float32(1)
  if format == "nf4":
    return weights.NF4Array(codes, jnp.zeros((outputs, inputs // 64), jnp.uint8), scalar, scalar)
  dtype, block = (jnp.uint8, 32) if format == "mxfp4" else (jnp.float8_e4m3fn, 16)
  scale = jnp.zeros((outputs, inputs // block), dtype)
  return weights.FP4Array(codes, scale, scalar, format=format, rotation=rotation)


REFUSED = {
  "nvfp4": (packed("nvfp4", 96), 4, "nvfp4 blocks of 16; got in = 96 over tensor = 4, 24 a"),
  "mxfp4": (packed("mxfp4", 96), 2, "mxfp4 blocks of 32; got in = 96 over tensor = 2, 48 a"),
  "nf4": (packed("nf4", 192), 2, "nf4 blocks of 64; got in = 192 over tensor = 2, 96 a"),
  "rotation": (
    packed("nvfp4", 192, rotation=64), 2, "nvfp4 blocks of 16 and rotations of 64; got in = 192",
  ),
  "dense": (dense(63), 2, "features; got in = 63 over tensor = 2, 31.5 a shard"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_shard_that_splits_a_block_is_refused(case):
  leaf, tensor, message = REFUSED[case]
  adapted = weights.LoRA(leaf, dense(leaf.shape[0], 4), dense(4))
  for w in (leaf, adapted):
    with pytest.raises(ValueError, match=f"layers/0/o/kernel: .* whole {message}"):
      rules.leaf_specs("layers/0/o/kernel", w, mesh_of(tensor=tensor))
    rules.leaf_specs("layers/0/o/kernel", w, mesh_of(data=2))


def test_outputs_are_refused_too_but_have_no_blocks():
  with pytest.raises(ValueError, match="whole features; got out = 68 over tensor = 8, 8.5 a shard"):
    rules.leaf_specs("layers/0/up/kernel", packed("nvfp4", 64, 68), mesh_of(tensor=8))
  rules.leaf_specs("layers/0/up/kernel", packed("nvfp4", 64, 72), mesh_of(tensor=8))


def test_other_errors_name_what_is_wrong():
  with pytest.raises(ValueError, match="got 'layers/router/kernel', and rules for q, k, v"):
    rules.param_specs({"layers": {"router": {"kernel": dense(64)}}}, mesh_of())
  with pytest.raises(ValueError, match=r"got \('data', 'model'\), without \['fsdp'"):
    rules.param_specs({"embed": dense(64)}, jax.make_mesh((4, 2), ("data", "model")))
  with pytest.raises(ValueError, match="multiple of data \\* fsdp = 8; got 12 rows"):
    rules.shard_rows({"x": np.ones((12, 2))}, mesh_of(*FSDP))


# --- the same numbers on every mesh


@pytest.fixture(scope="module")
def one_device():
  """(logits, gradients) of the mixed model."""
  return jax.device_get(tiny.logits_and_grads(*tiny.split(tiny.params("mixed")), tiny.batch()))


def on_mesh(params, shape, placed):
  mesh = mesh_of(*shape)
  trainable, frozen = tiny.split(rules.shard_params(params, mesh, num_kv_heads=2))
  placement = rules.Placement(mesh, 2) if placed else None
  batch = rules.shard_rows(tiny.batch(), mesh)
  logits, grads = tiny.logits_and_grads(trainable, frozen, batch, placement)
  if placed:  # gradients are born where their parameters are
    for path, grad in grads.items():
      assert grad.sharding.is_equivalent_to(trainable[path].sharding, grad.ndim), path
  return jax.device_get((logits, grads))


def assert_same(got, want):
  np.testing.assert_allclose(got[0], want[0], rtol=0, atol=LOGITS)
  assert got[1].keys() == want[1].keys()
  for path, grad in want[1].items():
    atol = GRADS * np.abs(grad).max()
    np.testing.assert_allclose(got[1][path], grad, rtol=0, atol=atol, err_msg=path)


@pytest.mark.parametrize(
  "shape, placed", [(SMALL, True), (LONG, True), ((2, 1, 1, 4), True), ((1, 1, 8, 1), False)]
)
def test_logits_and_gradients_are_those_of_one_device(one_device, shape, placed):
  assert_same(on_mesh(tiny.params("mixed"), shape, placed), one_device)


def test_a_list_of_layers_gives_the_same(one_device):
  logits, grads = on_mesh(stack.unstack(tiny.params("mixed")), (8, 1, 1, 1), False)
  found = {}
  for path in one_device[1]:
    first, _, rest = path.partition("/")
    layers = [grads[f"layers/{i}/{rest}"] for i in range(2)] if first == "layers" else []
    found[path] = np.stack(layers) if layers else grads[path]
  assert_same((logits, found), one_device)


OPTIMIZER = guard.guarded(optax.sgd(0.1, momentum=0.9))
TRAINS = lora.is_trainable(tiny.LORA)


def two_updates(params, batch, placement, place):
  """LoRA over nvfp4, two micro-batches an update: (trained, losses, text of the program)."""
  objective = functools.partial(tiny.objective, placement=placement)
  train_step = step.make_train_step(objective, OPTIMIZER, micro_batch=8)
  trainable, frozen = weights.partition(params, TRAINS)
  current = place(state.TrainState.create(trainable, OPTIMIZER))
  key, losses = jax.random.key(0), []
  compiled = train_step.lower(current, frozen, batch, key).compile()
  for _ in range(2):  # the program refuses a state that came out placed otherwise than it went in
    current, metrics = compiled(current, frozen, batch, key)
    losses.append(float(metrics["loss"]))
  return jax.device_get(current.trainable), losses, compiled.as_text()


@pytest.fixture(scope="module")
def updates_on_fsdp():
  mesh = mesh_of(*FSDP)
  params = rules.shard_params(tiny.params("nvfp4"), mesh, num_kv_heads=2)
  place = functools.partial(rules.replicate, mesh=mesh)
  batch = rules.shard_rows(tiny.batch(), mesh)
  return two_updates(params, batch, rules.Placement(mesh, 2), place)


def test_an_update_is_that_of_one_device(updates_on_fsdp):
  got, losses, _ = updates_on_fsdp
  want, want_losses, _ = two_updates(tiny.params("nvfp4"), tiny.batch(), None, lambda tree: tree)
  np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
  before, _ = weights.partition(tiny.params("nvfp4"), TRAINS)
  for path, x in want.items():
    change = np.abs(x - before[path]).max()
    atol = GRADS * change + ROUNDING * np.abs(x).max()
    assert change > 20 * atol, path  # there is something to compare
    np.testing.assert_allclose(got[path], x, rtol=0, atol=atol, err_msg=path)


def test_packed_kernels_travel_packed(updates_on_fsdp):
  """Under fsdp a placed layer gathers bytes, once forward and once backward; nothing decoded."""
  found = re.findall(r"= (\w+)\[([\d,]*)\]\S* all-gather\(", updates_on_fsdp[2])
  gathered = [(dtype, np.prod([int(d) for d in dims.split(",")])) for dtype, dims in found]
  layers = tiny.params("nvfp4")["layers"]
  codes = [layers[name]["kernel"].base.codes[0].size for name in lora.TARGETS]
  assert sum(n for dtype, n in gathered if dtype == "u8") == 2 * sum(codes)
  # Beside them: scales (which a CPU sends as 16 bits), thin factors, the embedding and the head.
  table, decoded = tiny.CONFIG.vocab_size * tiny.CONFIG.width, 2 * min(codes)
  others = sorted(n for dtype, n in gathered if dtype != "u8")
  assert others[-2:] == [table, table] and others[-3] < decoded
