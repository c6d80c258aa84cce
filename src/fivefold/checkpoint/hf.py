"""Imports Hugging Face directories as runs, and exports runs as such directories, without the whole model in memory."""

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

from fivefold.checkpoint.find import file_in_run, run_of
from fivefold.checkpoint.hf_extras import CARRIED_FILES, TOKENIZER_FILES, copy_extras
from fivefold.checkpoint.hf_files import INDEX_FILE, HuggingFace
from fivefold.checkpoint.load import load
from fivefold.checkpoint.manifest import Checkpoint, Manifest, step_name
from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.shards import Shard
from fivefold.checkpoint.store import Store
from fivefold.checkpoint.tensors import model_key
from fivefold.data.index import TOKENIZER_FILE
from fivefold.data.tokenizer import ByteTokenizer, tokenizer_mismatches
from fivefold.data.tokens import TokenStore
from fivefold.job.config import Job, RunConfig
from fivefold.job.fine_tuning import TULU_SOURCE, fine_tuning_job
from fivefold.job.recipes import Choice
from fivefold.job.toml_writer import commented_toml
from fivefold.launch.device import TORCH_DTYPES
from fivefold.layout.sharding import chunk
from fivefold.model.hf_names import (
    BALANCE_BIAS,
    TensorSource,
    expert_format_of,
    sources,
    stored_parameters,
    unnamed_kinds,
)
from fivefold.spec.hf import END_NAMED_IN, HF_CONFIG, kept_settings, no_tokens, to_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Parameter
from fivefold.support.errors import Note, UserError
from fivefold.support.files import Progress, whole_or_nothing
from fivefold.support.parsing import path_of, read_json
from fivefold.support.text import printable

T = TypeVar("T")
_Part = tuple[Parameter, TensorSource]  # rows of a parameter, and their place in one of Hugging Face's tensors
_MAX_HELD_BYTES = 1 << 30  # bytes that an import has in memory at once
_SINGLE_FILE = "model.safetensors"
EXPORT_DTYPES = ("float32", "bfloat16", "float16")


# ---- import -------------------------------------------------------------------------------------------------------


def import_hf(
    directory: Path, run: Path, progress: Progress, data: str | Path | None = None, model: ModelSpec | None = None
) -> Checkpoint:
    """Makes a run directory whose step 0 has the weights, and a job that fine-tunes them, on `data` if given.

    config.json describes the model, unless `model` does: then its kinds name the weights."""
    source = HuggingFace(directory, model)
    spec = source.spec
    store = TokenStore.open(path_of(data)) if data is not None else None
    if store and (problems := tokenizer_mismatches(directory, store.path, TOKENIZER_FILES, END_NAMED_IN)):
        raise UserError(problems)
    job, choices = fine_tuning_job(spec, _compute_dtype(source), store)
    checkpoints = Store(run / "checkpoints")
    job = msgspec.structs.replace(job, run=_run_config(run))
    manifest = Manifest(step=0, samples=0, updates=0, optimizer=False, data="", job=msgspec.to_builtins(job))
    parts = [
        {model_key(name): shard for name, shard in group}
        for shards in _batches(source, stored_parameters(spec))
        for group in _groups_up_to(shards, [shard.nbytes for _, shard in shards], _MAX_HELD_BYTES)
    ]
    with whole_or_nothing(run):
        run.mkdir(parents=True, exist_ok=True)
        path = write_alone(checkpoints, parts, manifest, progress)
        (run / "job.toml").write_text(_job_text(job, {key: choice.why for key, choice in choices.items()}))
        if model is None:
            shutil.copyfile(directory / "config.json", run / HF_CONFIG)
        carried = copy_extras(directory, run, CARRIED_FILES)
    if not store and TOKENIZER_FILE not in carried and spec.vocab != ByteTokenizer.vocab:
        warnings.warn(
            Note(
                f"{directory} has no {TOKENIZER_FILE}: whether tokens are the model's own cannot be told when it trains"
            ),
            stacklevel=2,
        )
    if bad_ids := no_tokens(source.settings, spec.vocab):
        sentence = f"{bad_ids} of config.json is not one of the {spec.vocab} tokens; an export writes it back unchanged"
        warnings.warn(Note(printable(sentence)), stacklevel=2)
    return Checkpoint(path)


