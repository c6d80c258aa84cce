"""Imports point one way. ARCHITECTURE.md's table of layers says which; the source is read, not run."""

import ast
import graphlib
import re

from tests.layers import HEAVY, HEIGHT, LAYERS, imports, loaded, modules, nodes, package, pure_modules, walk, way


def test_the_table_names_every_room_and_no_other() -> None:
    here = {package(module) for module in modules()} - {"", "__main__"}
    assert sorted(HEIGHT) == sorted(here)
    assert len(HEIGHT) == len(LAYERS), "a package stands in the table twice"
    for layer in LAYERS:
        assert layer.torch in ("no", "yes") or layer.front, layer
        missing = [name for name in layer.front if f"fivefold.{layer.package}.{name}" not in modules()]
        assert not missing, f"the table names modules of {layer.package} that do not exist: {missing}"


def test_imports_point_to_earlier_packages() -> None:
    upwards = {
        (module, found.module)
        for module in modules()
        if package(module) in HEIGHT
        for found in imports(module)
        if found.module in modules() and HEIGHT.get(package(found.module), -1) > HEIGHT[package(module)]
    }
    assert not upwards, sorted(upwards)


# Two classes that name each other: the second module imports the first when it is loaded, the first the second only
# for annotations, or in one function.
MUTUAL = {
    ("spec.kinds", "spec.model"): "a model's pattern has kinds, whose operations read the numbers of the model",
    ("spec.mixers", "spec.model"): "the same, of attention",
    ("spec.mlps", "spec.model"): "the same, of MLPs",
    ("spec.pattern", "spec.model"): "the same, of a layer's two",
    ("spec.operations", "spec.model"): "a model counts its operations, which are made of its numbers",
    ("spec.operations", "spec.pattern"): "a block's operations are those of a layer's kinds, which list them",
    ("data.rows", "data.tokens"): "a row names the prepared tokens that it reads, whose splits are rows",
    ("trainer.loop", "trainer.checkpointing"): "a trainer saves by its checkpoints, which hold the trainer's state",
    ("schedules.schedule", "schedules.result"): "a notebook asks a schedule itself for its picture",
}


def test_there_are_no_import_circles() -> None:
    """Of imports at module level, inside functions and for types."""
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for module in modules():
        for found in imports(module):
            mutual = (module.removeprefix("fivefold."), found.module.removeprefix("fivefold.")) in MUTUAL
            assert not (mutual and found.loads), f"{module} loads {found.module}"
            if found.module in modules() and found.module != module and not mutual:
                graph[module].add(found.module)
    list(graphlib.TopologicalSorter(graph).static_order())  # a circle is an error that names its modules
    for first, second in MUTUAL:
        assert f"fivefold.{second}" in {found.module for found in imports(f"fivefold.{first}")}, "no exception any more"


def test_the_package_itself_loads_nothing_and_nobody_asks_it() -> None:
    """Python imports it before any of its packages."""
    loads = {found.module for found in imports("fivefold") if found.loads and found.module in modules()}
    assert loads == {"fivefold.version"}
    asking = [module for module in modules() if "fivefold" in {found.module for found in imports(module)}]
    assert asking == []


PAGES = re.compile(r"\.foreign\.adapters\.|\.labs\.\w+\.(check|starter)$")  # read alone, and imported by ranks alone


def test_no_two_classes_have_one_name() -> None:
    """A reader who meets a name knows what it is."""
    homes: dict[str, list[str]] = {}
    for module in modules():
        for node in nodes(module):
            if isinstance(node, ast.ClassDef) and not PAGES.search(module):
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
