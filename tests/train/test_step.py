"""One update: exact accumulation, by hand and for every split; what is an error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.nn import weights
from jaxlab.objectives import weighted
from jaxlab.train import guard, state, step
from tests.train import tiny

KEY = jax.random.key(5)


def one_update(micro_batch, objective=tiny.without_dropout, batch=None):
  optimizer = guard.guarded(optax.sgd(0.1))
  current, frozen = tiny.start(optimizer)
  train_step = step.make_train_step(objective, optimizer, micro_batch=micro_batch)
  return train_step(current, frozen, tiny.batch_of(0) if batch is None else batch, KEY)


def test_by_hand():
  """Loss and gradient of w in mean((w x)^2 over weighted rows), SGD of rate 0.5."""

  def objective(params, batch, key):
    error_B = (params["w"] * batch["x"]) ** 2
    loss = weighted.Weighted(jnp.sum(error_B * batch["n"]), jnp.sum(batch["n"]))
    return loss, {"x": weighted.Weighted(jnp.sum(batch["x"]), jnp.float32(batch["x"].size))}

  optimizer = guard.guarded(optax.sgd(0.5))
  current = state.TrainState.create({"w": jnp.float32(2)}, optimizer)
  batch = {"x": jnp.float32([1, 2, 3, 4]), "n": jnp.float32([1, 0, 2, 1])}
  train_step = step.make_train_step(objective, optimizer, micro_batch=2)
  after, metrics = train_step(current, {"w": None}, batch, KEY)
  # sum n x^2 = 1 + 18 + 16 = 35 over weight 4: loss 4 * 8.75, gradient 2 * 2 * 8.75.
  assert metrics["loss"] == 35 and metrics["grad_norm"] == 35 and metrics["x"] == 2.5
  assert after.trainable["w"] == 2 - 0.5 * 35 and after.step == 1


@pytest.mark.parametrize("micro_batch", [1, 3, 4, 12])
def test_every_split_gives_the_same_update(micro_batch):
  want, want_metrics = one_update(None)
  got, metrics = one_update(micro_batch)
  for path in want.trainable:
    np.testing.assert_allclose(got.trainable[path], want.trainable[path], rtol=0, atol=1e-6)
  np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-6)
  np.testing.assert_allclose(metrics["grad_norm"], want_metrics["grad_norm"], rtol=1e-6)


def test_a_mean_of_means_would_differ():
  """The weights of the micro-batches differ, or the test above would prove nothing."""
  batch = tiny.batch_of(0)
  losses = [
    one_update(None, batch={k: v[i::6] for k, v in batch.items()})[1]["loss"] for i in range(6)
  ]
  assert abs(np.mean(losses) - one_update(None)[1]["loss"]) > 1e-2


def test_only_the_trainable_change_and_the_model_keeps_its_buffers():
  params = tiny.init_params()
  optimizer = guard.guarded(optax.sgd(0.1))
  trainable, frozen = weights.partition(params, lambda path: path != "up/kernel")
  current = state.TrainState.create(trainable, optimizer)
  train_step = step.make_train_step(tiny.objective, optimizer)
  after, _ = train_step(current, frozen, tiny.batch_of(0), KEY)
  merged = weights.merge(after.trainable, frozen)
  assert (merged["up"]["kernel"] == tiny.init_params()["up"]["kernel"]).all()
  assert (merged["down"]["kernel"] != params["down"]["kernel"]).any()  # params were not donated
  with pytest.raises(RuntimeError, match="deleted"):
    np.asarray(current.trainable["up/bias"])  # the state was


def test_masters_are_float32_and_compute_is_the_models_affair():
  current = state.TrainState.create({"w": jnp.ones(3, jnp.bfloat16)}, optax.sgd(1.0))
  assert current.trainable["w"].dtype == jnp.float32
  with pytest.raises(ValueError, match="uint8 at 'q/codes'"):
    state.TrainState.create({"q/codes": jnp.ones(3, jnp.uint8)}, optax.sgd(1.0))


def test_an_empty_batch_is_no_nan():
  batch = tiny.batch_of(0) | {"weight": np.zeros(tiny.ROWS, np.float32)}
  after, metrics = one_update(4, batch=batch)
  assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["bad_steps"] == 0
  assert np.isfinite(after.trainable["down/kernel"]).all()


def test_randomness_is_a_function_of_key_and_step():
  """The same state and key give the same bits; another step other dropout."""
  a, b = one_update(3, tiny.objective), one_update(3, tiny.objective)
  assert a[1]["loss"].tobytes() == b[1]["loss"].tobytes()
  train_step = tiny.make_step(optax.set_to_zero())
  current, frozen = tiny.start(optax.set_to_zero())
  current, first = train_step(current, frozen, tiny.batch_of(0), KEY)
  _, second = train_step(current, frozen, tiny.batch_of(0), KEY)
  assert first["loss"] != second["loss"]


def test_one_compilation_and_no_host_transfer():
  train_step = tiny.make_step(micro_batch=4)
  current, frozen = jax.device_put(tiny.start())
  key = jax.device_put(KEY)
  batches = jax.device_put([tiny.batch_of(i) for i in range(3)])
  with jax.transfer_guard("disallow"):
    for batch in batches:
      current, _ = train_step(current, frozen, batch, key)
  assert train_step._cache_size() == 1


def test_sharded_equals_unsharded():
  """Eight virtual devices: rows over "data", the frozen kernel over "model"."""
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def place(tree, *spec):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.tree.map(lambda x: jax.device_put(x, sharding), tree)

  optimizer = guard.guarded(optax.sgd(0.1))
  train_step = step.make_train_step(tiny.without_dropout, optimizer, micro_batch=4)
  current, frozen = tiny.start(optimizer)
  want, want_metrics = train_step(current, frozen, tiny.batch_of(0), KEY)
  current, frozen = tiny.start(optimizer)
  got, metrics = train_step(
    place(current), place(frozen, None, "model"), place(tiny.batch_of(0), "data"), place(KEY)
  )
  for path in want.trainable:
    np.testing.assert_allclose(got.trainable[path], want.trainable[path], rtol=0, atol=1e-6)
  np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-6)


def test_errors_name_the_values():
  with pytest.raises(ValueError, match="12 rows and micro_batch=5. Choose a divisor of 12"):
    one_update(5)
  with pytest.raises(ValueError, match="must have the same rows; got .*3"):
    one_update(None, batch=tiny.batch_of(0) | {"weight": np.ones(3, np.float32)})
  with pytest.raises(ValueError, match="micro_batch must be at least 1; got 0"):
    step.make_train_step(tiny.objective, tiny.OPTIMIZER, micro_batch=0)

  def clashing(params, batch, key):
    loss, _ = tiny.objective(params, batch, key)
    return loss, {"grad_norm": loss}

  with pytest.raises(ValueError, match=r"got \['grad_norm'\]"):
    one_update(None, clashing)
