"""Silent data corruption: detects bits that flip in memory, and ranks that compute wrongly.

    watch.digests = N    every N steps, and before every checkpoint, ranks compare digests of replicated tensors
    watch.shards = N     every N steps, unreplicated tensors are digested after an update and again before the next
    watch.replay = N     every N steps, each rank computes a microbatch of another, and the gradients are compared

One small all-gather gives every rank all digests, so all come to the same verdict: nothing is wrong, or the run ends
with the ranks and tensors that differ, before the update is made and before anything is saved.
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
from fivefold.trainer.records import AS_THE_MODEL_HAS_IT
from fivefold.trainer.replica_verdict import (
    Disagreement,
    ReplayDigests,
    ReplicaAxes,
    all_replica_axes,
    corruption_message,
    corruption_verdict,
    disagreement_message,
    find_disagreement,
    mismatched_pairs,
    names_text,
    rank_label,
    replay_partners,
    replica_axes,
    replica_groups,
)
from fivefold.trainer.spikes import Account

# ---- digests --------------------------------------------------------------------------------------------------------
# The digest of a tensor: a number that changes with its bits, computed on its device.
#
# A tensor is read as words w of 32 bits (16 of 2-byte numbers), and its digest is the sum of (2i + 1) * w[i] modulo
# 2^64. The sum has no order, so that all devices agree on it. Every single flipped bit changes it: 2^b * (2i + 1) is
# not 0 modulo 2^64. So does every pair of flipped bits in a tensor of up to 2^30 words: 2^a * (2i + 1) = 2^b * (2j +
# 1) only for a = b and i = j. Three flips or more are missed if their terms happen to cancel.


_WORD_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of a number
_CHUNK_WORDS = {"cpu": 1 << 20, "cuda": 1 << 22}  # digested at a time; each takes 8 bytes more for its product


@cache
def _odd_numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, 2 * count, 2, dtype=torch.int64, device=device)


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """The digest of a tensor's bits: one int64 on its device."""
    words = tensor.detach().reshape(-1).view(_WORD_TYPES[tensor.element_size()])
    size = _CHUNK_WORDS.get(tensor.device.type, 1 << 20)
    odd, total = _odd_numbers(size, tensor.device), torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), size):
        chunk = words[start : start + size]
        total += (chunk * odd[: chunk.numel()]).sum()
        if start:  # word i of the chunk is multiplied by 2(start + i) + 1
            total += chunk.sum() * (2 * start)
    return total


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The digests of several tensors: [n] int64."""
    return torch.stack(list(map(digest, tensors))) if tensors else torch.zeros(0, dtype=torch.int64, device=device)


# ---- replay ---------------------------------------------------------------------------------------------------------
# A microbatch is computed twice, in a step and in a replay by another rank; both digest its gradients.


class GradientRecorder:
    """Digests the gradients of the first microbatch that this rank computes after `start`."""

    def __init__(self, engine: Engine, account: Account):
        self.engine, self.account = engine, account
        self.digests: dict[str, Tensor] | None = None  # by parameter; None: not recording
        # The table that digests share is made now, on the stream of the run: FSDP2 hands over gradients on a stream of
        # its own, and a table made there could be read on this one before it is written.
        digest(torch.zeros(1, device=engine.mesh.device))
        engine.weights.set_grad_hook(self._record)

    def _record(self, name: str, gradient: Tensor) -> None:
        if self.digests is not None and name not in self.digests:
            start = time.perf_counter()
            with _disable_current_modes():
                self.digests[name] = digest(gradient)
            if not self.engine.weights.replaying:  # the time of a replay is counted as a whole
                self.account.add("replay", time.perf_counter() - start)

    def start(self) -> None:
        self.digests = {}

    def finish(self) -> Tensor:
        """Stops recording, and returns one digest of all gradients since `start`."""
        recorded, self.digests = self.digests or {}, None
        total = torch.zeros((), dtype=torch.int64, device=self.engine.mesh.device)
        for name, gradient_digest in recorded.items():
            total += gradient_digest * (2 * crc32(name.encode()) + 1)
        return total

    def replay(self, share: DpShare) -> Tensor:
        """The digest of all gradients of a share's first microbatch, which is computed without making a step."""
        self.start()
        with _disable_current_modes():
            self.engine.replay_microbatch(share)
            return self.finish()


