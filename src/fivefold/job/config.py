"""The job: one TOML file, KEY=VALUE changes on top, and everything that is wrong with them.

    job = read_job("job.toml", ["optimizer.lr=3e-4", "train.steps=200", "layout=dp=2,tp=2"])

No torch here: a bad job is refused before anything heavy is imported and before any process starts.
"""

import math
import os
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fivefold.data.index import read_index
from fivefold.job.aliases import apart, dtype_problem, explain
from fivefold.layout.layout import Layout
from fivefold.optim import OPTIMIZERS, AnyOptimizer
from fivefold.optim.adamw import AdamW
from fivefold.spec.blocks import Experts, LatentSpec, RopeScaling, Yarn
from fivefold.spec.hf import read_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import PRESETS, TOYS, preset
from fivefold.support.dtypes import dtype_of
from fivefold.support.errors import Note, UserError
from fivefold.support.parsing import Missing, parse_toml, path_of, read, read_toml, toml_value, unknown_key
from fivefold.support.places import remote_of
from fivefold.support.ranges import SECONDS, SEQUENCES, STEPS, TOKENS, outside, within
from fivefold.support.text import did_you_mean

# ---- changes --------------------------------------------------------------------------------------------------------
# KEY=VALUE of a command line, laid over a job's table.
#
# apply(table, "optimizer.lr=3e-4", problems)


Table = dict[str, Any]


def apply(table: Table, change: str, problems: list[str]) -> None:
    """Lay one `section.key=value` of the command line over the table."""
    key, equals, text = change.partition("=")
    if not equals or not key:
        problems.append(f"{change!r} is not of the form section.key=value")
        return
    if any("\ud800" <= letter <= "\udfff" for letter in change):  # how Python keeps bytes that are no text
        problems.append(f"{change!r} is not of a text in UTF-8; give it other characters")
        return
    *sections, last = key.split(".")
    for section in sections:
        if isinstance(table.get(section), str):  # a layout or model by its short name, then changed field by field
            table[section] = _spread(section, table[section], problems)
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            problems.append(f"{key}: {section} is a value, not a table")
            return
    table[last] = _value(text)


def _value(text: str) -> Any:
    """A TOML value, or plain text where it is none: `1e-4`, `true`, `[1, 2]`, and bare words."""
    try:
        table = parse_toml(f"value = {text}")
        return table["value"] if len(table) == 1 else text  # lines below the first would be read by nobody
    except (ValueError, RecursionError):
        return text


def _spread(section: str, text: str, problems: list[str]) -> Table:
    """The table that a short string stands for."""
    if section == "layout":
        try:
            return Layout.parse(text).given()
        except UserError as error:
            problems += error.problems
            return {}
    return {"preset": text} if section == "model" else {}


# ---- model ----------------------------------------------------------------------------------------------------------
# The model of a job: a preset, a Hugging Face config, or all its numbers.


TAG = "kind"  # tells tables apart of which a model may have one or another
_TABLES = {"experts": (Experts,), "mla": (LatentSpec,), "rope_scaling": (RopeScaling, Yarn)}
NESTED = {key: [*chain(*(one.__struct_fields__ for one in kinds)), TAG] for key, kinds in _TABLES.items()}  # settings


