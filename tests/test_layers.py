"""Imports point one way. ARCHITECTURE.md's table of layers says which; the source is read, not run."""

import ast
import graphlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "triton"}

# Imports that point the wrong way today. This list may only become shorter.
KNOWN_VIOLATIONS = {
    ("fivefold.schedule.builders.dualpipe_v", "fivefold.layout.layout"),
    ("fivefold.schedule.builders.interleaved", "fivefold.layout.layout"),
    ("fivefold.schedule.catalogue", "fivefold.layout.layout"),
    ("fivefold.schedule.tables", "fivefold.bench.schedules"),
}


class Layer(NamedTuple):
    room: str
    torch: str  # "no", "yes" or "yes, not in `a`, `b`"

    @property
    def front(self) -> list[str]:
        """The modules that import no torch although their room may."""
        return re.findall(r"`([\w.]+)`", self.torch)


class Import(NamedTuple):
    module: str
    loads: bool  # at module level: importing the module that says this imports it, too


def layers() -> list[Layer]:
    """The rows of the table, lowest first."""
    section = re.search(r"^## Layers\n(.*?)(?=^## |\Z)", (ROOT / "ARCHITECTURE.md").read_text(), re.DOTALL | re.M)
    assert section, "ARCHITECTURE.md has no section '## Layers'"
    return [Layer(*row) for row in re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", section[1], re.M)]


LAYERS = layers()
HEIGHT = {layer.room: height for height, layer in enumerate(LAYERS)}


@cache
def modules() -> dict[str, Path]:
    """Every module of the source by its dotted name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room(module: str) -> str:
    """`plan` of fivefold.plan.search.space; nothing of the package itself, which holds the version and lazy names."""
    return module.split(".")[1] if "." in module else ""


@cache
def imports(module: str) -> list[Import]:
    return list(walk(ast.parse(modules()[module].read_text()), loads=True))


def walk(node: ast.AST, loads: bool) -> Iterator[Import]:
    """All imports below a node. Those of functions and of TYPE_CHECKING blocks do not load when the module does."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, loads) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.module is not None, "imports name the whole path, so none is relative"
            assert child.level == 0, "imports name the whole path, so none is relative"
            for alias in child.names:
                whole = f"{child.module}.{alias.name}"
                yield Import(whole if whole in modules() else child.module, loads)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from walk(ast.Module(child.body, []), False)
            yield from walk(ast.Module(child.orelse, []), loads)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, loads and not function)


@cache
def loaded(module: str) -> frozenset[str]:
    """Everything that importing a module imports, other packages by their first name."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in modules():
            todo += [found.module for found in imports(name) if found.loads]
            todo += [name.rpartition(".")[0]] if "." in name else []  # its package comes along
    return frozenset(name if name in modules() else name.split(".")[0] for name in seen)


def test_the_table_names_every_room_and_no_other() -> None:
    here = {room(module) for module in modules()} - {"", "__main__"}
    assert sorted(HEIGHT) == sorted(here)
    assert len(HEIGHT) == len(LAYERS), "a room stands in the table twice"
    for layer in LAYERS:
        assert layer.torch in ("no", "yes") or layer.front, layer
        missing = [name for name in layer.front if f"fivefold.{layer.room}.{name}" not in modules()]
        assert not missing, f"the table names modules of {layer.room} that do not exist: {missing}"


def test_imports_point_to_earlier_rooms() -> None:
    upwards = {
        (module, found.module)
        for module in modules()
        if room(module) in HEIGHT
        for found in imports(module)
        if found.module in modules() and HEIGHT.get(room(found.module), -1) > HEIGHT[room(module)]
    }
    assert not upwards - KNOWN_VIOLATIONS, sorted(upwards - KNOWN_VIOLATIONS)


def test_there_are_no_import_circles() -> None:
    graph = {
        module: [found.module for found in imports(module) if found.loads and found.module in modules()]
        for module in modules()
    }
    list(graphlib.TopologicalSorter(graph).static_order())  # a circle is an error that names its modules


def test_the_package_itself_loads_nothing() -> None:
    """Every room may ask it for the version, so it must stand below all of them."""
    assert not [found for found in imports("fivefold") if found.loads and found.module in modules()]


def pure_modules() -> list[str]:
    """Every module that must load without torch: whole rooms, the fronts of others, and what the Python API names."""
    found = [named.module for named in imports("fivefold") if named.module in modules()]
    for layer in LAYERS:
        front = {f"fivefold.{layer.room}.{name}" for name in layer.front}
        here = [module for module in modules() if room(module) == layer.room]
        found += [module for module in here if layer.torch == "no" or module in front]
    return sorted(set(found))


def test_what_is_pure_loads_no_torch() -> None:
    wrong = [f"{HEAVY & loaded(module)}: {way(module)}" for module in pure_modules() if HEAVY & loaded(module)]
    assert not wrong, "\n".join(wrong)


def way(module: str) -> str:
    """The modules on the way from a pure one to the first that imports torch itself."""
    for found in imports(module):
        if found.loads and found.module in modules() and HEAVY & loaded(found.module):
            return f"{module} -> {way(found.module)}"
    return module


def test_functions_and_types_do_not_load_what_they_import() -> None:
    code = """
import fivefold.spec.model
from fivefold.plan import search
if TYPE_CHECKING:
    import torch
else:
    import rich
try:
    import numpy
except ImportError:
    pass
def later():
    from fivefold.train.run import run
"""
    assert [*walk(ast.parse(code), loads=True)] == [
        ("fivefold.spec.model", True),
        ("fivefold.plan.search", True),
        ("torch", False),
        ("rich", True),
        ("numpy", True),
        ("fivefold.train.run", False),
    ]
