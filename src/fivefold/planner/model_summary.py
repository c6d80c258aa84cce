"""One model: its numbers, its parameters by part, FLOPs of a token, bytes of its training state, and their source."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fivefold.cost.model_state import State, state
from fivefold.job.reading import job_of
from fivefold.layout.layout import Layout
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block
from fivefold.spec.presets import PRESETS, source_of
from fivefold.support.errors import UserError
from fivefold.support.ranges import MAX_TOKENS, check_range, within
from fivefold.support.text import si

_PART_OF_KIND = {"embedding": "embedding", "norm": "norms", "bias": "biases"}
_PART_ORDER = ("embedding", "attention", "other mixers", "mlp", "experts", "norms", "biases", "head")
STATE_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class ModelResult(Result):
    spec: ModelSpec
    seq: int
    source: str  # of its numbers

    @property
    def parts(self) -> dict[str, int]:
        """Parameters by the part of the decoder that they belong to."""
        spec, parts = self.spec, Counter[str]()
        for param in msgspec.structs.replace(spec, layers=0).parameters():
            parts["head" if param.kind == "linear" else _PART_OF_KIND[param.kind]] += param.size
        for layer, times in spec.counted().items():
            for param in spec.block_parameters(spec.first(layer)):
                if param.kind in ("norm", "bias"):
                    parts[_PART_OF_KIND[param.kind]] += times * param.size
                elif param.kind == "filter":
                    parts["other mixers"] += times * param.size
            for matmul in block(spec, layer=layer).matmuls:
                branch = matmul.branch if matmul.branch in _PART_ORDER else "other mixers"
                parts["experts" if matmul.experts else branch] += times * matmul.size
        return {name: parts[name] for name in _PART_ORDER if parts[name]}

    @property
    def states(self) -> dict[str, State]:
        """Bytes of training all of it on one device, by the dtype of compute."""
        return {dtype: state(self.spec, Layout(), dtype) for dtype in STATE_DTYPES}

    def to_dict(self) -> dict[str, Any]:
        spec = self.spec
        return msgspec.to_builtins(spec) | {
            "source": self.source,
            "parameters": spec.parameter_count,
            "parameters_by_part": self.parts,
            "active_parameters": spec.active_parameters,
            "matmul_parameters": spec.matmul_parameters,
            "seq": self.seq,
            "flops_per_token_full": spec.flops_per_token(self.seq, "full"),
            "flops_per_token_causal": spec.flops_per_token(self.seq, "causal"),
            "training_bytes": {dtype: held._asdict() | {"total": held.total} for dtype, held in self.states.items()},
        }

    def blocks(self) -> Iterator[Block]:
        spec, total = self.spec, self.spec.parameter_count
        active = f", {spec.active_parameters:,} of them active for a token" if spec.experts else ""
        yield Text(f"{spec.name}: {total:,} parameters{active}", "bold")
        yield Text(f"numbers: {self.source}")
        numbers = msgspec.to_builtins(spec) | {"name": None} | ({} if spec.qk_norm else {"qk_norm_over": None})
        yield Table(["", "~value"], [*_rows(numbers)], "Numbers")
        parts = [(name, f"{count:,}", f"{count / total:.1%}") for name, count in self.parts.items()]
        caption = "the head is the embedding" if spec.tied else ""
        yield Table(["part", ">parameters", ">share"], parts, "Parameters", caption, totals=[("total", f"{total:,}")])
        flops = [(kind, si(spec.flops_per_token(self.seq, kind), 4)) for kind in ("full", "causal")]
        title = f"FLOPs of a training token, at sequences of {self.seq:,}"
        yield Table(["attention counted", ">FLOPs"], flops, title, "forward and backward, without recomputation")
        rows = [(key, *(f"{size / 1e9:,.2f}" for size in (*held, held.total))) for key, held in self.states.items()]
        heads = ["computing in", ">weights", ">gradients", ">optimizer", ">total"]
        yield Table(heads, rows, "GB of training state, AdamW, all on one device", "activations come on top")


def _rows(numbers: dict[str, Any], of: str = "") -> Iterator[tuple[str, str]]:
    """A line for each number that is set; numbers of a nested table begin with its name."""
    for key, value in numbers.items():
        if isinstance(value, dict):
            yield from _rows(value, f"{key} ")
        elif value:
            yield (of + key).replace("_", " "), _value_text(value)


def _value_text(value: Any) -> str:
    return "yes" if value is True else f"{value:,}" if isinstance(value, int) else str(value)


def model(name: str | Path | ModelSpec, *, seq: int | None = None) -> ModelResult:
    """A preset, or the model of a Hugging Face config or a job file; FLOPs at `seq` tokens, or at its context."""
    check_range("seq", seq, within(1, MAX_TOKENS))
    spec = job_of(name)[0].model
    if problems := spec.problems():
        raise UserError(problems)
    source = source_of(spec.name) if isinstance(name, str) and name in PRESETS else str(name)
    return ModelResult(spec, seq or spec.context, "given" if isinstance(name, ModelSpec) else source)
