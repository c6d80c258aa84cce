"""The decoder: blocks of mixers and MLPs, as the pattern of its model has them, between embedding and head.

Shapes: B batch, S sequence, E hidden, H heads, K kv heads, D head dim, F feed-forward, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.layout.layout import Recompute
from fivefold.layout.stages import Stage
from fivefold.model import philox
from fivefold.model.cache import LayerCache
from fivefold.model.compiler import compile_function
from fivefold.model.layers import Linear, TokenPositions, accum_dtype
from fivefold.model.linear_cross_entropy import Targets
from fivefold.model.load_balancing import UNBALANCED, Balance
from fivefold.model.moe import MoE, RouterStats
from fivefold.model.ops import LocalOps, MixerInputs
from fivefold.model.recompute import recomputed
from fivefold.model.rope import Rotation, rope_cache
from fivefold.spec.kinds import MLP, WANTED_PARAMETERS, BlockKind, Mixer
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import Problem, UserError
from fivefold.support.plugin_calls import ask, error_text, value_text, wrong
from fivefold.support.plugins import is_plugin, resolve_class

NO_RECOMPUTE = recomputed("none")


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Skipped on the meta device, as for `Linear`."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Dropout(nn.Module):
    """Dropout of the residual stream, [B, S, E]; the identity in eval mode and at rate 0.

    The mask is a function of (seed, layer, sample, position, feature), so it is the same in every layout.
    """

    def __init__(self, rate: float, seed: int, name: str):
        super().__init__()
        self.rate, self.key = rate, philox.random_key(seed, "dropout", name)

    def forward(self, x: Tensor, positions: TokenPositions) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        features = torch.arange(-(-x.shape[-1] // 4), device=x.device)
        sample, position = positions.samples[:, None, None], positions.position_ids[..., None]
        mask = philox.dropout_mask(self.key, 1.0 - self.rate, features, position, sample, sample >> 32)
        return x * (mask.flatten(-2)[..., : x.shape[-1]].to(x.dtype) / (1.0 - self.rate))


def norm(spec: ModelSpec, width: int) -> nn.Module:
    kind = nn.RMSNorm if spec.norm == "rmsnorm" else nn.LayerNorm
    return kind(width, eps=spec.norm_eps)


def _compiled_run(recompute: Recompute, ops: LocalOps) -> Callable[..., Tensor]:
    """The compiled `run` of a block. One graph can contain its recomputation; a block of several graphs cannot, nor one
    with sharded weights (in torch 2.13 PyTorch would run it eagerly). There checkpointing is around the graphs."""
    if recompute == "selective" and ops.graph_breaks:
        return recomputed(recompute)  # eager: it selects by operator, and sees none inside graphs
    if recompute == "full" and (ops.sharded or ops.graph_breaks):
        return partial(recomputed("full"), compile_function(recomputed("none")))
    return compile_function(recomputed(recompute, compile=True))


def branch(kind: BlockKind, spec: ModelSpec, ops: LocalOps, layer: int) -> nn.Module:
    """The module that computes a kind: the class that the kind names, which is its author's code as the kind is."""
    if not is_plugin(kind.name):
        return resolve_class(kind.module)(kind, spec, ops)
    try:
        module = resolve_class(kind.module)(kind, spec, ops)
    except (Exception, SystemExit) as error:
        raise UserError(_protocol(kind, f"could not be made: {error_text(error, kind.name)}")) from error
    if not isinstance(module, nn.Module):
        raise UserError(_protocol(kind, f"gave a {type(module).__name__}, and not a torch.nn.Module"))
    if isinstance(module, MoE) != (isinstance(kind, MLP) and kind.routes):
        sends = "derives from fivefold.model.moe:MoE" if isinstance(module, MoE) else "does not"
        both = f"its module {sends}, and its kind has routes={not isinstance(module, MoE)}"
        raise UserError(_protocol(kind, f"{both}: what sends tokens to experts says so, and derives from that"))
    if uncallable := "; ".join(_uncallable(kind, module)):
        raise UserError(_protocol(kind, uncallable))
    if unlike := "; ".join(_parameter_differences(kind, spec, layer, module)):
        raise UserError(_protocol(kind, unlike))
    return module


def _protocol(kind: BlockKind, what: str) -> Problem:
    return Problem("plugin.protocol", f"{kind.module} of {kind.name} {what}")


def _uncallable(kind: BlockKind, module: nn.Module) -> Iterator[str]:
    """Methods of a module that cannot be called with what they are given."""
    given = {"forward": ("x", "shared") if isinstance(kind, Mixer) else ("x",)}
    if isinstance(kind, MLP) and kind.routes:
        given["forward"] = ("x", "positions")
    if isinstance(kind, Mixer) and hasattr(module, "mask"):
        given["mask"] = ("positions", "dtype")
    for method, words in given.items():
        try:
            inspect.signature(getattr(module, method)).bind(*words)
        except TypeError as error:
            yield f"cannot be called as {method}({', '.join(words)}): {error}"


