"""The JSON of FP4 checkpoints: what is read, what is written, what is refused by name."""

import copy
import json
import time

import hypothesis as hp
import pytest
from hypothesis import strategies as st

from jaxlab import errors
from jaxlab.io import fp4_configs
from jaxlab.io.fp4_layouts import Scheme

UP, DOWN, Q = (f"model.layers.3.{x}" for x in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj"))
CT_NV, CT_MX = Scheme("compressed_tensors", "nvfp4"), Scheme("compressed_tensors", "mxfp4")
NV_WEIGHTS = {
  "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
  "symmetric": True, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn",
}  # fmt: skip
MX_WEIGHTS = NV_WEIGHTS | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}


def compressed_tensors(**changes):
  return {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": NV_WEIGHTS}},
    **changes,
  }


def of(config, *modules, inputs=64):
  parsed = fp4_configs.parse(config)
  return [parsed.scheme_of(module, inputs) for module in modules]


# --- compressed-tensors


def test_one_group():
  assert of(compressed_tensors(), UP, Q, "lm_head") == [CT_NV, CT_NV, None]


def test_names_go_before_patterns_and_patterns_before_classes():
  groups = {
    "class": {"targets": ["Linear"], "weights": NV_WEIGHTS},
    "pattern": {"targets": ["re:.*mlp\\.(up|down)_proj$"], "weights": MX_WEIGHTS},
    "name": {
      "targets": [DOWN],
      "weights": NV_WEIGHTS,
      "input_activations": NV_WEIGHTS | {"dynamic": "local"},
    },
  }
  config = compressed_tensors(format="mixed-precision", config_groups=groups)
  named = Scheme("compressed_tensors", "nvfp4", "fp4", True)
  assert of(config, UP, DOWN, Q) == [CT_MX, named, CT_NV]
  backwards = dict(reversed(groups.items()))
  assert of(config | {"config_groups": backwards}, UP, DOWN, Q) == [CT_MX, named, CT_NV]


def test_ignore_by_name_by_pattern_by_class_and_by_group():
  config = compressed_tensors(ignore=[UP, "re:model.layers.3.self_attn.*"])
  assert of(config, UP, Q, DOWN, "lm_head") == [None, None, CT_NV, CT_NV]
  assert of(compressed_tensors(ignore=["Linear"]), UP) == [None]
  groups = {"g": {"targets": ["Linear"], "weights": NV_WEIGHTS, "ignore": [UP]}}
  assert of(compressed_tensors(config_groups=groups), UP, DOWN) == [None, CT_NV]
  groups |= {"h": {"targets": ["re:.*up_proj"], "weights": MX_WEIGHTS}}
  config = compressed_tensors(format="mixed-precision", config_groups=groups)
  assert of(config, UP, DOWN) == [CT_MX, CT_NV]


def test_a_target_that_is_no_linear_means_nothing_here():
  groups = {"g": {"targets": ["LlamaAttention"], "weights": NV_WEIGHTS}}
  assert of(compressed_tensors(config_groups=groups), Q) == [None]


@pytest.mark.parametrize(
  ("acts", "expected"),
  [
    (None, CT_NV),
    (NV_WEIGHTS | {"dynamic": "local"}, Scheme("compressed_tensors", "nvfp4", "fp4", True)),
    (NV_WEIGHTS | {"dynamic": True}, Scheme("compressed_tensors", "nvfp4", "fp4", False)),
  ],
)
def test_activations(acts, expected):
  groups = {"g": {"targets": ["Linear"], "weights": NV_WEIGHTS, "input_activations": acts}}
  assert of(compressed_tensors(config_groups=groups), UP) == [expected]


def test_presets_are_groups():
  config = compressed_tensors(format="mixed-precision", config_groups={
    "NVFP4A16": ["re:.*q_proj"], "MXFP4": [UP], "nvfp4": [DOWN],
  })  # fmt: skip
  assert of(config, Q, UP, DOWN) == [
    CT_NV,
    Scheme("compressed_tensors", "mxfp4", "fp4"),
    Scheme("compressed_tensors", "nvfp4", "fp4", True),
  ]


