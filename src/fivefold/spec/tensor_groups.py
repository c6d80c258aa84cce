"""What tp makes of a branch of a block: which of its matmuls are one column-parallel step, and which end in a sum.

    groups = tensor_groups(block(spec).of("attention"))
    groups.columns, groups.rows        # gathered before and summed after them, as `cost/block_collectives.py` counts

The ops of a module (`model/ops.py`) know four kinds of linear. `column_parallel` reads a tensor that every rank has
whole, and writes this rank's columns; `row_parallel` reads these, and sums. `replicated_linear` computes the same on
every rank, of its own tokens under sp; what it writes are latents, which `gather_latents` brings together and
`latent_up_projection` reads. What is described otherwise no module can compute under tp: `group_problems` says so.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fivefold.spec.operations import Matmul

Group = tuple["Matmul", ...]  # matmuls that read the same tensor in one step
COLUMNS = ("colwise", "colwise_kv")


class TensorGroups(NamedTuple):
    """The matmuls of a branch, but for experts and their router, which tp does not divide."""

    columns: tuple[Group, ...] = ()  # column-parallel, of what is whole on every rank
    replicated: Group = ()
    ups: tuple[Group, ...] = ()  # column-parallel, of latents
    rows: Group = ()  # row-parallel

    @property
    def latents(self) -> int:
        """Features of the latents that are gathered: all that the replicated linears before `ups` write."""
        return sum(matmul.outputs for matmul in self.replicated) if self.ups else 0

    @property
    def unread(self) -> int:
        """Those of them that no linear reads, such as a key of positions."""
        return self.latents - sum(group[0].inputs for group in self.ups)


def tensor_groups(matmuls: Iterable["Matmul"]) -> TensorGroups:
    dense = [matmul for matmul in matmuls if matmul.dense]
    columns: list[Group] = []
    ups: list[Group] = []
    wide = (matmul for matmul in dense if matmul.tp in COLUMNS)
    for _, group in groupby(wide, key=lambda matmul: matmul.reads):
        step = tuple(group)
        earlier = dense[: dense.index(step[0])]
        latent = not step[0].reads_residual and any(matmul.tp == "replicated" for matmul in earlier)
        (ups if latent else columns).append(step)
    replicated, rows = (tuple(matmul for matmul in dense if matmul.tp == rule) for rule in ("replicated", "rowwise"))
    return TensorGroups(tuple(columns), replicated, tuple(ups), rows)


def group_problems(matmuls: Iterable["Matmul"]) -> Iterator[str]:
    """What tp could not compute of a branch, in a sentence each."""
    divided = whole = False  # whether there are a rank's columns to read, and a tensor beside the stream that is whole
    open_ = False  # whether no sum has followed these columns
    for matmul in matmuls:
        name, reads = f"{matmul.branch}.{matmul.name}", f"reads {matmul.reads}"
        if not matmul.dense or matmul.tp == "experts":
            continue  # of a mixture of experts
        if matmul.tp == "rowwise":
            if matmul.reads_residual or not divided:
                yield f"{name} is rowwise and {reads}, of which every rank has all; make it colwise or replicated"
            open_, whole = False, True
            continue
        if matmul.tp not in (*COLUMNS, "replicated"):
            yield f"{name} is {matmul.tp}, and a linear is colwise, rowwise or replicated"
        elif not (matmul.reads_residual or whole):
            norm = f"{matmul.branch}_norm"
            yield (
                f"{name} is {matmul.tp} and {reads}, of which a rank has its columns; make it rowwise, or let it "
                f"read {norm} or what a replicated linear before it writes"
            )
        if matmul.tp in COLUMNS:
            divided = open_ = True
        whole = whole or matmul.tp == "replicated"
    if open_:
        yield "its last linear is colwise, and the stream needs the sum of a rowwise one"