def _parameter_differences(kind: BlockKind, spec: ModelSpec, layer: int, module: nn.Module) -> Iterator[str]:
    """What differs between a module's parameters and those that its kind's operations read."""
    within = f"layers.{layer}.{kind.place}."
    described: dict[str, tuple[int, ...]] = {}
    for parameter in ask(kind, "parameters", spec, layer, wanted=WANTED_PARAMETERS):
        name = parameter.name.removeprefix(within)
        if name in described:
            yield f"is described with {name} twice"
        described[name] = parameter.shape
    made = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    for name in sorted(described.keys() - made.keys()):
        yield f"has no parameter {name}, which its operations read"
    for name in sorted(made.keys() - described.keys()):
        yield f"has a parameter {name} that none of its operations reads"
    for name in sorted(described.keys() & made.keys()):
        if described[name] != made[name]:
            yield f"has {name} of shape {list(made[name])}, where its operations read {list(described[name])}"


def _check_output(kind: BlockKind, x: Tensor, y: Any) -> None:
    """The output of somebody else's module is added to the residual stream, so it has its shape and dtype."""
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        wanted = f"a Tensor of shape {list(x.shape)} and {x.dtype}"
        raise wrong(kind, f"forward of {kind.module}", f"gave {value_text(y)}, and not {wanted}")


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); without one of them, the other alone.

    Mixer and MLP, and the norms before them, are called what their kinds say: `attention`, `attention_norm`, `mlp`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        ops: LocalOps,
        layer: int,
        seed: int,
        run: Callable[..., Tensor] = NO_RECOMPUTE,
        balance: Balance = UNBALANCED,
    ):
        """`run` calls `steps`: directly, with activation recompute, or compiled."""
        super().__init__()
        self.ops, self.run, self.kinds = ops, run, spec.kinds(layer)
        self.mixer_place = self.kinds.mixer.place if self.kinds.mixer else None
        self.mlp_place = self.kinds.mlp.place if self.kinds.mlp else None
        self.foreign = {kind.place: kind for kind in self.kinds.branches if is_plugin(kind.name)}
        for kind in self.kinds.branches:
            self.add_module(f"{kind.place}_norm", norm(spec, spec.hidden))
            self.add_module(kind.place, branch(kind, spec, ops, layer))
            self.add_module(f"{kind.place}_dropout", Dropout(spec.dropout, seed, f"layers.{layer}.{kind.place}"))
        self.routed = self.kinds.routed  # whether its MLP takes positions too, and gives the router's statistics
        if (mixture := self.mixture) is not None:
            mixture.balance = balance

    def foreign_parameters(self, layer: int) -> Iterator[str]:
        """The names of what plugins' modules have. Not of experts, which may have no tokens."""
        for place in self.foreign:
            if not (self.routed and place == self.mlp_place):
                yield from (f"layers.{layer}.{place}.{name}" for name, _ in getattr(self, place).named_parameters())

    @property
    def mixer_module(self) -> nn.Module | None:
        return getattr(self, self.mixer_place) if self.mixer_place else None

    @property
    def mixture(self) -> MoE | None:
        """Its experts, where it has any."""
        return getattr(self, str(self.mlp_place)) if self.routed else None

    def forward(self, x: Tensor, positions: TokenPositions, shared: MixerInputs) -> Tensor:
        """`positions`: of x's tokens; `shared`: of all tokens that a mixer has here."""
        x, stats = self.run(self.steps, x, positions, shared)
        if self.training and stats is not None and (mixture := self.mixture) is not None:
            mixture.count(stats)
        return x

    def steps(self, x: Tensor, positions: TokenPositions, shared: MixerInputs) -> tuple[Tensor, RouterStats | None]:
        """The residual stream, and the router's statistics of its tokens."""
        stats: RouterStats | None = None
        if (place := self.mixer_place) is not None:
            y = getattr(self, place)(self.ops.norm(getattr(self, f"{place}_norm"), x), shared)
            if place in self.foreign:
                _check_output(self.foreign[place], x, y)
            x = x + getattr(self, f"{place}_dropout")(y, positions)
        if (place := self.mlp_place) is not None:
            mlp, normed = getattr(self, place), self.ops.norm(getattr(self, f"{place}_norm"), x)
            y, stats = mlp(normed, positions) if self.routed else (mlp(normed), None)
            if place in self.foreign:
                _check_output(self.foreign[place], x, y)
            x = x + getattr(self, f"{place}_dropout")(y, positions)
        return x, stats


