"""The source as the layers' test reads it: ARCHITECTURE.md's table, every module, and what each one imports."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "triton"}


class Layer(NamedTuple):
    package: str
    torch: str  # "no", "yes" or "yes, not in `a`, `b`"

    @property
    def front(self) -> list[str]:
        """The modules that import no torch although their package may."""
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
HEIGHT = {layer.package: height for height, layer in enumerate(LAYERS)}


@cache
def modules() -> dict[str, Path]:
    """Every module of the source by its dotted name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def package(module: str) -> str:
    """`planner` of fivefold.planner.space; nothing of the package itself, which holds the version and lazy names."""
    return module.split(".")[1] if "." in module else ""


@cache
def tree(module: str) -> ast.Module:
    """To parse all modules takes longer than what any test does with them."""
    return ast.parse(modules()[module].read_text())


@cache
def nodes(module: str) -> list[ast.AST]:
    return list(ast.walk(tree(module)))


@cache
def imports(module: str) -> list[Import]:
    return list(walk(tree(module), loads=True))


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
        elif not isinstance(child, ast.expr):  # most nodes are of expressions, and none of these imports
            yield from walk(child, loads and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


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


def pure_modules() -> list[str]:
    """Modules that must load without torch: whole packages, the fronts of others, and what the Python API names."""
    found = [named.module for named in imports("fivefold") if named.module in modules()]
    for layer in LAYERS:
        front = {f"fivefold.{layer.package}.{name}" for name in layer.front}
        here = [module for module in modules() if package(module) == layer.package]
        found += [module for module in here if layer.torch == "no" or module in front]
    return sorted(set(found))


def way(module: str) -> str:
    """The modules on the way from a pure one to the first that imports torch itself."""
    for found in imports(module):
        if found.loads and found.module in modules() and HEAVY & loaded(found.module):
            return f"{module} -> {way(found.module)}"
    return module