def transform(**changes):
  apply = [
    {"targets": ["Linear"], "location": "input", "ignore": ["lm_head"], "inverse": False},
    {"targets": ["Linear"], "location": "weight_input", "ignore": ["lm_head"], "inverse": True},
  ]
  scheme = {"type": "hadamard", "head_dim": 32, "randomize": False, "apply": apply, **changes}
  return compressed_tensors(transform_config={"config_groups": {"u": scheme}})


def test_rotations_of_inputs():
  (scheme,) = of(transform(), UP)
  assert scheme.rotation == 32
  assert of(transform(head_dim=None), UP, inputs=256)[0].rotation == 256
  one = transform(apply=[{"targets": [UP], "location": "input"}])
  assert [s.rotation for s in of(one, UP, DOWN)] == [32, 0]
  fused = transform(
    type="random-matrix", apply=[{"targets": ["Linear"], "location": "weight_output"}]
  )
  assert of(fused, UP) == [CT_NV]  # it is in the weights


def test_what_would_be_rotated_twice_or_without_being_packed_is_refused():
  config = transform()
  config["transform_config"]["config_groups"]["again"] = config["transform_config"][
    "config_groups"
  ]["u"]
  with pytest.raises(ValueError, match="up_proj 2 times; supported is one rotation"):
    of(config, UP)
  with pytest.raises(ValueError, match="lm_head 1 times"):
    of(transform(apply=[{"targets": ["Linear"], "location": "input"}]), "lm_head")


@pytest.mark.parametrize(
  ("path", "value", "named"),
  [
    ("quant_method", "gptq", "quant_method.*got 'gptq'"),
    ("quant_method", "bitsandbytes", "got 'bitsandbytes'"),
    ("quant_method", None, "got 'None'"),
    ("format", "pack-quantized", "format.*got 'pack-quantized'"),
    ("format", None, "format"),
    ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
    ("moe_sparsity_config", {"a": 1}, "moe_sparsity_config"),
    ("config_groups", {}, "config_groups"),
    ("config_groups", {"W4A16": ["Linear"]}, "config_groups.W4A16"),
    ("config_groups.group_0.targets", [3], "targets.*got '\\[3\\]'"),
    ("config_groups.group_0.format", "mxfp4-pack-quantized", "group_0.format"),
    ("config_groups.group_0.weights.group_size", 128, "weights.group_size.*got '128'"),
    ("config_groups.group_0.weights.strategy", "group", "weights.strategy"),
    ("config_groups.group_0.weights.type", "int", "weights.type"),
    ("config_groups.group_0.weights.num_bits", 8, "weights.num_bits"),
    ("config_groups.group_0.weights.symmetric", False, "weights.symmetric"),
    ("config_groups.group_0.weights.scale_dtype", "torch.uint8", "weights.scale_dtype"),
    ("config_groups.group_0.weights.actorder", "group", "weights.actorder"),
    ("config_groups.group_0.output_activations", {"num_bits": 4}, "output_activations"),
    ("config_groups.group_0.input_activations", {"num_bits": 8}, "input_activations.num_bits"),
    (
      "config_groups.group_0.input_activations",
      {**NV_WEIGHTS, "dynamic": False},
      "input_activations.dynamic",
    ),
    ("transform_config", {"config_groups": {"a": {}}}, "transform_config.config_groups.a"),
  ],
)
def test_other_layouts_are_refused_by_name(path, value, named):
  config = copy.deepcopy(compressed_tensors())
  *parents, last = path.split(".")
  node = config
  for parent in parents:
    node = node[parent]
  node[last] = value
  with pytest.raises(ValueError, match=f"{named}.*Supported: compressed-tensors") as error:
    of(config, UP)
  assert not isinstance(error.value, errors.CorruptFile)


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"type": "random-hadamard"}, "u.type.*random-hadamard"),
    ({"randomize": True}, "u.randomize"),
    ({"head_dim": 48}, "u.head_dim.*got '48'"),
    ({"apply": [{"targets": ["Linear"], "location": "output"}]}, "location.*got 'output'"),
    ({"apply": [{"targets": ["Linear"], "location": "k_cache"}]}, "location.*got 'k_cache'"),
  ],
)
def test_other_transforms_are_refused_by_name(changes, named):
  with pytest.raises(ValueError, match=named):
    of(transform(**changes), UP)