# ---- flips ----------------------------------------------------------------------------------------------------------
# Bits flipped on purpose, to test the detection: FIVEFOLD_FAULT=flip@rank=1,step=4,at=weight.


_FLIPPED_BIT = 1 << 2  # of the last byte but one: in the mantissa of every kind of number, so that no loss jumps


@torch.no_grad()
def flip_bit(tensor: Tensor) -> None:
    """Flips one bit of the first number."""
    tensor.view(-1)[:1].view(torch.uint8)[-2:-1].bitwise_xor_(_FLIPPED_BIT)


def flip_after_update(engine: Engine, step: int) -> None:
    """Flips a bit, if FIVEFOLD_FAULT asks for it: of a model weight, or of the optimizer's states on this rank."""
    if faults.strike("weight", step=step) == "flip":
        engine.weights.wait_params()  # a later all-gather would overwrite the flipped weight
        flip_bit(_largest([parameter for model in engine.stages.values() for parameter in model.parameters()]))
    if faults.strike("shard", step=step) == "flip":
        flip_bit(_largest([state for states in engine.optimizer.states.values() for state in states.values()]))


def _largest(tensors: list[Any]) -> Tensor:
    """The largest local tensor; of DTensors the local parts count."""
    local = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in tensors]
    return max(local, key=lambda tensor: tensor.numel())


class _FlipInForward(torch.autograd.Function):
    """A copy with one flipped bit; gradients pass unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        flip_bit(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def flip_before_forward(engine: Engine, step: int) -> None:
    """Flips a bit, if FIVEFOLD_FAULT asks for it, of the input of this rank's first block in a step's first microbatch.

    On a rank without blocks, of the input of its last stage.
    """
    if faults.strike("compute", step=step) != "flip":
        return
    stages = [*engine.stages.values()]
    block = next((block for model in stages for block in model.layers.values()), stages[-1])

    def flip_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        handle.remove()  # the first microbatch alone
        return (_FlipInForward.apply(inputs[0]), *inputs[1:])

    handle = block.register_forward_pre_hook(flip_input)


# ---- state ----------------------------------------------------------------------------------------------------------
# The tensors that a rank holds between steps, and the axes over which they are replicated.


class StateTensor(NamedTuple):
    name: str
    tensor: Tensor
    axes: ReplicaAxes  # empty: no other rank has it


def checkpoint_state(engine: Engine) -> list[StateTensor]:
    """The tensors that a checkpoint has: masters, the optimizer's states, and buffers."""
    return [*_masters_and_states(engine), *_buffers(engine)]


def _masters_and_states(engine: Engine) -> Iterator[StateTensor]:
    for name, master in engine.weights.masters.items():
        axes = _axes_of(engine, name)
        for kind, tensor in {"": master.detach(), **engine.optimizer.states[name]}.items():
            if tensor.numel():
                yield StateTensor(f"{kind} of {name}" if kind else name, tensor, axes)


def _buffers(engine: Engine) -> Iterator[StateTensor]:
    axes = replica_axes(["stage"], engine.job.layout) if engine.buffers else ()
    return (StateTensor(name, buffer, axes) for name, buffer in engine.buffers.items())


def model_weights(engine: Engine) -> list[StateTensor]:
    """The weights that the model computes with, where they are not the masters. ZeRO 3 has none between steps."""
    weights = engine.weights
    if not isinstance(weights, ZeroBuckets):
        return []
    return [
        StateTensor(AS_THE_MODEL_HAS_IT.format(name), weight, _axes_of(engine, name, full=True))
        for name, weight in weights.model_weights.items()
        if weight.numel() and not _same_memory(weight, weights.masters[name])
    ]


def _same_memory(weight: Tensor, master: Tensor) -> bool:
    same_storage = weight.untyped_storage()._cdata == master.untyped_storage()._cdata
    return same_storage and weight.numel() == master.numel()


