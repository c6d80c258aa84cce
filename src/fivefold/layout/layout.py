"""Layout: how one training step is spread over ranks.

    layout = Layout.parse("dp=2,tp=2,pp=2,zero=1,schedule=1f1b")
    layout.world                                  # 8
    layout.problems(preset("tiny"), world=8)      # [] or every reason why not, each with the nearest legal value

A layout says nothing about the machine or the model; `problems` checks it against both.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec

from fivefold.layout.axes import Axes, Degree
from fivefold.layout.rules import Given, has_copies
from fivefold.layout.rules import problems as rule_problems
from fivefold.schedules.info import ScheduleInfo
from fivefold.schedules.registry import MAX_SIZE, record_of
from fivefold.schedules.schedule import Placement
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import Problem, UserError
from fivefold.support.parsing import read, unknown_key
from fivefold.support.ranges import MAX_RANKS, outside, within

# ---- commas ---------------------------------------------------------------------------------------------------------
# A layout that was written with spaces for commas, and how it is written: dp=8 zero=3 is dp=8,zero=3.


SPACES_HINT = "a layout has commas and no spaces"
# Not every space: a schedule's file may have one, and one may stand beside a comma or an equals sign.
_FOR_COMMA = re.compile(r"(?<=[^\s,=])\s+(?=[a-z_]+\s*=|(?:sp|\d+)(?:[\s,]|$))")


def with_commas(text: str) -> str:
    """The same text where nothing was wrong with it."""
    joined, wrong = _FOR_COMMA.subn(",", text.strip())
    return re.sub(r"\s*([,=])\s*", r"\1", joined) if wrong else joined


def schedule_named(value: str | Mapping[str, Any]) -> str:
    """The schedule that a layout's text or table names; empty where it names none."""
    if not isinstance(value, str):
        return str(value.get("schedule", ""))
    parts = ([piece.strip() for piece in part.partition("=")] for part in value.split(","))
    return "".join(word for key, _, word in parts if key == "schedule")


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
    ep: Degree = 1  # ranks that experts are sharded over, of the dp x cp x tp that have the same layers
    dispatch: Dispatch = "alltoall"  # how tokens reach their experts
    schedule: str = "1f1b"
    chunks: Annotated[int, within(1, 1000)] = 0  # stages per pipeline rank; 0: the schedule's own
    microbatches: Annotated[int, within(1, MAX_SIZE)] = 1  # per dp rank and step
    recompute: Recompute = "none"
    split: tuple[int, ...] = ()  # layers of each stage; empty: balanced

    def __post_init__(self) -> None:
        if self.chunks == 0:
            own = 1 if self.schedule_problems else self.record.chunks
            msgspec.structs.force_setattr(self, "chunks", own)

    @property
    def record(self) -> ScheduleInfo:
        """The facts of its schedule; UserError if no schedule has that name."""
        return record_of(self.schedule)

    @property
    def schedule_problems(self) -> list[str]:
        """Why there is no such schedule; empty if there is."""
        try:
            record_of(self.schedule)
        except UserError as error:
            return error.problems
        return []

    @property
    def placement(self) -> Placement:
        """Which stages live on which pipeline rank."""
        return self.record.placement(self.pp, self.chunks)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from input gradients."""
        return not self.schedule_problems and self.record.splits

    @property
    def breaks_graphs(self) -> bool:
        """Whether a compiled block has graph breaks: at deferred weight gradients, and at the ring's messages."""
        return (self.pp > 1 and self.splits_backward) or (self.cp > 1 and self.cp_kind == "ring")

    @property
    def compiles_blocks(self) -> bool:
        """Whether blocks can be compiled: selective recompute goes by operator, so needs one whole graph, or none."""
        return not (self.breaks_graphs and self.recompute == "selective")

    @property
    def sp_degree(self) -> int:
        """Ranks that divide the tokens of norms and of the residual stream among them: tp under sp."""
        return self.tp if self.sp else 1

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
        if (joined := with_commas(text)) != text.strip():
            raise UserError(f"{SPACES_HINT}; write {joined}", "layout.spaces")
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
            raise UserError(problems, "layout.form")
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
        values = {field: getattr(self, field) for field in self.__struct_fields__}
        return {
            field: value
            for field, value in values.items()
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
        wrong = outside(self, "layout")
        out_of_range = {field: Problem(f"layout.{field}.range", text) for field, text in wrong.items()}
        # The other rules divide by these: they are checked with values in range.
        in_range = msgspec.structs.replace(self, **dict.fromkeys(out_of_range, 1))
        if in_range.world > MAX_RANKS:
            many = f"layout {in_range} has {in_range.world} ranks, which is more than {MAX_RANKS}"
            return [*out_of_range.values(), Problem("layout.ranks.most", many)]
        given = Given(spec, None if out_of_range else world, seq, batch, ranks_by)
        return [*out_of_range.values(), *rule_problems(in_range, given)]

    def fully_shards(self, spec: ModelSpec) -> bool:
        """Whether parameters are sharded (ZeRO 3)."""
        return self.zero == 3 and self.has_copies(spec)

    def has_copies(self, spec: ModelSpec) -> bool:
        """Whether ranks hold the same parameters, dense or of experts, which ZeRO can shard."""
        return bool(has_copies(self, spec))
