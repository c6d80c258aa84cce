"""Hugging Face directories: what is in their files, read box by box. Quantised weights are read as the numbers they
stand for.
"""

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

from fivefold.checkpoint.hf_extras import own_file
from fivefold.checkpoint.shards import Shards
from fivefold.checkpoint.tensors import MODEL
from fivefold.layout.sharding import Box
from fivefold.model.hf_names import BLOCK_SCALES, BLOCKS, TensorSource, expert_format_in, sources, tensors
from fivefold.spec.hf import read_hf_config
from fivefold.spec.operations import Parameter
from fivefold.support.errors import UserError
from fivefold.support.files import plain_name
from fivefold.support.parsing import read_json
from fivefold.support.text import counted

# ---- quantised ------------------------------------------------------------------------------------------------------
# Weights of released files with fewer than 16 bits, as the numbers they stand for.
#
# MXFP4  gpt-oss: 32 numbers of a row share a power of two; each is one of the 16 of e2m1 (OCP Microscaling Formats
#        Specification 1.0, section 5.3), two in a byte, the low four bits first
# FP8    DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), Kimi K2: e4m3, and a float32 for each tile of 128 x 128


BLOCK = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of e8m0, a power of two in a byte

Tile = tuple[int, int]


def tile(directory: Path, config: Any) -> Tile | None:
    """The tile of FP8 weights that a `quantization_config` means; None: it means none. What is unknown is refused."""
    match config:
        case None | {"quant_method": "mxfp4"}:
            return None
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if min(rows, columns) > 0:
            return rows, columns
    raise UserError(
        f"{directory} is quantised in a way that is not read ({config}); mxfp4 is, and fp8 with weight_block_size; or "
        "import the weights that it was made of"
    )