def _axes_of(engine: Engine, name: str, *, full: bool = False) -> ReplicaAxes:
    """The axes over which a parameter's master, or with `full` the model's weight, is replicated to the bit."""
    axes = engine.weights.replicate_axes(name, of_weight=full)
    if not engine.job.train.deterministic and not engine.weights.local_params[name].tp.partial:
        axes = [axis for axis in axes if axis != "tp"]  # each rank has a gradient of its own, and its own rounding
    return replica_axes(axes, engine.job.layout)


# ---- corruption -----------------------------------------------------------------------------------------------------


ReadShare = Callable[[int], DpShare]  # the share of the step's batch that belongs to a dp rank

_REPEAT_ADVICE = "a rank that is named again has bad memory or a bad device"


class Corrupt(TrainingError):
    """State or compute is known to be wrong. Checkpoints from step `suspect` on may also be damaged."""

    def __init__(self, sentence: str, suspect: int):
        super().__init__(sentence)
        self.suspect = suspect


class DigestTable(NamedTuple):
    tensors: list[StateTensor]
    digests: Tensor  # [n] int64

    def of_axes(self, axes: ReplicaAxes) -> dict[str, int]:
        """{name: digest} of the tensors that are replicated over the axes."""
        pairs = zip(self.tensors, self.digests.tolist(), strict=True)
        return {tensor.name: value for tensor, value in pairs if tensor.axes == axes}


class UnreplicatedState(NamedTuple):
    """Digests after an update of the tensors that no other rank has."""

    updates: int  # the optimizer's updates until then
    table: DigestTable


