"""What an optimizer is: its settings and their bounds, the state that it keeps, and its update rule.

An optimizer is a subclass of `OptimizerConfig` in a file of its own, and a line in the table of
`optim/__init__.py`; or in a module of yours, which a job names as "package.module:Name". The job file, the trainer,
checkpoints, memory accounting and the verifier read everything they need from the class. The norm and the clipping of
gradients are the same for all optimizers (`parallel/optimizer.py`), and so is the learning rate (`lr_schedule.py`).

Jobs and plans read this without torch: rules import it where they compute.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from fivefold.optim.groups import (
    WANTED_GROUP,
    GroupSettings,
    ParamGroup,
    apply_settings,
    match_problems,
    settings_problems,
)
from fivefold.support.errors import Problem, UserError
from fivefold.support.plugin_calls import WANTED_AMOUNT, Wanted, ask, each, value_text, wrong
from fivefold.support.plugin_settings import class_shortcomings, unhashable
from fivefold.support.plugins import is_plugin, untrusted_problem
from fivefold.support.ranges import MAX_STEPS, within

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fivefold.spec.operations import Parameter

    Tensors = Sequence[Tensor]
    States = Mapping[str, Tensors]  # by name, a tensor of each parameter

Rule = tuple[bool, str]  # whether a bound holds, and the sentence that says so if it does not


_RESERVED_NAMES = ("master", "model")  # names that checkpoints have for the weights themselves


WANTED_RULES = each(
    "pairs of a truth and a sentence",
    lambda one: "" if isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], str) else value_text(one),
)


def bound(setting: str, words: str) -> Problem:
    """The problem of a setting that is out of its bounds: its value, and what it must be."""
    return Problem(f"optimizer.{setting}.range", f"optimizer.{setting}={words}")


class OptimizerConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name", tag=str.lower
):
    # Names of the tensors kept for a parameter (`states_of`), each shaped and typed as its master: what is sharded,
    # counted and saved with it. Rows, columns and scalars (as of Adafactor) are not kept.
    states: ClassVar[tuple[str, ...]] = ()
    # What the rule reads: an element at a time, by `update`; or of some parameters whole matrices, which are brought
    # together for it, by `accumulate`, `matrix_update` and `apply`.
    unit: ClassVar[Literal["element", "matrix"]] = "element"
    fuses: ClassVar[bool] = False  # whether it has `fused_update`

    lr: float = 3e-3  # peak
    weight_decay: float = 0.1  # decoupled; norms, biases and embeddings are spared
    clip: float = 1.0  # of the global gradient norm; 0: never
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: int = 20  # steps, linear from 0
    decay: float = 0.2  # wsd: the share of the steps, at the end, in which the rate falls
    final: float = 0.1  # the last rate, as a share of the peak
    schedule_steps: Annotated[int, within(0, MAX_STEPS)] = (
        0  # over which the schedule runs, and then stays; 0: train.steps
    )
    groups: tuple[GroupSettings, ...] = ()  # parameters with another rate or decay; the first that matches wins

    @property
    def name(self) -> str:
        """What a job calls it: the class's name in lower case; of one in a module of its own, "package.module:Name"."""
        return str(self.__struct_config__.tag)

    @staticmethod
    def shortcomings(kind: "type[OptimizerConfig]", name: str) -> Iterator[str]:
        """What a class lacks that a job calls `name`."""
        yield from class_shortcomings(kind, OptimizerConfig, name)
        yield from unhashable(kind)
        states = kind.states if isinstance(kind.states, tuple) else (None,)
        if not all(isinstance(state, str) and state.isidentifier() for state in states):
            yield (
                f"has states={kind.states!r}, and not a tuple of names, for example ('momentum',); each state has its "
                "parameter's shape, and no others are kept"
            )
        elif len({*states, *_RESERVED_NAMES}) < len(states) + len(_RESERVED_NAMES):
            taken = " and ".join(_RESERVED_NAMES)
            yield f"has states={kind.states!r}; each has a name of its own, and {taken} are the weights"
        if kind.update is OptimizerConfig.update:
            yield "has no method update(self, masters, grads, states, rate, decay, step)"
        if kind.stock is OptimizerConfig.stock:
            yield "has no method stock(self, groups, **options), a torch.optim.Optimizer that verify holds it against"
        matrix_update = kind.matrix_update is not OptimizerConfig.matrix_update
        if kind.unit not in ("element", "matrix"):
            yield f'has unit={kind.unit!r}, and not "element" or "matrix"'
        elif kind.unit == "matrix" and not matrix_update:
            yield 'has unit="matrix", and no method matrix_update(self, matrices)'
        elif kind.unit == "element" and matrix_update:
            yield 'has a method matrix_update, which is called if it has unit="matrix"'
        if kind.fuses and kind.fused_update is OptimizerConfig.fused_update:
            yield "has fuses=True and no method fused_update; leave it False, or write one"
        elif kind.fuses and _owner(kind, "update") not in _owner(kind, "fused_update").__mro__:
            theirs = _owner(kind, "fused_update").__name__
            yield f"has a rule of its own, update, and {theirs}'s fused_update on a GPU; write fuses = False, or both"

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings: the rules that do not hold."""
        yield from (problem for holds, problem in self.rules() if not holds)

    def rules(self) -> list[Rule]:
        """Bounds of the settings."""
        return [
            (0 < self.lr < math.inf, bound("lr", f"{self.lr} must be a positive number")),
            *((False, problem) for problem in settings_problems(self.groups)),
            *ask(self, "own_rules", wanted=WANTED_RULES),
            (0 <= self.weight_decay < math.inf, bound("weight_decay", f"{self.weight_decay} must not be negative")),
            (0 <= self.clip < math.inf, bound("clip", f"{self.clip} must not be negative; 0 turns it off")),
            (self.warmup >= 0, bound("warmup", f"{self.warmup} must not be negative; 0 means none")),
            (0 <= self.decay <= 1, bound("decay", f"{self.decay} is a share of the steps, between 0 and 1")),
            (0 <= self.final <= 1, bound("final", f"{self.final} is a share of the peak rate, between 0 and 1")),
            (
                self.schedule_steps <= 0 or self.schedule_steps > self.warmup,
                Problem(
                    "optimizer.schedule_steps.warmup",
                    f"optimizer.schedule_steps={self.schedule_steps} must be above optimizer.warmup={self.warmup}, "
                    f"since the schedule follows the warm-up; nearest: optimizer.schedule_steps={self.warmup + 1}; "
                    "with 0, the schedule has train.steps",
                ),
            ),
        ]

    def own_rules(self) -> list[Rule]:
        """Bounds of the settings that only this optimizer has."""
        return []

    # ---- groups, states and the rule ---------------------------------------------------------------------------------

    def group(self, parameter: "Parameter") -> ParamGroup:
        """Which rule updates a parameter, with what weight decay and what share of the rate; a job's `groups` come on
        top of it. Linears decay; norms, biases and embeddings are spared."""
        return ParamGroup(self._usual_rule(parameter), self.weight_decay if parameter.kind == "linear" else 0.0)

    def _usual_rule(self, parameter: "Parameter") -> Literal["element", "matrix"]:
        """The linears of the layers are whole matrices to a rule that reads such."""
        layers_linear = parameter.kind == "linear" and parameter.layer is not None
        return "matrix" if self.unit == "matrix" and layers_linear else "element"

    def states_of(self, parameter: "Parameter") -> tuple[str, ...]:
        """Which of the states are kept for a parameter. Those that keep other ones are updated apart."""
        return self.states

    def update(
        self, masters: "Tensors", grads: "Tensors", states: "States", rate: float, decay: float, step: int
    ) -> None:
        """Update parameters of one group in place, as step number `step` (from 1). `states`: by name."""
        raise NotImplementedError

    # ---- rules that read whole matrices (unit = "matrix") ------------------------------------------------------------
    # tp and ZeRO leave a rank with a part of a matrix. What comes before and after the whole matrix is computed part by
    # part, where the states are; parallel/matrices.py brings the parts together in between.

    def accumulate(self, grads: "Tensors", states: "States", step: int) -> "Tensors":
        """Take in gradients of parts of matrices: what `matrix_update` is to read of them."""
        return grads

    def matrix_update(self, matrices: "Tensor") -> "Tensor":
        """[n, rows, columns] whole matrices -> what is subtracted from the weights, times the rate. In the dtype that
        the model computes in."""
        raise NotImplementedError

    def apply(self, masters: "Tensors", updates: "Tensors", rate: float, decay: float) -> None:
        """Update parts of the weights in place."""
        import torch

        torch._foreach_mul_([*masters], 1 - rate * decay)
        for master, update in zip(masters, updates, strict=True):
            master.add_(update, alpha=-rate)

    def matrix_flops(self, rows: int, columns: int) -> float:
        """FLOPs of `matrix_update` on one matrix: by these, matrices are dealt out to ranks."""
        return float(rows * columns)

    def matrix_memory(self, rows: int, columns: int) -> int:
        """Elements that `matrix_update` holds for one matrix at its most, beside the matrix itself."""
        return rows * columns

    # ---- a GPU's kernel, and the reference ---------------------------------------------------------------------------

    def fused_update(
        self,
        master: "Tensor",
        states: "Mapping[str, Tensor]",
        scale: "Tensor",
        compute_copy: "Tensor | None",
        rate: float,
        decay: float,
        step: int,
    ) -> None:
        """On a GPU, in one pass over memory: update one float32 parameter, with its gradient times `scale`, and cast it
        into the model's `compute_copy`."""
        raise NotImplementedError

    def stock(self, groups: list[dict[str, Any]], **options: Any) -> "torch.optim.Optimizer":
        """PyTorch's own optimizer with these settings: the verifier's reference, and the benchmarks' peers.

        Groups have "weight_decay"; the verifier's also have "rule", "lr_factor" and "about", the `Parameter` of each of
        "params", and it sets their "lr" before each step.
        """
        raise NotImplementedError


