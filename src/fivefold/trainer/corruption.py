"""Silent corruption: bits that flip in memory, and are found because somebody else has them, or had.

    watch.digests = N    every N steps, and before every checkpoint, ranks that hold the same compare digests
    watch.shards = N     every N steps, what one rank alone holds is digested after an update and before the next one
    watch.replay = N     every N steps, each rank computes a microbatch of another, and the gradients are compared

One small all-gather tells every rank what all have, so all come to the same end: nothing is wrong, or the run ends with
the ranks and tensors that differ, before the update is made and before anything is saved.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fivefold.data.batch import DpShare
from fivefold.launch import faults
from fivefold.launch.waits import timed_wait
from fivefold.parallel.collectives import all_gather, wait, waiting
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.zero import ZeroBuckets
from fivefold.support.errors import TrainingError
from fivefold.trainer.engine import Engine
from fivefold.trainer.replica_check import (
    Disagreement,
    ReplayDigests,
    ReplicaAxes,
    all_replica_axes,
    corruption_message,
    corruption_verdict,
    disagreement_message,
    find_disagreement,
    listed,
    mismatched_pairs,
    rank_label,
    replay_partners,
    replica_axes,
    replica_groups,
)
from fivefold.trainer.spikes import Account

# ---- digests --------------------------------------------------------------------------------------------------------
# Digests of tensors: a number that changes with the bits, computed where they lie.
#
# A tensor is read as words w of 32 bits (16 of 2-byte numbers), and its digest is the sum of (2i + 1) * w[i] modulo
# 2^64. The sum has no order, so that all devices agree on it. Every single flipped bit changes it: 2^b * (2i + 1) is
# not 0 modulo 2^64. So does every pair of flipped bits in a tensor of up to 2^30 words: 2^a * (2i + 1) = 2^b * (2j +
# 1) asks for a = b and i = j. Of three flips or more, those are missed whose terms happen to cancel.


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of a number
_AT_A_TIME = {"cpu": 1 << 20, "cuda": 1 << 22}  # words; each takes 8 bytes more while it is multiplied


@cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Of a tensor's bits, in their order; one int64 on its device."""
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
    size = _AT_A_TIME.get(tensor.device.type, 1 << 20)
    odd, total = _odd_numbers(size, tensor.device), torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, words.numel(), size):
        part = words[first : first + size]
        total += (part * odd[: part.numel()]).sum()
        if first:
            total += part.sum() * (2 * first)
    return total


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One of each, in a row."""
    return torch.stack(list(map(digest, tensors))) if tensors else torch.zeros(0, dtype=torch.int64, device=device)


# ---- replay ---------------------------------------------------------------------------------------------------------
# A microbatch computed twice: digests of its gradients, of the step itself and of a replay.


class Replay:
    """Listens to the gradients of first microbatches, on this rank."""

    def __init__(self, engine: Engine, account: Account):
        self.engine, self.account = engine, account
        self.seen: dict[str, Tensor] | None = None  # digests by name, while it listens
        # The table that digests share is made now, on the stream of the run: FSDP2 hands over gradients on a stream of
        # its own, and a table made there could be read on this one before it is written.
        digest(torch.zeros(1, device=engine.mesh.device))
        engine.weights.set_grad_hook(self._hear)

    def _hear(self, name: str, gradient: Tensor) -> None:
        if self.seen is not None and name not in self.seen:
            start = time.perf_counter()
            with _disable_current_modes():
                self.seen[name] = digest(gradient)
            if not self.engine.weights.replaying:  # whose time is counted as a whole
                self.account.add("replay", time.perf_counter() - start)

    def listen(self) -> None:
        self.seen = {}

    def heard(self) -> Tensor:
        """One number for all gradients since; nothing is listened to any more."""
        seen, self.seen = self.seen or {}, None
        total = torch.zeros((), dtype=torch.int64, device=self.engine.mesh.device)
        for name, digest_sum in seen.items():
            total += digest_sum * (2 * crc32(name.encode()) + 1)
        return total

    def replay_microbatch(self, share: DpShare) -> Tensor:
        """The same number of a replay."""
        self.listen()
        with _disable_current_modes():
            self.engine.replay_microbatch(share)
            return self.heard()


# ---- flips ----------------------------------------------------------------------------------------------------------
# Flipped bits on purpose: FIVEFOLD_FAULT=flip@rank=1,step=4,at=weight, so that it is seen who finds them.


_BIT = 1 << 2  # of the last byte but one: in the mantissa of every kind of number, so that no loss jumps


@torch.no_grad()
def flip(tensor: Tensor) -> None:
    """One bit of its first number."""
    tensor.view(-1)[:1].view(torch.uint8)[-2:-1].bitwise_xor_(_BIT)


def flip_after_update(engine: Engine, step: int) -> None:
    """In a weight that the model computes with, or in this rank's masters and the optimizer's states."""
    if faults.strike("weight", step=step) == "flip":
        engine.weights.wait_params()  # those that come over the flipped ones would mend them
        flip(_largest([parameter for model in engine.stages.values() for parameter in model.parameters()]))
    if faults.strike("shard", step=step) == "flip":
        flip(_largest([state for states in engine.optimizer.states.values() for state in states.values()]))


def _largest(tensors: list[Any]) -> Tensor:
    local = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]
    return max(local, key=lambda tensor: tensor.numel())


class _Flipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        flip(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def flip_before_forward(engine: Engine, step: int) -> None:
    """In what the first block of this rank is given, in the first microbatch of a step; of a stage without blocks, in
    what that is given."""
    if faults.strike("compute", step=step) != "flip":
        return
    stages = [*engine.stages.values()]
    block = next((block for model in stages for block in model.layers.values()), stages[-1])

    def once(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        handle.remove()
        return (_Flipped.apply(given[0]), *given[1:])

    handle = block.register_forward_pre_hook(once)


# ---- state ----------------------------------------------------------------------------------------------------------
# What a rank holds between steps, tensor by tensor, and over which axes others hold the same bits of it.


class KeptDigests(NamedTuple):
    name: str
    tensor: Tensor
    axes: ReplicaAxes  # empty: nobody else has it


def state_of(engine: Engine) -> list[KeptDigests]:
    """What a checkpoint would have: masters, the optimizer's states, and buffers."""
    return [*_learned(engine), *_buffers(engine)]


