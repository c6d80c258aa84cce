"""The attention of a Hugging Face `config.json`: rotary positions, latents, windows. `hf.py` reads the rest."""

from typing import Any

from fivefold.spec.blocks import LatentSpec, RopeScaling, Yarn
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block
from fivefold.support.errors import UserError
from fivefold.support.text import either

Config = dict[str, Any]
SpecFields = dict[str, Any]  # the fields of a ModelSpec, not yet checked

LATENT_SETTINGS = {
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}
_ORIGINAL = {"original_context": "original_max_position_embeddings"}
_STRETCHES: dict[str, tuple[type[RopeScaling] | type[Yarn], tuple[str, ...]]] = {  # and what may not be left out
    "llama3": (RopeScaling, RopeScaling.__struct_fields__),
    "yarn": (Yarn, ("factor", "original_context")),
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_rope(config: Config) -> SpecFields:
    """Theta, scaling and rotary dims, from either spelling: `rope_theta` + `rope_scaling`, or `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"rope scaling is {rope!r}, not a table", "hf.setting.value")
    theta = rope.get("rope_theta") or config.get("rope_theta", 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if not isinstance(kind, str) or kind not in _STRETCHES:
        raise UserError(
            f"rope type {kind!r} is not supported; {either([repr(known) for known in ('default', *_STRETCHES)])}",
            "hf.setting.value",
        )
    stretch, required = _STRETCHES[kind]
    keys = {field: _ORIGINAL.get(field, field) for field in stretch.__struct_fields__}
    if missing := [keys[field] for field in required if rope.get(keys[field]) is None]:
        raise UserError((f"rope scaling {kind!r} has no {key}" for key in missing), "hf.setting.missing")
    given = {field: rope[key] for field, key in keys.items() if rope.get(key) is not None}
    return {"rope_theta": theta, "rope_scaling": {"kind": kind} | given}


def write_rope(spec: ModelSpec) -> Config:
    """Both spellings: releases before 5 read rope_theta and rope_scaling, later ones rope_parameters."""
    older: Config | None = None
    if (stretch := spec.rope_scaling) is not None:
        older = {"rope_type": "yarn" if isinstance(stretch, Yarn) else "llama3"}
        older |= {_ORIGINAL.get(field, field): getattr(stretch, field) for field in stretch.__struct_fields__}
        # What follows from the rest is left out; theirs takes a 0 for a number.
        older = {key: value for key, value in older.items() if value != 0 or isinstance(value, bool)}
    newer = {"rope_theta": spec.rope_theta} | (older or {"rope_type": "default"})
    return {"rope_theta": spec.rope_theta, "rope_scaling": older, "rope_parameters": newer}


def read_partial(config: Config, default: float) -> SpecFields:
    """GLM: the share of a head's dims that positions turn."""
    rope = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", default))
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if type(width) is not int or not isinstance(share, int | float) or not 0 < share <= 1:
        raise UserError(
            f"partial_rotary_factor={share!r} of head_dim={width!r} is not a share of a head's dims", "hf.setting.value"
        )
    return {"rope_dim": 0 if share == 1 else int(width * share)}


def read_latent(config: Config) -> SpecFields:
    """DeepSeek's MLA."""
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise UserError(
            f"num_key_value_heads={kv_heads!r} beside latent attention, which has one for each of {heads} heads",
            "hf.setting.value",
        )
    latent = {"q_rank": config.get("q_lora_rank") or 0} | {field: config[key] for field, key in LATENT_SETTINGS.items()}
    return {"mla": latent, "rope_interleaved": bool(config.get("rope_interleave", True))}


def write_latent(spec: ModelSpec) -> Config:
    assert spec.mla is not None
    return _with_hf_keys(spec.mla, LATENT_SETTINGS) | {
        "q_lora_rank": spec.mla.q_rank or None,
        "num_key_value_heads": spec.heads,
        "head_dim": spec.mla.rope_dim,
        "rope_interleave": spec.rope_interleaved,
        "attention_bias": False,
    }


def read_windows(config: Config) -> SpecFields:
    """gpt-oss: which layers see a window of the keys, and which all of them."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [(_SLIDING, _FULL)[layer % 2] for layer in range(layers)]
    period = kinds.index(_FULL) + 1 if isinstance(kinds, list) and _FULL in kinds else 0
    if kinds != [_FULL if period and (layer + 1) % period == 0 else _SLIDING for layer in range(layers)]:
        raise UserError(
            f"layer_types={kinds!r} is not supported; every second (or third, ...) is {_FULL}, the others {_SLIDING}",
            "hf.setting.value",
        )
    if period == 1:
        return {"sinks": True}
    return {"sinks": True, "window": config.get("sliding_window", 128), "window_period": period or 1}


def write_windows(spec: ModelSpec) -> Config:
    windows = [block(spec, layer=spec.kinds(layer)).attention.window for layer in range(spec.layers)]
    kinds = [_SLIDING if window else _FULL for window in windows]
    return {"sliding_window": spec.window or None, "layer_types": kinds}


def _with_hf_keys(latents: LatentSpec, names: dict[str, str]) -> Config:
    return {key: getattr(latents, field) for field, key in names.items()}
