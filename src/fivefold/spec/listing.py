"""The presets, with what follows from their numbers: parameters and FLOPs per token."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.report import Block, Result, Table
from fivefold.spec.experts import Experts
from fivefold.spec.hf_config import read_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.formatting import si
from fivefold.support.ranges import TOKENS, checked, within

SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context")


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
        shapes = [[spec.name, *(str(getattr(spec, name)) for name in SHAPE)] for spec in self.specs]
        yield Table(["model", *(f">{name.replace('_', ' ')}" for name in SHAPE)], shapes, title="Shapes")
        yield Table(
            ["model", ">active", ">experts", ">shared", ">top k", ">expert ffn", ">dense layers", "scores"],
            [[spec.name, si(spec.active_parameters, 3), *_mixture(spec.experts)]
             for spec in self.specs if spec.experts is not None],
            title="Mixtures of experts",
            caption="active: parameters without those of experts that a token does not visit",
        )  # fmt: skip


def _mixture(experts: Experts) -> list[str]:
    numbers = experts.count, experts.shared, experts.top_k, experts.ffn, experts.dense_layers
    return [*map(str, numbers), experts.scores]


def models(config: str | Path | None = None, *, seq: int | None = None) -> ModelList:
    """Every preset, and the model of a Hugging Face `config`; FLOPs at `seq` tokens, or at each model's context.

    ff.models(seq=8192)
    """
    checked("seq", seq, within(1, TOKENS))
    specs = [preset(name) for name in PRESETS] + ([read_hf_config(config)] if config else [])
    return ModelList(tuple(specs), seq)
