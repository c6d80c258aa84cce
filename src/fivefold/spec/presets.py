"""Models by name. Shapes are those of the published configurations; `fivefold models` prints the table.

Sources: the config.json of each Llama 2/3/3.1/3.2 and Qwen3 release; GPT-2 and GPT-3 papers (table 2.1 of
arXiv 2005.14165); Megatron-LM's table 1 (arXiv 2104.04473), vocabulary 51,200, sequence 2,048.
"""

from typing import Any

from fivefold.spec.model import ModelSpec, RopeScaling
from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean

_GPT = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "tied": True}
_LLAMA2 = {"vocab": 32_000, "context": 4096}
_LLAMA3 = {"vocab": 128_256, "context": 8192, "rope_theta": 500_000.0}
_LLAMA31 = {**_LLAMA3, "context": 131_072, "rope_scaling": RopeScaling(factor=8.0)}
_LLAMA32 = {**_LLAMA31, "rope_scaling": RopeScaling(factor=32.0), "tied": True}
_QWEN3 = {"vocab": 151_936, "context": 40_960, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True}


def _shape(*numbers: int) -> dict[str, int]:
    """The numbers in this order; those at the end that are left out are derived."""
    return dict(zip(("layers", "hidden", "heads", "kv_heads", "ffn", "head_dim"), numbers, strict=False))


# For laptops and tests: 257 is 256 bytes and an end of document.
_BYTES = {"vocab": 257, "context": 2048}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _BYTES | _shape(4, 128, 4, 2, 384),
    "small": _BYTES | _shape(8, 512, 8, 4, 1536),
    "tiny-qwen3": _BYTES | _shape(4, 128, 4, 2, 384, 64) | {"qk_norm": True, "tied": True},
    "tiny-gpt": _BYTES | _GPT | _shape(4, 128, 4) | {"dropout": 0.1},
    "llama2-7b": _LLAMA2 | _shape(32, 4096, 32, 32, 11008),
    "llama2-13b": _LLAMA2 | _shape(40, 5120, 40, 40, 13824),
    "llama2-70b": _LLAMA2 | _shape(80, 8192, 64, 8, 28672),
    "llama3-8b": _LLAMA3 | _shape(32, 4096, 32, 8, 14336),
    "llama3-70b": _LLAMA3 | _shape(80, 8192, 64, 8, 28672),
    "llama3-405b": _LLAMA31 | _shape(126, 16384, 128, 8, 53248),
    "llama3.1-8b": _LLAMA31 | _shape(32, 4096, 32, 8, 14336),
    "llama3.1-70b": _LLAMA31 | _shape(80, 8192, 64, 8, 28672),
    "llama3.2-1b": _LLAMA32 | _shape(16, 2048, 32, 8, 8192),
    "llama3.2-3b": _LLAMA32 | _shape(28, 3072, 24, 8, 8192),
    "qwen3-0.6b": _QWEN3 | _shape(28, 1024, 16, 8, 3072, 128) | {"tied": True},
    "qwen3-8b": _QWEN3 | _shape(36, 4096, 32, 8, 12288, 128),
    "gpt2-124m": _GPT | _shape(12, 768, 12) | {"vocab": 50_257, "context": 1024, "activation": "gelu_tanh"},
    "gpt3-175b": _GPT | _shape(96, 12288, 96) | {"vocab": 50_257, "context": 2048},
}

_MEGATRON = {  # billions: layers, hidden, heads
    "1.7b": (24, 2304, 24),
    "3.6b": (30, 3072, 32),
    "7.5b": (36, 4096, 32),
    "18.4b": (40, 6144, 48),
    "39.1b": (48, 8192, 64),
    "76.1b": (60, 10240, 80),
    "145.6b": (80, 12288, 96),
    "310.1b": (96, 16384, 128),
    "529.6b": (105, 20480, 128),
    "1t": (128, 25600, 160),
}
for _size, _numbers in _MEGATRON.items():
    PRESETS[f"megatron-{_size}"] = _GPT | _shape(*_numbers) | {"vocab": 51_200, "context": 2048}


def preset(name: str, **changes: Any) -> ModelSpec:
    """A named model, with fields changed; what was derived from a changed field is derived again."""
    if name not in PRESETS:
        raise UserError(f"unknown model {name!r}; {did_you_mean(name, list(PRESETS))} ('fivefold models' lists them)")
    return ModelSpec(**({"name": name} | PRESETS[name] | changes))