def tiles(shape: tuple[int, ...], tile: Tile) -> tuple[int, ...]:
    """The shape of the scales of a matrix; the last tiles may be narrower."""
    return tuple(-(-size // each) for size, each in zip(shape, tile, strict=True))


def fp8(numbers: Tensor, scales: Tensor, box: tuple[slice, ...], tile: Tile) -> Tensor:
    """A box of a matrix, of which `numbers` are this part and `scales` are all."""
    rows, columns = (
        torch.arange(side.start or 0, (side.start or 0) + size) // each
        for side, size, each in zip(box, numbers.shape, tile, strict=True)
    )
    return numbers.to(torch.float32) * scales.to(torch.float32)[rows][:, columns]


def mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., n, 16] and scales [..., n] of bytes -> float32 [..., n * 32]."""
    table = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    numbers = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).long()].flatten(-2)
    return torch.ldexp(numbers, scales[..., None].int() - _BIAS).flatten(-2)


def unblocked(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of what `blocks` of this shape stand for."""
    return (*shape[:-2], shape[-2] * 2 * shape[-1]) if len(shape) > 1 else shape


# ---- hf files -------------------------------------------------------------------------------------------------------


INDEX = "model.safetensors.index.json"
_NAMED = 3  # files that are missing
_LISTED = 1000  # layers of a model of which every parameter is looked for by its name
# Tensors of others' files that are made of the configuration, or are the embedding once more.
_NEEDLESS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|^lm_head\.weight$")
_LAYER = re.compile(r"^model\.layers\.(\d{1,9})\.")
_FLOATS = ("F64", "F32", "F16", "BF16")
FP8, INVERSE = "F8_E4M3", "_scale_inv"


class HuggingFace:
    """A directory with config.json and safetensors, in one file or many; every tensor is there and has its shape."""

    def __init__(self, directory: Path):
        self.directory = directory
        config = own_file(directory, "config.json")
        self.spec = read_hf_config(directory)
        self.files = _files(directory)
        self.settings = read_json(config)
        self.tile = tile(directory, self.settings.get("quantization_config"))
        if self.spec.layers > max(_LISTED, len(self.files)):
            raise UserError(
                f"{config} declares {self.spec.layers} layers, but {directory} has only {len(self.files)} tensors"
            )
        self.open: dict[Path, Any] = {}
        self.kinds = Counter[str]()  # numbers of each kind, in the files' words
        expert_format = expert_format_in(self.spec, self.files)
        held = tensors(self.spec)
        self.sources = {parameter.name: list(sources(self.spec, parameter, expert_format)) for parameter in held}
        problems = [problem for parameter in held if (problem := self._misfit(parameter))]
        if left := self._left(self.settings.get("num_nextn_predict_layers")):
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            problems.append(f"tensor {left[0]}{more} of {directory} has no place in the model of its config.json")
        if problems:
            raise UserError(problems)

    def _left(self, further: object) -> list[str]:
        """Tensors that nothing reads, but for those of layers that predict `further` tokens than the next."""
        used = {name for found in self.sources.values() for source in found if (name := self._name(source))}
        used |= {beside for name in used if (beside := self._scales(name))}
        beyond = range(self.spec.layers, self.spec.layers + (further if isinstance(further, int) else 0))
        left = sorted(name for name in set(self.files) - used if not _NEEDLESS.search(name))
        return [name for name in left if not ((match := _LAYER.match(name)) and int(match[1]) in beyond)]

    def _misfit(self, parameter: Parameter) -> str | None:
        """The first thing that is wrong with a parameter's tensors."""
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
        file, beside = self.files[name].name, self._scales(name)
        try:
            lies = self._slice(name)
            scales = tuple(self._slice(beside).get_shape()) if beside else None
        except SafetensorError:
            return f"{INDEX} lists tensor {name} in {self.files[name]}, which does not have it"
        kind, shape, wanted = lies.get_dtype(), tuple(lies.get_shape()), source.shape(parameter)
        self.kinds[kind] += math.prod(shape)
        right: tuple[int, ...] | None = None
        if name.endswith(BLOCKS) and kind == "U8":
            shape, right = unblocked(shape), (*wanted[:-1], -(-wanted[-1] // BLOCK))
        elif kind == FP8 and self.tile is not None and len(wanted) == 2:
            right = tiles(wanted, self.tile)
        elif kind not in _FLOATS:
            return f"tensor {name} of {file} is of {kind}, which is not a weight dtype"
        if shape != wanted:
            means = f"for our {parameter.name}, but config.json expects {list(wanted)}"
            return f"tensor {name} of {file} has shape {list(shape)} {means}"
        if scales != right:
            has, needs = (f"scales of shape {list(sizes)}" if sizes else "no scales" for sizes in (scales, right))
            return f"tensor {name} of {file} is of {kind} with {has}, but config.json expects {needs}"
        return None

    def _name(self, source: TensorSource) -> str | None:
        """As the files spell it: a model without its head is saved without the first word of its names."""
        short = source.name.partition(".")[2]
        return next((name for name in (source.name, short) if name in self.files), None)

    def _scales(self, name: str) -> str | None:
        """The tensor with the scales of a quantised one."""
        beside = name.removesuffix(BLOCKS) + BLOCK_SCALES if name.endswith(BLOCKS) else name + INVERSE
        return beside if beside in self.files else None

    def _slice(self, name: str) -> Any:
        path = self.files[name]
        if path not in self.open:
            self.open[path] = _opened(path)
        return self.open[path].get_slice(name)

    def read(self, name: str, box: Box) -> Tensor:
        """A box of our parameter. Of experts no other's numbers are read, and of the rest no others at all, where they
        lie in their tensor as they do in ours."""
        parts = [part for source in self.sources[name] if (part := self._part(source, box)) is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, source: TensorSource, box: Box) -> Tensor | None:
        """The part of a box that a source has; None: nothing."""
        rows = range(max(box[0].start, source.rows.start), min(box[0].stop, source.rows.stop))
        if not rows and len(source.rows):
            return None
        own = (slice(rows.start - source.rows.start, rows.stop - source.rows.start),
               *(slice(side.start, side.stop) for side in box[1:]))  # fmt: skip
        name = self._name(source)
        assert name is not None
        at = (slice(source.expert_index, source.expert_index + 1),) if source.expert_dim else ()
        if source.transposed or source.slots > 1:
            numbers = self._numbers(name, (*at, *[slice(None)] * len(box)))
            return source.view_of_matrix(numbers[0] if at else numbers)[own].contiguous()
        part = self._numbers(name, (*at, *own))
        return part[0] if at else part

    def _numbers(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """A box of their tensor, as the numbers that it stands for."""
        beside, lies = self._scales(name), self._slice(name)
        if beside is None:
            return lies[box]
        if name.endswith(BLOCKS):
            return mxfp4(lies[box[:-1]], self._slice(beside)[box[:-1]])[..., box[-1]]
        assert self.tile is not None
        return fp8(lies[box], self._slice(beside)[:], box, self.tile)

    def fill(self, shards: Shards) -> None:
        """The `model.` shards of a rank, each its box."""
        for key, shard in shards.items():
            shard.make().copy_(self.read(key.removeprefix(f"{MODEL}."), shard.box))


def _files(directory: Path) -> dict[str, Path]:
    """By tensor, the file that has it."""
    index = own_file(directory, INDEX)
    if index.is_file():
        try:
            names = msgspec.convert(read_json(index)["weight_map"], dict[str, str])
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            raise UserError(f"{index} is not an index of tensors: {error}") from None
        wanted = sorted(set(names.values()))
        here = set(os.listdir(directory))  # at once: each look at a file of its own takes its time
        places = {name: own_file(directory, name) for name in wanted if name in here or not plain_name(name)}
        if missing := [name for name in wanted if name not in here or not places[name].is_file()]:
            few = ", ".join(name[:80] for name in missing[:_NAMED]) + (" ..." if len(missing) > _NAMED else "")
            raise UserError(f"{directory} lacks {counted(len(missing), 'file')} that {INDEX} names: {few}")
        return {tensor: places[name] for tensor, name in names.items()}
    paths = [own_file(directory, path.name) for path in sorted(directory.glob("*.safetensors"))]
    if not paths:
        others = [path.name for pattern in ("*.bin", "*.pth") for path in directory.glob(pattern)]
        hint = f"; it has {others[0]}: save it with safetensors first" if others else ""
        raise UserError(f"{directory} has no *.safetensors{hint}")
    return {tensor: path for path in paths for tensor in _opened(path).keys()}  # noqa: SIM118 - it is no dict


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a safetensors file that can be read: {error}") from None