def _owner(kind: type, member: str) -> type:
    """The class in which a member of `kind` is written."""
    return next(owner for owner in kind.__mro__ if member in vars(owner))


class UnknownOptimizer(OptimizerConfig, frozen=True, kw_only=True):
    """One that a stored job names, and whose module nobody has imported here: its settings, and no rule.

    What reads a run, or its weights alone, needs no more.
    """

    def rules(self) -> list[Rule]:
        return [(False, untrusted_problem("optimizer.name", self.name))]


# ---- what is asked of an optimizer ----------------------------------------------------------------------------------


def states_of(config: OptimizerConfig, parameter: "Parameter") -> tuple[str, ...]:
    """Which states it keeps for a parameter."""

    def odd(found: object) -> str:
        fits = isinstance(found, tuple | list) and all(found.count(one) == 1 and one in config.states for one in found)
        return "" if fits else value_text(found)

    return tuple(
        ask(config, "states_of", parameter, wanted=Wanted(f"some of its states, {config.states}, each once", odd))
    )


def group_of(config: OptimizerConfig, parameter: "Parameter") -> ParamGroup:
    """The group that it puts a parameter into, as a job's `groups` change it."""
    return apply_settings(_own_group(config, parameter), config.groups, parameter.name)


def _own_group(config: OptimizerConfig, parameter: "Parameter") -> ParamGroup:
    group: ParamGroup = ask(config, "group", parameter, wanted=WANTED_GROUP)
    if group.rule == "matrix" and (lack := _no_matrix(config, parameter)):
        raise wrong(config, "group", f'gave rule="matrix" for {parameter.name}, {lack}')
    return group


