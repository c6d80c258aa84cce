"""A Hugging Face `config.json` read as a ModelSpec, and written of one. Pure: planning a model needs no torch."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fivefold.spec.model import Activation, ModelSpec, RopeScaling
from fivefold.support.documents import path_of, read_json
from fivefold.support.errors import Note, UserError
from fivefold.support.formatting import did_you_mean
from fivefold.support.reading import read

Config = dict[str, Any]
Numbers = dict[str, Any]  # the fields of a ModelSpec, not yet checked
HF_CONFIG = "config.hf.json"  # beside an imported run's job: what Hugging Face's config.json said

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


def read_hf_config(path: str | Path) -> ModelSpec:
    """The model that a `config.json`, or the directory that holds one, describes."""
    path = path_of(path)
    file = path / "config.json" if os.path.isdir(path) else path
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{file} holds a {type(config).__name__}, not the table of a model's settings")
    try:
        return spec_from_hf(config, name=file.resolve().parent.name)
    except UserError as error:
        raise UserError(f"{file}: {problem}" for problem in error.problems) from None


def spec_from_hf(config: Config, name: str = "custom") -> ModelSpec:
    kind = str(config.get("model_type", ""))
    if kind not in _READERS:
        raise UserError(f"model_type {kind!r} is not of the family; {did_you_mean(kind, list(_READERS))}")
    reader, required = _READERS[kind]
    missing = [key for key in required.values() if type(config.get(key)) is not int]  # True is an int to isinstance
    if missing:
        raise UserError(f"{key} is missing or not a whole number" for key in missing)
    problems = [f"{key}={config[key]!r} is not supported for {kind}; only {key}={only!r} is"
                for key, only in _ONLY[kind].items() if config.get(key) not in (None, only)]  # fmt: skip
    if problems:
        raise UserError(problems)
    for key, default in (("attn_pdrop", 0.1 if kind == "gpt2" else 0.0), ("attention_dropout", 0.0)):
        if config.get(key, default):
            warnings.warn(Note(f"{key} is read as 0: attention probabilities are never dropped"), stacklevel=2)
    spec = read(ModelSpec, {"name": name} | reader(config), "model", problems)
    if spec is None or (problems := spec.problems()):
        raise UserError(problems)
    return spec


def to_hf_config(spec: ModelSpec, dtype: str) -> Config:
    """The `config.json` under which `transformers` has this model, with weights of `dtype`, if it has it at all."""
    kind = "qwen3" if spec.qk_norm else "qwen2" if spec.qkv_bias else "llama"  # Mistral's weights are a Llama's
    kind = "gpt2" if spec.positions == "learned" else kind
    write = {"gpt2": _to_gpt2}.get(kind, _to_llama)
    wanted: Config = {
        "gpt2": {"norm": "layernorm", "bias": True, "kv_heads": spec.heads, "head_dim": spec.hidden // spec.heads}
    }.get(kind, {"norm": "rmsnorm", "bias": False, "activation": "swiglu", "qkv_bias": kind == "qwen2"})
    problems = [
        f"{kind} of transformers has {key}={only!r}, and {spec.name} has {key}={getattr(spec, key)!r}"
        for key, only in wanted.items()
        if getattr(spec, key) != only
    ]
    if kind == "gpt2" and spec.activation == "swiglu":
        problems.append(f"gpt2 of transformers has no activation='swiglu', and {spec.name} has")
    if problems:
        raise UserError(problems)
    shared = {
        "model_type": kind,
        "architectures": ["GPT2LMHeadModel" if kind == "gpt2" else f"{kind.title()}ForCausalLM"],
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied,
        "initializer_range": spec.init_std,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return shared | write(spec)


def _written(spec: ModelSpec, names: dict[str, str]) -> Config:
    return {key: getattr(spec, field) for field, key in names.items()}


def _to_llama(spec: ModelSpec) -> Config:
    rope: Config = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if (stretch := spec.rope_scaling) is not None:
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": stretch.original_context}
        rope |= {key: getattr(stretch, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    # Both spellings: releases before 5 read rope_theta and rope_scaling, later ones rope_parameters.
    older = {key: value for key, value in rope.items() if key != "rope_theta"} if spec.rope_scaling else None
    return (
        _written(spec, _LLAMA | _QWEN3)
        | {
            "rms_norm_eps": spec.norm_eps,
            "rope_theta": spec.rope_theta,
            "rope_scaling": older,
            "rope_parameters": rope,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
        }
        | ({"use_sliding_window": False} if spec.qk_norm or spec.qkv_bias else {"mlp_bias": False})
        | ({} if spec.qkv_bias else {"attention_bias": False})  # Qwen2 has no such setting: its q, k and v have biases
    )


def _to_gpt2(spec: ModelSpec) -> Config:
    return _written(spec, _GPT2 | {"ffn": "n_inner"}) | {
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[spec.activation],
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "attn_pdrop": 0.0,
    }


def _llama(config: Config) -> Numbers:
    theta, scaling = _rope(config)
    return {field: config.get(key) or 0 for field, key in (_LLAMA | _QWEN3).items()} | {
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": config["model_type"] == "qwen2",
        "qk_norm": config["model_type"] == "qwen3",
        "init_std": config.get("initializer_range", 0.02),
    }


def _mistral(config: Config) -> Numbers:
    window = config.get("sliding_window", 4096)  # what Hugging Face fills in
    if window is not None:
        raise UserError(f"sliding_window={window!r} is not supported for mistral; only null is, as in Mistral 7B v0.3")
    return _llama(config)


def _gpt2(config: Config) -> Numbers:
    rates = {key: config.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop")}
    if rates["resid_pdrop"] != rates["embd_pdrop"]:
        raise UserError(
            f"resid_pdrop={rates['resid_pdrop']} and embd_pdrop={rates['embd_pdrop']} differ; one rate is kept"
        )
    activation = str(config.get("activation_function", "gelu_new"))
    if activation not in _GELUS:
        raise UserError(
            f"activation_function={activation!r} is not supported; {did_you_mean(activation, list(_GELUS))}"
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


def _rope(config: Config) -> tuple[Any, Numbers | None]:
    """Theta and scaling, from either spelling: `rope_theta` + `rope_scaling`, or the newer `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"rope scaling is {rope!r}, not a table")
    theta = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"rope type {kind!r} is not supported; 'default' and 'llama3' are")
    names = {"original_context": "original_max_position_embeddings"}
    keys = {field: names.get(field, field) for field in RopeScaling.__struct_fields__}
    if missing := [key for key in keys.values() if key not in rope]:
        raise UserError(f"rope scaling 'llama3' has no {key}" for key in missing)
    return theta, {field: rope[key] for field, key in keys.items()}


_GELUS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_READERS: dict[str, tuple[Callable[[Config], Numbers], dict[str, str]]] = {
    "llama": (_llama, _LLAMA),
    "mistral": (_mistral, _LLAMA | {"kv_heads": "num_key_value_heads"}),
    "qwen2": (_llama, _LLAMA | {"kv_heads": "num_key_value_heads"}),
    # What Hugging Face would fill in for an absent head_dim or number of kv heads is not what Llama's rule gives.
    "qwen3": (_llama, _LLAMA | _QWEN3),
    "gpt2": (_gpt2, _GPT2),
}
# Settings that would change the arithmetic: anything but these values is refused, never ignored.
_ONLY: dict[str, Config] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"hidden_act": "silu"},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
}
