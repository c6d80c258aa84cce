"""The machines to plan for: nodes x GPUs per node x accelerator.

Cluster.parse("8x8xH100")                  8 nodes of 8;  "8xH100" is one node of 8, "H100" a single GPU
Cluster.parse("H100x8"), ("8h100")         the same node of 8, as other tools write it
Cluster.parse("4x8xH100+2x8xA100-80")      nodes of two kinds; ranks count through the groups in this order
Cluster.parse("1x64xH100")                 one node of 64; "64xH100" is refused, as nodes of H100s have 8
Cluster.parse("2x72xGB200")                two NVL72 racks: a node is what NVLink joins
Cluster.parse("2x8xmine/h200.toml")        an accelerator of your own: the file that `fivefold calibrate` writes

[[cluster.group]]                          the same as TOML, for Cluster.from_dict
nodes = 4
gpus = 8
accelerator = "H100"                       or a file, or a table: name, peak, memory, memory_bandwidth, inside, across
across = "RoCE-200G"                       or { bandwidth = 25e9 }: any figure of the accelerator can be replaced
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, structs, to_builtins

from fivefold.hardware.accelerators import (
    ACCELERATORS,
    PAGES,
    PRECISIONS,
    SOURCES,
    Accelerator,
    Achieved,
    Link,
    Rates,
    achieved,
    find_accelerator,
    find_link,
    source_of,
    usual_node,
)
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.support.errors import Problem, UserError
from fivefold.support.parsing import Missing, path_of, read_toml
from fivefold.support.ranges import MAX_RANKS, misfit, within
from fivefold.support.text import bytes_text, did_you_mean, either

# ---- short form -----------------------------------------------------------------------------------------------------
# Equal nodes as text, with counts before or after the accelerator: 8x8xH100, 8xH100, 8h100, H100x8, H100:8, 8x4090.


HOW = "write nodes x GPUs per node x accelerator, for example '8x8xH100'"


def table_of(text: str) -> dict[str, Any]:
    """'8x8xH100' as the table that TOML would hold."""
    counts: list[str] = []
    name, behind = _counts_behind(text)
    if not behind:
        before, name = re.findall(r"(?is)\A((?:-?[\d.]+\s*[x×]\s*)*)(.*)\Z", text)[0]
        counts = re.findall(r"-?[\d.]+", before)
        glued = re.fullmatch(r"(?is)(\d+)\s*(.*\S)\s*", name)
        if glued and not _is_known(name) and _is_known(glued[2]):  # 8h100, 8 H100
            counts, name = [*counts, glued[1]], glued[2]
        name, behind = _counts_behind(name)
    if not re.search(r"[^\W\d_]", name) and not _is_known(name):
        raise UserError(f"no accelerator is named; {HOW}", "cluster.form")
    if len(counts) + len(behind) > 2:
        raise UserError(f"{len(counts) + len(behind)} counts are too many; {HOW}", "cluster.form")
    if counts and behind:
        both = f"{counts[0]} before and {behind[0]} behind the name may be read in two ways"
        raise UserError(f"{both}; {HOW}", "cluster.form")
    if len(behind) == 2:
        ways = dict.fromkeys(f"{x}x{y}x{find_accelerator(name).name}" for x, y in (behind, behind[::-1]))
        order = "nodes and GPUs per node stand before the accelerator"
        raise UserError(f"{order}; write {either(list(ways))}", "cluster.form")
    if len(counts + behind) == 1 and _is_known(name):
        _one_node((counts + behind)[0], find_accelerator(name).name)
    return {**dict(zip(("gpus", "nodes"), reversed(counts + behind), strict=False)), "accelerator": name}


def _one_node(count: str, name: str) -> None:
    """Refuse more GPUs than a node has: most users who write 64xH100 mean eight nodes, which are slower than one."""
    usual = usual_node(name)
    if usual is None or not re.fullmatch(r"\d{1,9}", count) or int(count) <= usual:
        return
    wanted = int(count)
    gpus = max(n for n in range(1, usual + 1) if wanted % n == 0)
    nodes = wanted // gpus
    if 2 * gpus < usual:  # 17 GPUs: whole nodes nearby are nearer than 17 nodes of one
        nodes, gpus = round(wanted / usual), usual
    raise UserError(
        f"{wanted} GPUs are more than the {usual} that a node of {name} has; write {nodes}x{gpus}x{name}, or "
        f"1x{wanted}x{name} for one node of {wanted}",
        "cluster.node",
    )


def _counts_behind(text: str) -> tuple[str, list[str]]:
    """The accelerator, and the counts after it in h100x8 or H100:8."""
    name, counts = text.strip(), list[str]()
    while len(counts) < 3 and not _is_known(name) and (cut := re.fullmatch(r"(?is)(.+?)\s*[x×:]\s*(\d+)", name)):
        name, counts = cut[1], [cut[2], *counts]
    return (name, counts) if _is_known(name) else (text, [])


def _is_known(name: str) -> bool:
    try:
        return bool(find_accelerator(name))
    except UserError:
        return False


# ---- cluster --------------------------------------------------------------------------------------------------------


OVERRIDES = tuple(field for field in Accelerator.__struct_fields__ if field != "name")
GROUP_KEYS = ("nodes", "gpus", "accelerator", *OVERRIDES)


class Group(Struct, frozen=True):
    """Nodes with equally many GPUs of one kind."""

    nodes: int
    gpus: int  # per node
    accelerator: Accelerator

    @property
    def world(self) -> int:
        return self.nodes * self.gpus

    @property
    def from_catalogue(self) -> bool:
        return ACCELERATORS.get(self.accelerator.name) == self.accelerator

    def to_dict(self) -> dict[str, Any]:
        device = self.accelerator.name if self.from_catalogue else to_builtins(self.accelerator)
        return {"nodes": self.nodes, "gpus": self.gpus, "accelerator": device}

    def __str__(self) -> str:
        # The text of a changed accelerator must not read back as the catalogue's: the star makes `parse` refuse it.
        name = self.accelerator.name + ("" if self.from_catalogue else "*")
        if self.nodes == 1 and self.gpus <= (usual_node(self.accelerator.name) or self.gpus):
            return name if self.gpus == 1 else f"{self.gpus}x{name}"
        return f"{self.nodes}x{self.gpus}x{name}"


class Cluster(Struct, frozen=True):
    """Groups of equal nodes; ranks run through the GPUs of a node, then the nodes of a group, then the groups.

    >>> ff.Cluster.read("2x8xH100+2x8xA100").world
    32
    """

    groups: tuple[Group, ...]

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Read "8x8xH100" and other short forms; the error has all problems of the text."""
        if not text.strip():
            raise UserError(f"the cluster is empty; {HOW}", "cluster.form")
        return cls(_read_groups([(repr(part.strip()), part.strip()) for part in text.split("+")], []))

    @classmethod
    def read(cls, value: "str | Path | Cluster") -> "Cluster":
        """Read a cluster from its text form or a TOML file with a [cluster] table; a Cluster is returned as it is."""
        if isinstance(value, Cluster):
            return value
        if not isinstance(value, str | Path):
            kind = type(value).__name__
            raise UserError(f"a cluster is a text, a file or a Cluster, not a {kind}; {HOW}", "cluster.type")
        path = path_of(value)
        if path.suffix == ".toml" and os.path.isfile(path):
            table = read_toml(path)
            if "cluster" in table or "group" in table:
                return cls.from_dict(table)
        return cls.parse(str(value))

    @classmethod
    def from_dict(cls, value: Any) -> "Cluster":
        """Read what TOML or JSON holds under `cluster`: the text form, one group's table, or `group` tables."""
        if isinstance(value, str):
            return cls.parse(value)
        if not isinstance(value, Mapping):
            raise UserError(f"cluster={value!r} is neither a text nor a table; {HOW}", "cluster.type")
        if set(value) == {"cluster"}:  # the whole file
            return cls.from_dict(value["cluster"])
        known = ("group",) if "group" in value else ("group", *GROUP_KEYS)
        problems = _unknown_keys(value, known, "cluster: ")
        if "group" not in value:
            group = {key: value[key] for key in GROUP_KEYS if key in value}
            return cls(_read_groups([("cluster", group)], problems))
        groups = [value["group"]] if isinstance(value["group"], Mapping) else value["group"]
        if not isinstance(groups, list | tuple) or not groups:
            raise UserError([*problems, f"cluster.group={groups!r} must be one table or more"], "cluster.type")
        places = [(f"cluster.group[{number}]", group) for number, group in enumerate(groups)]
        return cls(_read_groups(places, problems))

    def to_dict(self) -> dict[str, Any]:
        """Plain tables that `from_dict` reads back to an equal cluster, also if figures were replaced."""
        return {"group": [group.to_dict() for group in self.groups]}

    def __str__(self) -> str:
        return "+".join(map(str, self.groups))

    @property
    def world(self) -> int:
        """The number of GPUs."""
        return sum(group.world for group in self.groups)

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def machines(self) -> int:
        """The number of nodes; groups of CPU ranks of different speed are one machine."""
        one_machine = all(group.nodes == 1 and group.accelerator.is_cpu for group in self.groups)
        return 1 if one_machine else self.nodes

    def alike(self) -> "Cluster | None":
        """The same nodes as one group, if there are several groups and all are of one kind; else None."""
        first = self.groups[0]
        if len(self.groups) < 2 or any((g.gpus, g.accelerator) != (first.gpus, first.accelerator) for g in self.groups):
            return None
        return Cluster((structs.replace(first, nodes=self.nodes),))