def _no_matrix(config: OptimizerConfig, parameter: "Parameter") -> str:
    """Why a parameter cannot be read as whole matrices; empty where it can."""
    if config.unit == "element":
        return 'and its class has unit="element"'
    if len(parameter.shape) != 2 or parameter.kind in ("norm", "bias"):
        return f"a {parameter.kind} of shape {[*parameter.shape]}, which is no matrix"
    return ""


def reads_whole(config: OptimizerConfig, parameter: "Parameter") -> bool:
    """Whether it reads a parameter's matrices whole."""
    return _own_group(config, parameter).rule == "matrix"


def group_problems(config: OptimizerConfig, parameters: "Sequence[Parameter]") -> list[str]:
    """What is wrong with its groups and states for the parameters of a model."""
    if isinstance(config, UnknownOptimizer):
        return []
    matrices: dict[tuple[int, ...], None] = {}
    try:
        for parameter in parameters:
            if _own_group(config, parameter).rule == "matrix":
                matrices[parameter.shape] = None
            states_of(config, parameter)
        for rows, columns in matrices:
            matrix_flops(config, rows, columns)
            matrix_memory(config, rows, columns)
    except UserError as error:
        return error.coded
    return [*match_problems(config.groups, [parameter.name for parameter in parameters])]


@contextmanager
def reading(config: OptimizerConfig, member: str, states: "States") -> Iterator[None]:
    """A context in which a plugin's member, its own or one of ours that it has inherited, is given some of its
    states."""
    try:
        yield
    except KeyError as error:
        if not is_plugin(config.name) or error.args[0] not in {*config.states} - states.keys():
            raise
        kept = f"states_of keeps {', '.join(states) or 'none'} for these parameters"
        raise wrong(config, member, f"reads the state {error.args[0]}, and {kept}") from error


def check_update(config: OptimizerConfig, masters: "Tensors", states: "States") -> None:
    """Raises UserError if a plugin's `update` has left tensors of another shape or dtype: others count on these."""
    for name, tensors in {**states, "the weights": masters}.items() if is_plugin(config.name) else ():
        for tensor, master, grad in zip(tensors, masters, (one.grad for one in masters), strict=True):
            like = master if grad is None or name != "the weights" else grad
            if tensor.shape != like.shape or tensor.dtype != master.dtype:
                left = f"has left {name} as {value_text(tensor)}, and not as it was given {value_text(like)}"
                raise wrong(config, "update", left)


def matrix_flops(config: OptimizerConfig, rows: int, columns: int) -> float:
    return float(ask(config, "matrix_flops", rows, columns, wanted=WANTED_AMOUNT))


def matrix_memory(config: OptimizerConfig, rows: int, columns: int) -> int:
    return int(ask(config, "matrix_memory", rows, columns, wanted=WANTED_AMOUNT))