def _run_config(run: Path) -> RunConfig:
    """The settings of a run that trains in its own directory; other runs of its job start from its weights."""
    home = run.absolute()
    return RunConfig(name=run.name, dir=str(home.parent), weights=str(home / "checkpoints" / step_name(0)))


def _job_text(job: Job, why: dict[str, str]) -> str:
    """The job file as text, with a heading, and reasons as comments."""
    heading = [f"{job.model.name}, fine-tuned as Tulu 3 was: {TULU_SOURCE} (arXiv 2411.15124)"]
    placeholder = 'path = "..."  tokens of this model\'s tokenizer: fivefold data prepare TEXT -o TOKENS --tokenizer '
    notes = {"data": f"{placeholder}{job.run.dir}/{job.run.name}"} if job.data.usual else {}
    return commented_toml(job, why, heading, notes)


def _compute_dtype(source: HuggingFace) -> Choice:
    """The compute dtype of the job: the dtype of the weights, if it can be used for training."""
    (kind, _), *_ = source.kinds.most_common(1)
    if kind in ("F32", "F64"):
        return Choice("float32", "as the weights")
    why = "as the weights; masters are float32"
    if kind == "F16":
        why = "the weights are float16, which would need a loss scale; masters are float32"
        warnings.warn(
            Note(
                f"{source.directory} has weights of float16, and the job computes in bfloat16: float16 would need a "
                "loss scale; an export is float16 again"
            ),
            stacklevel=3,
        )
    return Choice("bfloat16", why)  # also of quantised weights, which bfloat16 represents exactly