# Reading. msgspec's own decoder stops at the first problem and names types, not what to write instead; hence by hand.

NESTED: dict[str, type[Struct]] = {"peak": Rates, "inside": Link, "across": Link, "achieved": Achieved}
SHARE = 1.5  # the largest share of a ceiling; above 1, as some ceilings are too low
LIMITS: dict[str, tuple[float, float, str]] = {  # least, upper bound (1e30 excludes infinity and nan), in words
    "memory": (1, 1e30, "bytes, at least 1"),
    **dict.fromkeys(("memory_bandwidth", "bandwidth"), (1, 1e30, "bytes/s, at least 1")),
    "latency": (0, 1e30, "seconds, at least 0"),
    **dict.fromkeys(("launch", "host", "update"), (0, 1, "seconds, at least 0 and below 1")),
    "ramp": (0, 1e6, "steps, at least 0 and below a million"),
}
T = TypeVar("T", bound=Struct)


@contextmanager
def _gathering(problems: list[str], where: str = "") -> Iterator[None]:
    """Collect the problems of a block, each after its place, instead of stopping at the first."""
    try:
        yield
    except UserError as error:
        problems += error.framed(f"{where}: " if where else "")


def _unknown_keys(table: Mapping[Any, Any], known: Sequence[str], where: str = "") -> list[str]:
    return [
        Problem("cluster.key", f"{where}unknown key {key!r}; {did_you_mean(str(key), known)}")
        for key in table
        if key not in known
    ]


