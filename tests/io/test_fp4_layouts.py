"""The tensors of one FP4 linear in every layout. Oracles 2, 3 and 7 of arXiv 2509.23202's spec."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxlab import errors
from jaxlab.io import fp4_layouts
from jaxlab.io.fp4_layouts import Scheme
from jaxlab.nn import weights
from jaxlab.quant import fp4

NAME = "model.layers.3.mlp.up_proj"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CT_NV, CT_MX = Scheme("compressed_tensors", "nvfp4"), Scheme("compressed_tensors", "mxfp4")
CT_NV_ACTS = Scheme("compressed_tensors", "nvfp4", "fp4", True)
MODELOPT = Scheme("modelopt", "nvfp4", "fp4", True)
MODELOPT_16 = Scheme("modelopt", "nvfp4")
FP_NV = Scheme("fp_quant", "nvfp4", "fp4", True, 16)
FP_MX = Scheme("fp_quant", "mxfp4", "fp4", True, 32)
QUEST = dataclasses.replace(FP_MX, method="quest")


def leaf(format="nvfp4", **changes):
  w = fp4.quantize(jax.random.normal(jax.random.key(0), (64, 48)), format)
  return dataclasses.replace(w, **changes)


def of(scheme: Scheme):
  """A leaf that the scheme stores."""
  acts = {"activations": scheme.activations}
  if scheme.static_acts and scheme.format == "nvfp4":
    acts["act_scale"] = jnp.float32(12.5)
  acts["scale_is_divisor"] = scheme.layout != "modelopt"
  rotated = scheme.layout == "fp_quant" and scheme.transform == "hadamard"
  return leaf(scheme.format, rotation=scheme.rotation if rotated else 0, **acts)


def raw(a):
  return np.asarray(a).view(np.uint8) if np.asarray(a).dtype.itemsize == 1 else np.asarray(a)


def by_suffix(tensors):
  return {name.rpartition(".")[2]: value for name, value in tensors.items()}


def read(tensors, scheme, file="checkpoint"):
  return fp4_layouts.read(by_suffix(tensors), scheme, NAME, file)


# --- worked by hand: w16 = .013 -.021 .007 0 .05 .., row = [w16, reverse(w16) / 4], K = 32

NV_CODES = "c30196e5a0460b4ff4b0640a5e69103c"
NV = {
  "codes": np.frombuffer(bytes.fromhex(NV_CODES), np.uint8)[None],
  "scale": np.array([[126, 110]], np.uint8).view(ml_dtypes.float8_e4m3fn),
}
DIVISOR = np.float32(2688 / 0.0605)
W16 = [.013, -.021, .007, 0, .05, -.0031, .0299, -.0443, .0011, -.0078, .0362, .0204, -.0127,
       .0009, -.0605, .0251]  # fmt: skip
ROW = np.array(W16 + [w / 4 for w in reversed(W16)])

WORKED = {
  "compressed_tensors": (
    Scheme("compressed_tensors", "nvfp4"),
    {
      "weight_packed": NV["codes"],
      "weight_scale": NV["scale"],
      "weight_global_scale": DIVISOR.reshape(1),
    },
  ),
  "modelopt": (
    Scheme("modelopt", "nvfp4"),
    {
      "weight": NV["codes"],
      "weight_scale": NV["scale"],
      "weight_scale_2": np.float32(0.0605 / 2688),
    },
  ),
  "fp_quant": (
    Scheme("fp_quant", "nvfp4", "fp4", True, 16, transform="identity"),
    {
      "qweight": NV["codes"],
      "scales": NV["scale"].view(np.uint8),
      "weight_global_scale": DIVISOR.reshape(1),
      "act_global_scale": np.float32([10]),
      "forward_hadamard_matrix": np.eye(16, dtype=ml_dtypes.bfloat16),
    },
  ),
}


@pytest.mark.parametrize("layout", WORKED)
def test_the_worked_nvfp4_row(layout):
  scheme, tensors = WORKED[layout]
  w = fp4_layouts.to_leaf(fp4_layouts.read(tensors, scheme, "x"))
  row = np.asarray(weights.dense(w))[:, 0]
  np.testing.assert_allclose(row[[0, 14]], [0.015125, -0.0605], rtol=1e-6)
  np.testing.assert_allclose(np.mean((row - ROW) ** 2), 5.867e-6, rtol=1e-3)


def test_the_worked_mxfp4_row_and_the_factor_three():
  """`even` in compressed-tensors' layout; `fp43` is a third of what OCP's reading would give."""
  codes = np.frombuffer(bytes.fromhex("b20185d490340a3ea180110819280009"), np.uint8)[None]
  tensors = {"weight_packed": codes, "weight_scale": np.uint8([[121]])}
  ocp = fp4_layouts.read(tensors, CT_MX, "x")
  row = np.asarray(weights.dense(fp4_layouts.to_leaf(ocp)))[:, 0]
  np.testing.assert_allclose(np.mean((row - ROW) ** 2), 4.976e-6, rtol=1e-3)

  codes = np.frombuffer(
    bytes.fromhex("c20196e590450a4fb190210 81a280019".replace(" ", "")), np.uint8
  )
  tensors = {
    "qweight": codes[None],
    "scales": np.uint8([[122]]),
    "weight_global_scale": np.float32([3]),
    "act_global_scale": np.float32([3]),
    "forward_hadamard_matrix": np.eye(32, dtype=ml_dtypes.bfloat16),
  }
  fp43 = fp4_layouts.to_leaf(fp4_layouts.read(tensors, FP_MX, "x"))
  row = np.asarray(weights.dense(fp43))[:, 0]
  np.testing.assert_allclose(np.mean((row - ROW) ** 2), 5.692e-6, rtol=1e-3)
  as_ocp = {"weight_packed": codes[None], "weight_scale": np.uint8([[122]])}
  as_ocp = fp4_layouts.to_leaf(fp4_layouts.read(as_ocp, CT_MX, "x"))
  np.testing.assert_array_equal(weights.dense(as_ocp)[:, 0] * np.float32(1 / 3), row)


def test_names_shapes_and_dtypes():
  f8, bf16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
  expected = {
    CT_NV: {"weight_packed": (np.uint8, (48, 32)), "weight_scale": (f8, (48, 4)),
            "weight_global_scale": (np.float32, (1,))},
    CT_MX: {"weight_packed": (np.uint8, (48, 32)), "weight_scale": (np.uint8, (48, 2))},
    CT_NV_ACTS: {"weight_packed": (np.uint8, (48, 32)), "weight_scale": (f8, (48, 4)),
                 "weight_global_scale": (np.float32, (1,)),
                 "input_global_scale": (np.float32, (1,))},
    MODELOPT: {"weight": (np.uint8, (48, 32)), "weight_scale": (f8, (48, 4)),
               "weight_scale_2": (np.float32, ()), "input_scale": (np.float32, ())},
    FP_NV: {"qweight": (np.uint8, (48, 32)), "scales": (np.uint8, (48, 4)),
            "weight_global_scale": (np.float32, (1,)), "act_global_scale": (np.float32, (1,)),
            "forward_hadamard_matrix": (bf16, (16, 16)),
            "backward_hadamard_matrix": (bf16, (16, 16))},
  }  # fmt: skip
  for scheme, tensors in expected.items():
    w = of(scheme)
    found = by_suffix(fp4_layouts.write(NAME, w, scheme))
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == tensors
    for part, suffix in fp4_layouts.parts(scheme).items():
      assert fp4_layouts.part_shape(w, scheme, part) == (found[suffix].shape, found[suffix].dtype)


# --- there and back

EVERY = {
  "ct_nv": CT_NV, "ct_mx": CT_MX, "ct_nv_acts": CT_NV_ACTS, "modelopt": MODELOPT,
  "modelopt_w4a16": MODELOPT_16, "fp_nv": FP_NV, "fp_mx": FP_MX, "quest": QUEST,
  "identity": dataclasses.replace(FP_MX, transform="identity"),
  "pseudo_nv": dataclasses.replace(FP_NV, pseudo=True),
  "pseudo_mx": dataclasses.replace(FP_MX, pseudo=True),
}  # fmt: skip


@pytest.mark.parametrize("case", EVERY)
def test_write_read_write_is_byte_stable(case):
  scheme, w = EVERY[case], of(EVERY[case])
  first = fp4_layouts.write(NAME, w, scheme)
  back = fp4_layouts.to_leaf(read(first, scheme))
  assert jax.tree.structure(back) == jax.tree.structure(w)
  np.testing.assert_array_equal(weights.dense(back), weights.dense(w))
  second = fp4_layouts.write(NAME, back, scheme)
  assert first.keys() == second.keys()
  for name, tensor in first.items():
    np.testing.assert_array_equal(raw(tensor), raw(second[name]))


@pytest.mark.parametrize(("here", "there"), [(CT_NV_ACTS, MODELOPT), (MODELOPT, CT_NV_ACTS)])
def test_divisors_and_multipliers(here, there):
  """Codes and block scales go over as they are; tensor scales within one unit in the last place."""
  first = fp4_layouts.write(NAME, of(here), here)
  back = read(first, here)
  other = fp4_layouts.write(NAME, back, there)
  again = fp4_layouts.write(NAME, read(other, there), here)
  names, others = fp4_layouts.parts(here), fp4_layouts.parts(there)
  for part in ("codes", "scale"):
    for tensors, suffix in ((other, others[part]), (again, names[part])):
      np.testing.assert_array_equal(
        raw(tensors[f"{NAME}.{suffix}"]), raw(first[f"{NAME}.{names[part]}"])
      )
  for part in ("tensor_scale", "act_scale"):
    value = first[f"{NAME}.{names[part]}"]
    np.testing.assert_array_max_ulp(again[f"{NAME}.{names[part]}"], value, 1)
    other_value = other[f"{NAME}.{others[part]}"].astype(np.float64)
    np.testing.assert_allclose(other_value * value.astype(np.float64), 1, rtol=2.0**-24)


def test_what_is_read_does_not_alias_the_file():
  tensors = {n: t.copy() for n, t in fp4_layouts.write(NAME, leaf(), CT_NV).items()}
  back = fp4_layouts.to_leaf(read(tensors, CT_NV))
  before = np.asarray(weights.dense(back))
  tensors[f"{NAME}.weight_packed"][:] = 0
  np.testing.assert_array_equal(weights.dense(back), before)


def test_a_zero_scale_over_zero_codes_is_accepted():
  w = fp4.quantize(jnp.zeros((32, 2)).at[16:].set(1.0))
  tensors = fp4_layouts.write(NAME, w, CT_NV)
  tensors[f"{NAME}.weight_scale"] = np.asarray(w.scale).copy()
  tensors[f"{NAME}.weight_scale"][:, 0] = 0
  back = fp4_layouts.to_leaf(read(tensors, CT_NV))
  np.testing.assert_array_equal(weights.dense(back), weights.dense(w))


# --- rotations


def test_our_hadamard_is_recognised_and_another_matrix_is_kept():
  scipy_like = np.array([[1]])
  while len(scipy_like) < 64:
    scipy_like = np.kron(np.array([[1, 1], [1, -1]]), scipy_like)
  stored = (scipy_like / 8).astype(ml_dtypes.bfloat16)
  assert fp4_layouts.recognise(stored) == (64, None)
  assert fp4_layouts.recognise(np.eye(32, dtype=ml_dtypes.bfloat16)) == (0, None)
  for size in (16, 32, 64, 128):  # 1 / sqrt(32) is not exact in bfloat16
    assert fp4_layouts.recognise(fp4_layouts.hadamard(size)) == (size, None)
    assert fp4_layouts.recognise(fp4_layouts.hadamard(size, np.float32)) == (size, None)
  # Columns by sequency: FP-Quant's "gsr".
  flips = (np.diff(np.sign(stored.astype(np.float32)), axis=0) != 0).sum(0)
  gsr = stored[:, np.argsort(flips)]
  size, matrix = fp4_layouts.recognise(gsr)
  assert size == 64
  np.testing.assert_array_equal(matrix, gsr)


def test_a_stored_matrix_multiplies_as_it_should():
  """x @ dense = (x R) @ (what the codes say), in float64."""
  rng = np.random.default_rng(0)
  matrix = np.linalg.qr(rng.standard_normal((16, 16)))[0].astype(ml_dtypes.bfloat16)
  tensors = fp4_layouts.write(NAME, of(FP_NV), FP_NV)
  tensors[f"{NAME}.forward_hadamard_matrix"] = matrix
  del tensors[f"{NAME}.backward_hadamard_matrix"]  # only training needs it
  w = fp4_layouts.to_leaf(read(tensors, FP_NV))
  assert (w.rotation, w.rotation_matrix.shape) == (16, (16, 16))
  plain = dataclasses.replace(w, rotation=0, rotation_matrix=None)
  codes_IO = np.asarray(weights.dense(plain), np.float64)
  x_MI = rng.standard_normal((3, 64))
  rotated = (x_MI.reshape(3, 4, 16) @ matrix.astype(np.float64)).reshape(3, 64)
  found = x_MI @ np.asarray(weights.dense(w), np.float64)
  np.testing.assert_allclose(found, rotated @ codes_IO, atol=1e-4)
  again = fp4_layouts.write(NAME, w, FP_NV)
  np.testing.assert_array_equal(again[f"{NAME}.forward_hadamard_matrix"], matrix)


# --- damage


@pytest.mark.parametrize("case", EVERY)
def test_a_missing_tensor_is_damage(case):
  scheme = EVERY[case]
  tensors = fp4_layouts.write(NAME, of(scheme), scheme)
  for part, suffix in fp4_layouts.parts(scheme).items():
    if part != "backward":
      rest = {n: t for n, t in tensors.items() if n != f"{NAME}.{suffix}"}
      with pytest.raises(errors.CorruptFile, match=rf"a.st: {NAME}\.{suffix}: .*missing"):
        read(rest, scheme, file="a.st")


def with_first_byte(scale, byte):
  changed = np.array(scale)
  changed.view(np.uint8)[0, 0] = byte
  return changed


@pytest.mark.parametrize(
  ("scheme", "part", "damage", "message"),
  [
    (CT_NV, "codes", lambda t: t.astype(np.int32), "must be uint8 .*got int32"),
    (CT_NV, "codes", lambda t: t[:, :30], r"multiple of 16; got uint8 \(48, 30\)"),
    (CT_MX, "codes", lambda t: t[:, :24], r"multiple of 32; got uint8 \(48, 24\)"),
    (CT_NV, "codes", lambda t: t[0], r"got uint8 \(32,\)"),
    (CT_NV, "scale", lambda t: t[:, :3], r"float8_e4m3fn \(48, 4\) for codes .*\(48, 3\)"),
    (CT_NV, "scale", lambda t: t.astype(np.float32), "got float32"),
    (CT_MX, "scale", lambda t: t.astype(np.int8), "must be uint8 .*got int8"),
    (FP_NV, "scale", lambda t: t.astype(np.int8), "must be float8_e4m3fn .*got int8"),
    (CT_NV, "scale", lambda t: with_first_byte(t, 0x7F), "1 block scales are NaN or negative"),
    (FP_NV, "scale", lambda t: with_first_byte(t, 0xB0), "1 block scales are NaN or negative"),
    (MODELOPT, "scale", lambda t: with_first_byte(t, 0), "1 block scales are zero over codes"),
    (CT_MX, "scale", lambda t: with_first_byte(t, 255), "1 block scales are NaN"),
    (CT_NV, "tensor_scale", lambda t: t * 0, "finite and positive; got 0.0"),
    (MODELOPT, "tensor_scale", lambda t: -t, "finite and positive; got -"),
    (CT_NV, "tensor_scale", lambda t: t * np.nan, "finite and positive; got nan"),
    (FP_MX, "tensor_scale", lambda t: np.float32([np.inf]), "finite and positive; got inf"),
    (CT_NV, "tensor_scale", lambda t: np.float32([1, 2]), r"float32 \[1\]; got float32 \(2,\)"),
    (CT_NV, "tensor_scale", lambda t: t.astype(np.float64), "got float64"),
    (MODELOPT, "act_scale", lambda t: t * 0, "finite and positive; got 0.0"),
    (FP_MX, "act_scale", lambda t: t / 3, "must be 3 for mxfp4 abs_max; got 1"),
    (QUEST, "act_scale", lambda t: t * 3, "must be 1 for mxfp4 quest; got 3"),
    (FP_NV, "rotation", lambda t: t[:8], r"square and divide 64 inputs; got shape \(8, 16\)"),
    (FP_NV, "rotation", lambda t: np.eye(48, dtype=t.dtype), r"divide 64 inputs.*\(48, 48\)"),
    (FP_NV, "rotation", lambda t: t * np.float32(np.nan).astype(t.dtype), "must be finite"),
    (FP_NV, "rotation", lambda t: t * 0, "must be orthonormal"),
    (FP_NV, "rotation", lambda t: np.eye(32, dtype=t.dtype), r"json says, 16; got \(32, 32\)"),
    (EVERY["pseudo_nv"], "codes", lambda t: t + t.T[:1, :1], "are not nvfp4 values"),
    (EVERY["pseudo_mx"], "codes", lambda t: t + t.dtype.type(np.inf), "must be finite"),
  ],
)  # fmt: skip
def test_damaged_tensors_are_named(scheme, part, damage, message):
  tensors = fp4_layouts.write(NAME, of(scheme), scheme)
  name = f"{NAME}.{fp4_layouts.parts(scheme)[part]}"
  tensors[name] = damage(tensors[name])
  with pytest.raises(errors.CorruptFile, match=message) as error:
    read(tensors, scheme)
  assert name in str(error.value)


def test_a_rotation_of_the_config_must_fit():
  tensors = fp4_layouts.write(NAME, leaf(), CT_NV)
  with pytest.raises(errors.CorruptFile, match="a Hadamard of 128 does not fit 64 inputs"):
    read(tensors, dataclasses.replace(CT_NV, rotation=128))


def test_a_tensor_too_many_is_named():
  tensors = fp4_layouts.write(NAME, leaf(), CT_NV)
  extra = tensors | {f"{NAME}.input_global_scale": np.float32([1])}
  with pytest.raises(ValueError, match="got also .*input_global_scale"):
    read(extra, CT_NV)


# --- what a layout has no place for


@pytest.mark.parametrize(
  ("layout", "w", "message"),
  [
    ("modelopt", leaf("mxfp4"), "it holds nvfp4 without rotation; got mxfp4"),
    ("modelopt", leaf(rotation=16), "got nvfp4, rotation 16. Use compressed_tensors"),
    ("modelopt", leaf(activations="fp4"), r"static scale of the activations \(input_scale\)"),
    ("fp_quant", leaf(), "always round activations to FP4; got activations 'none'"),
    ("fp_quant", leaf(activations="fp4"), r"static scale .*\(act_global_scale\)"),
    ("fp_quant", leaf("mxfp4", activations="fp4", rotation=16), r"\(32, 64, 128\); got 16"),
    (
      "compressed_tensors",
      leaf(rotation=16, rotation_matrix=jnp.eye(16)),
      "Hadamard matrices; got another",
    ),
    ("gptq", leaf(), "unknown layout 'gptq'. Use one of compressed_tensors, modelopt, fp_quant"),
  ],
)
def test_leaves_that_a_layout_cannot_hold_are_refused(layout, w, message):
  with pytest.raises(ValueError, match=message):
    fp4_layouts.scheme_of_leaf(w, layout, module=NAME)


def test_codes_of_fp43_have_no_place_without_a_tensor_scale():
  w = dataclasses.replace(leaf("mxfp4"), tensor_scale=jnp.float32(3))
  with pytest.raises(ValueError, match="mxfp4 has no tensor scale; got 3 .*fp43"):
    fp4_layouts.write(NAME, w, CT_MX)


def test_a_stack_is_written_layer_by_layer():
  w = fp4.quantize(jnp.ones((2, 32, 4)))
  with pytest.raises(ValueError, match=r"one matrix; got a stack \(2, 4, 16\)"):
    fp4_layouts.write(NAME, w, CT_NV)
