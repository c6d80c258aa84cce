"""Import Hugging Face directories as runs, and export runs as such. No process ever holds the whole model."""

import json
import math
import shutil
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fivefold.checkpoint.find import beside, run_of
from fivefold.checkpoint.hf_extras import CARRIED, TOKENIZERS, carry
from fivefold.checkpoint.hf_files import INDEX, HuggingFace
from fivefold.checkpoint.load import load
from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.shards import Shard
from fivefold.checkpoint.store import Checkpoint, Manifest, Store, step_name
from fivefold.checkpoint.tensors import model_key
from fivefold.data.index import TOKENIZER
from fivefold.data.tokenizer import ByteTokenizer, foreign
from fivefold.data.tokens import TokenStore
from fivefold.job.config import Job, RunConfig
from fivefold.job.fine_tuning import SOURCE, tuned
from fivefold.job.recipes import Choice, written
from fivefold.layout.sharding import chunk
from fivefold.model.hf_names import EXPERT_BIAS, TensorSource, expert_format_of, sources, tensors
from fivefold.spec.hf import END_NAMED_IN, HF_CONFIG, kept_settings, no_tokens, to_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Parameter
from fivefold.support.errors import Note, UserError
from fivefold.support.files import Progress, whole_or_nothing
from fivefold.support.parsing import path_of, read_json
from fivefold.support.text import printable

T = TypeVar("T")
_Part = tuple[Parameter, TensorSource]  # rows of a parameter, and where they lie in a tensor of theirs
_MAX_HELD = 1 << 30  # bytes that an import holds at once
_SINGLE = "model.safetensors"
EXPORTED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ---- in ------------------------------------------------------------------------------------------------------------


def import_hf(directory: Path, run: Path, progress: Progress, data: str | Path | None = None) -> Checkpoint:
    """A run directory whose step 0 has the weights, and a job that trains them further, on `data` if that is given."""
    theirs = HuggingFace(directory)
    spec = theirs.spec
    store = TokenStore.open(path_of(data)) if data is not None else None
    if store and (problems := foreign(directory, store.path, TOKENIZERS, END_NAMED_IN)):
        raise UserError(problems)
    job, choices = tuned(spec, _dtype(theirs), store)
    where = Store(run / "checkpoints")
    job = msgspec.structs.replace(job, run=_run_config(run))
    manifest = Manifest(step=0, samples=0, updates=0, optimizer=False, data="", job=msgspec.to_builtins(job))
    parts = [
        {model_key(name): piece for name, piece in group}
        for pieces in _batches(theirs, tensors(spec))
        for group in _groups_up_to(pieces, [piece.nbytes for _, piece in pieces], _MAX_HELD)
    ]
    with whole_or_nothing(run):
        run.mkdir(parents=True, exist_ok=True)
        path = write_alone(where, parts, manifest, progress)
        (run / "job.toml").write_text(_job_text(job, {key: choice.why for key, choice in choices.items()}))
        shutil.copyfile(directory / "config.json", run / HF_CONFIG)
        carried = carry(directory, run, CARRIED)
    if not store and TOKENIZER not in carried and spec.vocab != ByteTokenizer.vocab:
        warnings.warn(
            Note(f"{directory} has no {TOKENIZER}: whether tokens are the model's own cannot be told when it trains"),
            stacklevel=2,
        )
    if strange := no_tokens(theirs.settings, spec.vocab):
        sentence = f"{strange} of config.json is not one of the {spec.vocab} tokens; an export writes it back unchanged"
        warnings.warn(Note(printable(sentence)), stacklevel=2)
    return Checkpoint(path)


def _run_config(run: Path) -> RunConfig:
    """Settings of a run that continues in its directory; every other run of its job starts from its weights."""
    home = run.absolute()
    return RunConfig(name=run.name, dir=str(home.parent), weights=str(home / "checkpoints" / step_name(0)))


def _job_text(job: Job, why: dict[str, str]) -> str:
    """The job file, with a heading and reasons for people."""
    head = [f"{job.model.name}, fine-tuned as Tulu 3 was: {SOURCE} (arXiv 2411.15124)"]
    fill = 'path = "..."  tokens of this model\'s tokenizer: fivefold data prepare TEXT -o TOKENS --tokenizer '
    return written(job, why, head, {} if not job.data.usual else {"data": f"{fill}{job.run.dir}/{job.run.name}"})


def _dtype(theirs: HuggingFace) -> Choice:
    """The compute dtype: that of the weights, if it can be trained in."""
    (kind, _), *_ = theirs.kinds.most_common(1)
    if kind in ("F32", "F64"):
        return Choice("float32", "as the weights")
    why = "as the weights; masters are float32"
    if kind == "F16":
        why = "the weights are float16, which would need a loss scale; masters are float32"
        warnings.warn(
            Note(
                f"{theirs.directory} has weights of float16, and the job computes in bfloat16: float16 would need a "
                "loss scale; an export is float16 again"
            ),
            stacklevel=3,
        )
    return Choice("bfloat16", why)  # quantised weights, too: their values are exact in it