def _read_groups(places: list[tuple[str, Any]], problems: list[str]) -> tuple[Group, ...]:
    groups = []
    for where, group in places:
        with _gathering(problems, where):
            groups.append(_read_group(table_of(group) if isinstance(group, str) else group))
    if (world := sum(group.world for group in groups)) > MAX_RANKS:
        problems.append(Problem("cluster.size", f"{world} GPUs are more than {MAX_RANKS}"))
    if problems:
        raise UserError(problems)
    return tuple(groups)


def _read_group(table: Any) -> Group:
    if not isinstance(table, Mapping):
        raise UserError(f"{table!r} must be a table with the keys {', '.join(GROUP_KEYS)}", "cluster.type")
    problems = _unknown_keys(table, GROUP_KEYS)
    counts = {}
    for key in ("nodes", "gpus"):
        with _gathering(problems):
            counts[key] = _read_count(key, table.get(key, 1))
    device = ACCELERATORS["CPU"]  # a substitute if it cannot be read, so that the overrides are checked all the same
    value = table.get("accelerator")
    if isinstance(value, Mapping):
        with _gathering(problems, "accelerator"):
            device = _read(Accelerator, value)
    elif isinstance(value, str):
        with _gathering(problems):
            device = read_accelerator(value) if value.strip().endswith(".toml") else find_accelerator(value)
    else:
        wanted = f"must be a table or one of {', '.join(ACCELERATORS)}"
        problems.append(Problem("cluster.accelerator", f"accelerator={value!r} {wanted}"))
    with _gathering(problems):
        device = _read(Accelerator, {key: table[key] for key in OVERRIDES if key in table}, device)
    if problems:
        raise UserError(problems)
    return Group(accelerator=device, **counts)


