"""The job: one TOML file, KEY=VALUE changes on top, and everything that is wrong with them.

No torch here: a bad job is refused before anything heavy is imported and before any process starts.
"""

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fivefold.data import SOURCES
from fivefold.data.base import DataSource
from fivefold.data.shards import TokenShards
from fivefold.job.named_listeners import listener_problems
from fivefold.job.table import NESTED_KEYS
from fivefold.layout.layout import Layout
from fivefold.losses import LOSSES
from fivefold.losses.base import Loss, reduced_problems
from fivefold.losses.cross_entropy import CrossEntropy
from fivefold.optim import OPTIMIZERS
from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig, group_problems
from fivefold.schedules.registry import is_file
from fivefold.spec.model import ModelSpec
from fivefold.support.dtypes import Dtype
from fivefold.support.errors import Problem, UserError
from fivefold.support.plugins import Sections, is_plugin
from fivefold.support.ranges import MAX_SECONDS, MAX_STEPS, SEQUENCES, outside, within
from fivefold.support.storage_place import remote_of

Compile = Literal["auto", "on", "off"]
Steps = Annotated[int, within(1, MAX_STEPS)]
NoneOrMore = Annotated[int, within(0, MAX_STEPS, "0 means none")]
BALANCE_RATE = 0.001  # DeepSeek-V3's (arXiv 2412.19437, section 4.2)


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: Steps = 300
    batch: Annotated[int, within(1, SEQUENCES)] = 16  # sequences per step, over all ranks and microbatches
    seed: int = 0  # of weights and dropout
    dtype: Dtype = "float32"  # compute dtype, also as fp32, bf16, fp64; bfloat16 keeps float32 master weights
    # Of models with experts. How far a step moves the biases of model.experts.balance_bias; and the factors of two
    # losses: of the load of each row, and of the squared log-partition of routers.
    balance_rate: Annotated[float, within(0, 1, "0 moves no bias")] = BALANCE_RATE
    balance_loss: Annotated[float, within(0, 1000, "0 means none")] = 0.0
    router_z_loss: Annotated[float, within(0, 1000, "0 means none")] = 0.0
    # mixed: a GPU for as many ranks of a node as it has, the CPU for the others; gloo joins them all.
    device: Literal["auto", "cpu", "cuda", "mixed"] = "auto"
    # Backend of ranks that share a GPU. nccl: real NCCL over sockets, each rank posing as its own host; not for timing.
    share_gpu: Literal["gloo", "nccl"] = "gloo"
    compile: Compile = "auto"  # torch.compile of blocks and the loss; auto: on a GPU
    fp8: bool = False  # matmuls of blocks in 8-bit floats, with a scale for each tensor; not of experts
    fp8_experts: bool = False  # matmuls of experts, with a scale for each row; weights' gradients stay in bfloat16
    deterministic: bool = True  # the same run twice gives the same bits; on CUDA that costs some (docs/speed.md)
    eval_every: NoneOrMore = 0  # steps between evaluations on the held-out split; 0: only at the end
    eval_samples: NoneOrMore = 64  # held-out sequences per evaluation
    log_every: Steps = 10  # steps between printed lines where there is no terminal
    count: bool = False  # count bytes held and sent, and FLOPs, in the second step, and print them at the end
    digest: bool = False  # writes a digest of every parameter after each step, for `fivefold compare runs`
    timeout: Annotated[float, within(0.001, MAX_SECONDS)] = 600.0  # seconds that a rank waits for another


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    save: bool = True  # false: never
    every: NoneOrMore = 100  # steps between checkpoints; the end of a run, and SIGTERM, always make one
    keep: Annotated[int, within(1, MAX_STEPS, "checkpoint.save=false makes none")] = 2  # the newest that are kept
    keep_every: NoneOrMore = 0  # also keeps the checkpoints whose step is a multiple of this; 0: none
    memory_every: NoneOrMore = 0  # steps between snapshots in memory that outlives ranks (docs/checkpoints.md); 0: none
    url: str = ""  # object storage that has them, such as s3://bucket/runs; empty: the run's directory


class WatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A step is a spike if its loss is above the median of the last `window` steps by more than `factor` times their
    # median distance from it, and by more than a twentieth of it; or if its gradient norm is above `factor` medians.
    spike: Literal["warn", "skip", "rollback", "off"] = "warn"  # skip: no update; rollback: earlier ones are undone
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"  # if the loss or gradient norm is NaN or Inf
    window: Annotated[int, within(4, 1000)] = 64  # steps in the running median; half of them suffice at first
    factor: Annotated[float, within(1, 10**6)] = 10.0
    rollback: Steps = 10  # steps to undo before the bad one; more where no checkpoint is that close
    most: Steps = 3  # skips and rollbacks allowed within `window` steps; one more ends the run
    # A rank is slow if a phase of its steps takes `slow` times the median of the ranks that do the same work.
    slow: Annotated[float, within(0, 1000, "0 turns it off")] = 1.5
    slow_every: Steps = 10  # steps between checks
    # Silent corruption, each every so many steps.
    digests: NoneOrMore = 100  # replicas compare the bits of their state, also before every checkpoint; 0: never
    shards: NoneOrMore = 0  # state that one rank alone holds must not have changed between two updates; 0: never
    replay: NoneOrMore = 0  # each rank recomputes another's microbatch; gradients must agree to the bit; 0: never


class ElasticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `fivefold train --elastic`: what the job accepts when ranks are lost."""

    least: Annotated[int, within(1, SEQUENCES)] = 1  # ranks; with fewer the run ends, and resumes when they are back
    fixed: str = ""  # settings that every layout keeps, such as tp=2,zero=1
    whole: str = ""  # the layout with all ranks, noted here by a run that has lost some; empty: the job's own
    probe: Annotated[float, within(0.1, MAX_SECONDS)] = 30.0  # seconds between checks for lost ranks of this machine


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: NoneOrMore = 0  # to trace, into trace.json of the run's directory; 0: none
    after: NoneOrMore = 3  # steps before the first of them


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""  # empty: the job file's, or "run"
    dir: str = "runs"  # the run's own directory is made inside, and found there to resume from its last checkpoint
    tensorboard: bool = False  # a short way to write listeners = ["tensorboard"]
    listeners: tuple[str, ...] = ()  # tensorboard, wandb, mlflow, or package.module:Name (docs/plugins.md)
    weights: str = ""  # a checkpoint, or a run's newest, whose weights a new run starts from; empty: random ones
    cluster: str = ""  # what the job was planned for, such as 8x8xH100: `launch` asks for it, `doctor` compares with it

    @property
    def heard(self) -> list[str]:
        """Its listeners, each once."""
        return list(dict.fromkeys((*self.listeners, *(["tensorboard"] if self.tensorboard else []))))


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a run is made of: the sections of a job file. `read_job` makes one; `problems` says what is wrong."""

    model: ModelSpec
    layout: Layout = Layout()
    data: DataSource = TokenShards()
    optimizer: OptimizerConfig = AdamW()
    loss: Loss = CrossEntropy()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: WatchConfig = WatchConfig()
    elastic: ElasticConfig = ElasticConfig()
    trace: TraceConfig = TraceConfig()
    run: RunConfig = RunConfig()

    @property
    def plugins(self) -> list[str]:
        """What it names of modules of a user's own; commands that read it as a stored one are told by --plugin."""
        schedule = "" if is_file(self.layout.schedule) else self.layout.schedule
        kinds = (kind.name for layer in self.model.pattern for kind in layer.branches)
        classes = (self.data.source, self.optimizer.name, self.loss.name, schedule)
        names = dict.fromkeys((*classes, *kinds, *self.run.listeners))
        return [name for name in names if is_plugin(name)]

    def problems(self, world: int | None = None, ranks_by: str = "--nproc", unread: Collection[str] = ()) -> list[str]:
        """Everything wrong with the values, beyond their types; `ranks_by` is how the reader gets a number of ranks.
        Nothing is said of `unread` sections, whose values are not the user's, nor of what depends on them."""
        model = [] if "model" in unread else self.model.problems()
        # A layout is held against numbers that make sense, and their absence has been reported already.
        seq, batch = max(1, self.data.seq), max(1, self.train.batch)
        checks: list[tuple[str, Iterable[str]]] = [
            *((name, self._ranges(name)) for name in SECTIONS if name != "layout"),
            ("optimizer", own := OPTIMIZERS.problems(self.optimizer)),
            ("optimizer model", [] if model or own else group_problems(self.optimizer, self.model.parameters())),
            ("loss", [*LOSSES.problems(self.loss), *reduced_problems(self.loss)]),
            ("train layout model data", self._fp8()),
            ("train model", self._fp8_experts()),
            ("train model", self._balance()),
            ("watch checkpoint train", self._watch()),
            ("data", SOURCES.problems(self.data)),
            ("run", listener_problems(self.run.listeners)),
            ("data model", self._positions()),
            ("train trace", self._traced()),
            ("run", self._name()),
            ("checkpoint layout", self._storage()),
        ]
        problems = [*model]
        for sections, found in checks:
            problems += [] if set(sections.split()) & set(unread) else found
        if model or "layout" in unread:
            return problems
        if "model" in unread:
            return [*problems, *self._ranges("layout")]
        given = {"seq": None if "data" in unread else seq, "batch": None if "train" in unread else batch}
        return [*problems, *self.layout.problems(self.model, world=world, ranks_by=ranks_by, **given)]

    def _ranges(self, section: str) -> Iterable[str]:
        return outside(getattr(self, section), section).values()

    def _positions(self) -> Iterator[Problem]:
        seq, context = self.data.seq, self.model.context
        if self.model.positions == "learned" and seq > context:
            yield Problem(
                "data.seq.positions",
                f"data.seq={seq} is longer than the {context} learned positions of {self.model.name}; nearest: "
                f"data.seq={context}",
            )

    def _traced(self) -> Iterator[Problem]:
        steps, traced, after = self.train.steps, self.trace.steps, self.trace.after
        if min(traced, after) >= 0 and traced and after + traced > steps:
            yield Problem(
                "trace.steps.end",
                f"trace.steps={traced} after trace.after={after} steps are more than train.steps={steps}; nearest: "
                f"train.steps={after + traced}",
            )

    def _name(self) -> Iterator[Problem]:
        name = self.run.name
        if not (Path(name).name == name != ".." and name.isprintable() and len(os.fsencode(name)) < 200):
            plain = "must be a plain name, of less than 200 bytes and without slashes"
            yield Problem("run.name.plain", f"run.name={name!r} {plain}")

    def _storage(self) -> list[str]:
        """What is wrong with where checkpoints are to lie."""
        if not self.checkpoint.url:
            return []
        try:
            place = remote_of(self.checkpoint.url)
        except UserError as error:
            return error.framed("checkpoint.url: ")
        if place.protocol == "memory" and self.layout.world > 1:
            shared = f"checkpoint.url={place} is the memory of one process, and the layout has {self.layout.world}"
            return [Problem("checkpoint.url.memory", shared)]
        return []

    def _fp8(self) -> Iterator[Problem]:
        """What 8-bit products ask for, where they are asked for."""
        train, layout, model = self.train, self.layout, self.model
        if not train.fp8:
            return
        if train.dtype != "bfloat16":
            yield Problem("train.fp8.dtype", f"train.fp8=true rounds from train.dtype=bfloat16, not {train.dtype}")
        if layout.tp != 1:
            yield Problem("train.fp8.tp", f"train.fp8=true is for layouts with tp=1, not tp={layout.tp}")
        if layout.pp > 1 and layout.splits_backward:
            yield Problem(
                "train.fp8.schedule",
                f"train.fp8=true is for schedules without passes for weight gradients alone, not {layout.schedule}; "
                "nearest: schedule=1f1b",
            )
        tokens = train.batch // max(1, layout.size("batch") * layout.microbatches) * self.data.seq // max(1, layout.cp)
        widths = {
            "hidden": model.hidden,
            "ffn": model.ffn,
            "heads x head_dim": model.heads * model.head_dim,
            "kv_heads x head_dim": model.kv_heads * model.head_dim,
            "tokens of a microbatch on a rank": tokens,
        }
        if odd := _odd(widths):
            yield Problem("train.fp8.widths", f"train.fp8=true takes widths that are multiples of 16, not {odd}")

    def _fp8_experts(self) -> Iterator[Problem]:
        setting, train, experts = "train.fp8_experts=true", self.train, self.model.experts
        if not train.fp8_experts:
            return
        if experts is None:
            yield Problem("train.fp8_experts.dense", f"{setting} is for experts, and {self.model.name} has none")
            return
        if train.dtype != "bfloat16":
            yield Problem("train.fp8_experts.dtype", f"{setting} rounds from train.dtype=bfloat16, not {train.dtype}")
        if odd := _odd({"model.hidden": self.model.hidden, "model.experts.ffn": experts.ffn}):
            yield Problem("train.fp8_experts.widths", f"{setting} takes widths that are multiples of 16, not {odd}")

    def _balance(self) -> Iterator[Problem]:
        """What keeps the load of experts even has no effect where there is nothing of the kind."""
        train, experts, model = self.train, self.model.experts, self.model.name
        if experts is None and train.balance_loss:
            dense = f"train.balance_loss={train.balance_loss} is for experts, and {model} has none"
            yield Problem("train.balance_loss.dense", dense)
        if experts is None and train.router_z_loss:
            dense = f"train.router_z_loss={train.router_z_loss} is for experts, and {model} has none"
            yield Problem("train.router_z_loss.dense", dense)
        if train.balance_rate not in (0, BALANCE_RATE) and not (experts is not None and experts.balance_bias):
            yield Problem(
                "train.balance_rate.bias",
                f"train.balance_rate={train.balance_rate} moves the biases of model.experts.balance_bias=true, and "
                f"{model} has none",
            )

    def _watch(self) -> Iterator[Problem]:
        """What watchers ask for."""
        watch, kept = self.watch, self.checkpoint
        asked = [f"watch.{name}=rollback" for name in ("spike", "nonfinite") if getattr(watch, name) == "rollback"]
        interval, back = kept.every if kept.save else 0, " and ".join(asked)
        steps = max(
            (kept.keep - 1) * interval, kept.memory_every
        )  # that the oldest is behind, at least: memory has two
        if asked and not interval and not kept.memory_every:
            none = "checkpoint.save=false" if not kept.save else "checkpoint.every=0"
            way = f"{back} goes back to a checkpoint, and {none} makes none; nearest: skip"
            yield Problem("watch.rollback.checkpoint", way)
        elif asked and steps < watch.rollback:
            has, more = "two of checkpoint.memory_every", f"memory_every={watch.rollback}"
            if interval:
                has = f"checkpoint.keep={kept.keep} of checkpoint.every={interval}"
                more = f"keep={-(-watch.rollback // interval) + 1}"
            yield Problem(
                "watch.rollback.steps",
                f"{back} goes back watch.rollback={watch.rollback} steps, and {has} steps may have {steps} of them; "
                f"nearest: checkpoint.{more}",
            )
        if watch.replay and not self.train.deterministic:
            yield Problem(
                "watch.replay.deterministic",
                f"watch.replay={watch.replay} compares bits, and train.deterministic=false computes others each time",
            )
        if not (watch.slow == 0 or watch.slow > 1):
            yield Problem("watch.slow.factor", f"watch.slow={watch.slow} is a factor: above 1, or 0 for none")


def _odd(widths: dict[str, int]) -> str:
    """Those that 8-bit products cannot have."""
    return ", ".join(f"{name}={width}" for name, width in widths.items() if width % 16)


NAMED_SECTIONS: dict[str, Sections[Any]] = {registry.section: registry for registry in (SOURCES, OPTIMIZERS, LOSSES)}
SECTIONS: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(Job) if field.name != "model"}
SECTION_KEYS: dict[str, list[str]] = {  # of every section, and of tables in one
    "model": ["preset", "config", *ModelSpec.__struct_fields__],
    **{f"model.{name}": keys for name, keys in NESTED_KEYS.items()},
    **{name: list(kind.__struct_fields__) for name, kind in SECTIONS.items()},
    **{name: registry.keys() for name, registry in NAMED_SECTIONS.items()},
}
