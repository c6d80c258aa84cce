"""Whole matrices for an optimizer's rule: parts of them travel to their owners, and parts of the updates back.

`layout/matrix_owners.py` says who owns which, and why. Here a rank runs its rounds: it takes in the gradients of the
parts that it holds, sends them, computes the updates of its own batch, and applies what comes back, or what is gathered
from all owners, to the parts it holds.
What travels has the dtype in which the rule computes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.launch.waits import timed_wait
from fivefold.layout.matrix_owners import AllToAll, Gather, MatrixOwners, Part, Parts, Round, elements, in_order
from fivefold.optim.base import OptimizerConfig, group_of, reading
from fivefold.optim.groups import ParamGroup
from fivefold.parallel.collectives import staged_all_gather, waiting
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.weights import Weights
from fivefold.spec.model import ModelSpec
from fivefold.support.plugin_calls import value_text, wrong

States = Mapping[str, Mapping[str, Tensor]]  # of the optimizer, by parameter and name


class WholeMatrices:
    def __init__(self, weights: Weights, spec: ModelSpec, config: OptimizerConfig, mesh: Mesh, dtype: torch.dtype):
        self.weights, self.config, self.axis, self.dtype = weights, config, mesh.stage, dtype
        parameters = [parameter for parameter in spec.parameters() if parameter.name in weights.local_params]
        owners = MatrixOwners.of(parameters, spec, mesh.layout, config, mesh.pp.rank)
        groups = {parameter.name: group_of(config, parameter) for parameter in parameters}
        self.groups = {name: group for name, group in groups.items() if group.rule == "matrix"}
        self.rounds = [*owners.rounds(self.axis.rank)] if self.groups else []
        self.boxes = {name: weights.master_box(name) for name in self.groups}

    @torch.no_grad()
    def step(self, states: States, scale: Tensor | None, rate: float, step: int) -> None:
        """One update. `scale`: what gradients are multiplied with first."""
        kept: Tensor | None = None  # this rank's updates, until they are gathered
        for round_ in self.rounds:  # of which nothing else stays but the weights, not even in a variable
            for parts in round_.unread:
                self._accumulate(parts, states, scale, step)
            if round_.gather is None:
                directions = self._accumulate(round_.read, states, scale, step)
                self._to_holders(round_, self._updates(round_, directions), rate)
                continue
            if kept is None:
                kept = torch.zeros(round_.gather.length, dtype=self.dtype, device=self._device)
            self._keep(round_, self._updates(round_, self._accumulate(round_.read, states, scale, step)), kept)
            if round_.last:
                for call in round_.gather.calls:
                    self._gather(round_.gather, call, kept, rate)
                kept = None

    def _updates(self, round_: Round, directions: dict[Part, Tensor]) -> Tensor | None:
        """Of the matrices that this rank owns: [n, rows, columns]."""
        batch = self._to_owners(round_, directions)
        directions.clear()
        if batch is None:
            return None
        updates = self.config.matrix_update(batch)
        if not isinstance(updates, Tensor) or (updates.shape, updates.dtype) != (batch.shape, batch.dtype):
            raise wrong(
                self.config, "matrix_update", f"gave {value_text(updates)}, and not as it was given {value_text(batch)}"
            )
        return updates

    def _accumulate(self, parts: list[Part], states: States, scale: Tensor | None, step: int) -> dict[Part, Tensor]:
        """Advance the states of parts that this rank holds: what the rule is to read of each."""
        alike: dict[tuple[str, ...], list[Part]] = defaultdict(list)  # with the same states
        for part in parts:
            alike[tuple(states[part.name])].append(part)
        directions: dict[Part, Tensor] = {}
        for keys, of_keys in alike.items():
            directions |= self._accumulate_alike(of_keys, keys, states, scale, step)
        return directions

    def _accumulate_alike(
        self, parts: list[Part], keys: Sequence[str], states: States, scale: Tensor | None, step: int
    ) -> dict[Part, Tensor]:
        grads = []
        for part in parts:
            master = self.weights.masters[part.name]
            assert master.grad is not None
            grads.append(self._of(part, master.grad).to(master.dtype))
        if scale is not None:
            torch._foreach_mul_(grads, scale.to(grads[0].dtype))
        own = {key: [self._of(part, states[part.name][key]) for part in parts] for key in keys}
        with reading(self.config, "accumulate", own):
            read = self.config.accumulate(grads, own, step)
        shapes = [[*one.shape] for one in grads]
        if not isinstance(read, list | tuple) or [[*getattr(one, "shape", ())] for one in read] != shapes:
            gave = ", ".join(map(value_text, read)) if isinstance(read, list | tuple) else value_text(read)
            raise wrong(self.config, "accumulate", f"gave {gave}, and not tensors as the gradients, of {shapes}")
        return dict(zip(parts, read, strict=True))

    def _to_owners(self, round_: Round, directions: dict[Part, Tensor]) -> Tensor | None:
        """The matrices that this rank owns: [n, rows, columns]."""
        batch = None
        if round_.batch:
            batch = torch.empty(len(round_.batch), *round_.batch[0].shape, dtype=self.dtype, device=self._device)
            _copy([self._in(batch, part) for part in round_.own], [directions[part] for part in round_.own])
        if round_.to_owners is not None:
            sent = self._packed(round_.to_owners.sent, directions)
            received = self._sent(round_.to_owners, sent)
            if batch is not None:
                pairs = [*_unpacked(received, round_.to_owners.received)]
                _copy([self._in(batch, part) for part, _ in pairs], [x for _, x in pairs])
        return batch

    def _to_holders(self, round_: Round, updates: Tensor | None, rate: float) -> None:
        own = {}
        if updates is not None:
            self._apply([(part, self._in(updates, part)) for part in round_.own], rate)
        for call in round_.to_holders:
            if updates is not None:
                own = {part: self._in(updates, part) for part in in_order(call.sent)}
            received = self._sent(call, self._packed(call.sent, own))
            self._apply(_unpacked(received, call.received), rate)

    def _keep(self, round_: Round, updates: Tensor | None, kept: Tensor) -> None:
        if updates is not None:
            kept[round_.first :][: updates.numel()].view_as(updates).copy_(updates)

    def _gather(self, gather: Gather, call: range, kept: Tensor, rate: float) -> None:
        """Every owner's updates to every rank, as many of them as a call has; `kept` are this one's."""
        gathered = torch.empty(len(gather.parts), len(call), dtype=self.dtype, device=self._device)
        with waiting("the optimizer's matrices", self.weights.mesh, self.axis):
            given = kept[call.start : call.stop]
            timed_wait(staged_all_gather, gathered.view(-1), given, group=self.axis.group)
        for parts, updates in zip(gather.parts, gathered, strict=True):
            slices = (
                (part, self._of(part, self.weights.masters[part.name]).view(-1)[inside], updates[there])
                for part, inside, there in _slices(parts, call)
            )
            self._apply_to(slices, rate)

    def _apply(self, pairs: Iterable[tuple[Part, Tensor]], rate: float) -> None:
        whole = ((part, self._of(part, self.weights.masters[part.name]), update) for part, update in pairs)
        self._apply_to(whole, rate)

    def _apply_to(self, updated: Iterable[tuple[Part, Tensor, Tensor]], rate: float) -> None:
        """Of each part what is updated of the weights, and its update."""
        by_group: dict[ParamGroup, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for part, master, update in updated:
            by_group[self.groups[part.name]].append((master, update))
        for group, own in by_group.items():
            masters, updates = [master for master, _ in own], [update for _, update in own]
            self.config.apply(masters, updates, rate * group.lr_factor, group.weight_decay)

    # ---- parts -------------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self.weights.mesh.device

    def _of(self, part: Part, shard: Tensor) -> Tensor:
        """A part of a tensor shaped like this rank's master."""
        rows, columns = self.boxes[part.name]
        first = part.rows.start - rows.start
        return shard[first : first + len(part.rows), part.columns.start - columns.start :][:, : len(part.columns)]

    def _in(self, batch: Tensor, part: Part) -> Tensor:
        """A part of a matrix in its owner's batch."""
        first = part.rows.start - part.matrix.rows.start
        matrix = batch[part.number]
        return matrix[first : first + len(part.rows), part.columns.start : part.columns.stop]

    def _packed(self, parts: Parts, of: dict[Part, Tensor]) -> Tensor:
        """Parts one after the other, rank by rank."""
        buffer = torch.empty(elements(parts), dtype=self.dtype, device=self._device)
        pairs = [*_unpacked(buffer, parts)]
        _copy([place for _, place in pairs], [of[part] for part, _ in pairs])
        return buffer

    def _sent(self, call: AllToAll, buffer: Tensor) -> Tensor:
        sent, received = (
            [sum(part.size for part in side.get(place, ())) for place in range(self.axis.size)] for side in call
        )
        coming = torch.empty(sum(received), dtype=self.dtype, device=self._device)
        with waiting("the optimizer's matrices", self.weights.mesh, self.axis):
            timed_wait(dist.all_to_all_single, coming, buffer, received, sent, group=self.axis.group)
        return coming


def _unpacked(buffer: Tensor, parts: Parts) -> Iterable[tuple[Part, Tensor]]:
    first = 0
    for part in in_order(parts):
        yield part, buffer[first : first + part.size].view(len(part.rows), len(part.columns))
        first += part.size


def _slices(parts: Iterable[Part], call: range) -> Iterable[tuple[Part, slice, slice]]:
    """Of an owner's matrices, one after the other, what a call has: the elements of each, and where they are in it."""
    first = 0
    for part in parts:
        start, stop = max(first, call.start), min(first + part.size, call.stop)
        if start < stop:
            yield part, slice(start - first, stop - first), slice(start - call.start, stop - call.start)
        first += part.size


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_([*targets], [*sources])
