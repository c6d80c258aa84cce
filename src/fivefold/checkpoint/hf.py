"""Hugging Face directories: read tensor by tensor, written file by file. No process ever holds the whole model."""

import json
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fivefold.checkpoint.load import load
from fivefold.checkpoint.pieces import Piece, Pieces
from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.store import Checkpoint, Manifest, Store
from fivefold.checkpoint.tensors import MODEL, model_key
from fivefold.job.config import Job, RunConfig, to_toml
from fivefold.layout.sharding import Box
from fivefold.model.hf import Source, source
from fivefold.spec.hf_config import HF_CONFIG, read_hf_config, to_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.spec.parameters import Parameter
from fivefold.support.documents import read_json
from fivefold.support.errors import UserError
from fivefold.support.files import Progress, plain_name, whole_or_nothing

T = TypeVar("T")
_PART = 1 << 30  # bytes that an import holds at a time
_LISTED = 1000  # layers of a model of which every parameter is looked for by its name
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Tensors of others' files that are made of the configuration, or are the embedding once more.
_NEEDLESS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|^lm_head\.weight$")
_FLOATS = ("F64", "F32", "F16", "BF16")


class HuggingFace:
    """A directory with config.json and safetensors, in one file or many; every tensor is there and has its shape."""

    def __init__(self, directory: Path):
        self.directory = directory
        config = own_file(directory, "config.json")
        self.spec = read_hf_config(directory)
        if quantised := read_json(config).get("quantization_config"):
            raise UserError(f"{directory} is quantised ({quantised}); import the weights that it was made of")
        self.files = _files(directory)
        if self.spec.layers > max(_LISTED, len(self.files)):
            raise UserError(f"{config} means {self.spec.layers} layers, and {directory} has {len(self.files)} tensors")
        self.open: dict[Path, Any] = {}
        self.homes = {parameter.name: source(self.spec, parameter) for parameter in self.spec.parameters()}
        problems = [problem for one in self.spec.parameters() if (problem := self._misfit(one))]
        used = {self._name(home) for home in self.homes.values()}
        left = sorted(name for name in set(self.files) - used if not _NEEDLESS.search(name))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            problems.append(f"tensor {left[0]}{more} of {directory} has no place in the model of its config.json")
        if problems:
            raise UserError(problems)

    def _misfit(self, parameter: Parameter) -> str | None:
        home = self.homes[parameter.name]
        name = self._name(home)
        if name is None:
            return f"{self.directory} has no tensor {home.name} (our {parameter.name}, shape {list(parameter.shape)})"
        try:
            lies = self._slice(name)
        except SafetensorError:
            return f"{self.files[name]} has no tensor {name}, and {_INDEX} says so"
        if lies.get_dtype() not in _FLOATS:
            return f"tensor {name} of {self.files[name].name} is of {lies.get_dtype()}, which is no kind of weight"
        shape = lies.get_shape()
        shape = shape[::-1] if home.transposed else shape
        if home.third is not None and shape and shape[0] % 3 == 0:
            shape = [shape[0] // 3, *shape[1:]]
        if tuple(shape) != parameter.shape:
            return (
                f"tensor {name} of {self.files[name].name} gives shape {list(shape)} for our {parameter.name}, and "
                f"config.json means {list(parameter.shape)}"
            )
        return None

    def _name(self, home: Source) -> str | None:
        """As the files spell it: a model without its head is saved without the first word of its names."""
        short = home.name.partition(".")[2]
        return next((name for name in (home.name, short) if name in self.files), None)

    def _slice(self, name: str) -> Any:
        path = self.files[name]
        if path not in self.open:
            self.open[path] = _opened(path)
        return self.open[path].get_slice(name)

    def read(self, name: str, box: Box) -> Tensor:
        """A box of our parameter; no more than it is read where it lies in their tensor as it does in ours."""
        home = self.homes[name]
        found = self._name(home)
        assert found is not None
        lies = self._slice(found)
        if home.third is None and not home.transposed:
            return lies[tuple(slice(side.start, side.stop) for side in box)]
        return home.ours(lies[:])[tuple(slice(side.start, side.stop) for side in box)].contiguous()

    def fill(self, pieces: Pieces) -> None:
        """The `model.` pieces of a rank, each its box."""
        for key, piece in pieces.items():
            piece.make().copy_(self.read(key.removeprefix(f"{MODEL}."), piece.box))


def own_file(directory: Path, name: str) -> Path:
    """A file of a directory that others made: nothing elsewhere, and nothing that is no file. It may be missing.

    The hub's cache has links in its directories, to the `blobs` beside them.
    """
    if not plain_name(name):
        raise UserError(f"{directory} names the file {name[:200]!r}, which is not one of its own")
    place, home = directory / name, directory.resolve()
    homes = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    try:
        real = place.resolve()
    except RuntimeError:  # a link to itself
        real = Path()
    if not any(real.is_relative_to(one) for one in homes):
        raise UserError(f"{place} leads out of {directory}, to {real}; put the file itself there")
    if real.exists() and not real.is_file():
        raise UserError(f"{place} is no regular file")
    return place


def _files(directory: Path) -> dict[str, Path]:
    """By tensor, the file that has it."""
    index = own_file(directory, _INDEX)
    if index.is_file():
        try:
            names = msgspec.convert(read_json(index)["weight_map"], dict[str, str])
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            raise UserError(f"{index} is not an index of tensors: {error}") from None
        places = {name: own_file(directory, name) for name in sorted(set(names.values()))}
        if missing := [place for place in places.values() if not place.is_file()]:
            raise UserError(f"{place} is missing, and {_INDEX} names it" for place in missing)
        return {tensor: places[name] for tensor, name in names.items()}
    found = [own_file(directory, path.name) for path in sorted(directory.glob("*.safetensors"))]
    if not found:
        others = [path.name for pattern in ("*.bin", "*.pth") for path in directory.glob(pattern)]
        hint = f"; it has {others[0]}: save it with safetensors first" if others else ""
        raise UserError(f"{directory} has no *.safetensors{hint}")
    return {tensor: path for path in found for tensor in _opened(path).keys()}  # noqa: SIM118 - it is no dict


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a safetensors file that can be read: {error}") from None


# ---- in ------------------------------------------------------------------------------------------------------------


def import_hf(directory: Path, run: Path, progress: Progress) -> Checkpoint:
    """A run directory whose step 0 has the weights, and a job to train it further."""
    theirs = HuggingFace(directory)
    spec = theirs.spec
    job = Job(model=spec, run=RunConfig(name=run.name, dir=str(run.absolute().parent)))
    manifest = Manifest(step=0, samples=0, updates=0, optimizer=False, data="", job=msgspec.to_builtins(job))
    pieces = [(parameter.name, _lazy(theirs, parameter)) for parameter in spec.parameters()]
    parts = [
        {model_key(name): piece for name, piece in group}
        for group in _cut(pieces, [piece.nbytes for _, piece in pieces], _PART)
    ]
    with whole_or_nothing(run):
        run.mkdir(parents=True, exist_ok=True)
        path = write_alone(Store(run / "checkpoints"), parts, manifest, progress)
        (run / "job.toml").write_text(to_toml(job))
        shutil.copyfile(directory / "config.json", run / HF_CONFIG)
        if (tokenizer := own_file(directory, "tokenizer.json")).is_file():
            shutil.copyfile(tokenizer, run / "tokenizer.json")
    return Checkpoint(path)


def _lazy(theirs: HuggingFace, parameter: Parameter) -> Piece:
    box = tuple(range(size) for size in parameter.shape)

    def make() -> Tensor:
        tensor = theirs.read(parameter.name, box).to(torch.float32)
        if not torch.isfinite(tensor).all():
            raise UserError(f"{theirs.directory} has weights that are no numbers in {parameter.name}")
        return tensor

    return Piece(parameter.shape, box, torch.float32, make)


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

    `end` is the token that ends a text, if there is one.
    """
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    config = to_hf_config(spec, dtype) | {"bos_token_id": None, "eos_token_id": end}
    homes: dict[str, list[Parameter]] = {}  # a tensor of theirs is one or three of our parameters
    for parameter in spec.parameters():
        homes.setdefault(source(spec, parameter).name, []).append(parameter)
    sizes = [sum(part.size for part in parts) * kind.itemsize for parts in homes.values()]
    groups = list(_cut(list(homes.values()), sizes, limit))
    half = out.with_name(f".{out.name}-{uuid.uuid4().hex}")
    with whole_or_nothing(out):
        try:
            half.mkdir(parents=True)
            config_file = half / "config.json"
            config_file.write_text(json.dumps(config, indent=2) + "\n")
            names: dict[str, str] = {}
            for number, group in enumerate(groups, start=1):
                file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else _SINGLE
                tensors = _read(checkpoint, spec, group, kind)
                save_file(tensors, half / file, metadata={"format": "pt"})
                (half / file).chmod(config_file.stat().st_mode)  # safetensors makes it for its owner alone
                names |= dict.fromkeys(tensors, file)
                progress(sum(tensor.nbytes for tensor in tensors.values()))
                del tensors
            if len(groups) > 1:
                index = {"metadata": {"total_size": sum(sizes)}, "weight_map": names}
                (half / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
            if tokenizer is not None:
                shutil.copyfile(tokenizer, half / "tokenizer.json")
            half.rename(out)  # also onto an empty directory
        except SafetensorError as error:
            raise OSError(str(error)) from None
        finally:
            shutil.rmtree(half, ignore_errors=True)
    return out


def _cut(items: list[T], sizes: list[int], limit: int) -> Iterator[list[T]]:
    """Consecutive items in groups of at most `limit` together; a larger one is a group of its own."""
    group: list[T] = []
    held = 0
    for item, size in zip(items, sizes, strict=True):
        if group and held + size > limit:
            yield group
            group, held = [], 0
        group.append(item)
        held += size
    yield group


def _read(
    checkpoint: Checkpoint, spec: ModelSpec, group: list[list[Parameter]], dtype: torch.dtype
) -> dict[str, Tensor]:
    found = {}
    for parts in group:
        ours = {part.name: torch.empty(part.shape) for part in parts}
        load(checkpoint, {model_key(name): Piece.whole(tensor) for name, tensor in ours.items()})
        home = source(spec, parts[0])
        found[home.name] = home.theirs(*ours.values()).to(dtype).contiguous()
    return found
