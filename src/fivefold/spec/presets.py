"""Models by name. Shapes are from the published configurations; `fivefold list models` prints the table.

A preset has a line with its numbers, and its family a line that says where they come from.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.render.blocks import Block, Result, Table
from fivefold.spec.blocks import Experts, LatentSpec, RopeScaling, Yarn
from fivefold.spec.hf import read_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.parsing import read
from fivefold.support.ranges import MAX_TOKENS, check_range, outside, within
from fivefold.support.text import did_you_mean, si

_GPT = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "tied": True}
_LLAMA2 = {"vocab": 32_000, "context": 4096}
_LLAMA3 = {"vocab": 128_256, "context": 8192, "rope_theta": 500_000.0}
_LLAMA31 = {**_LLAMA3, "context": 131_072, "rope_scaling": RopeScaling(factor=8.0)}
_LLAMA32 = {**_LLAMA31, "rope_scaling": RopeScaling(factor=32.0), "tied": True}
_QWEN = {"vocab": 151_936, "context": 32_768, "rope_theta": 1e6, "norm_eps": 1e-6}
_QWEN25 = {**_QWEN, "qkv_bias": True}
_QWEN25_LARGE = {**_QWEN25, "vocab": 152_064, "context": 131_072, "norm_eps": 1e-5}
_QWEN3 = {**_QWEN, "context": 40_960, "qk_norm": True}
_TIED = {"tied": True}
_SMOL = {"vocab": 49_152, "context": 8192, "rope_theta": 100_000.0, "tied": True}
_OSS = {"sinks": True, "window": 128, "window_period": 2, "bias": True, "activation": "swiglu_clamped"}


def _shape(*numbers: int) -> dict[str, int]:
    """The numbers in this order; those at the end that are left out are derived."""
    return dict(zip(("layers", "hidden", "heads", "kv_heads", "ffn", "head_dim"), numbers, strict=False))


def _sigmoid(count: int, top_k: int, ffn: int, **others: Any) -> Experts:
    """DeepSeek-V3's way to choose, with one shared expert."""
    return Experts(count=count, top_k=top_k, ffn=ffn, shared=1, scores="sigmoid", balance_bias=True, **others)


