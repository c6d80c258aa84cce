"""Reads the weights of Hugging Face directories, box by box. Quantised weights are dequantised."""

import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fivefold.checkpoint.dequantise import (
    MXFP4_BLOCK,
    dequantise_fp8,
    dequantise_mxfp4,
    dequantised_shape,
    fp8_tile,
    scales_shape,
)
from fivefold.checkpoint.hf_extras import own_file
from fivefold.checkpoint.shards import Shards
from fivefold.checkpoint.tensors import MODEL
from fivefold.layout.sharding import Box
from fivefold.model.hf_names import (
    BLOCK_SCALES,
    BLOCKS,
    TensorSource,
    expert_format_in,
    sources,
    stored_parameters,
    unnamed_kinds,
)
from fivefold.spec.hf import read_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Parameter
from fivefold.support.errors import UserError
from fivefold.support.files import plain_name
from fivefold.support.parsing import read_json
from fivefold.support.text import plural

INDEX_FILE = "model.safetensors.index.json"
_MAX_LISTED = 3  # missing files in a sentence
_MAX_LAYERS = 1000  # a model with more must have a tensor for each layer, before its parameters are listed
# Tensors that are computed from the configuration, or are a copy of the embedding.
_UNUSED_TENSOR = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|^lm_head\.weight$")
_LAYER = re.compile(r"^model\.layers\.(\d{1,9})\.")
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
FP8, SCALE_SUFFIX = "F8_E4M3", "_scale_inv"