def _batches(theirs: HuggingFace, parameters: list[Parameter]) -> Iterator[list[tuple[str, Shard]]]:
    """Groups of parameters in model order; one larger than `_MAX_HELD` is cut into pieces, a group each."""
    together: list[tuple[str, Shard]] = []
    for parameter in parameters:
        times = -(-4 * parameter.size // _MAX_HELD)
        if times < 2:
            together.append((parameter.name, _lazy_shard(theirs, parameter, range(parameter.shape[0]))))
            continue
        yield together
        together = []
        for index in range(times):
            if rows := chunk(parameter.shape[0], times, index):
                yield [(parameter.name, _lazy_shard(theirs, parameter, rows))]
    yield together


def _lazy_shard(theirs: HuggingFace, parameter: Parameter, rows: range) -> Shard:
    box = (rows, *(range(size) for size in parameter.shape[1:]))

    def make() -> Tensor:
        tensor = theirs.read(parameter.name, box).to(torch.float32)
        if not torch.isfinite(tensor).all():
            raise UserError(f"{parameter.name} of {theirs.directory} contains NaN or Inf")
        return tensor

    return Shard(parameter.shape, box, torch.float32, make)


# ---- out -----------------------------------------------------------------------------------------------------------


def export_hf(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    out: Path,
    dtype: str,
    limit: int,
    tokenizer: Path | None,
    end: int | None,
    progress: Progress,
) -> Path:
    """config.json and safetensors of at most `limit` bytes each (a larger tensor has a file of its own).

    Files that an import kept are exported again. For other runs, `end` is the token that ends a text, if there is one.
    """
    kind = EXPORTED[dtype]
    imported, run = imported_config(checkpoint), run_of(checkpoint)
    own: dict[str, Any] = {"bos_token_id": None, "eos_token_id": end} if imported is None else kept_settings(imported)
    config = to_hf_config(spec, dtype) | own
    by_tensor: dict[str, list[_Part]] = {}
    for parameter in tensors(spec):
        for source in sources(spec, parameter, expert_format_of(config["model_type"])):
            by_tensor.setdefault(source.name, []).append((parameter, source))
    sizes = [math.prod(source.shape(param)) * kind.itemsize for ((param, source), *_) in by_tensor.values()]
    groups = list(_groups_up_to(list(by_tensor.values()), sizes, limit))
    partial = out.with_name(f".{out.name}-{uuid.uuid4().hex}")
    with whole_or_nothing(out):
        try:
            partial.mkdir(parents=True)
            config_file = partial / "config.json"
            config_file.write_text(json.dumps(config, indent=2) + "\n")
            names: dict[str, str] = {}
            for number, group in enumerate(groups, start=1):
                file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else _SINGLE
                written = {parts[0][1].name: _read(checkpoint, parts, kind) for parts in group}
                save_file(written, partial / file, metadata={"format": "pt"})
                (partial / file).chmod(config_file.stat().st_mode)  # safetensors makes it for its owner alone
                names |= dict.fromkeys(written, file)
                progress(sum(tensor.nbytes for tensor in written.values()))
                del written
            if len(groups) > 1:
                index = {"metadata": {"total_size": sum(sizes)}, "weight_map": names}
                (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
            if TOKENIZER not in carry(run, partial, CARRIED) and tokenizer is not None:
                shutil.copyfile(tokenizer, partial / TOKENIZER)
            partial.rename(out)  # also onto an empty directory
        except SafetensorError as error:
            raise OSError(str(error)) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out


def imported_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The config.json of the weights that a run was imported from; None if it was not."""
    file = beside(checkpoint, HF_CONFIG)
    config = read_json(file) if file else None
    return config if isinstance(config, dict) else None


def usual_dtype(checkpoint: Checkpoint, job: Job) -> str:
    """The default dtype of an export: that of the import, if there was one."""
    if (config := imported_config(checkpoint)) is None:
        return "float32"
    said = config.get("dtype", config.get("torch_dtype"))
    return said if said in EXPORTED else job.train.dtype if job.train.dtype in EXPORTED else "float32"


def _groups_up_to(items: list[T], sizes: list[int], limit: int) -> Iterator[list[T]]:
    """Consecutive items in groups of at most `limit` together; a larger one is a group of its own."""
    group: list[T] = []
    held = 0
    for item, size in zip(items, sizes, strict=True):
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append(item)
        held += size
    if group:
        yield group


def _read(checkpoint: Checkpoint, parts: list[_Part], dtype: torch.dtype) -> Tensor:
    """One of Hugging Face's tensors, assembled from its parts."""
    (parameter, source), *_ = parts
    theirs = torch.empty(source.shape(parameter), dtype=torch.float32 if source.name.endswith(EXPERT_BIAS) else dtype)
    for parameter, source in parts:
        box = (source.rows, *(range(size) for size in parameter.shape[1:]))
        rows = torch.empty([len(side) for side in box])
        load(checkpoint, {model_key(parameter.name): Shard.of(rows, parameter.shape, box)})
        source.view_of(theirs).copy_(rows)
    return theirs
