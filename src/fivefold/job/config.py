"""The job: one TOML file, KEY=VALUE changes on top, and everything that is wrong with them.

    job = read_job("job.toml", ["optimizer.lr=3e-4", "train.steps=200", "layout=dp=2,tp=2"])

No torch here: a bad job is refused before anything heavy is imported and before any process starts.
"""

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fivefold.data import SOURCES
from fivefold.data.base import DataSource
from fivefold.data.shards import TokenShards
from fivefold.job.aliases import apart, dtype_problem, explain
from fivefold.job.listeners import LISTENERS, listener_problems, names_in
from fivefold.job.table import NESTED_KEYS, Table, apply, model_of
from fivefold.layout.layout import Layout, schedule_named
from fivefold.losses import LOSSES
from fivefold.losses.base import Loss, reduced_problems
from fivefold.losses.cross_entropy import CrossEntropy
from fivefold.optim import OPTIMIZERS
from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig, group_problems
from fivefold.schedules.info import ScheduleInfo
from fivefold.schedules.registry import is_file
from fivefold.spec.model import ModelSpec
from fivefold.spec.pattern import KIND_REGISTRIES, names_in_pattern
from fivefold.spec.presets import preset
from fivefold.support.dtypes import Dtype, dtype_of
from fivefold.support.errors import Note, Problem, UserError
from fivefold.support.parsing import Missing, number_problems, path_of, read, read_toml, toml_value, unknown_key
from fivefold.support.plugins import Sections, find_value, is_plugin
from fivefold.support.ranges import MAX_SECONDS, MAX_STEPS, SEQUENCES, outside, within
from fivefold.support.storage_place import remote_of
from fivefold.support.text import did_you_mean

Compile = Literal["auto", "on", "off"]
Steps = Annotated[int, within(1, MAX_STEPS)]
NoneOrMore = Annotated[int, within(0, MAX_STEPS, "0 means none")]
EXAMPLES_DIR = Path(__file__).parent.parent / "examples"  # jobs that are installed with the package
RECIPES_DIR = EXAMPLES_DIR.parent / "recipes"
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
    listeners: tuple[str, ...] = ()  # what hears of the run: tensorboard, or package.module:Name (docs/plugins.md)
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
_SCHEDULES = ("layout", "layout.schedule")
# How changes that name a plugin begin.
NAMING_PREFIXES = tuple(
    f"{name}=" for name in (*(its.setting for its in NAMED_SECTIONS.values()), LISTENERS.setting, *_SCHEDULES)
)
SECTION_KEYS: dict[str, list[str]] = {  # of every section, and of tables in one
    "model": ["preset", "config", *ModelSpec.__struct_fields__],
    **{f"model.{name}": keys for name, keys in NESTED_KEYS.items()},
    **{name: list(kind.__struct_fields__) for name, kind in SECTIONS.items()},
    **{name: registry.keys() for name, registry in NAMED_SECTIONS.items()},
}


def read_job(path: str | Path | None = None, changes: Sequence[str] = ()) -> Job:
    """The job of the file `path` (none: all defaults) with `changes`, KEY=VALUE; raises all problems of form at once.

    >>> ff.read_job(None, ["optimizer.lr=3e-4", "layout=dp=2"]).optimizer.lr
    0.0003
    """
    file = path_of(path) if path is not None else None
    table = _table_of(file) if file else {}
    return resolve(table, changes, file.stem if file else "run", stored=file is not None and lies_in_run(file))


def lies_in_run(file: Path) -> bool:
    """Whether a job file lies in a run's directory, at any depth: then it came with the run, not from its user."""
    for folder in {Path(os.path.abspath(file)).parent, file.resolve().parent}:
        here = ("checkpoints", "claim", "progress.json")
        if "checkpoints" in folder.parts or any(os.path.lexists(folder / name) for name in here):
            return True
        # Further up only what no other directory has: that of a user's projects may well have one of checkpoints.
        above = ("metrics.jsonl", "environment.json")
        if any(os.path.lexists(parent / name) for parent in (folder, *folder.parents) for name in above):
            return True
    return False


def _table_of(file: Path) -> Table:
    table = _read_job(_file_of(file))
    if isinstance(layout := table.get("layout"), dict) and isinstance(name := layout.get("schedule"), str):
        beside = file.parent / name  # a schedule file may lie beside the job
        if os.path.isfile(beside) and not os.path.exists(name):
            table["layout"] = layout | {"schedule": str(beside)}
    return table


