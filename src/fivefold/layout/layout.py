"""Layout: how one training step is spread over ranks.

    layout = Layout.parse("dp=2,tp=2,pp=2,zero=1,schedule=1f1b")
    layout.world                                  # 8
    layout.problems(preset("tiny"), world=8)      # [] or every reason why not, each with the nearest legal value

A layout says nothing of the machine and nothing of the model; `problems` holds it against both.
"""

import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

import msgspec

from fivefold.layout.axes import Axes, Degree
from fivefold.schedules.actions import COLLECTIVES
from fivefold.schedules.build import ScheduleInfo
from fivefold.schedules.registry import LARGEST, RECORDS, record_of, size_problem
from fivefold.schedules.schedule import Placement, Schedule
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import Problem, UserError
from fivefold.support.parsing import read, unknown_key
from fivefold.support.ranges import RANKS, outside, within
from fivefold.support.text import divisors, either

# ---- commas ---------------------------------------------------------------------------------------------------------
# A layout that was written with spaces for commas, and how it is written: dp=8 zero=3 is dp=8,zero=3.


SPACED = "a layout has commas and no spaces"
# Not every space: a schedule's file may have one, and one may stand beside a comma or an equals sign.
_FOR_COMMA = re.compile(r"(?<=[^\s,=])\s+(?=[a-z_]+\s*=|(?:sp|\d+)(?:[\s,]|$))")


def with_commas(text: str) -> str:
    """The same text where nothing was wrong with it."""
    whole, wrong = _FOR_COMMA.subn(",", text.strip())
    return re.sub(r"\s*([,=])\s*", r"\1", whole) if wrong else whole


# ---- layout ---------------------------------------------------------------------------------------------------------


ContextKind = Literal["ring", "allgather", "ulysses"]
Dispatch = Literal["alltoall", "allgather"]
Recompute = Literal["none", "selective", "full"]