class Decoder(nn.Module):
    """Tokens [B, S] in, logits [B, S, V] out, or with targets the sum of the losses.

    Parameter names are as in `spec.parameters()`.
    `ops` compute a layer's steps, on this device or together with other ranks. With a `stage` it is a pipeline stage of
    the model: its input is the residual stream [B, S, E] unless it is the first, and so is its output unless it is the
    last.
    """

    def __init__(
        self,
        spec: ModelSpec,
        recompute: Recompute = "none",
        seed: int = 0,
        ops: LocalOps | None = None,
        stage: Stage | None = None,
        compile: bool = False,
        balance: Balance = UNBALANCED,
    ):
        super().__init__()
        stage = stage or Stage(0, range(spec.layers), first=True, last=True)
        self.spec, self.ops, self.stage = spec, ops or LocalOps(), stage
        embeds, learned = stage.first or (stage.last and spec.tied), stage.first and spec.positions == "learned"
        self.embedding = Embedding(spec.vocab, spec.hidden) if embeds else None
        self.positions = Embedding(spec.context, spec.hidden) if learned else None
        self.dropout = Dropout(spec.dropout, seed, "embedding")
        run = _compiled_run(recompute, self.ops) if compile else recomputed(recompute)
        self.layers = nn.ModuleDict({str(n): Block(spec, self.ops, n, seed, run, balance) for n in stage.layers})
        self.norm = norm(spec, spec.hidden) if stage.last else None
        self.head = Linear(spec.hidden, spec.vocab, bias=False) if stage.last and not spec.tied else None
        self._rotations = torch.empty(0)
        self.caches: list[LayerCache] = []  # of each layer, while text is generated
        # Position ids, dtype and result of the last call: a cache for microbatches with the same positions.
        self._last_rotation: tuple[Tensor, torch.dtype, Rotation] | None = None

    def forward(self, x: Tensor, positions: TokenPositions | None = None, targets: Targets | None = None) -> Tensor:
        positions = positions or TokenPositions.of(x)
        residual = self.ops.residual_positions(positions)  # positions of this rank's part of the residual stream
        if self.stage.first:
            assert self.embedding is not None
            x = self.ops.embed(self.embedding, x)  # [B, S, E]
            if self.positions is not None:
                x = x + self.ops.position_embedding(self.positions, residual.position_ids)
            x = self.dropout(x, residual)
        for block, shared in zip(self.layers.values(), self._shared(positions, x.dtype), strict=True):
            x = block(x, residual, shared)
        if self.norm is None:
            return x
        table = self.head or self.embedding
        assert table is not None
        x = self.ops.norm(self.norm, x)
        return self.ops.logits(x, table) if targets is None else self.ops.loss(x, table, targets)

    def _shared(self, positions: TokenPositions, compute: torch.dtype) -> list[MixerInputs]:
        """What the mixer of each layer is given; made once for each kind of mixer, but for caches."""
        rotation = self.rotation(positions, compute)
        made: dict[BlockKind | None, MixerInputs] = {None: MixerInputs(positions, rotation)}
        blocks: list[Any] = [*self.layers.values()]
        for block in blocks:
            if (kind := block.kinds.mixer) not in made:
                mask_of = getattr(block.mixer_module, "mask", None)
                mask = None if mask_of is None else mask_of(positions, compute)
                made[kind] = MixerInputs(positions, rotation, mask)
        shared = [made[block.kinds.mixer] for block in blocks]
        if not self.caches:
            return shared
        return [one._replace(cache=cache) for one, cache in zip(shared, self.caches, strict=True)]

    def begin_text(self, length: int) -> None:
        """From here on tokens follow each other, up to so many: layers keep what they need of earlier ones."""
        self.caches = [LayerCache(length) for _ in self.layers]

    def rotation(self, positions: TokenPositions, compute: torch.dtype) -> Rotation | None:
        """Cosine and sine of every token's angles, [B, 1, S, D/2], from a table computed once, on the CPU."""
        if self.spec.positions != "rope" or not self.spec.attends:
            return None
        ids, dtype, table, last = positions.position_ids, accum_dtype(compute), self._rotations, self._last_rotation
        if last is not None and last[0] is ids and last[1] == dtype:
            return last[2]
        if table.shape[0] < positions.length or table.dtype != dtype or table.device != ids.device:
            self._rotations = table = rope_cache(self.spec, positions.length).to(ids.device, dtype)
        cos, sin = table[ids].unbind(2)
        self._last_rotation = ids, dtype, (cos[:, None], sin[:, None])
        return self._last_rotation[2]