class CorruptionChecks:
    """The checks of one rank. Their methods are collective: all ranks call them in the same order."""

    def __init__(self, engine: Engine, mesh: Mesh, account: Account):
        self.engine, self.mesh, self.account = engine, mesh, account
        self.watch = engine.job.watch
        self.replica_axes = all_replica_axes(engine.job.layout, has_experts=engine.job.model.experts is not None)
        self.groups: dict[tuple[ReplicaAxes, tuple[int, ...]], list[tuple[int, ...]]] = {}  # of `_groups`, by arguments
        self.device_kind = torch.tensor([crc32(_device_kind(mesh.device).encode())], device=mesh.device)
        self.recorder = GradientRecorder(engine, account) if self.watch.replay else None
        self.data_failed: Callable[[], bool] = lambda: False  # whether this rank could not read its data
        self.partner_of = replay_partners(engine.job.layout) if self.watch.replay else {}
        self.partner_digest: Tensor | None = None  # of the gradients of the partner's microbatch in this step
        self.last_replayed = -1  # the last step that was loaded, or whose gradients were compared
        self.unreplicated: UnreplicatedState | None = None
        self.last_equal = -1  # the last step after which all replicas were equal, or that was loaded

    def _due(self, every: int, step: int) -> bool:
        return bool(every) and step % every == 0

    # ---- when ----------------------------------------------------------------------------------------------------

    def before_forward(self, step: int, read: ReadShare) -> None:
        """Replays the partner's first microbatch, where that is due, and starts to record this rank's own."""
        if self.recorder is not None and self._due(self.watch.replay, step):
            with self.account.of("replay"):
                partner = self.partner_of[self.mesh.world.rank]
                self.partner_digest = self.recorder.replay(read(self._dp_rank(partner)))
                self.recorder.start()
        flip_before_forward(self.engine, step)

    def _dp_rank(self, rank: int) -> int:
        return self.mesh.layout.position("batch", rank)

    def before_update(self, step: int, read: ReadShare) -> None:
        """All checks that are due, when gradients are complete: the weights were used, and nothing has changed yet."""
        # In the first step of a start, the step that was loaded; and a rollback may have undone steps.
        self.last_equal, self.last_replayed = (
            step - 1 if last < 0 else min(last, step - 1) for last in (self.last_equal, self.last_replayed)
        )
        if self.recorder is not None and self.partner_digest is not None:
            with self.account.of("replay"):
                self._check_compute(self.recorder, self.partner_digest, step, read)
            self.partner_digest, self.last_replayed = None, step
        if self._due(self.watch.shards, step):
            with self.account.of("shards"):
                self._check_unreplicated(step)
        if self._due(self.watch.digests, step) and self.replica_axes:
            with self.account.of("digests"), _disable_current_modes():
                tensors = [*checkpoint_state(self.engine), *model_weights(self.engine)]
                self._check_replicas(tensors, step, "its update was not made")
                self.last_equal = step - 1

    def after_update(self, step: int) -> None:
        if self._due(self.watch.shards, step + 1):
            with self.account.of("shards"), _disable_current_modes():
                table = self._table(self._unreplicated_tensors())
                self.unreplicated = UnreplicatedState(self.engine.optimizer.updates, table)
        flip_after_update(self.engine, step)

    def before_save(self, step: int) -> None:
        """Checks the replicas of what the checkpoint will have."""
        if self.watch.digests and self.replica_axes:
            with self.account.of("digests"), _disable_current_modes():
                self._check_replicas(checkpoint_state(self.engine), step, "it was not saved")
                self.last_equal = step

    # ---- replicas ------------------------------------------------------------------------------------------------

    def _table(self, tensors: list[StateTensor]) -> DigestTable:
        return DigestTable(tensors, digests([tensor.tensor for tensor in tensors], self.mesh.device))

    def _check_replicas(self, tensors: list[StateTensor], step: int, outcome: str) -> None:
        """Raises `Corrupt` on all ranks, if replicas differ. `outcome`: what the error says that was not done."""
        table = self._table([tensor for tensor in tensors if tensor.axes])
        by_rank = self._all_gather(torch.cat((self.device_kind, self._combined_by_axes(table))))
        device_kinds = tuple(kind for kind, *_ in by_rank)
        disagreeing = [
            (axes, group)
            for column, axes in enumerate(self.replica_axes, start=1)
            for group in self._groups(axes, device_kinds)
            if find_disagreement({rank: by_rank[rank][column] for rank in group})
        ]
        if not disagreeing:
            return
        rank = self.mesh.world.rank
        own = {"+".join(axes): table.of_axes(axes) for axes, group in disagreeing if rank in group}
        tables = self._all_gather_values(own, dict[str, dict[str, int]])
        messages = [
            self._disagreement({rank: tables[rank]["+".join(axes)] for rank in group}) for axes, group in disagreeing
        ]
        raise Corrupt(
            f"step {step}: {'; '.join(messages)}; {outcome}, and after step {self.last_equal} all copies were the "
            "same; the same command resumes from the last checkpoint, whose copies were compared before it was saved; "
            f"{_REPEAT_ADVICE}",
            suspect=self.last_equal + 1,
        )

    def _combined_by_axes(self, table: DigestTable) -> Tensor:
        """For each of `replica_axes` one number, which changes with the digest of any of its tensors."""
        weights = torch.zeros(len(self.replica_axes), len(table.tensors), dtype=torch.int64)
        for column, tensor in enumerate(table.tensors):
            weights[self.replica_axes.index(tensor.axes), column] = 2 * crc32(tensor.name.encode()) + 1
        return (weights.to(self.mesh.device) * table.digests).sum(1)

    def _groups(self, axes: ReplicaAxes, device_kinds: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The replica groups, divided by kind of device, since only devices of one kind round alike."""
        key = axes, device_kinds
        if key not in self.groups:
            ranks_by_kind: dict[tuple[int, int], list[int]] = {}  # by group and kind
            for number, group in enumerate(replica_groups(self.mesh.layout, axes)):
                for rank in group:
                    ranks_by_kind.setdefault((number, device_kinds[rank]), []).append(rank)
            self.groups[key] = [tuple(ranks) for ranks in ranks_by_kind.values() if len(ranks) > 1]
        return self.groups[key]

    def _disagreement(self, tables: dict[int, dict[str, int]]) -> str:
        """A sentence on the ranks of a group that disagree; `tables` has {name: digest} by rank."""
        names_by_disagreement: dict[Disagreement, list[str]] = {}
        for name in next(iter(tables.values())):
            disagreement = find_disagreement({rank: table.get(name) for rank, table in tables.items()})
            if disagreement is not None:
                names_by_disagreement.setdefault(disagreement, []).append(name)
        return "; ".join(
            disagreement_message(self.mesh.layout, disagreement, names)
            for disagreement, names in names_by_disagreement.items()
        )

    # ---- unreplicated tensors ------------------------------------------------------------------------------------

    def _unreplicated_tensors(self) -> list[StateTensor]:
        compute_copies = self.engine.weights.compute_copies()
        weights = [tensor for tensor in model_weights(self.engine) if tensor.name.partition(" ")[0] in compute_copies]
        return [tensor for tensor in (*checkpoint_state(self.engine), *weights) if not tensor.axes]

    def _check_unreplicated(self, step: int) -> None:
        """Raises `Corrupt` on all ranks, if unreplicated tensors of one have changed since its last update."""
        changed: list[str] = []
        before, self.unreplicated = self.unreplicated, None
        with _disable_current_modes():
            if before is not None and before.updates == self.engine.optimizer.updates:
                table = self._table(before.table.tensors)
                differs = (table.digests != before.table.digests).tolist()
                changed = [tensor.name for tensor, different in zip(table.tensors, differs, strict=True) if different]
            counts = self._all_gather(torch.tensor([len(changed)], device=self.mesh.device))
        if not any(count for (count,) in counts):
            return
        messages = [
            f"{rank_label(self.mesh.layout, rank)}: {names_text(names)}"
            for rank, names in enumerate(self._all_gather_values(changed, list[str]))
            if names
        ]
        raise Corrupt(
            f"step {step}: what nobody else holds has changed between the updates of steps {step - 1} and {step}, on "
            f"{'; '.join(messages)}; its update was not made; the same command resumes from the last checkpoint before "
            f"step {step - 1}; {_REPEAT_ADVICE}",
            suspect=step - 1,
        )

    # ---- compute -------------------------------------------------------------------------------------------------

    def _check_compute(self, recorder: GradientRecorder, partner_digest: Tensor, step: int, read: ReadShare) -> None:
        """Raises `Corrupt` on all ranks, if two of them got different gradients of the same microbatch."""
        with _disable_current_modes():
            rank, ranks = self.mesh.world.rank, range(self.mesh.world.size)
            data_failed = torch.full_like(partner_digest, self.data_failed())
            own_row = torch.stack((self.device_kind[0], recorder.finish(), partner_digest, data_failed))
            rows = self._all_gather(own_row)  # a row for each rank
            if any(row[3] for row in rows):  # the step will end with an error about the data
                return
            comparable = {
                rank: partner for rank, partner in self.partner_of.items() if rows[rank][0] == rows[partner][0]
            }
            replay_digests = ReplayDigests(
                {rank: rows[rank][1] for rank in ranks}, {rank: rows[rank][2] for rank in ranks}
            )
            if not mismatched_pairs(comparable, replay_digests):
                return
            own_again, partner_again = (
                recorder.replay(read(self._dp_rank(peer))) for peer in (rank, self.partner_of[rank])
            )
            rows = self._all_gather(torch.stack((own_again, partner_again)))
        replay_digests = replay_digests._replace(
            own_again={rank: rows[rank][0] for rank in ranks}, partner_again={rank: rows[rank][1] for rank in ranks}
        )
        message = corruption_message(self.mesh.layout, corruption_verdict(comparable, replay_digests))
        raise Corrupt(
            f"step {step}: {message}; its update was not made; gradients of steps {self.last_replayed + 1} to {step} "
            f"may be wrong, and those of step {self.last_replayed} were not: the same command resumes from the last "
            f"checkpoint up to there; {_REPEAT_ADVICE}",
            suspect=self.last_replayed + 1,
        )

    # ---- between ranks -------------------------------------------------------------------------------------------

    def _all_gather(self, numbers: Tensor) -> list[list[int]]:
        """The numbers of every rank, by rank."""
        world = self.mesh.world
        with waiting("the exchange of digests", self.mesh, world):
            return timed_wait(wait(all_gather(numbers, world), world).view(world.size, -1).tolist)

    def _all_gather_values(self, value: object, kind: object) -> list:  # type: ignore[type-arg]
        """The values of every rank, by rank, by the control channel: only used when something is wrong."""
        with closing(Control(self.mesh, self.engine.job.train.timeout)) as control:
            return control.all_gather_values(value, kind)


def _device_kind(device: torch.device) -> str:
    """A name such that devices of the same name compute the same bits."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