class Layout(Axes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a step is divided over ranks: degrees, kinds and the schedule, and what follows from them.

    >>> layout = ff.Layout(dp=2, tp=4, zero=1)  # or ff.Layout.parse("dp=2,tp=4,zero=1")
    >>> print(f"{layout}: {layout.world} ranks, and rank 5 is {layout.place(5)}")
    dp=2,tp=4,zero=1: 8 ranks, and rank 5 is dp 1, tp 1
    """

    cp_kind: ContextKind = "ring"
    zero: int = 0  # what is sharded over dp x cp: 1 optimizer, 2 + gradients, 3 + parameters
    replicate: Degree = 1  # hybrid sharding: copies of the zero=3 shards, a divisor of dp
    sp: bool = False  # norms and residual sharded over the sequence, along tp
    ep: Degree = 1  # ranks that experts are dealt out over, of the dp x cp x tp that have the same layers
    dispatch: Dispatch = "alltoall"  # how tokens reach their experts
    schedule: str = "1f1b"
    chunks: Annotated[int, within(1, 1000)] = 0  # stages per pipeline rank; 0: the schedule's own
    microbatches: Annotated[int, within(1, LARGEST)] = 1  # per dp rank and step
    recompute: Recompute = "none"
    split: tuple[int, ...] = ()  # layers of each stage; empty: balanced

    def __post_init__(self) -> None:
        if self.chunks == 0:
            try:
                own = self.record.chunks
            except UserError:  # `problems` says which
                own = 1
            msgspec.structs.force_setattr(self, "chunks", own)

    @property
    def record(self) -> ScheduleInfo:
        """What its schedule is like; raises what is wrong with one that does not exist."""
        return record_of(self.schedule)

    @property
    def placement(self) -> Placement:
        """Which stages live on which pipeline rank."""
        return self.record.placement(self.pp, self.chunks)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from input gradients."""
        try:
            return self.record.splits
        except UserError:
            return False

    @property
    def breaks_graphs(self) -> bool:
        """Whether a compiled block is several graphs: what is put off, and the ring's messages, stand between them."""
        return (self.pp > 1 and self.splits_backward) or (self.cp > 1 and self.cp_kind == "ring")

    @property
    def compiles_blocks(self) -> bool:
        """Selective recompute goes by operator: it must see them all, in one graph or in none."""
        return not (self.breaks_graphs and self.recompute == "selective")

    @property
    def last_stage(self) -> int:
        return self.placement.owner[-1]

    @property
    def stages(self) -> int:
        return self.pp * self.chunks

    # ---- text ----------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "dp=2,tp=2,sp,split=3,5": commas separate, a bare flag is true, numbers after split= belong to it."""
        if (whole := with_commas(text)) != text.strip():
            raise UserError(f"{SPACED}; write {whole}")
        values: dict[str, str] = {}
        problems: list[str] = []
        last = ""
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals and last == "split" and key.isdigit():
                values["split"] += f",{key}"
                continue
            if key not in cls.__struct_fields__:
                problems.append(unknown_key("layout", key, list(cls.__struct_fields__)))
            elif key in values:
                problems.append(f"layout gives {key} twice, as {values[key]} and as {value}")
            elif not equals and key != "sp":
                problems.append(f"layout.{key} has no value; write {key}=...")
            else:
                values[key], last = value if equals else "true", key
        if problems:
            raise UserError(problems)
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From a TOML table or the pieces of a string; every value that does not fit is named."""
        if isinstance(split := values.get("split"), str):
            values = values | {"split": [piece for piece in split.split(",") if piece]}
        problems: list[str] = []
        layout = read(cls, values, "layout", problems)
        if layout is None:
            raise UserError(problems)
        return layout

    def given(self) -> dict[str, Any]:
        """What differs from one rank doing everything, without what follows from the schedule's name."""
        default = Layout(schedule=self.schedule)
        found = {field: getattr(self, field) for field in self.__struct_fields__}
        return {
            field: value
            for field, value in found.items()
            if value != ("1f1b" if field == "schedule" else getattr(default, field))
        }

    def __str__(self) -> str:
        """What differs from one rank doing everything; parses back to the same layout."""
        parts = []
        for field, value in self.given().items():
            text = ",".join(map(str, value)) if field == "split" else str(value)
            parts.append("sp" if field == "sp" else f"{field}={text}")
        return ",".join(parts) or "dp=1"

    # ---- validation ----------------------------------------------------------------------------------------------

    def problems(
        self,
        spec: ModelSpec,
        *,
        world: int | None = None,
        seq: int | None = None,
        batch: int | None = None,
        ranks_by: str = "--nproc",
    ) -> list[str]:
        """Every reason why this layout cannot run `spec`, with the values and the nearest that would do; each is a
        `Problem`, with a code (docs/problems.md).

        `world` is the number of ranks there are, `seq` the sequence length, `batch` the global batch in sequences;
        what is not given is not checked. `ranks_by` says how the reader gives a number of ranks: "--nproc" 8.
        """
        absurd = {field: Problem(f"layout.{field}.range", text) for field, text in outside(self, "layout").items()}
        # The other rules divide by these: they are held against values that make sense.
        sane = msgspec.structs.replace(self, **dict.fromkeys(absurd, 1))
        if sane.world > RANKS:
            many = f"layout {sane} has {sane.world} ranks, which is more than {RANKS}"
            return [*absurd.values(), Problem("layout.ranks.most", many)]
        found = (
            *sane._tensor(spec),
            *sane._context(spec, seq),
            *sane._pipeline(spec),
            *sane._data(batch),
            *sane._experts(spec),
        )
        return [*absurd.values(), *found, *sane._world(world, ranks_by)]

    def _tensor(self, spec: ModelSpec) -> Iterator[Problem]:
        tp = self.tp
        legal = [n for n in divisors(spec.heads) if tp_fits(spec, n)]
        nearest = f"nearest: {_around('tp', tp, legal)}"
        if spec.heads % tp:
            yield Problem(
                "layout.tp.heads",
                f"layout.tp={tp} does not divide the {spec.heads} attention heads of {spec.name}; {nearest}",
            )
        elif spec.kv_heads % tp and tp % spec.kv_heads:
            yield Problem(
                "layout.tp.kv_heads",
                f"layout.tp={tp} neither divides the {spec.kv_heads} kv heads of {spec.name} nor is a multiple; "
                f"{nearest}",
            )
        for width in spec.tensor_widths:
            if width % tp:
                yield Problem(
                    "layout.tp.ffn",
                    f"layout.tp={tp} does not divide the feed-forward width {width} of {spec.name}; {nearest}",
                )
        if self.sp and tp == 1:
            yield Problem("layout.sp.tp", "layout.sp shards the sequence over tp, and tp=1; nearest: sp=false, or tp=2")

    def _context(self, spec: ModelSpec, seq: int | None) -> Iterator[Problem]:
        if self.cp > 1 and self.cp_kind == "ulysses":
            ranks = self.cp * self.tp
            if spec.heads % ranks:
                legal = [n for n in divisors(spec.heads) if spec.heads % (n * self.tp) == 0]
                yield Problem(
                    "layout.cp.heads",
                    f"cp_kind=ulysses deals the heads out over cp x tp = {ranks} ranks, which does not divide the "
                    f"{spec.heads} heads of {spec.name}; nearest: "
                    + (f"{_around('cp', self.cp, legal)}, or cp_kind=ring" if legal else "cp_kind=ring"),
                )
        if seq is not None:
            zigzag = self.cp > 1 and self.cp_kind != "ulysses"  # each cp rank holds one early and one late piece
            pieces = self.cp * (2 if zigzag else 1) * (self.tp if self.sp else 1)  # sp cuts a cp rank's share over tp
            if seq % pieces:
                near = [n for n in (seq // pieces * pieces, -(-seq // pieces) * pieces) if n]
                yield Problem(
                    "layout.seq.pieces",
                    f"a sequence of {seq} tokens does not divide into the {pieces} equal pieces that {self} needs; "
                    f"nearest: {either([f'seq={n}' for n in near])}",
                )

    def _pipeline(self, spec: ModelSpec) -> Iterator[Problem]:
        try:
            record = self.record
        except UserError as error:
            yield from (Problem("layout.schedule.unknown", text) for text in error.problems)
            return
        if record.schedule is not None and (wrong := [*self._file(record.schedule)]):
            yield from wrong
            return
        if not record.any_chunks and self.chunks != record.chunks:
            others = either([one.name for one in RECORDS if one.any_chunks])
            yield Problem(
                "layout.chunks.schedule",
                f"layout.chunks={self.chunks}, and schedule={self.schedule} has {record.chunks} per rank; "
                f"nearest: chunks={record.chunks}, or schedule={others}",
            )
        if too_large := size_problem(self.stages, self.microbatches):
            yield Problem("layout.schedule.size", too_large)
            return
        least = record.least * self.pp
        if self.microbatches < least:
            yield Problem(
                "layout.microbatches.schedule",
                f"layout.microbatches={self.microbatches}, and schedule={self.schedule} and pp={self.pp} need at least "
                f"{least}; nearest: microbatches={least}, or schedule={'zb-v' if self.chunks == 2 else '1f1b'}",
            )
        if self.split:
            split = f"layout.split={','.join(map(str, self.split))}"
            if min(self.split) < 0:
                yield Problem("layout.split.negative", f"{split} has a negative number of layers; the least is 0")
            if len(self.split) != self.stages:
                made = f"pp={self.pp} x chunks={self.chunks} makes {self.stages}"
                yield Problem("layout.split.stages", f"{split} names {len(self.split)} stages, and {made}")
            if sum(self.split) != spec.layers:
                yield Problem(
                    "layout.split.layers",
                    f"{split} adds up to {sum(self.split)} layers, and {spec.name} has {spec.layers}",
                )
        elif self.stages > spec.layers + 2:
            # The embedding and the head may each be a stage without layers, as in Llama 3's 405B run.
            most = (spec.layers + 2) // self.chunks
            nearest = f"pp={most}" if most else f"chunks={(spec.layers + 2) // self.pp}"
            yield Problem(
                "layout.pp.layers",
                f"pp={self.pp} x chunks={self.chunks} makes {self.stages} stages, and {spec.name} has {spec.layers} "
                f"layers, an embedding and a head to fill them; nearest: {nearest}",
            )
        both_ends = self.chunks > 1 and self.last_stage == 0
        if spec.tied and both_ends and (self.fully_shards(spec) or (self.zero == 2 and self.size("data") > 1)):
            why = "gathers the weights of each stage by itself"
            if self.zero == 2:
                why = "keeps no whole gradient between two stages' passes"
            yield Problem(
                "layout.zero.tied",
                f"zero={self.zero} {why}, and schedule={self.schedule} has the tied embedding of {spec.name} in two "
                f"stages of one rank; nearest: zero=1, or schedule=zb-h1",
            )

    def _file(self, schedule: Schedule) -> Iterator[Problem]:
        """Why a schedule of a file cannot train in this layout: other numbers, or what the trainer does not do."""
        name, placement = self.schedule, schedule.placement
        for field, asked, held in (("pp", self.pp, schedule.p), ("microbatches", self.microbatches, schedule.m)):
            if asked != held:
                yield Problem(
                    "layout.schedule.degree",
                    f"layout.{field}={asked}, and {name} is a schedule for {field}={held}; nearest: {field}={held}",
                )
        if len(set(map(len, placement.of_rank))) > 1:
            counts = ", ".join(f"{len(stages)} on rank {rank}" for rank, stages in enumerate(placement.of_rank))
            yield Problem(
                "layout.schedule.stages",
                f"{name} has {counts}: training needs the same number of stages on every pipeline rank",
            )
        if placement.owner[0] != 0:
            yield Problem(
                "layout.schedule.first",
                f"{name} has stage 0 on rank {placement.owner[0]}: training reads its input on pipeline rank 0",
            )
        if schedule.count(*COLLECTIVES):
            yield Problem(
                "layout.schedule.collectives",
                f"{name} places GATHER, REDUCE or STEP: training does these by layout.zero; leave them out of the file",
            )

    def _data(self, batch: int | None) -> Iterator[Problem]:
        if self.zero not in (0, 1, 2, 3):
            yield Problem(
                "layout.zero.stage",
                f"layout.zero={self.zero} is not a ZeRO stage; nearest: zero={min(max(self.zero, 0), 3)}",
            )
        if self.replicate > 1 and self.zero != 3:
            yield Problem(
                "layout.replicate.zero",
                f"layout.replicate={self.replicate} copies the shards of zero=3, and zero={self.zero}; nearest: "
                "replicate=1, or zero=3",
            )
        if self.dp % self.replicate:
            yield Problem(
                "layout.replicate.dp",
                f"layout.replicate={self.replicate} does not divide dp={self.dp}; nearest: "
                f"{_around('replicate', self.replicate, divisors(self.dp))}",
            )
        share = self.size("batch") * self.microbatches
        if batch is not None and batch % share:
            near = [n for n in (batch // share * share, -(-batch // share) * share) if n]
            whole, rest = divmod(batch, self.size("batch"))
            fewer = [n for n in divisors(whole) if n < self.microbatches] if whole and not rest else []
            yield Problem(
                "layout.batch.share",
                f"a global batch of {batch} sequences does not divide over dp={self.dp} x "
                f"microbatches={self.microbatches}; nearest: batch={either(near)}"
                + (f", or layout.microbatches={max(fewer)}" if fewer else ""),
            )

    def _experts(self, spec: ModelSpec) -> Iterator[Problem]:
        ep, ranks = self.ep, self.size("stage") // self.replicate
        if spec.experts is None:
            if ep > 1:
                yield Problem(
                    "layout.ep.dense", f"layout.ep={ep} deals out experts, and {spec.name} has none; nearest: ep=1"
                )
            elif self.dispatch != "alltoall":
                yield Problem(
                    "layout.dispatch.dense",
                    f"layout.dispatch={self.dispatch} sends tokens to experts, and {spec.name} has none; leave it out",
                )
            return
        if ep == 1 and self.dispatch != "alltoall":
            yield Problem(
                "layout.dispatch.ep",
                f"layout.dispatch={self.dispatch} is how tokens reach other ranks of ep, and ep=1; leave it out",
            )
        if self.dp % self.replicate:  # said already
            return
        count, of = spec.experts.count, "dp/replicate x cp x tp" if self.replicate > 1 else "dp x cp x tp"
        legal = [n for n in divisors(ranks) if count % n == 0]
        if ranks % ep:
            more = "" if ranks > 1 or count % ep else f", or dp={ep} or tp={ep}: ep adds no ranks, it shares theirs"
            yield Problem(
                "layout.ep.ranks",
                f"layout.ep={ep} does not divide the {of} = {ranks} ranks that have the same layers; nearest: "
                f"{_around('ep', ep, legal)}{more}",
            )
        if count % ep:
            yield Problem(
                "layout.ep.experts",
                f"layout.ep={ep} does not divide the {count} experts of {spec.name}: each rank has as many; nearest: "
                f"{_around('ep', ep, legal)}",
            )

    def fully_shards(self, spec: ModelSpec) -> bool:
        """Whether parameters are sharded (ZeRO 3)."""
        return self.zero == 3 and self.has_copies(spec)

    def has_copies(self, spec: ModelSpec) -> bool:
        """Whether ranks hold the same parameters, which ZeRO can shard: dense ones, or those of experts."""
        return self.size("data") > 1 or (spec.experts is not None and self.size("edp") > 1)

    def _world(self, world: int | None, ranks_by: str) -> Iterator[Problem]:
        if world is not None and world != self.world:
            inner = self.world // self.dp
            fewer, shared = world // inner, world // self.pp  # ranks that have the same layers
            dp = f"dp={fewer}" + (f",ep={math.gcd(self.ep, shared)}" if shared % self.ep else "")
            fit = (f"{dp}, or " if world % inner == 0 else "") + f"{ranks_by} {self.world}"
            yield Problem(
                "layout.ranks.given",
                f"layout {self} needs {self.world} rank{'s' * (self.world > 1)} ({' x '.join(self.degrees)}), and "
                f"there {'is' if world == 1 else 'are'} {world}; nearest: {fit}",
            )


def tp_fits(spec: ModelSpec, tp: int) -> bool:
    """Heads and feed-forward columns are dealt out evenly; kv heads evenly, or each to several ranks."""
    kv_fits = spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0
    return spec.heads % tp == 0 and kv_fits and not any(width % tp for width in spec.tensor_widths)


def _around(field: str, value: int, legal: list[int]) -> str:
    """The legal values on either side: 'tp=2 or tp=4'."""
    below, above = [n for n in legal if n < value], [n for n in legal if n > value]
    return either([f"{field}={n}" for n in (*below[-1:], *above[:1])] or [f"{field}=1"])
