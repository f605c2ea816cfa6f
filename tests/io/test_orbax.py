"""Checkpoints: what was saved is what comes back; damage, kills and full disks are survived."""

import collections
import logging
import os
import random
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxlab import errors
from jaxlab.io import orbax, seal
from jaxlab.nn import weights
from tests import forkserver
from tests.io import checkpoints

DTYPES = [
  jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.int8, jnp.uint8, jnp.uint32, jnp.bool_,
  jnp.int4, jnp.float4_e2m1fn, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu,
]  # fmt: skip


@pytest.fixture(scope="module")
def fork():
  return forkserver.context()


def call(fork, target, *args, timeout=60):
  """The one object that a child process sends back."""
  results = fork.Queue()
  process = fork.Process(target=target, args=(*args, results))
  process.start()
  try:
    return results.get(timeout=timeout)
  finally:
    process.join(5)
    process.kill()


def fp4(**static):
  """A small packed kernel; the static fields are what the checkpoint must not lose."""
  return weights.FP4Array(
    codes=jnp.arange(64, dtype=jnp.uint8).reshape(4, 16),
    scale=jnp.full((4, 2), 1.5, jnp.float8_e4m3fn),
    tensor_scale=jnp.float32(3),
    **static,
  )


def bits(tree):
  def data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

  return [np.asarray(data(x)).tobytes() for x in jax.tree.leaves(tree)]


# --- digests


def digest(x):
  return seal.inspect({"x": jnp.asarray(x)})[0]["x"][0]


