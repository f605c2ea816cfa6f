"""The paper's story on one synthetic layer: section 7 of the specification of arXiv 2509.23202.

512 inputs, 256 outputs, 2048 tokens to calibrate on and 1024 to measure; X = Z (1 + sparse
Gaussian), 8 large channels, weights of Student's t. The figures of the specification are of other
draws of the same kind, in NumPy.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlab.quant import calibrate, hadamard, mr_gptq, scales, site
from pallas_kernels.fp4_gemm import codec

D, O, SEEDS = 512, 256, 1
ABSMAX, MSE = scales.ScaleConfig(), scales.ScaleConfig(search="mse")
ARMS = {
  "rtn": {"rotation": 0, "solver": "rtn", "scales": ABSMAX},
  "rtn had16": {"rotation": 16, "solver": "rtn", "scales": ABSMAX},
  "rtn had128": {"rotation": 128, "solver": "rtn", "scales": ABSMAX},
  "gptq": {"rotation": 0, "order": "default", "scales": ABSMAX},
  "gptq order": {"rotation": 0, "scales": ABSMAX},
  "gptq had32": {"rotation": 32, "order": "default", "scales": ABSMAX},
  "gptq had128 order mse": {"rotation": 128, "scales": MSE},
}
# Relative squared error of the outputs, W4A16 and W4A4 [specification §7].
EXPECTED = {
  "nvfp4": {
    "rtn": (0.0090, 0.0165),
    "rtn had16": (0.0092, 0.0216),
    "rtn had128": (0.0088, 0.0190),
    "gptq": (0.0052, 0.0129),
    "gptq order": (0.0026, 0.0105),
    "gptq had32": (0.0011, 0.0128),
    "gptq had128 order mse": (0.0009, 0.0110),
  },
  "mxfp4": {
    "rtn": (0.0143, 0.0385),
    "rtn had16": (0.0122, 0.0237),
    "rtn had128": (0.0126, 0.0235),
    "gptq": (0.0081, 0.0335),
    "gptq order": (0.0036, 0.0298),
    "gptq had32": (0.0014, 0.0122),
    "gptq had128 order mse": (0.0013, 0.0123),
  },
}


def layer(seed):
  """(tokens to calibrate on, tokens to measure, kernel)."""
  random = np.random.default_rng(seed)
  mix = np.eye(D) + random.standard_normal((D, D)) * (random.random((D, D)) < 0.05)
  size = np.ones(D)
  size[random.choice(D, 8, replace=False)] = random.uniform(8, 30, 8)
  x = np.float32(random.standard_normal((3072, D)) @ mix * size)
  return x[:2048], x[2048:], np.float32(random.standard_t(6, (D, O)) / np.sqrt(D))


def errors(format, arm, seed):
  """Relative squared error of the outputs (W4A16, W4A4), activations by a static tensor scale."""
  calibration, test, w_IO = layer(seed)
  config = mr_gptq.MRGPTQConfig(format, **ARMS[arm])
  nothing = calibrate.Statistics(jnp.zeros((D, D)), jnp.float32(0), jnp.float32(0), jnp.zeros(D))
  seen = calibrate.update(nothing, codec.rotate(jnp.asarray(calibration)[:, None], config.rotation))
  kernel = hadamard.rotate_kernel(jnp.asarray(w_IO), config.rotation)
  packed, _ = site.quantize({"w": kernel}, seen, config, config.rotation)
  w = packed["w"]
  new_IO = np.asarray(codec.decode(w.codes, w.scale, w.multiplier, jnp.float32), np.float64).T
  x = codec.rotate(jnp.asarray(test), config.rotation)
  act_scale = seen.amax * calibrate.MULTIPLIER if format == "nvfp4" else None
  expected = test.astype(np.float64) @ w_IO
  share = lambda y: np.sum((y - expected) ** 2) / np.sum(expected**2)
  rounded = codec.fake_quantize(x, format, act_scale)
  return share(np.asarray(x) @ new_IO), share(np.asarray(rounded) @ new_IO)


@pytest.fixture(scope="module")
def table():
  return {
    format: {
      arm: np.mean([errors(format, arm, seed) for seed in range(SEEDS)], axis=0) for arm in ARMS
    }
    for format in EXPECTED
  }


@pytest.mark.parametrize("format", EXPECTED)
def test_figures_are_those_of_the_specification(table, format):
  for arm, expected in EXPECTED[format].items():
    np.testing.assert_allclose(table[format][arm], expected, rtol=0.25, err_msg=arm)


def test_orderings(table):
  a16 = {f: {arm: v[0] for arm, v in found.items()} for f, found in table.items()}
  a4 = {f: {arm: v[1] for arm, v in found.items()} for f, found in table.items()}
  for format in EXPECTED:
    order = ("gptq had128 order mse", "gptq order", "gptq", "rtn")
    found = [a16[format][arm] for arm in order]
    assert found == sorted(found), format
  # Rotation helps MXFP4 a lot and harms the rounding of NVFP4 activations.
  assert a4["mxfp4"]["rtn had128"] < 0.7 * a4["mxfp4"]["rtn"]
  assert a4["nvfp4"]["rtn had16"] > 1.2 * a4["nvfp4"]["rtn"]
  # With GPTQ it brings MXFP4 to within a fifth of NVFP4 ...
  assert a4["mxfp4"]["gptq had128 order mse"] < 1.2 * a4["nvfp4"]["gptq had128 order mse"]
  # ... but here the best NVFP4 W4A4 is not rotated.
  assert a4["nvfp4"]["gptq order"] == min(a4["nvfp4"].values())