class HuggingFace:
    """A directory with config.json and one or more safetensors files; every tensor exists and has the right shape."""

    def __init__(self, directory: Path, model: ModelSpec | None = None):
        """`model`: describes the weights in place of config.json, which then may be missing."""
        self.directory = directory
        config = own_file(directory, "config.json")
        self.spec = model or read_hf_config(directory)
        if lacks := unnamed_kinds(self.spec):
            raise UserError(lacks)
        self.files = _files(directory)
        self.settings = read_json(config) if model is None else {}
        self.tile = fp8_tile(directory, self.settings.get("quantization_config"))
        if self.spec.layers > max(_MAX_LAYERS, len(self.files)):
            raise UserError(
                f"{config} declares {self.spec.layers} layers, but {directory} has only {len(self.files)} tensors",
                "hf.weights.layers",
            )
        self.open_files: dict[Path, Any] = {}
        self.kinds = Counter[str]()  # how many numbers of each safetensors dtype
        expert_format = expert_format_in(self.spec, self.files)
        parameters = stored_parameters(self.spec)
        self.sources = {parameter.name: list(sources(self.spec, parameter, expert_format)) for parameter in parameters}
        problems = [problem for parameter in parameters if (problem := self._misfit(parameter))]
        if unread := self._unread(self.settings.get("num_nextn_predict_layers")):
            more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            problems.append(f"tensor {unread[0]}{more} of {directory} has no place in the model of its config.json")
        if problems:
            raise UserError(problems, "hf.weights.tensor")

    def _unread(self, mtp_layers: object) -> list[str]:
        """The tensors that no parameter reads, except those of multi-token prediction layers."""
        used = {name for parts in self.sources.values() for source in parts if (name := self._name(source))}
        used |= {scales for name in used if (scales := self._scales(name))}
        mtp = range(self.spec.layers, self.spec.layers + (mtp_layers if isinstance(mtp_layers, int) else 0))
        unread = sorted(name for name in set(self.files) - used if not _UNUSED_TENSOR.search(name))
        return [name for name in unread if not ((match := _LAYER.match(name)) and int(match[1]) in mtp)]

    def _misfit(self, parameter: Parameter) -> str | None:
        """A sentence on the first problem of a parameter's tensors; None if there is none."""
        seen = set[str]()
        for source in self.sources[parameter.name]:
            name = self._name(source)
            if name is None:
                shape = list(parameter.shape)
                return f"{self.directory} has no tensor {source.name} (our {parameter.name}, shape {shape})"
            if name not in seen and (problem := self._misshapen(parameter, source, name)):
                return problem
            seen.add(name)
        return None

    def _misshapen(self, parameter: Parameter, source: TensorSource, name: str) -> str | None:
        """A sentence if the tensor or its scales have a wrong dtype or shape; else None."""
        file, scales_name = self.files[name].name, self._scales(name)
        try:
            tensor = self._slice(name)
            scales = tuple(self._slice(scales_name).get_shape()) if scales_name else None
        except SafetensorError:
            return f"{INDEX_FILE} lists tensor {name} in {self.files[name]}, which does not have it"
        kind, shape, expected = tensor.get_dtype(), tuple(tensor.get_shape()), source.shape(parameter)
        self.kinds[kind] += math.prod(shape)
        expected_scales: tuple[int, ...] | None = None
        if name.endswith(BLOCKS) and kind == "U8":
            shape, expected_scales = dequantised_shape(shape), (*expected[:-1], -(-expected[-1] // MXFP4_BLOCK))
        elif kind == FP8 and self.tile is not None and len(expected) == 2:
            expected_scales = scales_shape(expected, self.tile)
        elif kind not in _FLOAT_DTYPES:
            return f"tensor {name} of {file} is of {kind}, which is not a weight dtype"
        if shape != expected:
            consequence = f"for our {parameter.name}, but config.json expects {list(expected)}"
            return f"tensor {name} of {file} has shape {list(shape)} {consequence}"
        if scales != expected_scales:
            has, needs = (
                f"scales of shape {list(sizes)}" if sizes else "no scales" for sizes in (scales, expected_scales)
            )
            return f"tensor {name} of {file} is of {kind} with {has}, but config.json expects {needs}"
        return None

    def _name(self, source: TensorSource) -> str | None:
        """The name of a source's tensor in the files: models saved without their head lack the first word of names."""
        short = source.name.partition(".")[2]
        return next((name for name in (source.name, short) if name in self.files), None)

    def _scales(self, name: str) -> str | None:
        """The name of the tensor with the scales of a quantised one; None if it has none."""
        scales = name.removesuffix(BLOCKS) + BLOCK_SCALES if name.endswith(BLOCKS) else name + SCALE_SUFFIX
        return scales if scales in self.files else None

    def _slice(self, name: str) -> Any:
        path = self.files[name]
        if path not in self.open_files:
            self.open_files[path] = _open(path)
        return self.open_files[path].get_slice(name)

    def read(self, name: str, box: Box) -> Tensor:
        """A box of our parameter. Reads only the bytes of the box, where the tensor in the file has the same order."""
        parts = [part for source in self.sources[name] if (part := self._part(source, box)) is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, source: TensorSource, box: Box) -> Tensor | None:
        """The part of a box that a source has; None if it has none."""
        rows = range(max(box[0].start, source.rows.start), min(box[0].stop, source.rows.stop))
        if not rows and len(source.rows):
            return None
        own = (slice(rows.start - source.rows.start, rows.stop - source.rows.start),
               *(slice(side.start, side.stop) for side in box[1:]))  # fmt: skip
        name = self._name(source)
        assert name is not None
        expert = (slice(source.expert_index, source.expert_index + 1),) if source.expert_dim else ()
        if source.transposed or source.slots > 1:
            matrix = self._dequantised(name, (*expert, *[slice(None)] * len(box)))
            return source.view_of_matrix(matrix[0] if expert else matrix)[own].contiguous()
        part = self._dequantised(name, (*expert, *own))
        return part[0] if expert else part

    def _dequantised(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of the tensor in the files."""
        scales, tensor = self._scales(name), self._slice(name)
        if scales is None:
            return tensor[box]
        if name.endswith(BLOCKS):
            return dequantise_mxfp4(tensor[box[:-1]], self._slice(scales)[box[:-1]])[..., box[-1]]
        assert self.tile is not None
        return dequantise_fp8(tensor[box], self._slice(scales)[:], box, self.tile)

    def fill(self, shards: Shards) -> None:
        """Reads the values of a rank's shards of the model."""
        for key, shard in shards.items():
            shard.make().copy_(self.read(key.removeprefix(f"{MODEL}."), shard.box))


def _files(directory: Path) -> dict[str, Path]:
    """{tensor: the file that has it}."""
    index = own_file(directory, INDEX_FILE)
    if index.is_file():
        try:
            names = msgspec.convert(read_json(index)["weight_map"], dict[str, str])
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            raise UserError(f"{index} is not an index of tensors: {error}", "file.syntax") from None
        listed = sorted(set(names.values()))
        existing = set(os.listdir(directory))  # one call, since asking for each file takes long on a network
        places = {name: own_file(directory, name) for name in listed if name in existing or not plain_name(name)}
        if missing := [name for name in listed if name not in existing or not places[name].is_file()]:
            few = ", ".join(name[:80] for name in missing[:_MAX_LISTED]) + (
                " ..." if len(missing) > _MAX_LISTED else ""
            )
            raise UserError(
                f"{directory} lacks {plural(len(missing), 'file')} that {INDEX_FILE} names: {few}",
                "hf.weights.missing",
            )
        return {tensor: places[name] for tensor, name in names.items()}
    paths = [own_file(directory, path.name) for path in sorted(directory.glob("*.safetensors"))]
    if not paths:
        others = [path.name for pattern in ("*.bin", "*.pth") for path in directory.glob(pattern)]
        hint = f"; it has {others[0]}: save it with safetensors first" if others else ""
        raise UserError(f"{directory} has no *.safetensors{hint}", "hf.weights.missing")
    return {tensor: path for path in paths for tensor in _open(path).keys()}  # noqa: SIM118 - it is no dict


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a safetensors file that can be read: {error}", "file.syntax") from None
