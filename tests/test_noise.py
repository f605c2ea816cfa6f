"""AQN against oracles O4 and O5 of the QeRL specification."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab import noise

CODE_TABLE = (0, 0.01, 0.00687656, 0.00472871, 0.00325172, 0.00223607)
CODE_TABLE += (0.00153765, 0.00105737, 0.00072711, 0.0005)
PAPER_TABLE = (0, 0.01, 0.00716871, 0.00513904, 0.00368403, 0.00264098)
PAPER_TABLE += (0.00189324, 0.00135721, 0.00097294, 0.00069748)
PRINTED = {"rtol": 0, "atol": 5.1e-9}  # eight decimals


def make_params(depth=3, width=16, dtype=jnp.float32, gain=1.0):
  rows = jnp.full((depth, width), gain, dtype)
  return {
    "embed": jnp.ones((4, width)),
    "layers": {
      "attn_norm": rows,
      "mlp_norm": 2 * rows,
      "q": {"kernel": jnp.ones((depth, width, 2))},
      "q_norm": jnp.ones((depth, 8)),
    },
    "norm": jnp.ones(width),
  }


def unstacked(params):
  depth = params["layers"]["attn_norm"].shape[0]
  layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(depth)]
  return params | {"layers": layers}


# --- O5: the schedule -----------------------------------------------------------------------------


def test_stage_values():
  settings = {"stages": 10, "sigma_start": 1e-2, "sigma_end": 5e-4}
  np.testing.assert_allclose(noise.sigma_table(**settings), CODE_TABLE, **PRINTED)
  paper = noise.sigma_table(**settings, paper_form=True)
  np.testing.assert_allclose(paper, PAPER_TABLE, **PRINTED)


@pytest.mark.parametrize(
  "step, sigma",
  [(0, 0), (59, 0), (60, 0.01), (119, 0.01), (120, 0.00687656), (300, 0.00223607)]
  + [(539, 0.00072711), (540, 0.0005), (599, 0.0005), (600, 0.0005), (10**9, 0.0005)],
)
def test_steps(step, sigma):
  assert noise.sigma_at(step, total_steps=600) == pytest.approx(sigma, abs=5.1e-9)


@pytest.mark.parametrize("total", [7, 10, 467, 600])
def test_a_traced_step_gives_the_same_without_recompiling(total):
  traces = []

  @jax.jit
  def traced(step):
    traces.append(1)
    return jax.vmap(lambda s: noise.sigma_at(s, total_steps=total))(step)

  steps = np.arange(total + 3)
  expected = [noise.sigma_at(int(s), total_steps=total) for s in steps]
  np.testing.assert_allclose(traced(jnp.asarray(steps)), expected, rtol=1e-6)
  traced(jnp.asarray(steps))
  assert len(traces) == 1


def test_other_shapes_start_and_end_where_they_should():
  for shape in noise.SHAPES:
    table = noise.sigma_table(stages=10, sigma_start=1e-2, sigma_end=5e-4, shape=shape)
    assert table[0] == 0
    assert table[1] == pytest.approx(1e-2)
    assert table[-1] == pytest.approx(5e-4)
    assert all(a > b for a, b in zip(table[1:], table[2:], strict=False)), shape
  middle = {
    shape: noise.sigma_table(stages=5, sigma_start=1.0, sigma_end=0.5, shape=shape)[2]
    for shape in ("linear", "cosine", "log")
  }
  assert middle["linear"] == pytest.approx(1 - 0.5 / 3)
  assert middle["cosine"] == pytest.approx(0.5 + 0.25 * 1.5)
  assert middle["log"] == pytest.approx(1 - 0.5 * np.log(2) / np.log(4))


# --- O4: what the noise does ----------------------------------------------------------------------


def test_gain_noise_is_row_scaled_weights():
  x, w, z = np.array([[1, -2, 3, 0.5], [0.5, 1, 2, 0.25], [0.01, -0.02, 0.03, 0.005]])
  w_IO = np.array([[1, 0], [0, 2], [-1, 1], [4, -2.0]])
  unit = x / np.sqrt((x**2).mean() + 1e-6)
  params = {"layers": {n: jnp.array(w[None], jnp.float32) for n in noise.GAINS}}
  key = jax.random.key(0)
  drawn = noise.perturb(params, 1.0, key)["layers"]["attn_norm"][0] - jnp.float32(w)
  noisy = (w + z) * unit @ w_IO
  np.testing.assert_allclose(noisy, [-2.686151, 1.014592], atol=1e-6)
  np.testing.assert_allclose(w * unit @ w_IO, [-2.649064, 0.927173], atol=1e-6)
  np.testing.assert_allclose(w * unit @ ((1 + z / w)[:, None] * w_IO), noisy, atol=1e-12)
  # The same identity with the noise that `perturb` draws.
  by_gain = (w + np.float64(drawn)) * unit @ w_IO
  by_rows = w * unit @ ((1 + np.float64(drawn) / w)[:, None] * w_IO)
  np.testing.assert_allclose(by_gain, by_rows, atol=1e-9)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_zero_sigma_is_bit_identical(dtype):
  params = make_params(dtype=dtype, gain=0.3)
  for sigma in (0.0, jnp.float32(0.0)):
    noisy = noise.perturb(params, sigma, jax.random.key(1))
    for name in noise.GAINS:
      clean = params["layers"][name].astype(jnp.float32)
      np.testing.assert_array_equal(noisy["layers"][name], clean)
  assert float(noise.effective_std(params, noisy)) == 0.0


def test_only_the_block_norms_change_and_parameters_never_do():
  params = make_params()
  before = jax.tree.map(np.asarray, params)
  for step in range(100):
    noisy = noise.perturb(params, 0.1, jax.random.fold_in(jax.random.key(0), step))
  jax.tree.map(np.testing.assert_array_equal, before, params)
  for path, leaf in jax.tree.leaves_with_path(noisy):
    changed = path[-1].key in noise.GAINS
    clean = params
    for entry in path:
      clean = clean[entry.key]
    assert (leaf is clean) != changed, path


def test_stacked_and_unstacked_layers_get_the_same_noise():
  params = make_params(gain=0.7)
  key = jax.random.key(3)
  stacked = noise.perturb(params, 0.05, key)
  listed = noise.perturb(unstacked(params), 0.05, key)
  jax.tree.map(np.testing.assert_array_equal, unstacked(stacked), listed)
  assert float(noise.effective_std(unstacked(params), listed)) == float(
    noise.effective_std(params, stacked)
  )
  layer_key = jax.random.fold_in(jax.random.fold_in(key, 2), 1)
  expected = 1.4 + 0.05 * jax.random.normal(layer_key, (16,))
  np.testing.assert_allclose(listed["layers"][2]["mlp_norm"], expected, rtol=1e-6)


def test_layers_and_norms_are_uncorrelated():
  params = make_params(depth=2, width=20_000)
  layers = noise.perturb(params, 1.0, jax.random.key(0))["layers"]
  draws = np.concatenate([np.asarray(layers[name]) for name in noise.GAINS])
  correlation = np.corrcoef(draws) - np.eye(4)
  assert np.abs(correlation).max() < 4 / np.sqrt(20_000)  # four standard errors


# --- O5: bfloat16 swallows small noise, float32 does not ------------------------------------------


@pytest.mark.parametrize(
  "gain, sigma, std, changed",
  [(1.0, 1e-2, 0.0102, 0.77), (1.0, 5e-3, 0.0053, 0.56), (1.0, 1e-3, 6.1e-4, 0.025)]
  + [(1.0, 5e-4, 2.5e-5, 1e-4), (1.0, 1e-4, 0, 0), (0.1, 5e-4, 5.2e-4, 0.63)],
)
def test_bf16_table(gain, sigma, std, changed):
  params = make_params(depth=2, width=100_000, dtype=jnp.bfloat16, gain=gain)
  noisy = noise.perturb(params, sigma, jax.random.key(0))
  # "attn_norm" holds the oracle's gain; effective_std is over both norms, so compare one tree.
  one = dict.fromkeys(noise.GAINS, params["layers"]["attn_norm"])
  z = noisy["layers"]["attn_norm"] - one["attn_norm"].astype(jnp.float32)
  assert float(jnp.std(z)) == pytest.approx(sigma, rel=0.02)

  swallowed = one["attn_norm"] + z.astype(jnp.bfloat16)
  rounded = dict.fromkeys(noise.GAINS, swallowed)
  measured = float(noise.effective_std({"layers": one}, {"layers": rounded}))
  assert measured == pytest.approx(std, rel=0.05, abs=1.5e-5)
  moved = float(jnp.mean(swallowed != one["attn_norm"]))
  assert moved == pytest.approx(changed, rel=0.08, abs=1e-4)


def test_relative_noise_scales_with_the_gain():
  params = make_params(depth=2, width=50_000)
  layers = noise.perturb(params, 0.1, jax.random.key(0), relative=True)["layers"]
  assert float(jnp.std(layers["attn_norm"])) == pytest.approx(0.1, rel=0.02)
  assert float(jnp.std(layers["mlp_norm"])) == pytest.approx(0.2, rel=0.02)


# --- error messages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "settings, words",
  [
    ({"stages": 2}, "stages must be >= 3.*got 2"),
    ({"shape": "step"}, "exponential, linear, cosine, log; got 'step'"),
    ({"sigma_start": 0.0}, "sigma_start must be > 0.*got 0.0"),
    ({"sigma_end": float("nan")}, "sigma_end must be > 0.*got nan"),
    ({"total_steps": 0}, "total_steps must be >= 1; got 0"),
    ({"shape": "linear", "paper_form": True}, "eq. 8.*'linear'"),
  ],
)
def test_schedule_errors(settings, words):
  with pytest.raises(ValueError, match=words):
    noise.sigma_at(0, **({"total_steps": 600} | settings))


def test_a_model_without_block_norms_is_refused():
  with pytest.raises(ValueError, match="attn_norm, mlp_norm; got norm1"):
    noise.perturb({"layers": {"norm1": jnp.ones((1, 2))}}, 0.1, jax.random.key(0))