def read_accelerator(name: str) -> Accelerator:
    """The accelerator that a TOML file describes, as `fivefold calibrate` writes it."""
    path = path_of(name.strip())
    try:
        table = read_toml(path)
    except Missing:
        others = sorted(str(file) for file in path.parent.glob("*.toml")) if os.path.isdir(path.parent) else []
        hint = did_you_mean(str(path), others) if others else f"'fivefold calibrate -o {path}' makes one of this device"
        raise UserError(f"no accelerator file {path}; {hint}", "cluster.accelerator") from None
    problems: list[str] = []
    with _gathering(problems, str(path)):
        return _read(Accelerator, table)
    raise UserError(problems)


def _read_count(key: str, value: Any) -> int:
    # 18 digits: beyond them int() of a text may refuse, and no cluster is so large
    count = int(value) if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value) else value
    if type(count) is not int or count < 1:
        raise UserError(f"{key}={value} must be a whole number of at least 1", "cluster.count")
    if wrong := misfit(key, count, within(1, MAX_RANKS)):
        raise UserError(wrong, "cluster.count")
    return count


def _read(kind: type[T], value: Any, default: T | None = None) -> T:
    """A description from a table; fields that the table leaves out are those of `default`."""
    fields = structs.fields(kind)
    names = [field.name for field in fields]
    if not isinstance(value, Mapping):
        raise UserError(f"{value!r} must be a table with the keys {', '.join(names)}", "cluster.type")
    problems = _unknown_keys(value, names)
    values = {}
    for field in fields:
        if field.name in value:
            with _gathering(problems, field.name if kind is Accelerator and field.name in NESTED else ""):
                values[field.name] = _read_field(kind, field.name, value, default)
        elif default is None and field.required:
            problems.append(Problem("cluster.missing", f"{field.name} is missing"))
    if problems:
        raise UserError(problems)
    return structs.replace(default, **values) if default else kind(**values)


def _read_field(kind: type[Struct], name: str, table: Mapping[str, Any], parent: Any) -> Any:
    """One value of a table; `parent` is the description whose field it replaces, if there is one."""
    value, default = table[name], getattr(parent, name, None)
    if name in ("name", "source"):
        if isinstance(value, str) and value.strip():
            return value
        raise UserError(f"{name}={value!r} must be a text", "cluster.type")
    if name == "units":
        return _read_count(name, value)
    if kind is Accelerator and name in NESTED:
        if name == "achieved":
            if value is None:  # the catalogue's
                return None
            default = default or achieved(str(table.get("name", getattr(parent, "name", ""))))
        if NESTED[name] is Link and isinstance(value, str):
            return find_link(value)
        return _read(NESTED[name], value, default)
    is_number = type(value) in (int, float)
    if kind is Achieved and name not in LIMITS:
        if is_number and 0 < value <= SHARE:
            return float(value)
        share = f"must be a share of the ceiling: above 0, at most {SHARE}"
        raise UserError(f"{name}={value!r} {share}", "cluster.share")
    least, bound, wanted = LIMITS.get(name, (1, 1e30, "FLOP/s, at least 1"))
    if is_number and least <= value < bound:
        return int(value) if name == "memory" else float(value)
    raise UserError(f"{name}={value!r} must be a number of {wanted}", "cluster.figure")


