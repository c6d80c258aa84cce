"""Whole matrices for an optimizer's rule: parts of them travel to their owners, and parts of the updates back.

`layout/matrix_owners.py` says who owns which, and why. Here a rank runs its rounds: it takes in the gradients of the
parts that it holds, sends them, computes the updates of its own batch, and applies what comes back to the parts it
holds.
What travels has the dtype in which the rule computes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.launch.waits import timed_wait
from fivefold.layout.matrix_owners import AllToAll, MatrixOwners, Part, Parts, Round, elements
from fivefold.optim.base import OptimizerConfig, group_of
from fivefold.optim.groups import ParamGroup
from fivefold.parallel.collectives import waiting
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.weights import Weights
from fivefold.spec.model import ModelSpec
from fivefold.support.plugin_calls import shown, wrong

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
        for round_ in self.rounds:  # of which nothing stays but the weights
            for parts in round_.unread:
                self._accumulate(parts, states, scale, step)
            self._to_holders(round_, self._updates(round_, self._accumulate(round_.read, states, scale, step)), rate)

    def _updates(self, round_: Round, directions: dict[Part, Tensor]) -> Tensor | None:
        """Of the matrices that this rank owns: [n, rows, columns]."""
        batch = self._to_owners(round_, directions)
        directions.clear()
        if batch is None:
            return None
        updates = self.config.matrix_update(batch)
        if not isinstance(updates, Tensor) or updates.shape != batch.shape:
            raise wrong(self.config, "matrix_update", f"gave {shown(updates)}, and not as it was given {shown(batch)}")
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
        read = self.config.accumulate(grads, own, step)
        shapes = [[*one.shape] for one in grads]
        if not isinstance(read, list | tuple) or [[*getattr(one, "shape", ())] for one in read] != shapes:
            gave = ", ".join(map(shown, read)) if isinstance(read, list | tuple) else shown(read)
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
                own = {part: self._in(updates, part) for of_rank in call.sent for part in of_rank}
            received = self._sent(call, self._packed(call.sent, own))
            self._apply(_unpacked(received, call.received), rate)

    def _apply(self, pairs: Iterable[tuple[Part, Tensor]], rate: float) -> None:
        by_group: dict[ParamGroup, list[tuple[Part, Tensor]]] = defaultdict(list)
        for part, update in pairs:
            by_group[self.groups[part.name]].append((part, update))
        for group, own in by_group.items():
            masters = [self._of(part, self.weights.masters[part.name]) for part, _ in own]
            self.config.apply(masters, [update for _, update in own], rate * group.lr_factor, group.weight_decay)

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
        sent, received = ([sum(part.size for part in parts) for parts in side] for side in call)
        coming = torch.empty(sum(received), dtype=self.dtype, device=self._device)
        with waiting("the optimizer's matrices", self.weights.mesh, self.axis):
            timed_wait(dist.all_to_all_single, coming, buffer, received, sent, group=self.axis.group)
        return coming


def _unpacked(buffer: Tensor, parts: Parts) -> Iterable[tuple[Part, Tensor]]:
    first = 0
    for of_rank in parts:
        for part in of_rank:
            yield part, buffer[first : first + part.size].view(len(part.rows), len(part.columns))
            first += part.size


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_([*targets], [*sources])