def test_what_a_server_does_with_its_cache_is_no_matter():
  assert of(compressed_tensors(kv_cache_scheme={"num_bits": 8}), UP) == [CT_NV]
  config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}
  assert of(config, UP) == [Scheme("modelopt", "nvfp4", "fp4", True)]


@pytest.mark.parametrize(
  "pattern",
  ["re:(a+)+$", "re:(a|a)*b", "re:.*a.*a.*a.*a.*b", "re:(", "re:" + "a" * 600, "re:(ab){2,}"],
)
def test_patterns_that_do_not_compile_or_never_end_are_refused(pattern):
  start = time.monotonic()
  with pytest.raises(ValueError, match="a pattern of quantization_config must"):
    of(compressed_tensors(ignore=[pattern]), "a" * 60)
  assert time.monotonic() - start < 1


def test_patterns_that_people_write_are_read():
  for pattern in (
    "re:.*lm_head", "re:.*mlp.gate$", "re:model[.]layers[.]\\d+[.]mlp[.].*_proj$",
    "re:(.*\\.)?up_proj", "re:.*\\.(gate|up|down)_proj$",
  ):  # fmt: skip
    of(compressed_tensors(ignore=[pattern]), UP)


# --- ModelOpt


def modelopt(**changes):
  return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], **changes}


def test_modelopt_wildcards():
  config = modelopt(ignore=["lm_head", "model.layers.3.self_attn*", "*.up_proj", "model.layers.7"])
  scheme = Scheme("modelopt", "nvfp4", "fp4", True)
  names = [Q, UP, DOWN, "model.layers.7.mlp.down_proj", "model.layers.77.mlp.down_proj"]
  assert of(config, *names) == [None, None, scheme, None, scheme]


def test_modelopt_weight_only():
  scheme = Scheme("modelopt", "nvfp4")
  for algorithm in ("W4A16_NVFP4", "w4a16_nvfp4"):
    assert of(modelopt(quant_algo=algorithm, group_size=16), UP) == [scheme]
  written = fp4_configs.describe({UP: (scheme, 64)}, {})
  # What nvidia-modelopt 0.47 makes of such a hf_quant_config.json (convert_hf_config.py).
  weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
  assert written["config_groups"] == {"group_0": {"weights": weights, "targets": ["Linear"]}}


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"quant_algo": "FP8"}, "quant_algo.*got 'FP8'"),
    ({"quant_algo": "NVFP4_AWQ"}, "got 'NVFP4_AWQ'"),
    ({"quant_algo": "MIXED_PRECISION"}, "got 'MIXED_PRECISION'"),
    ({"group_size": 32}, "group_size.*got '32'"),
    ({"pre_quant_scale": True}, "pre_quant_scale"),
    ({"ignore": "lm_head"}, "ignore"),
  ],
)
def test_other_modelopt_files_are_refused_by_name(changes, named):
  with pytest.raises(ValueError, match=named):
    of(modelopt(**changes), UP)