def resolve(table: Table, changes: Sequence[str] = (), name: str = "run", *, stored: bool = False) -> Job:
    """The job of a table with changes, which are laid over the table itself; a run without a name gets `name`.

    What a `stored` table names is not imported (support/plugins.py); what the changes name is.
    """
    of_its_own = "model" in table
    problems: list[str] = []
    layouts = [change.removeprefix("layout=") for change in changes if change.startswith("layout=")]
    problems += apart(changes, "".join(layouts[-1:]), "layout=")
    before = {name: _name_in(table, registry) for name, registry in NAMED_SECTIONS.items()}
    for change in [] if problems else changes:
        apply(table, change, problems)
    table = _move_loss_settings(table)
    given, after = {change.partition("=")[0] for change in changes}, list[str]()  # the model's are reported first

    def kind(name: str, named: Callable[..., Any], *settings: str) -> Any:
        """The class of a section, whose plugins are imported if they may be; None where there is none."""
        try:
            return named(table.get(name), trusted=not stored or bool(given.intersection(settings)))
        except UserError as error:
            after.extend(error.coded)
            return None

    kinds = {name: kind(name, registry.of, registry.setting) for name, registry in NAMED_SECTIONS.items()}
    known = dict[str, list[str]]()
    for section, registry in NAMED_SECTIONS.items():
        its, was = kinds[section], before[section]
        if its and was not in (None, _name_in(table, registry)):
            _drop_settings_of(was, table[section], registry, its, given)
        # Of a class that is not here nobody knows the settings.
        known[section] = registry.keys(its) if its else [*table.get(section, ())]
    explain(table, SECTION_KEYS | known, problems)
    problems += [unknown_key("", key, ["model", *SECTIONS]) for key in table if key not in ("model", *SECTIONS)]
    kinds["layout"] = kind("layout", _layout_kind, *_SCHEDULES)
    kinds["run"] = kind("run", _run_kind, LISTENERS.setting)
    sections = {name: _section(name, table.get(name, {}), after, its) for name, its in (SECTIONS | kinds).items()}
    _import_kinds(table.get("model"), problems, trusted=not stored or "model.pattern" in given)
    model = model_of(table.get("model", {}), sections["data"], problems, of_its_own=of_its_own)
    problems += after
    unread = [key for key, section in (sections | {"model": model}).items() if section is None]
    if problems or unread or model is None:
        rest = {key: section for key, section in sections.items() if section is not None}
        others = Job(model=model or preset("tiny"), **rest).problems(unread=unread)
        raise UserError([*problems, *others])
    if not sections["run"].name:
        sections["run"] = msgspec.structs.replace(sections["run"], name=name)
    return Job(model=model, **sections)


def _name_in(table: Table, registry: Sections[Any]) -> Any:
    """What a table calls the class of a section; None if it does not say."""
    section = table.get(registry.section)
    return section.get(registry.key) if isinstance(section, dict) else None


def _drop_settings_of(before: Any, section: Table, registry: Sections[Any], kind: type[Any], given: set[str]) -> None:
    """Take out of a section what only the class had that it named before a change gave it another one."""
    keys = registry.keys(kind)
    dropped = [key for key in section if key not in keys and f"{registry.section}.{key}" not in given]
    for key in dropped:
        del section[key]
    if dropped:
        settings = ", ".join(f"{registry.section}.{key}" for key in dropped)
        warnings.warn(Note(f"{settings} of {before} fell away: {section[registry.key]} does not have it"), stacklevel=3)


def _move_loss_settings(table: Table) -> Table:
    """The table with the loss's settings in their own section: in the first releases they were in [train]."""
    train, loss = table.get("train"), table.get("loss", {})
    if not isinstance(train, dict) or not isinstance(loss, dict):
        return table
    moved = {key: train[key] for key in ("label_smoothing", "z_loss") if key in train}
    rest = {key: value for key, value in train.items() if key not in moved}
    return table | {"train": rest, "loss": loss | moved} if moved else table


def _import_kinds(model: Any, problems: list[str], *, trusted: bool) -> None:
    """Import the plugins that a model's pattern names, if it is `trusted`; what cannot be used is taken out of it."""
    refused = set[tuple[str, str]]()  # a plugin in several entries is refused once
    for number, place, name in names_in_pattern(model.get("pattern")) if isinstance(model, dict) else ():
        if is_plugin(name) and (place, name) in refused:
            continue
        try:
            KIND_REGISTRIES[place].named(name, trusted=trusted)
        except UserError as error:
            problems += number_problems(error.coded, f"model.pattern[{number}]")
            model.pop("pattern", None)
            refused.add((place, name))


def _file_of(path: Path) -> Path:
    """The file; where there is none, the example or recipe of that name that comes with the package."""
    example = installed_job(path)
    if os.path.isfile(path) or example is None:
        return path
    warnings.warn(Note(f"there is no file {path} here; the job is Fivefold's own example {example}"), stacklevel=3)
    return example


def installed_job(path: Path) -> Path | None:
    """The job of that name that comes with the package."""
    name = path.name.removesuffix(".toml") + ".toml"
    homes = [home for home in (EXAMPLES_DIR, RECIPES_DIR) if path.parent in (Path(), Path(home.name))]
    return next((home / name for home in homes if os.path.isfile(home / name)), None)


def _read_job(path: Path) -> Table:
    try:
        return read_toml(path)
    except Missing:
        beside = path.parent if os.path.isdir(path.parent) else Path()
        others = sorted(str(file) for file in beside.glob("*.toml") if file.name != "pyproject.toml")
        hint = did_you_mean(str(path), others) if others else "'fivefold train' without one trains the built-in demo"
        raise UserError(f"no job file {path}; {hint}", "job.file") from None


