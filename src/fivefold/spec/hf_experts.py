"""The mixture of experts of a Hugging Face `config.json`. `hf.py` reads the rest."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fivefold.spec.blocks import Experts
from fivefold.spec.hf_attention import Config, SpecFields
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import Note, UserError


@dataclass(frozen=True)
class ExpertConfigMap:
    """How the config.json of a `model_type` says what its experts are."""

    hf_keys: dict[str, str]  # the key of each field of Experts that it has a key for
    implied: Config = field(default_factory=dict)  # fields without a key whose value is not the default
    required_values: Config = field(default_factory=dict)  # of keys beside them: any other value is refused


_TOP_K = {"top_k": "num_experts_per_tok"}
_MIXTRAL = _TOP_K | {"count": "num_local_experts", "ffn": "intermediate_size"}
_QWEN = _TOP_K | {"count": "num_experts", "ffn": "moe_intermediate_size", "renormalise": "norm_topk_prob"}
_DEEPSEEK = _TOP_K | {
    "count": "n_routed_experts",
    "ffn": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "top_groups": "topk_group",
}
_V3 = ExpertConfigMap(
    _DEEPSEEK | {"renormalise": "norm_topk_prob"},
    {"scores": "sigmoid", "balance_bias": True},
    {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
)
EXPERT_CONFIG_MAPS: dict[str, ExpertConfigMap] = {
    "mixtral": ExpertConfigMap(_MIXTRAL, required_values={"router_jitter_noise": 0.0}),
    "gpt_oss": ExpertConfigMap(_MIXTRAL),
    "olmoe": ExpertConfigMap(_QWEN | {"ffn": "intermediate_size"}),
    "qwen3_moe": ExpertConfigMap(_QWEN, required_values={"decoder_sparse_step": 1}),
    # DeepSeek-V2 of transformers never renormalises, whatever norm_topk_prob says: true is refused, because the model
    # there would not be the one that its config.json describes.
    "deepseek_v2": ExpertConfigMap(
        _DEEPSEEK, {"renormalise": False}, {"scoring_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": False}
    ),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe": _V3,
}
_DEFAULTS = {info.name: info.default for info in msgspec.structs.fields(Experts)}
_WITHOUT_GROUPS, _WITH_GROUPS = _TOPK_METHODS = ("greedy", "group_limited_greedy")  # of DeepSeek-V2
_ALIASES = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}  # transformers 5 renames for some


def read_experts(config: Config) -> SpecFields:
    """The `experts` of a model, if any of its layers has some."""
    model_type, layers = str(config["model_type"]), config["num_hidden_layers"]
    hf_keys = EXPERT_CONFIG_MAPS[model_type].hf_keys
    if further := config.get("num_nextn_predict_layers"):
        warnings.warn(
            Note(f"num_nextn_predict_layers={further} is read as 0: multi-token prediction (MTP) layers are left out"),
            stacklevel=2,
        )
    given = {name: _get(config, key) for name, key in hf_keys.items()}
    if model_type == "deepseek_v2" and _topk_method(config) == _WITHOUT_GROUPS:
        given |= {"groups": 1, "top_groups": 1}  # n_group and topk_group have no effect then
    if model_type == "qwen3_moe":
        given["dense_layers"] = _count_dense_layers(config)
    dense = given.get("dense_layers", 0)
    # A model whose layers are all dense has no experts; `write_experts` writes one this way. The value is unchecked as
    # yet: of anything but an int (a bool is one to isinstance) the check of the fields says what is wrong.
    if type(dense) is int and dense >= layers:
        return {}
    if missing := [hf_keys[name] for name, value in given.items() if value is None]:
        raise UserError((f"{key} is missing" for key in missing), "hf.setting.missing")
    return {"experts": given | EXPERT_CONFIG_MAPS[model_type].implied}


def _get(config: Config, key: str) -> Any:
    return config.get(key, config.get(_ALIASES.get(key, key)))


def _topk_method(config: Config) -> str:
    """DeepSeek-V2's way to choose."""
    method = config.get("topk_method", _WITHOUT_GROUPS)
    if method not in _TOPK_METHODS:
        raise UserError(
            f"topk_method={method!r} is not supported for deepseek_v2; {' and '.join(_TOPK_METHODS)} are",
            "hf.setting.value",
        )
    return str(method)


def _count_dense_layers(config: Config) -> int:
    """Qwen names the layers without experts; they have to be the first."""
    dense = config.get("mlp_only_layers") or []
    is_list = isinstance(dense, list)
    first = [*range(len(dense))] if is_list else []
    if not is_list or dense != first:
        raise UserError(
            f"mlp_only_layers={dense!r} is not supported: layers without experts are the first ones, as in {first}",
            "hf.setting.value",
        )
    return len(first)


def model_type_with_experts(spec: ModelSpec) -> str:
    """The `model_type` of transformers that comes nearest to the model; `expert_misfits` and `to_hf_config` then say
    in what it differs. Each is told by what no other before it has."""
    assert spec.experts is not None
    sigmoid = spec.experts.scores == "sigmoid"
    if spec.mla is not None:  # DeepSeek alone has latent attention
        return "deepseek_v3" if sigmoid else "deepseek_v2"
    if sigmoid:
        return "glm4_moe"
    if spec.bias:  # of all linears
        return "gpt_oss"
    if spec.qk_norm:
        return "olmoe" if spec.qk_norm_over == "all" else "qwen3_moe"
    return "mixtral"


def expert_misfits(spec: ModelSpec, model_type: str) -> list[str]:
    """Why transformers' models of this type do not have these experts."""
    experts = spec.experts
    if experts is None:
        return []
    config_map = EXPERT_CONFIG_MAPS[model_type]
    mapped = {*config_map.hf_keys}
    if model_type == "qwen3_moe":
        mapped.add("dense_layers")  # by mlp_only_layers, a list
    required = {
        name: config_map.implied.get(name, _DEFAULTS[name]) for name in Experts.__struct_fields__ if name not in mapped
    }
    problems = [
        f"{model_type} of transformers has experts.{name}={value!r}, and {spec.name} has {getattr(experts, name)!r}"
        for name, value in required.items()
        if getattr(experts, name) != value
    ]
    if "shared" in mapped and not experts.shared:
        problems.append(f"{model_type} of transformers has at least one shared expert, and {spec.name} has none")
    return problems


def write_experts(spec: ModelSpec, model_type: str) -> Config:
    """The part of a `config.json` that is about experts."""
    hf_keys = EXPERT_CONFIG_MAPS[model_type].hf_keys
    if (experts := spec.experts) is None:
        # Latent attention or partial rotary positions without experts: only types with experts have these, so all
        # layers are among the first, dense ones (`read_experts`).
        return {hf_keys["dense_layers"]: spec.layers}
    config = {key: getattr(experts, name) for name, key in hf_keys.items()}
    config |= EXPERT_CONFIG_MAPS[model_type].required_values
    if model_type == "deepseek_v2":
        config["topk_method"] = _WITH_GROUPS if experts.groups > 1 else _WITHOUT_GROUPS
    if model_type == "qwen3_moe":
        config["mlp_only_layers"] = [*range(experts.dense_layers)]
    if model_type in ("deepseek_v3", "glm4_moe"):
        config["num_nextn_predict_layers"] = 0
    return config