def model_of(value: Any, of_its_own: bool, data: Any, problems: list[str]) -> ModelSpec | None:
    """`model = "tiny"`, or a table: a `preset` or a Hugging Face `config` and what changes it, or all the numbers.

    Where the file says nothing of a model (`of_its_own`), what the command line says changes tiny. A toy has the
    vocabulary of the job's data, unless it is given.
    """
    table = {"preset": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        problems.append(f"model={value!r} is neither a preset's name nor a table")
        return None
    bases = [key for key in ("preset", "config") if key in table]
    if len(bases) > 1:
        problems.append(f"model.preset={table['preset']!r} and model.config={table['config']!r} exclude each other")
        return None
    if not bases and not of_its_own:
        bases, table = ["preset"], {"preset": "tiny"} | table
    known = ["preset", "config", *ModelSpec.__struct_fields__]
    problems += [unknown_key("model", key, known) for key in table if key not in known]
    fields = {key: value for key, value in table.items() if key in ModelSpec.__struct_fields__}
    try:
        base: Table = {}
        if "config" in bases:
            base = msgspec.structs.asdict(read_hf_config(path_of(str(table["config"]))))
        elif bases:  # a preset leaves out what is derived from others, so that it follows them
            name = str(table["preset"])
            preset(name)  # names the nearest where there is none
            base = {"name": name} | PRESETS[name] | (_vocabulary(data) if name in TOYS else {})
    except UserError as error:
        problems += error.problems
        return None
    for key in NESTED.keys() & fields.keys():
        given, whole = fields[key], msgspec.to_builtins(base.get(key)) or {}
        if isinstance(given, dict) and given.get(TAG, whole.get(TAG)) == whole.get(TAG):
            fields[key] = whole | given  # a preset's, and what changes it
        elif given is not None and not isinstance(given, dict):
            problems.append(
                f"model.{key}={given!r} is not a table; write model.{key}.{NESTED[key][0]}=... and the like, or take a "
                f"preset without {key}"
            )
            return None
    return read(ModelSpec, base | fields, "model", problems)


def _vocabulary(data: Any) -> Table:
    """Of prepared data, if it can be read; what is wrong with it is told where the data is opened."""
    path = data.get("path") if isinstance(data, dict) else None
    try:
        return {"vocab": read_index(path_of(path)).vocab} if isinstance(path, str) and path else {}
    except UserError:
        return {}


# ---- config ---------------------------------------------------------------------------------------------------------


Compile = Literal["auto", "on", "off"]
Dtype = Literal["float32", "bfloat16", "float64"]
Steps = Annotated[int, within(1, STEPS)]
NoneOrMore = Annotated[int, within(0, STEPS, "0 means none")]
EXAMPLES = Path(__file__).parent.parent / "examples"  # jobs that are installed with the package
RECIPES = EXAMPLES.parent / "recipes"
BALANCE_RATE = 0.001  # DeepSeek-V3's (arXiv 2412.19437, section 4.2)


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str = ""  # a directory made by `fivefold data prepare`; empty: the Python standard library's own source
    seq: Annotated[int, within(1, TOKENS)] = 128  # tokens of a sample
    seed: int = 0  # of the data order
    document_mask: bool = False  # attention stays within a document


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: Steps = 300
    batch: Annotated[int, within(1, SEQUENCES)] = 16  # sequences per step, over all ranks and microbatches
    seed: int = 0  # of weights and dropout
    dtype: Dtype = "float32"  # of compute, also as fp32, bf16, fp64; bfloat16 keeps float32 master weights
    label_smoothing: float = 0.0  # share of the target's probability that is spread over the vocabulary
    z_loss: float = 0.0  # times the squared log-partition, added to the loss
    # Of models with experts. How far a step moves the biases of model.experts.balance_bias; and the factors of two
    # losses: of the load of each row, and of the squared log-partition of routers.
    balance_rate: Annotated[float, within(0, 1, "0 moves no bias")] = BALANCE_RATE
    balance_loss: Annotated[float, within(0, 1000, "0 means none")] = 0.0
    router_z_loss: Annotated[float, within(0, 1000, "0 means none")] = 0.0
    # mixed: a GPU for as many ranks of a node as it has, the CPU for the others; gloo joins them all.
    device: Literal["auto", "cpu", "cuda", "mixed"] = "auto"
    # How ranks talk that share a GPU. nccl: each is a host of its own, through sockets; real NCCL, no figure of speed.
    share_gpu: Literal["gloo", "nccl"] = "gloo"
    compile: Compile = "auto"  # torch.compile of blocks and the loss; auto: on a GPU
    fp8: bool = False  # products of blocks in 8-bit floats, with a scale for each tensor; not those of experts
    fp8_experts: bool = False  # those of experts, with a scale for each row; weights' gradients stay in bfloat16
    deterministic: bool = True  # the same run twice gives the same bits; on CUDA that costs some (docs/speed.md)
    eval_every: NoneOrMore = 0  # steps between looks at the held-out split; 0: only at the end
    eval_samples: NoneOrMore = 64  # held-out sequences per look
    log_every: Steps = 10  # steps between printed lines where there is no terminal
    count: bool = False  # count bytes held and sent, and FLOPs, in the second step, and print them at the end
    timeout: Annotated[float, within(0.001, SECONDS)] = 600.0  # seconds that a rank waits for another


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    save: bool = True  # false: never
    every: NoneOrMore = 100  # steps between checkpoints; the end of a run, and SIGTERM, always make one
    keep: Annotated[int, within(1, STEPS, "checkpoint.save=false makes none")] = 2  # the newest that are kept
    keep_every: NoneOrMore = 0  # and those of every so many steps; 0: none of them
    memory_every: NoneOrMore = 0  # steps between snapshots in memory that outlives ranks (docs/checkpoints.md); 0: none
    url: str = ""  # object storage that has them, such as s3://bucket/runs; empty: the run's directory


class WatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # A step is a spike if its loss is above the median of the last `window` steps by more than `factor` times their
    # median distance from it, and by more than a twentieth of it; or if its gradient norm is above `factor` medians.
    spike: Literal["warn", "skip", "rollback", "off"] = "warn"  # skip: no update; rollback: and those before are undone
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"  # of a loss or gradient norm that is no number
    window: Annotated[int, within(4, 1000)] = 64  # steps that say what is usual; half of them are enough to judge by
    factor: Annotated[float, within(1, 10**6)] = 10.0
    rollback: Steps = 10  # steps before the bad one that are undone, or more: as the checkpoints have it
    most: Steps = 3  # skips and rollbacks within `window` steps; at one more the run ends
    # A rank is slow if a phase of its steps takes `slow` times the median of the ranks that do the same work.
    slow: Annotated[float, within(0, 1000, "0 turns it off")] = 1.5
    slow_every: Steps = 10  # steps between looks
    # Silent corruption, each every so many steps.
    digests: NoneOrMore = 100  # ranks that hold the same compare its bits, also before every checkpoint; 0: never
    shards: NoneOrMore = 0  # what one rank alone holds must be, before an update, what the update before has left
    replay: NoneOrMore = 0  # each rank also computes a microbatch of another, and their gradients must be the same bits


class ElasticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of `fivefold train --elastic`: what the job accepts when ranks are lost."""

    least: Annotated[int, within(1, SEQUENCES)] = 1  # ranks; with fewer the run ends, and goes on when they are back
    fixed: str = ""  # choices that every layout keeps, such as tp=2,zero=1
    whole: str = ""  # the layout with all ranks, which a run that has lost some notes here; empty: the job's own
    probe: Annotated[float, within(0.1, SECONDS)] = 30.0  # seconds between looks for lost ranks of this machine


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: NoneOrMore = 0  # to trace, into trace.json of the run's directory; 0: none
    after: NoneOrMore = 3  # steps before the first of them


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""  # empty: the job file's, or "run"
    dir: str = "runs"  # the run's own directory is made inside, and found there to resume from its last checkpoint
    tensorboard: bool = False
    weights: str = ""  # a checkpoint, or a run's newest, whose weights a new run starts from; empty: random ones
    cluster: str = ""  # what the job was planned for, such as 8x8xH100: `launch` asks for it, `doctor` compares with it


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a run is made of: the sections of a job file. `read_job` makes one; `problems` says what is wrong."""

    model: ModelSpec
    layout: Layout = Layout()
    data: DataConfig = DataConfig()
    optimizer: AnyOptimizer = AdamW()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: WatchConfig = WatchConfig()
    elastic: ElasticConfig = ElasticConfig()
    trace: TraceConfig = TraceConfig()
    run: RunConfig = RunConfig()

    def problems(self, world: int | None = None, ranks_by: str = "--nproc") -> list[str]:
        """Everything wrong with the values, beyond their types; `ranks_by` is how the reader gets a number of ranks."""
        model = self.model.problems()
        # A layout is held against numbers that make sense, and their absence has been reported already.
        seq, batch = max(1, self.data.seq), max(1, self.train.batch)
        layout = [] if model else self.layout.problems(self.model, world=world, seq=seq, batch=batch, ranks_by=ranks_by)
        return [*model, *self._settings(), *self._storage(), *layout]

    def _storage(self) -> list[str]:
        """What is wrong with where checkpoints are to lie."""
        if not self.checkpoint.url:
            return []
        try:
            place = remote_of(self.checkpoint.url)
        except UserError as error:
            return [f"checkpoint.url: {problem}" for problem in error.problems]
        if place.protocol == "memory" and self.layout.world > 1:
            return [f"checkpoint.url={place} is the memory of one process, and the layout has {self.layout.world}"]
        return []

    def _fp8(self) -> list[tuple[bool, str]]:
        """What 8-bit products ask for, where they are asked for."""
        t, layout, model = self.train, self.layout, self.model
        if not t.fp8:
            return []
        widths = {"hidden": model.hidden, "ffn": model.ffn, "heads x head_dim": model.heads * model.head_dim}
        widths["kv_heads x head_dim"] = model.kv_heads * model.head_dim
        tokens = t.batch // max(1, layout.size("batch") * layout.microbatches) * self.data.seq // max(1, layout.cp)
        widths["tokens of a microbatch on a rank"] = tokens
        odd = [f"{name}={width}" for name, width in widths.items() if width % 16]
        splits = layout.pp > 1 and layout.splits_backward
        return [
            (t.dtype == "bfloat16", f"train.fp8=true rounds from train.dtype=bfloat16, not {t.dtype}"),
            (layout.tp == 1, f"train.fp8=true is for layouts with tp=1, not tp={layout.tp}"),
            (
                not splits,
                f"train.fp8=true is for schedules without passes for weight gradients alone, not {layout.schedule}; "
                "nearest: schedule=1f1b",
            ),
            (not odd, f"train.fp8=true takes widths that are multiples of 16, not {', '.join(odd)}"),
        ]

    def _fp8_experts(self) -> list[tuple[bool, str]]:
        t, experts = self.train, self.model.experts
        if not t.fp8_experts:
            return []
        if experts is None:
            return [(False, f"train.fp8_experts=true is for experts, and {self.model.name} has none")]
        widths = {"hidden": self.model.hidden, "experts.ffn": experts.ffn}
        odd = [f"model.{name}={width}" for name, width in widths.items() if width % 16]
        return [
            (t.dtype == "bfloat16", f"train.fp8_experts=true rounds from train.dtype=bfloat16, not {t.dtype}"),
            (not odd, f"train.fp8_experts=true takes widths that are multiples of 16, not {', '.join(odd)}"),
        ]

    def _whole_matrices(self) -> list[tuple[bool, str]]:
        """A rule that reads whole matrices finds them where no rank holds a part."""
        sizes = {"tp": self.layout.tp - 1, "zero": self.layout.zero}
        cut = " and ".join(f"layout.{key}" for key, size in sizes.items() if size)
        why = (
            f"optimizer.name={self.optimizer.name} reads whole matrices, and {cut} divides them; nearest: tp=1, zero=0"
        )
        return [(not (self.optimizer.whole_matrices and cut), why)]

    def _balance(self) -> list[tuple[bool, str]]:
        """What keeps the load of experts even has no effect where there is nothing of the kind."""
        t, experts = self.train, self.model.experts
        losses = {"balance_loss": t.balance_loss, "router_z_loss": t.router_z_loss}
        return [
            *(
                (
                    experts is not None or not factor,
                    f"train.{name}={factor} is for experts, and {self.model.name} has none",
                )
                for name, factor in losses.items()
            ),
            (
                t.balance_rate in (0, BALANCE_RATE) or (experts is not None and experts.balance_bias),
                f"train.balance_rate={t.balance_rate} moves the biases of model.experts.balance_bias=true, and "
                f"{self.model.name} has none",
            ),
        ]

    def _watch(self) -> list[tuple[bool, str]]:
        """What watchers ask for."""
        watch, kept = self.watch, self.checkpoint
        asked = [f"watch.{name}=rollback" for name in ("spike", "nonfinite") if getattr(watch, name) == "rollback"]
        every, back = kept.every if kept.save else 0, " and ".join(asked)
        none = "checkpoint.save=false" if not kept.save else "checkpoint.every=0"
        steps = max((kept.keep - 1) * every, kept.memory_every)  # that the oldest is behind, at least: memory has two
        has = f"checkpoint.keep={kept.keep} of checkpoint.every={every}" if every else "two of checkpoint.memory_every"
        more = f"keep={-(-watch.rollback // max(1, every)) + 1}" if every else f"memory_every={watch.rollback}"
        return [
            (
                not asked or bool(every or kept.memory_every),
                f"{back} goes back to a checkpoint, and {none} makes none; nearest: skip",
            ),
            (
                not asked or not (every or kept.memory_every) or steps >= watch.rollback,
                f"{back} goes back watch.rollback={watch.rollback} steps, and {has} steps may have {steps} of them; "
                f"nearest: checkpoint.{more}",
            ),
            (
                not watch.replay or self.train.deterministic,
                f"watch.replay={watch.replay} compares bits, and train.deterministic=false computes others each time",
            ),
            (watch.slow == 0 or watch.slow > 1, f"watch.slow={watch.slow} is a factor: above 1, or 0 for none"),
        ]

    def _settings(self) -> list[str]:
        t, d, name = self.train, self.data, self.run.name
        traced, after = self.trace.steps, self.trace.after
        learned = self.model.positions == "learned"
        rules = [
            *self.optimizer.rules(),
            *self._whole_matrices(),
            (0 <= t.label_smoothing < 1, f"train.label_smoothing={t.label_smoothing} is a share: 0 <= it < 1"),
            (0 <= t.z_loss < math.inf, f"train.z_loss={t.z_loss} must not be negative; 0 turns it off"),
            *self._fp8(),
            *self._fp8_experts(),
            *self._balance(),
            *self._watch(),
            (
                not learned or d.seq <= self.model.context,
                f"data.seq={d.seq} is longer than the {self.model.context} learned positions of {self.model.name}; "
                f"nearest: data.seq={self.model.context}",
            ),
            (
                min(traced, after) < 0 or not traced or after + traced <= t.steps,
                f"trace.steps={traced} after trace.after={after} steps are more than train.steps={t.steps}; nearest: "
                f"train.steps={after + traced}",
            ),
            (
                Path(name).name == name != ".." and name.isprintable() and len(os.fsencode(name)) < 200,
                f"run.name={name!r} must be a plain name, of less than 200 bytes and without slashes",
            ),
        ]
        ranges = [outside(getattr(self, section), section).values() for section in SECTIONS if section != "layout"]
        return [*chain(*ranges), *(sentence for holds, sentence in rules if not holds)]


SECTIONS: dict[str, Any] = {field.name: field.type for field in msgspec.structs.fields(Job) if field.name != "model"}
KEYS: dict[str, list[str]] = {  # of every section, and of tables in one
    "model": ["preset", "config", *ModelSpec.__struct_fields__],
    **{f"model.{name}": keys for name, keys in NESTED.items()},
    **{name: list(kind.__struct_fields__) for name, kind in SECTIONS.items() if name != "optimizer"},
    "optimizer": ["name", *chain(*(kind.__struct_fields__ for kind in OPTIMIZERS.values()))],
}


def read_job(path: str | Path | None = None, changes: Sequence[str] = ()) -> Job:
    """The job of the file `path` (none: all defaults) with `changes`, KEY=VALUE; raises all problems of form at once.

    >>> ff.read_job(None, ["optimizer.lr=3e-4", "layout=dp=2"]).optimizer.lr
    0.0003
    """
    file = path_of(path) if path is not None else None
    return resolve(_table_of(file) if file else {}, changes, file.stem if file else "run")


def _table_of(file: Path) -> Table:
    table = _read_job(_found(file))
    if isinstance(layout := table.get("layout"), dict) and isinstance(name := layout.get("schedule"), str):
        beside = file.parent / name  # a schedule file may lie beside the job
        if os.path.isfile(beside) and not os.path.exists(name):
            table["layout"] = layout | {"schedule": str(beside)}
    return table


def resolve(table: Table, changes: Sequence[str] = (), name: str = "run") -> Job:
    """The job of a table with changes, which are laid over the table itself; a run without a name gets `name`."""
    of_its_own = "model" in table
    problems: list[str] = []
    layouts = [change.removeprefix("layout=") for change in changes if change.startswith("layout=")]
    problems += apart(changes, "".join(layouts[-1:]), "layout=")
    for change in [] if problems else changes:
        apply(table, change, problems)
    explain(table, KEYS, problems)
    problems += [unknown_key("", key, ["model", *SECTIONS]) for key in table if key not in ("model", *SECTIONS)]
    model = model_of(table.get("model", {}), of_its_own, table.get("data"), problems)
    sections = {name: _section(name, table.get(name, {}), problems) for name in SECTIONS}
    if problems or model is None:
        raise UserError(problems)
    if not sections["run"].name:
        sections["run"] = msgspec.structs.replace(sections["run"], name=name)
    return Job(model=model, **sections)


def _found(path: Path) -> Path:
    """The file; where there is none, the example or recipe of that name that comes with the package."""
    example = installed(path)
    if os.path.isfile(path) or example is None:
        return path
    warnings.warn(Note(f"there is no file {path} here; the job is Fivefold's own example {example}"), stacklevel=3)
    return example


def installed(path: Path) -> Path | None:
    """The job of that name that comes with the package."""
    name = path.name.removesuffix(".toml") + ".toml"
    homes = [home for home in (EXAMPLES, RECIPES) if path.parent in (Path(), Path(home.name))]
    return next((home / name for home in homes if os.path.isfile(home / name)), None)


def _read_job(path: Path) -> Table:
    try:
        return read_toml(path)
    except Missing:
        beside = path.parent if os.path.isdir(path.parent) else Path()
        others = sorted(str(file) for file in beside.glob("*.toml") if file.name != "pyproject.toml")
        hint = did_you_mean(str(path), others) if others else "'fivefold train' without one trains the built-in demo"
        raise UserError(f"no job file {path}; {hint}") from None


def _section(section: str, value: Any, problems: list[str]) -> Any:
    """An object of the section's class; None where there are problems."""
    kind = SECTIONS[section]
    try:
        if kind is Layout and isinstance(value, str | dict):
            return Layout.parse(value) if isinstance(value, str) else Layout.from_dict(value)
        if not isinstance(value, dict):
            raise UserError(f"{section}={value!r} is not a table of settings")
        if isinstance(word := value.get("dtype") if section == "train" else None, str):
            sentence = dtype_problem(word)
            problems += [sentence] if sentence else []
            value = value | {"dtype": "bfloat16" if sentence else dtype_of(word)}
        if section == "optimizer":  # its name decides which settings there are
            name = value.get("name", AdamW().name)
            if not isinstance(name, str) or name not in OPTIMIZERS:
                hint = did_you_mean(str(name), list(OPTIMIZERS))
                raise UserError(f"optimizer.name={name!r} is not a choice; {hint}")
            kind, value = OPTIMIZERS[name], {key: it for key, it in value.items() if key != "name"}
    except UserError as error:
        problems += error.problems
        return None
    return read(kind, value, section, problems)


def job_from(table: Table) -> Job:
    """A job as a checkpoint has it. The first releases knew one optimizer and one scaling of the rotary positions, and
    did not name them."""
    model, optimizer = table["model"], {"name": AdamW().name} | table.get("optimizer", {})
    if scaling := model.get("rope_scaling"):
        model = model | {"rope_scaling": {"kind": "llama3"} | scaling}
    return msgspec.convert(table | {"model": model, "optimizer": optimizer}, Job)


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

    `model` is a preset's name, a config.json or its directory, a job file, or an object; `changes` are KEY=VALUE.
    """
    strange = [change for change in changes if "=" not in change]
    if strange:
        raise UserError(f"{strange[0]!r} is not a change; write KEY=VALUE, for example model.layers=40")
    named = {change.partition("=")[0] for change in changes}
    whole = named | {"data.seq", "train.batch"}
    if isinstance(model, (ModelSpec, Job)):
        if changes:
            raise UserError(f"{changes[0]!r} changes a model that is given by name; change the object instead")
        if isinstance(model, ModelSpec):
            return Job(model=model), named
        return model, whole | ({"train.dtype"} if model.train.dtype != TrainConfig().dtype else set())
    name = str(model)
    if "=" in name:
        raise UserError(f"{name!r} is a change, and the model comes first; for example llama3-8b {name}")
    if name.endswith(".toml"):
        table = _table_of(file := path_of(name))
        said = isinstance(train := table.get("train"), dict) and "dtype" in train
        return resolve(table, changes, file.stem), whole | ({"train.dtype"} if said else set())
    kind = "model.config" if os.path.exists(path_of(name)) or name.endswith(".json") else "model"
    return read_job(None, [f"{kind}={name}", *changes]), named