def murmur3(h):
  """Of the reference implementation, on Python integers."""
  h = ((h ^ h >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
  h = ((h ^ h >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
  return h ^ h >> 16


def test_digest_by_hand():
  words = [0, 1, 2**32 - 1, 12345]
  want = sum(murmur3((w + i * 0x9E3779B9) & 0xFFFFFFFF) for i, w in enumerate(words)) & 0xFFFFFFFF
  assert digest(np.uint32(words).reshape(2, 2)) == want


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_changed_word_changes_the_digest(dtype):
  values = np.random.default_rng(0).integers(0, 2, 24)
  x = jnp.asarray(values.astype(np.float32)).astype(dtype)
  found = {digest(x)}
  for i in range(24):
    changed = values.copy()
    changed[i] ^= 1
    found.add(digest(jnp.asarray(changed.astype(np.float32)).astype(dtype)))
  assert len(found) == 25


def test_a_lost_sector_of_equal_values_changes_the_digest():
  """Word times odd weight would not see it: the change is a multiple of 2^32."""
  ones = np.ones((64, 128), np.float32)
  lost = ones.copy()
  lost[2] = 0  # 512 bytes
  assert digest(lost) != digest(ones)
  words, weight = np.uint64(ones.view(np.uint32)), 2 * np.arange(64 * 128).reshape(64, 128) + 1
  old = [int((w * np.uint64(weight)).sum()) % 2**32 for w in (words, words * (lost > 0))]
  assert old[0] == old[1]


def test_digests_are_the_same_under_every_sharding():
  x = jax.random.normal(jax.random.key(0), (16, 8))
  mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  for spec in (PartitionSpec("a", "b"), PartitionSpec(("a", "b")), PartitionSpec(None, "a")):
    assert digest(jax.device_put(x, NamedSharding(mesh, spec))) == digest(x)


def test_structure_is_rebuilt():
  layer = {"q": {"kernel": weights.LoRA(fp4(), jnp.ones((8, 2)), jnp.ones((2, 4)), 2.0)}}
  tree = {"layers": [layer, layer], "pair": (jnp.ones(2), None)}
  again = seal.rebuild(seal.describe(tree), seal.flatten(tree))
  assert jax.tree.structure(again) == jax.tree.structure(tree)
  with pytest.raises(ValueError, match="classes of jaxlab can be made from a file; got 'Ema"):
    seal.rebuild(seal.describe(optax.EmaState(1, 2)), {"count": 1, "ema": 2})
  evil = {"": {"type": "os:system", "children": [], "static": {"command": "true"}}}
  with pytest.raises(ValueError, match="got 'os:system'"):
    seal.rebuild(evil, {})


# --- round trips


def everything():
  """Every dtype that we hold, typed keys, Optax's states, every leaf of the weight seam."""
  values = 1 + jnp.arange(24).reshape(4, 6) % 2  # E8M0 has no zero
  params = {"a/b": jnp.ones(3), "norm": jnp.zeros(2)}
  return {
    "dtypes": {jnp.dtype(d).name: values.astype(d) for d in DTYPES},
    "key": jax.random.key(7),
    "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
    "opt": optax.adamw(1e-3).init(params),
    "q": weights.LoRA(fp4(rotation=32), jnp.ones((8, 2)), jnp.ones((2, 4)), 2.0),
    "list": [jnp.float32(1), (jnp.int32(2), None)],
  }


def test_what_was_saved_is_what_comes_back(tmp_path):
  state = everything()
  with orbax.CheckpointStore(tmp_path) as store:
    assert store.restore_latest(state) is None
    store.save(5, state, {"position": 5, "name": "a"})
    store.wait()
    restored = store.restore_latest(state)
  assert restored.step == 5 and restored.meta == {"position": 5, "name": "a"}
  assert jax.tree.structure(restored.state) == jax.tree.structure(state)
  assert bits(restored.state) == bits(state)


def test_arrays_may_be_donated_right_after_save(tmp_path):
  add = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
  state = add({str(i): jnp.zeros(1 << 20) for i in range(4)})
  with orbax.CheckpointStore(tmp_path) as store:
    store.save(1, state, {})
    for _ in range(5):
      state = add(state)
    restored = store.restore_latest(state)
  assert all((x == 1).all() for x in restored.state.values())


def test_a_step_counts_when_it_is_committed_and_the_newest_stay(tmp_path, caplog):
  caplog.set_level(logging.INFO, "absl")
  with orbax.CheckpointStore(tmp_path, keep=2) as store:
    for step in (1, 2, 3, 4):
      store.save(step, checkpoints.make(step), {})
      assert f"Saved step {step}." not in caplog.messages
      deadline = time.monotonic() + 20
      while f"Saved step {step}." not in caplog.messages and time.monotonic() < deadline:
        store.check()
    assert store.steps() == [3, 4]
  assert [m for m in caplog.messages if m.startswith("Saved")] == [
    f"Saved step {i}." for i in (1, 2, 3, 4)
  ]
  assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "4"]  # no trash, no temporaries
  assert len(caplog.messages) == 4  # and nothing of Orbax's own


def test_an_uncommitted_array_stays_free(tmp_path):
  """A restored step counter must be able to meet parameters on a mesh."""
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spread = NamedSharding(mesh, PartitionSpec("data"))
  state = {"step": jnp.int32(3), "key": jax.random.key(1), "w": jax.device_put(jnp.ones(8), spread)}
  with orbax.CheckpointStore(tmp_path) as store:
    store.save(1, state, {})
    store.wait()
    got = store.restore_latest(state).state
  assert got["w"].sharding == spread
  jax.block_until_ready(jax.jit(lambda s: s["w"] * s["step"])(got))


# --- what is refused


@pytest.mark.parametrize(
  "leaf, text",
  [
    (jnp.float32([1, np.nan]), "finite numbers; got NaN or inf in 1 arrays of step 2, first 'x'"),
    (jnp.array([np.inf], jnp.bfloat16), "finite numbers"),
    (jnp.zeros((0, 3)), r"neither empty .*; got float32\[0, 3\] at 'x'"),
    (jnp.zeros(2, jnp.uint4), r"got uint4\[2\] at 'x'"),
    (np.zeros(2, np.int64), "got int64 at 'x'. Cast it to 32 bits"),
    (3, "every leaf must be an array; got int at 'x'"),
  ],
)
def test_refused_leaves(tmp_path, leaf, text):
  with orbax.CheckpointStore(tmp_path) as store:
    store.save(1, {"x": jnp.ones(2)}, {})
    with pytest.raises(ValueError, match=text):
      store.save(2, {"x": leaf}, {})
    assert store.steps() == [1]  # and nothing pushed the healthy step out


def test_paths_must_differ():
  with pytest.raises(ValueError, match="2 leaves and 1 paths. Rename a key that contains '/'"):
    seal.flatten({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})


@pytest.mark.parametrize(
  "target, text",
  [
    ({"w": jnp.ones((2, 3), jnp.bfloat16)}, r"w: \['float32', \[2, 3\]\] -> \['bfloat16'"),
    ({"w": jnp.ones((2, 4))}, r"w: \['float32', \[2, 3\]\] -> \['float32', \[2, 4\]\]"),
    ({"v": jnp.ones((2, 3))}, r"v: None -> .*, w: .* -> None"),
    ([jnp.ones((2, 3))], "0: None -> "),
  ],
)
def test_another_model_is_the_users_mistake(tmp_path, target, text):
  with orbax.CheckpointStore(tmp_path) as store:
    store.save(1, {"w": jnp.ones((2, 3))}, {})
    store.wait()
    with pytest.raises(ValueError, match=text):
      store.restore_latest(target)
    assert store.steps() == [1]  # the checkpoint is well


@pytest.mark.parametrize(
  "field, value",
  [("format", "mxfp4"), ("activations", "fp4"), ("rotation", 16), ("scale_is_divisor", False)],
)
def test_static_fields_are_compared(tmp_path, field, value):
  """Orbax would take the target's: nvfp4 codes would be read as mxfp4."""
  with orbax.CheckpointStore(tmp_path) as store:
    store.save(1, {"q": fp4()}, {})
    store.wait()
    with pytest.raises(ValueError, match=rf"q: .*'{field}'.* -> .*{value}"):
      store.restore_latest({"q": fp4(**{field: value})})
    assert store.restore_latest({"q": fp4()}).step == 1


def test_node_types_are_compared(tmp_path):
  params = {"w": jnp.ones(2)}
  with orbax.CheckpointStore(tmp_path) as store:
    store.save(1, optax.scale_by_adam().init(params), {})
    store.wait()
    with pytest.raises(ValueError, match="root: .*ScaleByAdamState.* -> .*ScaleByLionState|nu"):
      store.restore_latest(optax.scale_by_lion().init(params))


def test_a_complaint_about_the_meta_stops_before_the_arrays(tmp_path):
  with orbax.CheckpointStore(tmp_path) as store:
    store.save(1, {"w": jnp.ones(2)}, {"seed": 1})
    store.wait()
    with pytest.raises(ValueError, match="another seed: 1"):
      store.restore_latest({"other": jnp.ones(3)}, lambda meta: f"another seed: {meta['seed']}")


# --- checkpoints of parameters


def test_params_round_trip(tmp_path):
  kernel = weights.LoRA(fp4(), jnp.ones((8, 2)), jnp.ones((2, 4)), 0.5)
  params = {"embed": jnp.ones((4, 8), jnp.bfloat16), "layers": {"q": {"kernel": kernel}}}
  path = tmp_path / "model"
  assert not orbax.is_checkpoint(path)
  orbax.save_params(path, jax.tree.map(jnp.zeros_like, params), {"version": 0})
  orbax.save_params(path, params, {"version": 1, "config": {"hidden_size": 8}})
  assert orbax.is_checkpoint(path)
  got, meta = orbax.load_params(path)
  assert meta == {"version": 1, "config": {"hidden_size": 8}}
  assert jax.tree.structure(got) == jax.tree.structure(params) and bits(got) == bits(params)
  mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = {"embed": PartitionSpec("fsdp")}
  got, _ = orbax.load_params(
    path, lambda name: NamedSharding(mesh, spec.get(name, PartitionSpec()))
  )
  assert got["embed"].sharding.spec == spec["embed"] and bits(got) == bits(params)


def test_params_errors(tmp_path):
  with pytest.raises(ValueError, match="must be a folder written by save_params"):
    orbax.load_params(tmp_path / "absent")
  orbax.save_params(tmp_path / "m", {"w": jnp.ones(1000)}, {})
  meta = next((tmp_path / "m" / "0" / "meta").glob("metadata"))
  meta.write_bytes(meta.read_bytes().replace(b"float32", b"float16"))
  with pytest.raises(errors.CorruptFile, match="metadata differs from its checksum"):
    orbax.load_params(tmp_path / "m")


# --- damage


@pytest.fixture(scope="module")
def good_root(tmp_path_factory):
  root = tmp_path_factory.mktemp("good")
  with orbax.CheckpointStore(root) as store:
    for step in (1, 2, 3):
      store.save(step, checkpoints.make(step), {"step": step})
  return root


def damage(path, kind, rng):
  data = bytearray(path.read_bytes())
  start = rng.randrange(len(data)) if data else 0
  match kind:
    case "delete":
      return path.unlink()
    case "empty":
      data = b""
    case "truncate":
      data = data[:start]
    case "flip" if data:
      data[start] ^= 1 << rng.randrange(8)
    case "zero" if data:
      data[start : start + 512] = bytes(len(data[start : start + 512]))
    case "junk":
      data += b"junk"
  path.write_bytes(data)


def survive_damage(good_root, work, trials):
  rng, outcomes = random.Random(0), collections.Counter()
  files = sorted(p.relative_to(good_root) for p in (good_root / "3").rglob("*") if p.is_file())
  target = checkpoints.make(0)
  for trial in range(trials):
    root = work / str(trial)
    shutil.copytree(good_root, root)
    file = rng.choice(files)
    kind = rng.choice(["delete", "empty", "truncate", "flip", "flip", "flip", "zero", "junk"])
    damage(root / file, kind, rng)
    with orbax.CheckpointStore(root) as store:
      restored = store.restore_latest(target)
    where = f"trial {trial}: {kind} in {file}"
    assert restored.step in (2, 3), where
    assert restored.meta == {"step": restored.step}, where
    assert checkpoints.same(restored.state, restored.step), where
    assert (root / "damaged.3").is_dir() == (restored.step == 2), where
    outcomes[restored.step] += 1
    shutil.rmtree(root)
  return outcomes


def test_damage_is_noticed_and_the_step_before_is_used(good_root, tmp_path):
  outcomes = survive_damage(good_root, tmp_path, 60)
  assert outcomes[2] >= 20  # most damage matters


@pytest.mark.soak
def test_damage_a_thousand_times(good_root, tmp_path):
  survive_damage(good_root, tmp_path, 1000)


def test_a_damaged_step_is_reported_in_one_line(good_root, tmp_path, caplog, capfd):
  root = tmp_path / "root"
  shutil.copytree(good_root, root)
  for path in (root / "3" / "state" / "d").iterdir():
    path.write_bytes(path.read_bytes()[:100])
  capfd.readouterr()
  with orbax.CheckpointStore(root) as store:
    assert store.restore_latest(checkpoints.make(0)).step == 2
    assert store.steps() == [1, 2]
    store.save(3, checkpoints.make(3), {"step": 3})  # and the number is free again
    store.wait()
    assert store.restore_latest(checkpoints.make(0)).step == 3
  assert len(caplog.messages) == 1 and "set aside as damaged.3" in caplog.messages[0]
  printed = "".join(capfd.readouterr())
  assert printed.count("\n") <= 1, printed


def test_when_every_step_is_damaged_the_run_stops(good_root, tmp_path):
  root = tmp_path / "root"
  shutil.copytree(good_root, root)
  for step in (1, 2, 3):
    shutil.rmtree(root / str(step) / "state")
  with orbax.CheckpointStore(root) as store:
    with pytest.raises(errors.CorruptFile, match=r"steps \[1, 2, 3\]: every checkpoint is damaged"):
      store.restore_latest(checkpoints.make(0))
    assert store.restore_latest(checkpoints.make(0)) is None  # the same command starts anew


def test_a_missing_digest_is_damage(good_root, tmp_path):
  """Also when the seal was renewed: what has no digest is not trusted."""
  root = tmp_path / "root"
  shutil.copytree(good_root, root)
  import json

  path = root / "3" / "meta" / "metadata"
  meta = seal.unsealed(json.loads(path.read_text()))
  meta["leaves"]["n"][0] = None
  path.write_text(json.dumps(seal.sealed(meta)))
  with orbax.CheckpointStore(root) as store:
    assert store.restore_latest(checkpoints.make(0)).step == 2


# --- processes


def kill_while_saving(fork, root, trials):
  rng, newest = random.Random(0), 0
  for trial in range(trials):
    ready = fork.Event()
    process = fork.Process(target=checkpoints.save_for_ever, args=(root, ready))
    process.start()
    assert ready.wait(60)
    time.sleep(rng.random() * 0.8)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    steps, wrong = checkpoints.check_every_step(root)
    assert not wrong, f"trial {trial}: steps {steps}, not whole {wrong}"
    assert max(steps, default=0) >= newest, f"trial {trial}: {newest} was there, now {steps}"
    newest = max(steps, default=0)
  assert newest > 1  # saves happened, however busy the machine


def test_kill_9_while_saving(fork, tmp_path):
  kill_while_saving(fork, tmp_path / "root", 8)


@pytest.mark.soak
def test_kill_9_two_hundred_times(fork, tmp_path):
  kill_while_saving(fork, tmp_path / "root", 200)


def test_a_full_disk_costs_one_step(fork, tmp_path):
  error, steps, newest, equal = call(fork, checkpoints.fill_the_disk, tmp_path)
  assert "step 2 could not be written; got " in error and "File too large" in error
  assert len(error) < 400 and "\n" not in error
  assert steps == [1] and newest == 3 and equal


def test_restore_on_another_mesh(fork, tmp_path):
  """Saved on (4, 2) devices, restored on (2, 2) and (1, 2)."""
  results = [call(fork, checkpoints.reshard, tmp_path, devices) for devices in (8, 4, 2)]
  assert [r[0] for r in results] == [8, 4, 2]
  assert all(digests == results[0][1] for _, digests, _ in results)
  assert all(equal for _, _, equal in results)