def test_the_two_files_of_modelopt(tmp_path):
  beside = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16},
  }
  file = tmp_path / "hf_quant_config.json"
  assert fp4_configs.of_folder(tmp_path, {}) is None
  file.write_text(json.dumps(beside))
  alone = fp4_configs.of_folder(tmp_path, {})
  both = fp4_configs.of_folder(tmp_path, {"quantization_config": modelopt()})
  assert (alone.rules, alone.ignore) == (both.rules, both.ignore)
  assert alone.file == "hf_quant_config.json"
  with pytest.raises(errors.CorruptFile, match="says another thing than quantization_config"):
    fp4_configs.of_folder(tmp_path, {"quantization_config": modelopt(quant_algo="W4A16_NVFP4")})
  other = {"quantization_config": compressed_tensors()}
  assert fp4_configs.of_folder(tmp_path, other).layout == "compressed_tensors"
  file.write_text("{")
  with pytest.raises(errors.CorruptFile, match="does not parse"):
    fp4_configs.of_folder(tmp_path, {})


# --- FP-Quant and gpt-oss


def fp_quant(**changes):
  return {"quant_method": "fp_quant", "forward_dtype": "mxfp4", **changes}


def test_fp_quant_defaults_are_those_of_transformers():
  assert of(fp_quant(), UP, "lm_head") == [Scheme("fp_quant", "mxfp4", "fp4", True, 32), None]
  (scheme,) = of(fp_quant(forward_dtype="nvfp4"), UP)
  assert scheme == Scheme("fp_quant", "nvfp4", "fp4", True, 16)
  (scheme,) = of(fp_quant(forward_method="quest", hadamard_group_size=128), UP)
  assert scheme == Scheme("fp_quant", "mxfp4", "fp4", True, 128, "quest")
  (scheme,) = of(fp_quant(pseudoquantization=True, transform_init="gsr"), UP)
  assert scheme == Scheme("fp_quant", "mxfp4", "fp4", True, 32, "abs_max", "gsr", True)
  assert of(fp_quant(modules_to_not_convert=["lm_head", "q_proj"]), Q) == [None]


@pytest.mark.parametrize(
  ("changes", "named"),
  [
    ({"forward_dtype": "fp8"}, "forward_dtype.*got 'fp8'"),
    ({"forward_method": "mse"}, "forward_method of mxfp4.*got 'mse'"),
    ({"forward_dtype": "nvfp4", "forward_method": "quest"}, "forward_method of nvfp4"),
    ({"store_master_weights": True}, "store_master_weights"),
    ({"hadamard_group_size": 16}, "hadamard_group_size of mxfp4.*got '16'"),
    ({"transform_init": "dct"}, "transform_init.*got 'dct'"),
  ],
)
def test_other_fp_quant_files_are_refused_by_name(changes, named):
  with pytest.raises(ValueError, match=named):
    of(fp_quant(**changes), UP)


def test_gpt_oss_is_known_and_has_no_linears():
  config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
  assert fp4_configs.parse(config).layout == fp4_configs.GPT_OSS
  assert of(config, UP) == [None]


# --- writing

WRITTEN = {
  "ct": {UP: CT_NV, DOWN: CT_NV},
  "ct_mx": {UP: CT_MX, DOWN: CT_MX},
  "ct_w4a4": {UP: Scheme("compressed_tensors", "nvfp4", "fp4", True)},
  "ct_w4a4_dynamic": {UP: Scheme("compressed_tensors", "nvfp4", "fp4")},
  "ct_mixed": {UP: CT_NV, DOWN: CT_MX, Q: Scheme("compressed_tensors", "nvfp4", "fp4", True)},
  "ct_rotated": {UP: Scheme("compressed_tensors", "mxfp4", "fp4", rotation=64)},
  "ct_two_rotations": {
    UP: Scheme("compressed_tensors", "nvfp4", rotation=64),
    DOWN: Scheme("compressed_tensors", "nvfp4", rotation=16),
    Q: CT_NV,
  },
  "modelopt": {UP: Scheme("modelopt", "nvfp4", "fp4", True)},
  "modelopt_w4a16": {UP: Scheme("modelopt", "nvfp4")},
  "fp_quant": {UP: Scheme("fp_quant", "nvfp4", "fp4", True, 64)},
  "fp_quant_quest": {UP: Scheme("fp_quant", "mxfp4", "fp4", True, 32, "quest", "identity")},
  "fp_quant_pseudo": {UP: Scheme("fp_quant", "mxfp4", "fp4", True, 32, pseudo=True)},
}