def _layout_kind(value: Any, *, trusted: bool) -> type[Layout]:
    """A layout, once there is the schedule that it names."""
    if isinstance(value, str | dict) and is_plugin(name := schedule_named(value)) and not is_file(name):
        find_value("layout.schedule", name, ScheduleInfo, trusted=trusted)
    return Layout


def _run_kind(value: Any, *, trusted: bool) -> type[RunConfig]:
    """A run, once the listeners that it names are imported."""
    names = names_in(value.get("listeners", ())) if isinstance(value, dict) else ()
    if problems := listener_problems(names if isinstance(names, list | tuple) else (), trusted=trusted):
        raise UserError(problems)
    return RunConfig


def _section(section: str, value: Any, problems: list[str], kind: Any) -> Any:
    """An object of the section's class; None where there are problems."""
    if kind is None:
        return None
    try:
        if kind is Layout and isinstance(value, str | dict):
            return Layout.parse(value) if isinstance(value, str) else Layout.from_dict(value)
        if not isinstance(value, dict):
            raise UserError(f"{section}={value!r} is not a table of settings", f"{section}.type")
        if isinstance(word := value.get("dtype") if section == "train" else None, str):
            sentence = dtype_problem(word)
            problems += [sentence] if sentence else []
            value = value | {"dtype": "bfloat16" if sentence else dtype_of(word)}
        if kind is RunConfig and "listeners" in value:
            value = value | {"listeners": names_in(value["listeners"])}
    except UserError as error:
        problems += error.coded
        return None
    return read(kind, value, section, problems)


def job_from(table: Table) -> Job:
    """A job as a checkpoint has it. The first releases knew one scaling of rotary positions, and did not name it."""
    table = _move_loss_settings(table)
    model, own = (
        table["model"],
        {name: registry.stored(table.get(name, {})) for name, registry in NAMED_SECTIONS.items()},
    )
    if scaling := model.get("rope_scaling"):
        model = model | {"rope_scaling": {"kind": "llama3"} | scaling}
    others = {key: section for key, section in table.items() if key not in NAMED_SECTIONS}
    return msgspec.structs.replace(msgspec.convert(others | {"model": model}, Job), **own)


def to_toml(job: Job) -> str:
    """The resolved job as a file that `fivefold train` runs again."""
    lines: list[str] = []
    sections = msgspec.to_builtins(job)
    if "chunks" not in job.layout.given():
        del sections["layout"]["chunks"]  # it is the schedule's own, and follows another one
    for section, table in sections.items():
        nested = {key: value for key, value in table.items() if isinstance(value, dict)}
        for name, values in [(section, table), *((f"{section}.{key}", value) for key, value in nested.items())]:
            lines.append(f"[{name}]")
            plain = {key: value for key, value in values.items() if value is not None and not isinstance(value, dict)}
            lines += [f"{key} = {toml_value(value)}" for key, value in plain.items()]
            lines.append("")
    return "\n".join(lines)


def job_of(model: str | Path | ModelSpec | Job, changes: Sequence[str] = ()) -> tuple[Job, set[str]]:
    """A job for commands that ask about a model, and the keys that were given: a job file's batch and sequence are, and
    its dtype, where it has one.

    `model` is a preset's name, a config.json or its directory, a job file, or an object; `changes` are KEY=VALUE. Its
    optimizer and loss are checked as for training: what they hold and compute is planned.
    """
    job, given = _job_of(model, changes)
    others = {"model", *SECTIONS} - {"optimizer", "loss"}
    if problems := job.problems(unread=others):
        raise UserError(problems)
    return job, given


def _job_of(model: str | Path | ModelSpec | Job, changes: Sequence[str]) -> tuple[Job, set[str]]:
    strange = [change for change in changes if "=" not in change]
    if strange:
        example = "write KEY=VALUE, for example model.layers=40"
        raise UserError(f"{strange[0]!r} is not a change; {example}", "change.form")
    named = {change.partition("=")[0] for change in changes}
    of_a_job = named | {"data.seq", "train.batch"}
    if isinstance(model, (ModelSpec, Job)):
        if changes:
            instead = "changes a model that is given as an object; change the object instead"
            raise UserError(f"{changes[0]!r} {instead}", "change.object")
        if isinstance(model, ModelSpec):
            return Job(model=model), named
        return model, of_a_job | ({"train.dtype"} if model.train.dtype != TrainConfig().dtype else set())
    name = str(model)
    if "=" in name:
        first = "is a change, and the model comes first; for example llama3-8b"
        raise UserError(f"{name!r} {first} {name}", "change.first")
    if name.endswith(".toml"):
        table = _table_of(file := path_of(name))
        said = isinstance(train := table.get("train"), dict) and "dtype" in train
        job = resolve(table, changes, file.stem, stored=lies_in_run(file))
        return job, of_a_job | ({"train.dtype"} if said else set())
    kind = "model.config" if os.path.exists(path_of(name)) or name.endswith(".json") else "model"
    return read_job(None, [f"{kind}={name}", *changes]), named