# ---- listing --------------------------------------------------------------------------------------------------------
# The catalogue as a result: peak figures, the shares of them that are reached, and where each figure is from.


_LISTED = ("fp32", "bf16", "fp8")  # the other rates are shown of one accelerator


@dataclass(frozen=True)
class AcceleratorList(Result):
    devices: tuple[Accelerator, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        return [
            to_builtins(device)
            | {"achieved": to_builtins(achieved(device.name)) | {"source": source_of(device.name)}}
            | {"sources": dict(zip(("rates", "memory and links"), SOURCES[device.name], strict=True))}
            | ({"page": PAGES[device.name]} if device.name in PAGES else {})
            for device in self.devices
        ]

    def blocks(self) -> Iterator[Block]:
        if len(self.devices) == 1:
            yield from _one(self.devices[0])
            return
        rows = [
            (
                device.name,
                f"{device.memory / 1e9:.1f}",
                f"{device.memory_bandwidth / 1e12:.3g}",
                *(_tera(getattr(device.peak, precision)) for precision in _LISTED),
                device.inside.name,
                device.across.name,
            )
            for device in self.devices
        ]
        heads = ["name", ">GB", ">TB/s", *(f">{precision}" for precision in _LISTED), "in a node", "between nodes"]
        caption = "Memory and its bandwidth, dense TFLOP/s, links; `fivefold list accelerators H100` shows one"
        yield Table(heads, rows, "Accelerators", caption)
        sources = [(device.name, f"{'. '.join(SOURCES[device.name])}.") for device in self.devices]
        yield Table(["name", "~its figures are from"], sources, "Sources")
        reached = [(device.name, source_of(device.name)) for device in self.devices]
        yield Table(["name", "~the shares of them that software reaches are"], reached, "Efficiency")


def _one(device: Accelerator) -> Iterator[Block]:
    """All about one accelerator."""
    rates, links = SOURCES[device.name]
    peaks = [(name, f"{_tera(peak)} TFLOP/s") for name in PRECISIONS if (peak := getattr(device.peak, name))]
    yield Table(["precision", ">dense, at best"], peaks, device.name, rates)
    rows = [
        ("memory", f"{bytes_text(device.memory)}, as its driver says"),
        ("memory bandwidth", f"{device.memory_bandwidth / 1e12:.3g} TB/s"),
        ("link inside a node", _link(device.inside)),
        ("link between nodes", f"{_link(device.across)}; a cluster's file can say another"),
    ]
    yield Table(["", "~figure"], rows, "Memory and links", links)
    shares = structs.asdict(achieved(device.name))
    shown = [(name, f"{value:.3g}") for name, value in shares.items() if isinstance(value, float) and 0.01 < value <= 1]
    yield Table(["share of a ceiling", ">reached"], shown, "What software reaches", source_of(device.name))
    if device.name in PAGES:
        yield Text(f"\nthe maker's paper: {PAGES[device.name]}")
    yield Text(f"\nwritten in a cluster as 8x{device.name} or 4x8x{device.name}; --json has all figures")


def _link(link: Link) -> str:
    return f"{link.name}, {link.bandwidth / 1e9:g} GB/s in one direction, {link.latency * 1e6:.3g} us a hop"


def _tera(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e12:.4g}"


def accelerators(name: str | None = None) -> AcceleratorList:
    """All accelerators that clusters can be made of, or one of them under any of its spellings."""
    return AcceleratorList(tuple(ACCELERATORS.values()) if name is None else (find_accelerator(name),))