def _learned(engine: Engine) -> Iterator[KeptDigests]:
    for name, master in engine.weights.masters.items():
        axes = _axes(engine, name)
        for kind, tensor in {"": master.detach(), **engine.optimizer.states[name]}.items():
            if tensor.numel():
                yield KeptDigests(f"{kind} of {name}" if kind else name, tensor, axes)


def _buffers(engine: Engine) -> Iterator[KeptDigests]:
    axes = replica_axes(["stage"], engine.job.layout) if engine.buffers else ()
    return (KeptDigests(name, buffer, axes) for name, buffer in engine.buffers.items())


def computed_with(engine: Engine) -> list[KeptDigests]:
    """The model's own weights, where they are not the masters themselves. ZeRO 3 has none between steps."""
    weights = engine.weights
    if not isinstance(weights, ZeroBuckets):
        return []
    return [
        KeptDigests(f"{name} as the model has it", weight, _axes(engine, name, full=True))
        for name, weight in weights.model_weights.items()
        if weight.numel() and not _same(weight, weights.masters[name])
    ]


def _same(weight: Tensor, master: Tensor) -> bool:
    same = weight.untyped_storage()._cdata == master.untyped_storage()._cdata
    return same and weight.numel() == master.numel()


def _axes(engine: Engine, name: str, *, full: bool = False) -> ReplicaAxes:
    axes = engine.weights.replicate_axes(name, of_weight=full)
    if not engine.job.train.deterministic and not engine.weights.local_params[name].tp.partial:
        axes = [axis for axis in axes if axis != "tp"]  # each rank has a gradient of its own, and its own rounding
    return replica_axes(axes, engine.job.layout)


# ---- corruption -----------------------------------------------------------------------------------------------------


Read = Callable[[int], DpShare]

_ADVICE = "a rank that is named again has bad memory or a bad device"


class Corrupt(TrainingError):
    """State or compute that is known to be wrong. Checkpoints of step `suspect` and after may have the damage, too."""

    def __init__(self, sentence: str, suspect: int):
        super().__init__(sentence)
        self.suspect = suspect


class DigestTable(NamedTuple):
    """Some tensors and their digests."""

    kept: list[KeptDigests]
    digests: Tensor  # [n] int64

    def of(self, axes: ReplicaAxes) -> dict[str, int]:
        """By name, those replicated over the axes."""
        pairs = zip(self.kept, self.digests.tolist(), strict=True)
        return {entry.name: value for entry, value in pairs if entry.axes == axes}


