"""A Hugging Face `config.json` read as a ModelSpec, and written of one. Pure: planning a model needs no torch.

`hf_attention.py` reads and writes what is about attention, `hf_experts.py` what is about experts.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec

from fivefold.spec.hf_attention import (
    LATENT_SETTINGS,
    Config,
    SpecFields,
    read_latent,
    read_partial,
    read_rope,
    read_windows,
    write_latent,
    write_rope,
    write_windows,
)
from fivefold.spec.hf_experts import (
    EXPERT_CONFIG_MAPS,
    expert_misfits,
    model_type_with_experts,
    read_experts,
    write_experts,
)
from fivefold.spec.model import Activation, ModelSpec
from fivefold.support.errors import Note, UserError
from fivefold.support.parsing import path_of, read, read_json
from fivefold.support.text import did_you_mean

HF_CONFIG = "config.hf.json"  # beside an imported run's job: what Hugging Face's config.json said
END_NAMED_IN = ("generation_config.json", "config.json", HF_CONFIG)  # files with eos_token_id

# Our fields in Hugging Face's words. A config without one of these is refused.
_LLAMA = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "context": "max_position_embeddings",
}
_QWEN3 = {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}  # a Llama may leave them to its rule
_GPT2 = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocab": "vocab_size", "context": "n_positions"}


_BLOCK: Config = {"norm": "rmsnorm", "bias": False, "activation": "swiglu", "sinks": False, "window": 0}
_PLAIN = _BLOCK | {"rope_interleaved": False, "rope_dim": 0, "qkv_bias": False}
_OSS = _PLAIN | {"bias": True, "activation": "swiglu_clamped", "sinks": True, "qk_norm": False}
_CLASS_NAMES = {"gpt2": "GPT2LMHeadModel"}


_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")
# Of their settings that no field of ours has, those that an export gives back: they change no logits.
_KEPT_SETTINGS = (
    *_TOKEN_IDS,
    "router_aux_loss_coef", "output_router_logits", "attn_pdrop", "attention_dropout", "pretraining_tp",
)  # fmt: skip


def kept_settings(config: Config) -> Config:
    """The settings of an imported `config.json` that an export keeps."""
    return {key: config[key] for key in _KEPT_SETTINGS if key in config}


def no_tokens(config: Config, vocab: int) -> str:
    """The special tokens of a `config.json` that its vocabulary does not have, or that are no numbers."""
    wrong = []
    for key in _TOKEN_IDS:
        ids = config[key] if isinstance(config.get(key), list) else [config.get(key)]
        if any(token is not None and not (type(token) is int and 0 <= token < vocab) for token in ids):
            wrong.append(f"{key}={str(config[key])[:40]}")
    return ", ".join(wrong)


def read_hf_config(path: str | Path) -> ModelSpec:
    """The model that a `config.json`, or the directory that holds one, describes."""
    path = path_of(path)
    file = path / "config.json" if os.path.isdir(path) else path
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{file} holds a {type(config).__name__}, not the table of a model's settings", "file.syntax")
    try:
        name = os.fsencode(file.resolve().parent.name).decode(errors="replace")  # which may be no text
        return spec_from_hf(config, name=name)
    except UserError as error:
        raise UserError(error.framed(f"{file}: ")) from None


def spec_from_hf(config: Config, name: str = "custom") -> ModelSpec:
    """The model that a table of settings describes; what has no equal here is refused, never ignored."""
    kind = str(config.get("model_type", ""))
    if kind not in _READERS:
        raise UserError(f"model_type {kind!r} is not of the family; {did_you_mean(kind, list(_READERS))}", "hf.family")
    reader, required = _READERS[kind]
    missing = [key for key in required.values() if type(config.get(key)) is not int]  # True is an int to isinstance
    if missing:
        raise UserError((f"{key} is missing or not a whole number" for key in missing), "hf.setting.missing")
    problems = [f"{key}={config[key]!r} is not supported for {kind}; only {key}={only!r} is"
                for key, only in _required_values(kind).items() if config.get(key) not in (None, only)]  # fmt: skip
    if problems:
        raise UserError(problems, "hf.setting.value")
    for key, default in (("attn_pdrop", 0.1 if kind == "gpt2" else 0.0), ("attention_dropout", 0.0)):
        if config.get(key, default):
            warnings.warn(Note(f"{key} is read as 0: attention probabilities are never dropped"), stacklevel=2)
    spec = read(ModelSpec, {"name": name} | reader(config), "model", problems)
    if spec is None or (problems := spec.problems()):
        raise UserError(problems)
    return spec


def to_hf_config(spec: ModelSpec, dtype: str) -> Config:
    """The `config.json` under which `transformers` has this model, with weights of `dtype`, if it has it at all."""
    if spec.counted() != (plain := msgspec.structs.replace(spec, pattern=())).counted():
        raise UserError(f"no model of transformers has the layers of {spec.name}'s pattern", "hf.pattern")
    spec = plain
    kind = "qwen3" if spec.qk_norm else "qwen2" if spec.qkv_bias else "llama"  # Mistral's weights are a Llama's
    if spec.positions == "learned" or spec.mla or spec.rope_dim:
        kind = "gpt2" if spec.positions == "learned" else "deepseek_v3" if spec.mla else "glm4_moe"
    kind = model_type_with_experts(spec) if spec.experts else kind
    write = _WRITERS.get(kind, _to_llama)
    wanted: Config = {
        "gpt2": {"norm": "layernorm", "bias": True, "kv_heads": spec.heads, "head_dim": spec.hidden // spec.heads},
        "deepseek_v2": _BLOCK | {"rope_interleaved": True},
        "deepseek_v3": _BLOCK,
        "glm4_moe": _BLOCK | {"rope_interleaved": False, "qk_norm_over": "head"},
        "gpt_oss": {field: only for field, only in _OSS.items() if field != "window"},
        "mixtral": _PLAIN | {"qk_norm": False},
        "olmoe": _PLAIN | {"qk_norm": True, "qk_norm_over": "all", "head_dim": spec.hidden // spec.heads},
        "qwen3_moe": _PLAIN | {"qk_norm": True, "qk_norm_over": "head"},
    }.get(kind, _PLAIN | {"qkv_bias": kind == "qwen2", "qk_norm_over": "head"})
    problems = [
        f"{kind} of transformers has {key}={only!r}, and {spec.name} has {key}={getattr(spec, key)!r}"
        for key, only in wanted.items()
        if getattr(spec, key) != only
    ]
    problems += expert_misfits(spec, kind)
    if kind == "gpt2" and spec.activation == "swiglu":
        problems.append(f"gpt2 of transformers has no activation='swiglu', and {spec.name} has")
    if problems:
        raise UserError(problems, "hf.setting.value")
    shared = {
        "model_type": kind,
        "architectures": [_CLASS_NAMES.get(kind, f"{kind.title().replace('_', '')}ForCausalLM")],
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied,
        "initializer_range": spec.init_std,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return shared | write(spec) | (write_experts(spec, kind) if kind in EXPERT_CONFIG_MAPS else {})


def _in_their_words(spec: ModelSpec, names: dict[str, str]) -> Config:
    """Fields of the model, each by its name in a config.json."""
    return {key: getattr(spec, field) for field, key in names.items()}


def _to_llama(spec: ModelSpec) -> Config:
    return (
        _in_their_words(spec, _LLAMA | _QWEN3)
        | write_rope(spec)
        | {"rms_norm_eps": spec.norm_eps, "hidden_act": "silu", "attention_dropout": 0.0}
        | ({"use_sliding_window": False} if spec.qk_norm or spec.qkv_bias else {"mlp_bias": False})
        | ({} if spec.qkv_bias else {"attention_bias": False})  # Qwen2 has no such setting: its q, k and v have biases
    )


def _to_deepseek(spec: ModelSpec) -> Config:
    return _to_llama(spec) | write_latent(spec)


def _to_glm(spec: ModelSpec) -> Config:
    config = _to_llama(spec) | {"attention_bias": spec.qkv_bias, "use_qk_norm": spec.qk_norm}
    share = {"partial_rotary_factor": (spec.rope_dim or spec.head_dim) / spec.head_dim}  # left out, it would be a half
    return config | share | {"rope_parameters": config["rope_parameters"] | share}


def _to_oss(spec: ModelSpec) -> Config:
    return _to_llama(spec) | write_windows(spec) | {"attention_bias": True} | _SWIGLU_CLAMPED


def _to_gpt2(spec: ModelSpec) -> Config:
    return _in_their_words(spec, _GPT2 | {"ffn": "n_inner"}) | {
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[spec.activation],
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "attn_pdrop": 0.0,
    }


def _llama(config: Config) -> SpecFields:
    return {field: config.get(key) or 0 for field, key in (_LLAMA | _QWEN3).items()} | {
        **read_rope(config),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": config["model_type"] == "qwen2",
        "qk_norm": config["model_type"] == "qwen3",
        "init_std": config.get("initializer_range", 0.02),
    }


def _mistral(config: Config) -> SpecFields:
    window = config.get("sliding_window", 4096)  # what Hugging Face fills in
    if window is not None:
        raise UserError(
            f"sliding_window={window!r} is not supported for mistral; only null is, as in Mistral 7B v0.3",
            "hf.setting.value",
        )
    return _llama(config)


def _deepseek(config: Config) -> SpecFields:
    """DeepSeek-V2 and V3, and Kimi K2, which is a V3. Their head_dim is the dim of positions."""
    own = {"kv_heads": 0, "head_dim": 0, "qkv_bias": False, "qk_norm": False}
    return _llama(config) | own | read_latent(config) | read_experts(config)


def _glm(config: Config) -> SpecFields:
    biased, normed = bool(config.get("attention_bias", False)), bool(config.get("use_qk_norm", False))
    own = {"norm_eps": config.get("rms_norm_eps", 1e-5), "qkv_bias": biased, "qk_norm": normed}
    return _llama(config) | own | read_partial(config, 0.5) | read_experts(config)


def _mixture(config: Config) -> SpecFields:
    """Mixtral, OLMoE and Qwen3's: Llamas with experts, some of them with a q/k norm."""
    kind = config["model_type"]
    own = {"qk_norm": kind != "mixtral", "qk_norm_over": "all" if kind == "olmoe" else "head"}
    return _llama(config) | own | read_experts(config)