@pytest.mark.parametrize("case", WRITTEN)
def test_the_config_that_is_written_says_what_was_meant(case, tmp_path):
  schemes = WRITTEN[case]
  linears = {module: (scheme, 128) for module, scheme in schemes.items()}
  dense = {"lm_head": 128, "model.layers.0.mlp.gate_proj": 128}
  config = json.loads(json.dumps(fp4_configs.describe(linears, dense)))
  parsed = fp4_configs.parse(config)
  assert {m: parsed.scheme_of(m, 128) for m in schemes} == schemes
  assert not any(parsed.scheme_of(m, 128) for m in dense)
  assert parsed.says(linears, dense)
  fp4_configs.write_beside(config, tmp_path)
  assert (tmp_path / "hf_quant_config.json").exists() == case.startswith("modelopt")
  again = fp4_configs.of_folder(tmp_path, {"quantization_config": config})
  assert again.rules == parsed.rules


def test_a_config_that_says_the_same_is_kept():
  own = compressed_tensors(
    ignore=["re:.*lm_head"], kv_cache_scheme={"num_bits": 8}, version="0.9", global_ratio=None
  )
  linears = {UP: (CT_NV, 64)}
  assert fp4_configs.describe(linears, {"lm_head": 64}, own) == own
  changed = fp4_configs.describe(linears, {"lm_head": 64, DOWN: 64}, own)
  assert changed["ignore"] == ["lm_head", DOWN]
  assert fp4_configs.describe({UP: (CT_MX, 64)}, {}, own)["format"] == "mxfp4-pack-quantized"


def test_one_config_of_modelopt_has_one_scheme():
  linears = {UP: (Scheme("modelopt", "nvfp4"), 64),
             DOWN: (Scheme("modelopt", "nvfp4", "fp4", True), 64)}  # fmt: skip
  with pytest.raises(ValueError, match="modelopt has one scheme for all linears; got 2"):
    fp4_configs.describe(linears, {})


# --- files from strangers

JSON = st.recursive(
  st.none() | st.booleans() | st.integers(-2, 40) | st.sampled_from(["", "Linear", "re:(", "x"]),
  lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner),
  max_leaves=4,
)


def places(node, path=()):
  """The path of every value inside a JSON value."""
  items = node.items if isinstance(node, dict) else lambda: enumerate(node)
  for key, value in items() if isinstance(node, dict | list) else ():
    yield (*path, key)
    yield from places(value, (*path, key))


WHOLE = [
  transform() | {"kv_cache_scheme": {"num_bits": 8}, "sparsity_config": {"format": "dense"}},
  modelopt(kv_cache_quant_algo="FP8"),
  fp_quant(modules_to_not_convert=["lm_head"], hadamard_group_size=64),
]


@hp.given(which=st.sampled_from(WHOLE), value=JSON, data=st.data())
def test_any_json_is_read_or_refused(which, value, data):
  config = copy.deepcopy(which)
  path = data.draw(st.sampled_from(list(places(config))))
  node = config
  for key in path[:-1]:
    node = node[key]
  node[path[-1]] = value
  try:
    of(config, UP, Q, "lm_head")
  except ValueError as error:
    assert len(str(error)) < 1000


@pytest.mark.parametrize("value", [[], "x", 3, {"quantization": []}])
def test_what_is_no_object_is_refused(value, tmp_path):
  (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": value}))
  with pytest.raises(ValueError, match="is not supported yet"):
    fp4_configs.of_folder(tmp_path, {})
  if value:
    with pytest.raises(ValueError, match="is not supported yet"):
      fp4_configs.of_folder(tmp_path / "nowhere", {"quantization_config": value})
