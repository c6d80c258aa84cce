"""The mixture of experts of a Hugging Face `config.json`. `hf.py` reads the rest."""

import warnings
from dataclasses import dataclass, field

import msgspec

from fivefold.spec.blocks import Experts
from fivefold.spec.hf_attention import Config, Numbers
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import Note, UserError


@dataclass(frozen=True)
class _ExpertWords:
    """How the config.json of a `model_type` says what its experts are."""

    names: dict[str, str]  # fields of Experts in the words of a `model_type`
    fixed: Config = field(default_factory=dict)  # fields that it has no word for, where they are not the default
    spelled: Config = field(default_factory=dict)  # what its config.json says beside them; nothing else is read


_VISITS = {"top_k": "num_experts_per_tok"}
_PLAIN_EXPERTS = _VISITS | {"count": "num_local_experts", "ffn": "intermediate_size"}
_QWEN = _VISITS | {"count": "num_experts", "ffn": "moe_intermediate_size", "renormalise": "norm_topk_prob"}
_DEEPSEEK = _VISITS | {
    "count": "n_routed_experts",
    "ffn": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "top_groups": "topk_group",
}
_V3 = _ExpertWords(
    _DEEPSEEK | {"renormalise": "norm_topk_prob"},
    {"scores": "sigmoid", "balance_bias": True},
    {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
)
EXPERT_WORDS: dict[str, _ExpertWords] = {
    "mixtral": _ExpertWords(_PLAIN_EXPERTS, spelled={"router_jitter_noise": 0.0}),
    "gpt_oss": _ExpertWords(_PLAIN_EXPERTS),
    "olmoe": _ExpertWords(_QWEN | {"ffn": "intermediate_size"}),
    "qwen3_moe": _ExpertWords(_QWEN, spelled={"decoder_sparse_step": 1}),
    # transformers' DeepSeek-V2 never renormalises, whatever norm_topk_prob says.
    "deepseek_v2": _ExpertWords(
        _DEEPSEEK, {"renormalise": False}, {"scoring_func": "softmax", "moe_layer_freq": 1, "norm_topk_prob": False}
    ),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe": _V3,
}
_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Experts)}
_METHODS = ("greedy", "group_limited_greedy")  # of DeepSeek-V2: without groups, and with
_OTHERS = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}  # transformers 5 renames for some


def read_experts(config: Config) -> Numbers:
    """The `experts` of a model, if any of its layers has some."""
    kind, layers = str(config["model_type"]), config["num_hidden_layers"]
    names = EXPERT_WORDS[kind].names
    if further := config.get("num_nextn_predict_layers"):
        warnings.warn(
            Note(f"num_nextn_predict_layers={further} is read as 0: layers that predict later tokens are left out"),
            stacklevel=2,
        )
    given = {name: config.get(key, config.get(_OTHERS.get(key, key))) for name, key in names.items()}
    if kind == "deepseek_v2" and _topk_method(config) == _METHODS[0]:
        given |= {"groups": 1, "top_groups": 1}
    if kind == "qwen3_moe":
        given["dense_layers"] = _count_dense_layers(config)
    dense = given.get("dense_layers", 0)
    if type(dense) is int and dense >= layers:
        return {}
    if missing := [names[name] for name, value in given.items() if value is None]:
        raise UserError(f"{key} is missing" for key in missing)
    return {"experts": given | EXPERT_WORDS[kind].fixed}


def _topk_method(config: Config) -> str:
    """DeepSeek-V2's way to choose."""
    method = config.get("topk_method", _METHODS[0])
    if method not in _METHODS:
        raise UserError(f"topk_method={method!r} is not supported for deepseek_v2; {' and '.join(_METHODS)} are")
    return method


def _count_dense_layers(config: Config) -> int:
    """Qwen names the layers without experts; they have to be the first."""
    dense = config.get("mlp_only_layers") or []
    first = [*range(len(dense))] if isinstance(dense, list) else []
    if dense != first:
        raise UserError(
            f"mlp_only_layers={dense!r} is not supported: layers without experts are the first ones, as in {first}"
        )
    return len(first)


def model_type_with_experts(spec: ModelSpec) -> str:
    """The `model_type` of transformers that has the model's experts."""
    assert spec.experts is not None
    sigmoid = spec.experts.scores == "sigmoid"
    if spec.mla is not None:
        return "deepseek_v3" if sigmoid else "deepseek_v2"
    if sigmoid:
        return "glm4_moe"
    if spec.bias:
        return "gpt_oss"
    return ("olmoe" if spec.qk_norm_over == "all" else "qwen3_moe") if spec.qk_norm else "mixtral"


def expert_misfits(spec: ModelSpec, kind: str) -> list[str]:
    """Why transformers' models of a kind do not have these experts."""
    experts = spec.experts
    if experts is None:
        return []
    fields = EXPERT_WORDS[kind]
    free = {*fields.names, *(("dense_layers",) if kind == "qwen3_moe" else ())}
    wanted = {name: fields.fixed.get(name, _DEFAULTS[name]) for name in Experts.__struct_fields__ if name not in free}
    problems = [
        f"{kind} of transformers has experts.{name}={only!r}, and {spec.name} has {getattr(experts, name)!r}"
        for name, only in wanted.items()
        if getattr(experts, name) != only
    ]
    if "shared" in free and not experts.shared:
        problems.append(f"{kind} of transformers has at least one shared expert, and {spec.name} has none")
    return problems


def write_experts(spec: ModelSpec, kind: str) -> Config:
    """The part of a `config.json` that is about experts."""
    names = EXPERT_WORDS[kind].names
    if (experts := spec.experts) is None:
        return {names["dense_layers"]: spec.layers}
    config = {key: getattr(experts, name) for name, key in names.items()} | EXPERT_WORDS[kind].spelled
    if kind == "deepseek_v2":
        config["topk_method"] = _METHODS[experts.groups > 1]
    if kind == "qwen3_moe":
        config["mlp_only_layers"] = [*range(experts.dense_layers)]
    if kind in ("deepseek_v3", "glm4_moe"):
        config["num_nextn_predict_layers"] = 0
    return config
