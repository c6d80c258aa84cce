"""Imports point one way. ARCHITECTURE.md's table of layers says which; the source is read, not run."""

import ast
import graphlib

from tests.layers import HEAVY, HEIGHT, LAYERS, imports, loaded, modules, pure_modules, room, walk, way


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
    assert not upwards, sorted(upwards)


def test_there_are_no_import_circles() -> None:
    graph = {
        module: [found.module for found in imports(module) if found.loads and found.module in modules()]
        for module in modules()
    }
    list(graphlib.TopologicalSorter(graph).static_order())  # a circle is an error that names its modules


def test_the_package_itself_loads_nothing_and_nobody_asks_it() -> None:
    """Python imports it before any of its rooms."""
    loads = {found.module for found in imports("fivefold") if found.loads and found.module in modules()}
    assert loads == {"fivefold.version"}
    asking = [module for module in modules() if "fivefold" in {found.module for found in imports(module)}]
    assert asking == []


def test_no_two_classes_have_one_name() -> None:
    """A reader who meets a name knows what it is."""
    homes: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_what_is_pure_loads_no_torch() -> None:
    wrong = [f"{HEAVY & loaded(module)}: {way(module)}" for module in pure_modules() if HEAVY & loaded(module)]
    assert not wrong, "\n".join(wrong)


def test_functions_and_types_do_not_load_what_they_import() -> None:
    code = """
import fivefold.spec.model
from fivefold.planner import search
if TYPE_CHECKING:
    import torch
else:
    import rich
try:
    import numpy
except ImportError:
    pass
def later():
    from fivefold.trainer.run import run
"""
    assert [*walk(ast.parse(code), loads=True)] == [
        ("fivefold.spec.model", True),
        ("fivefold.planner.search", True),
        ("torch", False),
        ("rich", True),
        ("numpy", True),
        ("fivefold.trainer.run", False),
    ]
