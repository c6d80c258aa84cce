"""Checkpoints of version 1: PyTorch's DCP wrote them, a pickled `.metadata` and an archive of torch.save per chunk.

Both kinds of pickle are read as plain data (`pickled.py`), and only in the shapes in which DCP wrote ours.
"""

import io
import math
import struct
import zipfile
from typing import Any

from fivefold.checkpoint.pickled import PERSISTENT, Made, Name, plain
from fivefold.checkpoint.storage import FileReader
from fivefold.checkpoint.tensors import BYTES, DIMENSIONS, Chunk, Stored, Tensors

TABLE = ".metadata"
_META, _FILES = "torch.distributed.checkpoint.metadata.", "torch.distributed.checkpoint.filesystem."
_DTYPES = {f"torch.{name}": name for name in BYTES}
_IN_METADATA = {
    *(_META + name for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
                                "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    _FILES + "_StorageInfo", "torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", *_DTYPES,
}  # fmt: skip
_STORAGES = {"torch.FloatStorage": "float32", "torch.DoubleStorage": "float64", "torch.HalfStorage": "float16",
             "torch.BFloat16Storage": "bfloat16"}  # fmt: skip
_REBUILD, _ORDERED = "torch._utils._rebuild_tensor_v2", "collections.OrderedDict"
_NO_ARCHIVE = (zipfile.BadZipFile, struct.error, NotImplementedError, RuntimeError, EOFError, OverflowError, KeyError,
               TypeError)  # fmt: skip
_HEADER = 30  # bytes of a file's header in a zip archive, before its name


def read_table(data: bytes) -> Tensors:
    """`.metadata` as our own table; ValueError where it is anything else."""
    try:
        return _table(plain(data, _IN_METADATA))
    except (KeyError, IndexError, TypeError):
        raise ValueError("it is not what DCP writes") from None


def _table(metadata: Any) -> Tensors:
    whole = _state(metadata, _META + "Metadata")
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for index, info in _typed(whole["storage_data"], dict).items():
        key, place = _state(index, _META + "MetadataIndex"), _state(info, _FILES + "_StorageInfo")
        if place.get("transform_descriptors"):
            raise ValueError("its chunks are compressed")
        where = _typed(place["relative_path"], str), _typed(place["offset"], int), _typed(place["length"], int)
        places[_typed(key["fqn"], str), _size(key["offset"])] = where
    tensors, left = {}, len(places)
    for name, of in _typed(whole["state_dict_metadata"], dict).items():
        stored = _state(of, _META + "TensorStorageMetadata")
        chunks = []
        for one in _typed(stored["chunks"], list):
            chunk = _state(one, _META + "ChunkStorageMetadata")
            offsets = _size(chunk["offsets"])
            chunks.append(Chunk(offsets, _size(chunk["sizes"]), *places[_typed(name, str), offsets]))
            left -= 1  # a list that stands in many places must not be read more often than the file is long
            if left < 0:
                raise ValueError("it has more chunks than places of chunks")
        tensors[name] = Stored(_size(stored["size"]), _dtype(stored["properties"]), tuple(chunks))
    return tensors


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} stands where DCP writes a {kind.__name__}")
    return value


def _made(value: Any, kind: str) -> Made:
    if type(value) is not Made or value.kind != kind:
        found = value.kind if type(value) is Made else type(value).__name__
        raise ValueError(f"a {found} stands where DCP writes a {kind}")
    return value


def _state(value: Any, kind: str) -> dict[str, Any]:
    made = _made(value, kind)
    if made.arguments:
        raise ValueError(f"a {kind} has arguments")
    state: dict[str, Any] = _typed(made.state, dict)
    return state


def _size(value: Any) -> tuple[int, ...]:
    (numbers,) = _made(value, "torch.Size").arguments
    if len(_typed(numbers, tuple)) > DIMENSIONS:  # one that stands in many places would be copied to each
        raise ValueError(f"a shape has {len(numbers)} dimensions")
    return tuple(_typed(number, int) for number in numbers)


def _dtype(value: Any) -> str:
    name = _typed(_made(value, _META + "TensorProperties").state, tuple)[0]
    return _DTYPES[_typed(name, Name).text]


def numbers_at(stream: FileReader, chunk: Chunk, dtype: str) -> int:
    """The first byte, in its file, of the numbers in an archive; ValueError where it is not the chunk's archive."""
    try:
        with zipfile.ZipFile(_Window(stream, chunk.start, chunk.bytes)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            listing, data, order = entries["data.pkl"], entries["data/0"], entries.get("byteorder")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
                raise ValueError("it is compressed")
            if listing.file_size > 1 << 16 or (order and order.file_size > 16):
                raise ValueError("its listing is too long")
            if order is not None and archive.read(order) != b"little":
                raise ValueError("its numbers are not little-endian")
            _check_listing(archive.read(listing), chunk, dtype)
            archive.open(data).close()  # which compares its header with the directory
            header = bytearray(_HEADER)
            stream.fill(memoryview(header), chunk.start + data.header_offset)
    except _NO_ARCHIVE as error:
        raise ValueError(f"it is no archive of a tensor: {error}") from None
    skip = _HEADER + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    needed = math.prod(chunk.sizes) * BYTES[dtype]
    if data.file_size != needed or not 0 <= data.header_offset <= chunk.bytes - skip - needed:
        raise ValueError(f"its numbers are not {needed} bytes")
    return chunk.start + data.header_offset + skip


def _check_listing(data: bytes, chunk: Chunk, dtype: str) -> None:
    """It must describe the chunk, from the first byte of its numbers on and without gaps."""
    tensor = _made(plain(data, {_REBUILD, _ORDERED, *_STORAGES}), _REBUILD)
    storage, offset, sizes, strides, _, hooks = tensor.arguments
    word, kind, key, _, count = _typed(_made(storage, PERSISTENT).arguments[0], tuple)
    steps = [math.prod(chunk.sizes[dim + 1 :]) for dim in range(len(chunk.sizes))]
    rows = [step for size, step in zip(chunk.sizes, steps, strict=True) if size > 1]
    given = [stride for size, stride in zip(chunk.sizes, strides, strict=True) if size > 1]
    right = (word, key, offset, count) == ("storage", "0", 0, math.prod(chunk.sizes)) and sizes == chunk.sizes
    if not right or given != rows or _made(hooks, _ORDERED).arguments or tensor.state is not None:
        raise ValueError("it describes another tensor")
    if _STORAGES[_typed(kind, Name).text] != dtype:
        raise ValueError(f"it is not of {dtype}")


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, stream: FileReader, start: int, size: int):
        self.stream, self.start, self.size, self.at = stream, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + {0: 0, 1: self.at, 2: self.size}[whence]
        if self.at < 0:
            raise OSError("before the beginning")
        return self.at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.size - self.at))
        self.stream.fill(memoryview(buffer)[:count], self.start + self.at)
        self.at += count
        return count
