"""One model: its numbers, its parameters by part, FLOPs of a token, bytes of its training state, and their source."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fivefold.job.config import job_of
from fivefold.layout.layout import Layout
from fivefold.plan.cost.memory import State, state
from fivefold.report import Block, Result, Table, Text
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block
from fivefold.spec.presets import PRESETS, source_of
from fivefold.support.errors import UserError
from fivefold.support.formatting import si
from fivefold.support.ranges import TOKENS, checked, within

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class ModelResult(Result):
    spec: ModelSpec
    seq: int
    source: str  # of its numbers

    @property
    def parts(self) -> dict[str, int]:
        """Parameters by the part of the decoder that they belong to."""
        spec, kinds = self.spec, Counter[str]()
        for one in msgspec.structs.replace(spec, layers=1).parameters():
            kinds[one.kind] += one.size * (1 if one.layer is None else spec.layers)
        branches = {name: spec.layers * sum(one.size for one in block(spec).of(name)) for name in ("attention", "mlp")}
        found = {"embedding": kinds["embedding"], **branches, "norms": kinds["norm"], "biases": kinds["bias"]}
        found["head"] = spec.parameter_count - sum(found.values())
        return {name: count for name, count in found.items() if count}

    @property
    def states(self) -> dict[str, State]:
        """Bytes of training all of it on one device, by the dtype of compute."""
        return {dtype: state(self.spec, Layout(), dtype) for dtype in DTYPES}

    def to_dict(self) -> dict[str, Any]:
        spec = self.spec
        return msgspec.to_builtins(spec) | {
            "source": self.source,
            "parameters": spec.parameter_count,
            "parameters_by_part": self.parts,
            "matmul_parameters": spec.matmul_parameters,
            "seq": self.seq,
            "flops_per_token_full": spec.flops_per_token(self.seq, "full"),
            "flops_per_token_causal": spec.flops_per_token(self.seq, "causal"),
            "training_bytes": {dtype: held._asdict() | {"total": held.total} for dtype, held in self.states.items()},
        }

    def blocks(self) -> Iterator[Block]:
        spec, total = self.spec, self.spec.parameter_count
        yield Text(f"{spec.name}: {total:,} parameters", "bold")
        yield Text(f"numbers: {self.source}")
        numbers = msgspec.to_builtins(spec)
        rows = [(key.replace("_", " "), _shown(value)) for key, value in numbers.items() if key != "name" and value]
        yield Table(["", "~value"], rows, "Numbers")
        parts = [(name, f"{count:,}", f"{count / total:.1%}") for name, count in self.parts.items()]
        caption = "the head is the embedding" if spec.tied else ""
        yield Table(["part", ">parameters", ">share"], parts, "Parameters", caption, totals=[("total", f"{total:,}")])
        flops = [(kind, si(spec.flops_per_token(self.seq, kind), 4)) for kind in ("full", "causal")]
        title = f"FLOPs of a training token, at sequences of {self.seq:,}"
        yield Table(["attention counted", ">FLOPs"], flops, title, "forward and backward, without recomputation")
        held = [(key, *(f"{size / 1e9:,.2f}" for size in (*one, one.total))) for key, one in self.states.items()]
        heads = ["computing in", ">weights", ">gradients", ">optimizer", ">total"]
        yield Table(heads, held, "GB of training state, AdamW, all on one device", "activations come on top")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    return "yes" if value is True else f"{value:,}" if isinstance(value, int) else str(value)


def model(name: str | Path | ModelSpec, *, seq: int | None = None) -> ModelResult:
    """A preset, or the model of a Hugging Face config or a job file; FLOPs at `seq` tokens, or at its context."""
    checked("seq", seq, within(1, TOKENS))
    spec = job_of(name)[0].model
    if problems := spec.problems():
        raise UserError(problems)
    source = source_of(spec.name) if isinstance(name, str) and name in PRESETS else str(name)
    return ModelResult(spec, seq or spec.context, "given" if isinstance(name, ModelSpec) else source)