class Corruption:
    """Of one rank. All ranks call it alike."""

    def __init__(self, engine: Engine, mesh: Mesh, account: Account):
        self.engine, self.mesh, self.account = engine, mesh, account
        self.watch = engine.job.watch
        self.replica_axes = all_replica_axes(engine.job.layout, engine.job.model.experts is not None)
        self.groups: dict[tuple[ReplicaAxes, tuple[int, ...]], list[tuple[int, ...]]] = {}
        self.kind = torch.tensor([crc32(_rounds_as(mesh.device).encode())], device=mesh.device)
        self.replay = Replay(engine, account) if self.watch.replay else None
        self.unread: Callable[[], bool] = lambda: False  # whether this rank could not read its data
        self.replayed: Tensor | None = None  # of the neighbour's microbatch in this step
        self.computed = -1  # the last step of which gradients were compared, or that was loaded
        self.partner_of = replay_partners(engine.job.layout) if self.watch.replay else {}
        self.taken: tuple[int, DigestTable] | None = None  # the optimizer's updates by then, and what nobody else has
        self.good = -1  # the last step after which all copies were the same, or that was loaded

    def _due(self, every: int, step: int) -> bool:
        return bool(every) and step % every == 0

    # ---- when ----------------------------------------------------------------------------------------------------

    def before_forward(self, step: int, read: Read) -> None:
        """`read` gives the part of the step's batch that the dp rank of a number has."""
        if self.replay is not None and self._due(self.watch.replay, step):
            with self.account.of("replay"):
                self.replayed = self.replay.replay_microbatch(read(self._dp(self.partner_of[self.mesh.world.rank])))
                self.replay.listen()
        flip_before_forward(self.engine, step)

    def _dp(self, rank: int) -> int:
        return self.mesh.layout.position("batch", rank)

    def before_update(self, step: int, read: Read) -> None:
        """After the gradients of a step: its weights have done their work, and nothing has changed yet."""
        # At first, what was loaded; and steps may have been undone.
        self.good, self.computed = (
            step - 1 if last < 0 else min(last, step - 1) for last in (self.good, self.computed)
        )
        if self.replay is not None and self.replayed is not None:
            with self.account.of("replay"):
                self._check_compute(self.replay, self.replayed, step, read)
            self.replayed, self.computed = None, step
        if self._due(self.watch.shards, step):
            with self.account.of("shards"):
                self._check_shards(step)
        if self._due(self.watch.digests, step) and self.replica_axes:
            with self.account.of("digests"), _disable_current_modes():
                kept = [*state_of(self.engine), *computed_with(self.engine)]
                self._compare(kept, step, "its update was not made")
                self.good = step - 1

    def after_update(self, step: int) -> None:
        if self._due(self.watch.shards, step + 1):
            with self.account.of("shards"), _disable_current_modes():
                self.taken = self.engine.optimizer.updates, self._table(self._lonely())
        flip_after_update(self.engine, step)

    def before_save(self, step: int) -> None:
        """What a checkpoint will have."""
        if self.watch.digests and self.replica_axes:
            with self.account.of("digests"), _disable_current_modes():
                self._compare(state_of(self.engine), step, "it was not saved")
                self.good = step

    # ---- what several ranks hold ---------------------------------------------------------------------------------

    def _table(self, kept: list[KeptDigests]) -> DigestTable:
        return DigestTable(kept, digests([entry.tensor for entry in kept], self.mesh.device))

    def _compare(self, kept: list[KeptDigests], step: int, then: str) -> None:
        """Raise `Corrupt` on all ranks, if ranks that should hold the same do not."""
        table = self._table([entry for entry in kept if entry.axes])
        by_rank = self._exchanged(torch.cat((self.kind, self._by_axes(table))))
        disagreeing = [
            (axes, group)
            for number, axes in enumerate(self.replica_axes, start=1)
            for group in self._groups(axes, tuple(kind for kind, *_ in by_rank))
            if find_disagreement({rank: by_rank[rank][number] for rank in group})
        ]
        if not disagreeing:
            return
        rank = self.mesh.world.rank
        own = {"+".join(axes): table.of(axes) for axes, group in disagreeing if rank in group}
        tables = self._told(own, dict[str, dict[str, int]])
        said = "; ".join(
            self._sentence({rank: tables[rank]["+".join(axes)] for rank in group}) for axes, group in disagreeing
        )
        raise Corrupt(
            f"step {step}: {said}; {then}, and after step {self.good} all copies were the same; the same command "
            f"resumes from the last checkpoint, whose copies were compared before it was saved; {_ADVICE}",
            suspect=self.good + 1,
        )

    def _by_axes(self, table: DigestTable) -> Tensor:
        """For each combination of axes one number, which changes with the digest of any of its tensors."""
        weights = torch.zeros(len(self.replica_axes), len(table.kept), dtype=torch.int64)
        for column, entry in enumerate(table.kept):
            weights[self.replica_axes.index(entry.axes), column] = 2 * crc32(entry.name.encode()) + 1
        return (weights.to(self.mesh.device) * table.digests).sum(1)

    def _groups(self, axes: ReplicaAxes, kinds: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The ranks that hold the same and round alike; `kinds` are the devices of all."""
        if (axes, kinds) not in self.groups:
            by_kind: dict[tuple[int, int], list[int]] = {}
            for number, group in enumerate(replica_groups(self.mesh.layout, axes)):
                for rank in group:
                    by_kind.setdefault((number, kinds[rank]), []).append(rank)
            self.groups[axes, kinds] = [tuple(group) for group in by_kind.values() if len(group) > 1]
        return self.groups[axes, kinds]

    def _sentence(self, tables: dict[int, dict[str, int]]) -> str:
        """Of the ranks of a group, by what each has."""
        names_by_disagreement: dict[Disagreement, list[str]] = {}
        for name in next(iter(tables.values())):
            disagreement = find_disagreement({rank: table.get(name) for rank, table in tables.items()})
            if disagreement is not None:
                names_by_disagreement.setdefault(disagreement, []).append(name)
        return "; ".join(
            disagreement_message(self.mesh.layout, disagreement, names)
            for disagreement, names in names_by_disagreement.items()
        )

    # ---- what one rank alone holds -------------------------------------------------------------------------------

    def _lonely(self) -> list[KeptDigests]:
        compute_copies = self.engine.weights.compute_copies()
        copies = [entry for entry in computed_with(self.engine) if entry.name.partition(" ")[0] in compute_copies]
        return [entry for entry in (*state_of(self.engine), *copies) if not entry.axes]

    def _check_shards(self, step: int) -> None:
        """Raise `Corrupt` on all ranks, if what one of them holds is not what its last update has left."""
        bad: list[str] = []
        if self.taken is not None and self.taken[0] == self.engine.optimizer.updates:
            with _disable_current_modes():
                now = self._table(self.taken[1].kept)
                if now.kept:
                    changed = (now.digests != self.taken[1].digests).tolist()
                    bad = [entry.name for entry, differs in zip(now.kept, changed, strict=True) if differs]
        self.taken = None
        with _disable_current_modes():
            if not any(count for (count,) in self._exchanged(torch.tensor([len(bad)], device=self.mesh.device))):
                return
        said = [
            f"{rank_label(self.mesh.layout, rank)}: {listed(names)}"
            for rank, names in enumerate(self._told(bad, list[str]))
            if names
        ]
        raise Corrupt(
            f"step {step}: what nobody else holds has changed between the updates of steps {step - 1} and {step}, on "
            f"{'; '.join(said)}; its update was not made; the same command resumes from the last checkpoint before "
            f"step {step - 1}; {_ADVICE}",
            suspect=step - 1,
        )

    # ---- what ranks compute --------------------------------------------------------------------------------------

    def _check_compute(self, replay: Replay, replayed: Tensor, step: int, read: Read) -> None:
        """Raise `Corrupt` on all ranks, if two of them have made other gradients of the same microbatch."""
        with _disable_current_modes():
            rank, size = self.mesh.world.rank, self.mesh.world.size
            blind = torch.full_like(replayed, self.unread())
            by_rank = self._exchanged(torch.stack((self.kind[0], replay.heard(), replayed, blind)))
            if any(row[3] for row in by_rank):  # the step will end for the data's sake
                return
            alike = {peer: other for peer, other in self.partner_of.items() if by_rank[peer][0] == by_rank[other][0]}
            first = ReplayDigests(*({peer: by_rank[peer][at] for peer in range(size)} for at in (1, 2)))
            if not mismatched_pairs(alike, first):
                return
            again = [replay.replay_microbatch(read(self._dp(peer))) for peer in (rank, self.partner_of[rank])]
            more = self._exchanged(torch.stack(again))
        again_by_rank = ({peer: more[peer][at] for peer in range(size)} for at in (0, 1))
        culprits = corruption_verdict(alike, ReplayDigests(first.own, first.partner, *again_by_rank))
        raise Corrupt(
            f"step {step}: {corruption_message(self.mesh.layout, culprits)}; its update was not made; gradients of "
            f"steps {self.computed + 1} to {step} may be wrong, and those of step {self.computed} were not: the same "
            f"command resumes from the last checkpoint up to there; {_ADVICE}",
            suspect=self.computed + 1,
        )

    # ---- between ranks -------------------------------------------------------------------------------------------

    def _exchanged(self, numbers: Tensor) -> list[list[int]]:
        """The numbers of every rank, on all."""
        world = self.mesh.world
        with waiting("the exchange of digests", self.mesh, world):
            return timed_wait(wait(all_gather(numbers, world), world).view(world.size, -1).tolist)

    def _told(self, value: object, kind: object) -> list:  # type: ignore[type-arg]
        """What every rank has to say, when something is wrong."""
        with closing(Control(self.mesh, self.engine.job.train.timeout)) as control:
            return control.all_gather_values(value, kind)


def _rounds_as(device: torch.device) -> str:
    """Devices of one name compute the same bits."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