def _batches(source: HuggingFace, parameters: list[Parameter]) -> Iterator[list[tuple[str, Shard]]]:
    """Groups of (name, shard) in model order; a parameter larger than `_MAX_HELD` is divided into several groups."""
    group: list[tuple[str, Shard]] = []
    for parameter in parameters:
        count = -(-4 * parameter.size // _MAX_HELD_BYTES)
        if count < 2:
            group.append((parameter.name, _lazy_shard(source, parameter, range(parameter.shape[0]))))
            continue
        yield group
        group = []
        for index in range(count):
            if rows := chunk(parameter.shape[0], count, index):
                yield [(parameter.name, _lazy_shard(source, parameter, rows))]
    yield group


def _lazy_shard(source: HuggingFace, parameter: Parameter, rows: range) -> Shard:
    box = (rows, *(range(size) for size in parameter.shape[1:]))

    def make() -> Tensor:
        tensor = source.read(parameter.name, box).to(torch.float32)
        if not torch.isfinite(tensor).all():
            raise UserError(f"{parameter.name} of {source.directory} contains NaN or Inf", "hf.weights.nan")
        return tensor

    return Shard(parameter.shape, box, torch.float32, make)


# ---- export -------------------------------------------------------------------------------------------------------


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
    """Writes config.json and safetensors of at most `limit` bytes each (a larger tensor has a file of its own).

    Exports the files that an import kept. For other runs, copies `tokenizer`, if given, and writes `end` as the token
    that ends a text.
    """
    torch_dtype = TORCH_DTYPES[dtype]
    imported, run = imported_config(checkpoint), run_of(checkpoint)
    extra: dict[str, Any] = {"bos_token_id": None, "eos_token_id": end}
    if imported is not None:
        extra = kept_settings(imported)
    config = _config(spec, dtype, out)
    by_tensor: dict[str, list[_Part]] = {}
    for parameter in stored_parameters(spec):
        for source in sources(spec, parameter, expert_format_of(config["model_type"] if config else "")):
            by_tensor.setdefault(source.name, []).append((parameter, source))
    sizes = [math.prod(source.shape(param)) * torch_dtype.itemsize for ((param, source), *_) in by_tensor.values()]
    groups = list(_groups_up_to(list(by_tensor.values()), sizes, limit))
    partial = out.with_name(f".{out.name}-{uuid.uuid4().hex}")
    with whole_or_nothing(out):
        try:
            partial.mkdir(parents=True)
            if config is not None:
                (partial / "config.json").write_text(json.dumps(config | extra, indent=2) + "\n")
            names: dict[str, str] = {}
            for number, group in enumerate(groups, start=1):
                file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else _SINGLE_FILE
                file_tensors = {parts[0][1].name: _read_parts(checkpoint, parts, torch_dtype) for parts in group}
                save_file(file_tensors, partial / file, metadata={"format": "pt"})
                (partial / file).chmod(
                    partial.stat().st_mode & 0o666
                )  # safetensors makes them readable for the owner alone
                names |= dict.fromkeys(file_tensors, file)
                progress(sum(tensor.nbytes for tensor in file_tensors.values()))
                del file_tensors
            if len(groups) > 1:
                index = {"metadata": {"total_size": sum(sizes)}, "weight_map": names}
                (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
            if TOKENIZER_FILE not in copy_extras(run, partial, CARRIED_FILES) and tokenizer is not None:
                shutil.copyfile(tokenizer, partial / TOKENIZER_FILE)
            partial.rename(out)  # also onto an empty directory
        except SafetensorError as error:
            raise OSError(str(error)) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out


def _config(spec: ModelSpec, dtype: str, out: Path) -> dict[str, Any] | None:
    """The model's config.json; None if no class of transformers has its layers, but their kinds name the weights."""
    try:
        return to_hf_config(spec, dtype)
    except UserError as error:
        if error.codes != ["hf.pattern"]:
            raise
        if lacks := unnamed_kinds(spec):
            raise UserError(lacks) from None
        nothing = f"{out} has weights under their kinds' names, and no config.json"
        warnings.warn(Note(f"{error}: {nothing}"), stacklevel=3)
        return None


def imported_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The config.json of the weights that a run was imported from; None if it was not."""
    file = file_in_run(checkpoint, HF_CONFIG)
    config = read_json(file) if file else None
    return config if isinstance(config, dict) else None


def usual_dtype(checkpoint: Checkpoint, job: Job) -> str:
    """The default dtype of an export: the dtype of the imported weights, if there were any."""
    if (config := imported_config(checkpoint)) is None:
        return "float32"
    candidates = (config.get("dtype", config.get("torch_dtype")), job.train.dtype)
    return next((dtype for dtype in candidates if dtype in EXPORT_DTYPES), "float32")


def _groups_up_to(items: list[T], sizes: list[int], limit: int) -> Iterator[list[T]]:
    """Consecutive items in groups whose sizes add up to at most `limit`; a larger one is a group of its own."""
    group: list[T] = []
    group_size = 0
    for item, size in zip(items, sizes, strict=True):
        if group and group_size + size > limit:
            yield group
            group, group_size = [], 0
        group.append(item)
        group_size += size
    if group:
        yield group


def _read_parts(checkpoint: Checkpoint, parts: list[_Part], dtype: torch.dtype) -> Tensor:
    """One of Hugging Face's tensors, assembled from its parts."""
    (parameter, source), *_ = parts
    tensor = torch.empty(source.shape(parameter), dtype=torch.float32 if source.name.endswith(BALANCE_BIAS) else dtype)
    for parameter, source in parts:
        box = (source.rows, *(range(size) for size in parameter.shape[1:]))
        rows = torch.empty([len(side) for side in box])
        load(checkpoint, {model_key(parameter.name): Shard.of(rows, parameter.shape, box)})
        source.view_of(tensor).copy_(rows)
    return tensor