def _oss(config: Config) -> SpecFields:
    """gpt-oss: biases everywhere, sinks, windows in some layers, a swiglu that is bounded."""
    own = {"norm_eps": config.get("rms_norm_eps", 1e-5), "bias": True, "activation": "swiglu_clamped"}
    return _llama(config) | own | read_windows(config) | read_experts(config)


def _gpt2(config: Config) -> SpecFields:
    rates = {key: config.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop")}
    if rates["resid_pdrop"] != rates["embd_pdrop"]:
        raise UserError(
            f"resid_pdrop={rates['resid_pdrop']} and embd_pdrop={rates['embd_pdrop']} differ; one rate is kept",
            "hf.setting.value",
        )
    activation = str(config.get("activation_function", "gelu_new"))
    if activation not in _GELUS:
        raise UserError(
            f"activation_function={activation!r} is not supported; {did_you_mean(activation, list(_GELUS))}",
            "hf.setting.value",
        )
    return {field: config.get(key) or 0 for field, key in (_GPT2 | {"ffn": "n_inner"}).items()} | {
        "norm": "layernorm",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": _GELUS[activation],
        "positions": "learned",
        "bias": True,
        "tied": bool(config.get("tie_word_embeddings", True)),
        "dropout": rates["resid_pdrop"],
        "init_std": config.get("initializer_range", 0.02),
    }


_GELUS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_READERS: dict[str, tuple[Callable[[Config], SpecFields], dict[str, str]]] = {
    "llama": (_llama, _LLAMA),
    "mistral": (_mistral, _LLAMA | {"kv_heads": "num_key_value_heads"}),
    "qwen2": (_llama, _LLAMA | {"kv_heads": "num_key_value_heads"}),
    # What Hugging Face would fill in for an absent head_dim or number of kv heads is not what Llama's rule gives.
    "qwen3": (_llama, _LLAMA | _QWEN3),
    "deepseek_v2": (_deepseek, _LLAMA | LATENT_SETTINGS),
    "deepseek_v3": (_deepseek, _LLAMA | LATENT_SETTINGS),
    "kimi_k2": (_deepseek, _LLAMA | LATENT_SETTINGS),
    "glm4_moe": (_glm, _LLAMA | {"kv_heads": "num_key_value_heads"}),
    "mixtral": (_mixture, _LLAMA | {"kv_heads": "num_key_value_heads"}),
    "olmoe": (_mixture, _LLAMA | {"kv_heads": "num_key_value_heads"}),
    "qwen3_moe": (_mixture, _LLAMA | _QWEN3),
    "gpt_oss": (_oss, _LLAMA | _QWEN3),
    "gpt2": (_gpt2, _GPT2),
}
_WRITERS: dict[str, Callable[[ModelSpec], Config]] = {
    "gpt2": _to_gpt2,
    "deepseek_v2": _to_deepseek,
    "deepseek_v3": _to_deepseek,
    "glm4_moe": _to_glm,
    "gpt_oss": _to_oss,
}
_SWIGLU_CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # as transformers 5 spells it
# Settings that would change the arithmetic: anything but these values is refused, never ignored.
_REQUIRED_SETTINGS: dict[str, Config] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"hidden_act": "silu"},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    "deepseek_v2": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "deepseek_v3": {"hidden_act": "silu", "attention_bias": False},
    "kimi_k2": {"hidden_act": "silu", "attention_bias": False},
    "glm4_moe": {"hidden_act": "silu"},
    "mixtral": {"hidden_act": "silu", "sliding_window": None},
    "olmoe": {"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
    "qwen3_moe": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    "gpt_oss": {"hidden_act": "silu", "attention_bias": True, **_SWIGLU_CLAMPED},
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
}


def _required_values(kind: str) -> Config:
    """Settings of a `model_type` that have one value here."""
    return _REQUIRED_SETTINGS[kind] | (EXPERT_CONFIG_MAPS[kind].required_values if kind in EXPERT_CONFIG_MAPS else {})
