"""Pickles read as plain data: what they name is never imported, and whatever else they hold is a ValueError."""

import os
import pickle
import random
import sys
from collections import OrderedDict
from typing import Any

import pytest

from fivefold.checkpoint import version1
from fivefold.checkpoint.pickled import Made, plain
from fivefold.checkpoint.tensors import check
from tests.checkpoint.old import unpack


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    run = unpack(tmp_path_factory.mktemp("old") / "run")
    return (run / "checkpoints" / "step-00000002" / ".metadata").read_bytes()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_data_is_read_as_it_is(protocol: int) -> None:
    value = {"a": [1, -2, 1 << 40, "text", None, True, False], "b": (1, (2, 3), ()), "c": {}, "d": [[]] * 3}
    assert plain(pickle.dumps(value, protocol), set()) == value


def test_an_object_is_its_name_and_what_it_would_be_made_of() -> None:
    found = plain(pickle.dumps(OrderedDict(), 4), {"collections.OrderedDict"})
    assert isinstance(found, Made)
    assert (found.kind, found.arguments, found.state) == ("collections.OrderedDict", (), None)


def test_a_few_bytes_that_describe_something_vast_are_refused_at_once() -> None:
    doubled = b"\x80\x04K\x00q\x00" + b"h\x00h\x00\x86q\x00" * 60 + b"h\x00\x93."  # x = (x, x), sixty times
    with pytest.raises(ValueError, match="no text"):
        plain(doubled, set())


def test_a_shape_of_many_dimensions_is_refused() -> None:
    shape = Made("torch.Size", (tuple(range(9)),))
    with pytest.raises(ValueError, match="9 dimensions"):
        version1._size(shape)


class Call:
    def __init__(self, function: Any, *arguments: Any):
        self.made = function, arguments

    def __reduce__(self) -> Any:
        return self.made


def test_what_is_named_is_not_imported() -> None:
    """Even a name that is allowed: it is compared as text."""
    sys.modules.pop("this", None)
    listing = b"cthis\ns\n)R."
    assert plain(listing, {"this.s"}).kind == "this.s"
    with pytest.raises(ValueError, match=r"it names this\.s, which a checkpoint has no use for"):
        plain(listing, set())
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    "evil",
    [
        pickle.dumps(Call(os.system, "true")),
        pickle.dumps([1, {"a": Call(eval, "1")}]),
        pickle.dumps(Call(os.getcwd), 0),
        b"(S'true'\nios\nsystem\n.",  # INST
        b"cos\nsystem\n(S'true'\no.",  # OBJ
        b"\x80\x02\x82\x01.",  # EXT1
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"(lp0\nI1\na.",
        b"L" + b"9" * 5000 + b"L\n.",
        b"\x8b\xff\xff\xff\x7f.",  # LONG4 of two gigabytes
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # BINBYTES8 of as much as there can be
        b"(" * 100_000 + b".",
        b"h\x07.", b"t.", b"R.", b"b.", b"e.", b"u.", b"s.", b"a.", b"\x93.", b"0.", b"", b".", b"N", b"NN.", b"\xff",
        b"}(}Nu.", b"}((NtNu.", b"](e(.", b"N)R.", b"]}b.",
    ],
)  # fmt: skip
def test_anything_else_is_refused(evil: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        plain(evil, {"torch.Size"})


def test_deep_nesting_neither_recurses_nor_lasts() -> None:
    assert plain(b")" + b"\x85" * 100_000 + b".", set())
    with pytest.raises(ValueError, match="stands where DCP writes a"):
        version1.read_table(b")" + b"\x85" * 100_000 + b".")


def test_a_list_that_stands_everywhere_is_not_read_everywhere(metadata: bytes) -> None:
    found: Any = pickle.loads(metadata)
    chunks = found.state_dict_metadata["model.embedding.weight"].chunks * 50
    for stored in found.state_dict_metadata.values():
        stored.chunks = chunks
    with pytest.raises(ValueError, match=r"more chunks than places|not what DCP writes"):
        version1.read_table(pickle.dumps(found))


def test_flipped_bits_and_cut_ends_of_dcp_s_metadata_are_value_errors_or_a_table(metadata: bytes) -> None:
    """A sample; sums would catch them before. A table that comes of one holds what tables hold, or is refused."""
    chance, read = random.Random(0), 0
    sizes = {f"__{rank}_0.distcp": 58185 for rank in range(2)}
    assert len(version1.read_table(metadata)) == 33
    for _ in range(100):
        data = bytearray(metadata[: chance.choice([len(metadata), chance.randrange(len(metadata))])])
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        try:
            check(version1.read_table(bytes(data)), sizes, archived=True)
            read += 1
        except ValueError:
            pass
    assert read < 50