_DEEPSEEK = {"context": 163_840, "norm_eps": 1e-6, "rope_interleaved": True}
_LATENTS = LatentSpec(kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
_LATENTS_OF_Q = LatentSpec(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)

# For laptops and tests: 257 is 256 bytes and an end of document.
_BYTE_LEVEL = {"vocab": 257, "context": 2048}
_OSS_RELEASED = _OSS | {"vocab": 201_088, "context": 131_072, "rope_theta": 150_000.0}
_OSS_RELEASED |= {"rope_scaling": Yarn(factor=32.0, original_context=4096, truncate=False)}
_TINY_OSS = _OSS | {"window": 10, "rope_scaling": Yarn(factor=4.0, original_context=512, truncate=False)}
_TINY_LATENTS = LatentSpec(q_rank=48, kv_rank=32, nope_dim=24, rope_dim=16, v_dim=32)

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _BYTE_LEVEL | _shape(4, 128, 4, 2, 384),
    "small": _BYTE_LEVEL | _shape(8, 512, 8, 4, 1536),
    "tiny-qwen2": _BYTE_LEVEL | _shape(4, 128, 4, 2, 384) | {"qkv_bias": True, "tied": True},
    "tiny-qwen3": _BYTE_LEVEL | _shape(4, 128, 4, 2, 384, 64) | {"qk_norm": True, "tied": True},
    "tiny-mla": _BYTE_LEVEL | _shape(4, 128, 4, 4, 384) | {"mla": _TINY_LATENTS, "rope_interleaved": True},
    "tiny-oss": _BYTE_LEVEL | _shape(4, 128, 4, 2, 384) | _TINY_OSS,
    "tiny-moe": _BYTE_LEVEL | _shape(4, 128, 4, 2) | {"experts": Experts(count=8, top_k=2, ffn=128)},
    "tiny-deepseek": _BYTE_LEVEL
    | _shape(4, 128, 4, 4, 384)
    | {
        "mla": _TINY_LATENTS,
        "rope_interleaved": True,
        "experts": Experts(
            count=8,
            top_k=2,
            ffn=64,
            shared=1,
            dense_layers=1,
            scores="sigmoid",
            scale=2.5,
            groups=4,
            top_groups=2,
            balance_bias=True,
        ),
    },
    "tiny-gpt": _BYTE_LEVEL | _GPT | _shape(4, 128, 4) | {"dropout": 0.1},
    "llama2-7b": _LLAMA2 | _shape(32, 4096, 32, 32, 11008),
    "llama2-13b": _LLAMA2 | _shape(40, 5120, 40, 40, 13824),
    "llama2-70b": _LLAMA2 | _shape(80, 8192, 64, 8, 28672),
    "llama3-8b": _LLAMA3 | _shape(32, 4096, 32, 8, 14336),
    "llama3-70b": _LLAMA3 | _shape(80, 8192, 64, 8, 28672),
    "llama3-405b": _LLAMA31 | _shape(126, 16384, 128, 8, 53248),
    "llama3.1-8b": _LLAMA31 | _shape(32, 4096, 32, 8, 14336),
    "llama3.1-70b": _LLAMA31 | _shape(80, 8192, 64, 8, 28672),
    "llama3.3-70b": _LLAMA31 | _shape(80, 8192, 64, 8, 28672),
    "llama3.2-1b": _LLAMA32 | _shape(16, 2048, 32, 8, 8192),
    "llama3.2-3b": _LLAMA32 | _shape(28, 3072, 24, 8, 8192),
    "mistral-7b-v0.3": _shape(32, 4096, 32, 8, 14336) | {"vocab": 32_768, "context": 32_768, "rope_theta": 1e6},
    "smollm2-135m": _SMOL | _shape(30, 576, 9, 3, 1536),
    "smollm2-360m": _SMOL | _shape(32, 960, 15, 5, 2560),
    "smollm2-1.7b": _SMOL | _shape(24, 2048, 32, 32, 8192) | {"rope_theta": 130_000.0},
    "qwen2.5-0.5b": _QWEN25 | _shape(24, 896, 14, 2, 4864) | _TIED,
    "qwen2.5-1.5b": _QWEN25 | _shape(28, 1536, 12, 2, 8960) | _TIED | {"context": 131_072},
    "qwen2.5-3b": _QWEN25 | _shape(36, 2048, 16, 2, 11008) | _TIED,
    "qwen2.5-7b": _QWEN25_LARGE | _shape(28, 3584, 28, 4, 18944) | {"norm_eps": 1e-6},
    "qwen2.5-14b": _QWEN25_LARGE | _shape(48, 5120, 40, 8, 13824),
    "qwen2.5-32b": _QWEN25_LARGE | _shape(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": _QWEN25_LARGE | _shape(80, 8192, 64, 8, 29568),
    "qwen3-0.6b": _QWEN3 | _shape(28, 1024, 16, 8, 3072, 128) | _TIED,
    "qwen3-1.7b": _QWEN3 | _shape(28, 2048, 16, 8, 6144, 128) | _TIED,
    "qwen3-4b": _QWEN3 | _shape(36, 2560, 32, 8, 9728, 128) | _TIED,
    "qwen3-8b": _QWEN3 | _shape(36, 4096, 32, 8, 12288, 128),
    "qwen3-14b": _QWEN3 | _shape(40, 5120, 40, 8, 17408, 128),
    "qwen3-32b": _QWEN3 | _shape(64, 5120, 64, 8, 25600, 128),
    "mixtral-8x7b": _shape(32, 4096, 32, 8, 14336)
    | {"vocab": 32_000, "context": 32_768, "rope_theta": 1e6, "experts": Experts(count=8, top_k=2, ffn=14336)},
    "olmoe-1b-7b": _shape(16, 2048, 16, 16, 1024)
    | {"vocab": 50_304, "context": 4096, "qk_norm": True, "qk_norm_over": "all"}
    | {"experts": Experts(count=64, top_k=8, ffn=1024, renormalise=False)},
    "qwen3-30b-a3b": _QWEN3 | _shape(48, 2048, 32, 4, 6144, 128) | {"experts": Experts(count=128, top_k=8, ffn=768)},
    "qwen3-235b-a22b": _QWEN3
    | _shape(94, 4096, 64, 4, 12288, 128)
    | {"experts": Experts(count=128, top_k=8, ffn=1536)},
    "deepseek-v2-lite": _DEEPSEEK
    | _shape(27, 2048, 16, 16, 10944)
    | {"vocab": 102_400, "mla": _LATENTS, "rope_scaling": Yarn(factor=40.0, mscale=0.707, mscale_all_dim=0.707)}
    | {"experts": Experts(count=64, top_k=6, ffn=1408, shared=2, dense_layers=1, renormalise=False)},
    "deepseek-v3": _DEEPSEEK
    | _shape(61, 7168, 128, 128, 18432)
    | {"vocab": 129_280, "mla": _LATENTS_OF_Q, "rope_scaling": Yarn(factor=40.0, mscale=1.0, mscale_all_dim=1.0)}
    | {"experts": _sigmoid(256, 8, 2048, dense_layers=3, scale=2.5, groups=8, top_groups=4)},
    "kimi-k2": _DEEPSEEK
    | _shape(61, 7168, 64, 64, 18432)
    | {"vocab": 163_840, "context": 131_072, "rope_theta": 50_000.0, "mla": _LATENTS_OF_Q}
    | {"rope_scaling": Yarn(factor=32.0, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0)}
    | {"experts": _sigmoid(384, 8, 2048, dense_layers=1, scale=2.827)},
    "glm-4.5-air": _shape(46, 4096, 96, 8, 10944, 128)
    | {"vocab": 151_552, "context": 131_072, "rope_theta": 1e6, "rope_dim": 64, "qkv_bias": True}
    | {"experts": _sigmoid(128, 8, 1408, dense_layers=1)},
    "gpt-oss-20b": _OSS_RELEASED
    | _shape(24, 2880, 64, 8, 2880, 64)
    | {"experts": Experts(count=32, top_k=4, ffn=2880)},
    "gpt-oss-120b": _OSS_RELEASED
    | _shape(36, 2880, 64, 8, 2880, 64)
    | {"experts": Experts(count=128, top_k=4, ffn=2880)},
    "grok-1": _shape(64, 6144, 48, 8, 32768, 128)
    | {"vocab": 131_072, "context": 8192, "tied": True, "experts": Experts(count=8, top_k=2, ffn=32768)},
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


# Whose vocabulary is no property of a published model: it is the data's, unless the user says otherwise.
TOY_PRESETS = tuple(name for name, numbers in PRESETS.items() if numbers["vocab"] == _BYTE_LEVEL["vocab"])

PRESET_SOURCES = {  # by how a name begins
    "llama2-": "config.json of meta-llama/Llama-2-*-hf on huggingface.co",
    "llama3-": "config.json of meta-llama/Meta-Llama-3-* on huggingface.co (405B: Llama-3.1-405B)",
    "llama3.1-": "config.json of meta-llama/Llama-3.1-* on huggingface.co",
    "llama3.2-": "config.json of meta-llama/Llama-3.2-* on huggingface.co",
    "llama3.3-": "config.json of meta-llama/Llama-3.3-70B-Instruct on huggingface.co",
    "mistral-": "config.json of mistralai/Mistral-7B-v0.3 on huggingface.co (no sliding window)",
    "smollm2-": "config.json of HuggingFaceTB/SmolLM2-* on huggingface.co",
    "qwen2.5-": "config.json of Qwen/Qwen2.5-* (the base models) on huggingface.co",
    "qwen3-": "config.json of Qwen/Qwen3-* on huggingface.co",
    "mixtral-": "config.json of mistralai/Mixtral-8x7B-v0.1 on huggingface.co",
    "olmoe-": "config.json of allenai/OLMoE-1B-7B-0924 on huggingface.co",
    "deepseek-v2-": "config.json of deepseek-ai/DeepSeek-V2-Lite on huggingface.co",
    "deepseek-v3": "config.json of deepseek-ai/DeepSeek-V3 on huggingface.co, without its layer for later tokens",
    "kimi-": "config.json of moonshotai/Kimi-K2-Instruct on huggingface.co",
    "glm-": "config.json of zai-org/GLM-4.5-Air on huggingface.co, without its layer for later tokens",
    "gpt-oss-": "config.json of openai/gpt-oss-* on huggingface.co",
    "grok-": "run.py of github.com/xai-org/grok-1; for planning: shapes are Grok's, and its further norms and factors "
    "are left out",
    "gpt2-": "config.json of openai-community/gpt2 on huggingface.co",
    "gpt3-": "table 2.1 of arXiv 2005.14165",
    "megatron-": "table 1 of arXiv 2104.04473; vocabulary 51,200, sequence 2,048",
}


def source_of(name: str) -> str:
    """Where the numbers of a preset come from."""
    if name in TOY_PRESETS:
        return "made for laptops and tests; the vocabulary is the data's"
    return next((source for prefix, source in PRESET_SOURCES.items() if name.startswith(prefix)), "not stated")


def preset(name: str, **changes: Any) -> ModelSpec:
    """The model of a `name`, with `changes` of its fields; what was derived from a changed field is derived again.

    >>> ff.preset("llama3-8b", layers=16).parameter_count
    4540469248
    """
    if name not in PRESETS:
        raise UserError(
            f"unknown model {name!r}; {did_you_mean(name, list(PRESETS))} ('fivefold list models' lists them)",
            "model.unknown",
        )
    if not changes:
        return ModelSpec(**({"name": name} | PRESETS[name]))
    problems: list[str] = []
    spec = read(ModelSpec, {"name": name} | PRESETS[name] | changes, "model", problems)
    if spec is None:
        raise UserError(problems)
    if absurd := outside(spec, "model"):
        raise UserError(absurd.values())
    return spec


# ---- listing --------------------------------------------------------------------------------------------------------
# The presets, with what follows from their numbers: parameters and FLOPs per token.


SHAPE_FIELDS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context")


@dataclass(frozen=True)
class ModelList(Result):
    specs: tuple[ModelSpec, ...]
    seq: int | None  # None: each model's own context

    def to_dict(self) -> list[dict[str, Any]]:
        return [
            {
                "model": spec.name,
                "parameters": spec.parameter_count,
                "active_parameters": spec.active_parameters,
                "matmul_parameters": spec.matmul_parameters,
                "seq": seq,
                "flops_per_token_full": spec.flops_per_token(seq, "full"),
                "flops_per_token_causal": spec.flops_per_token(seq, "causal"),
            }
            for spec in self.specs
            for seq in [self.seq or spec.context]
        ]

    def blocks(self) -> Iterator[Block]:
        rows = []
        for row in self.to_dict():
            flops = (si(row[f"flops_per_token_{counting}"]) for counting in ("full", "causal"))
            rows.append([row["model"], f"{row['parameters']:,}", str(row["seq"]), *flops])
        yield Table(
            ["model", ">parameters", ">seq", ">FLOPs/token full", ">FLOPs/token causal"],
            rows,
            title="Models",
            caption="FLOPs per training token, forward and backward, at the sequence length shown; full and causal: "
            "how attention is counted",
        )
        shapes = [[spec.name, *(str(getattr(spec, name)) for name in SHAPE_FIELDS)] for spec in self.specs]
        yield Table(["model", *(f">{name.replace('_', ' ')}" for name in SHAPE_FIELDS)], shapes, title="Shapes")
        yield Table(
            ["model", ">active", ">experts", ">shared", ">top k", ">expert ffn", ">dense layers", "scores"],
            [[spec.name, si(spec.active_parameters, 3), *_mixture(spec.experts)]
             for spec in self.specs if spec.experts is not None],
            title="Mixtures of experts",
            caption="active: parameters without the experts that a token does not visit",
        )  # fmt: skip


def _mixture(experts: Experts) -> list[str]:
    numbers = experts.count, experts.shared, experts.top_k, experts.ffn, experts.dense_layers
    return [*map(str, numbers), experts.scores]


def models(config: str | Path | None = None, *, seq: int | None = None) -> ModelList:
    """Every preset, and the model of a Hugging Face `config`; FLOPs at `seq` tokens, or at each model's context.

    >>> [spec.name for spec in ff.models(seq=8192).specs if spec.name.startswith("llama2")]
    ['llama2-7b', 'llama2-13b', 'llama2-70b']
    """
    check_range("seq", seq, within(1, MAX_TOKENS))
    specs = [preset(name) for name in PRESETS] + ([read_hf_config(config)] if config else [])
    return ModelList(tuple(specs), seq)
