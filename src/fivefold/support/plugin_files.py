"""Which files a plugin is made of: ranks compare them, and an error that has come through one is the plugin's."""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def source_files(module: str) -> tuple[tuple[Path, Path], ...]:
    """A plugin's files, each with the directory that it is known from: the module's; of one in a package, with or
    without an __init__.py, all of that package; and those beside them that these import, and so on.

    What is imported is read from the text, so it is the same on all ranks, whatever they have imported so far. Beside
    an installed module lie all others that are installed, which are not its own.
    """
    file = getattr(sys.modules.get(module), "__file__", None)
    top = module.partition(".")[0]
    return _files(top, Path(file), tuple(getattr(sys.modules.get(top), "__path__", ()))) if file else ()


@cache
def _files(top: str, file: Path, package: tuple[str, ...]) -> tuple[tuple[Path, Path], ...]:
    roots = [Path(root) for root in package]
    files = [(root, path) for root in roots for path in sorted(_code(root))] or [(file.parent, file)]
    homes = [home for home in ([root.parent for root in roots] or [file.parent]) if home.name not in _INSTALLED]
    looked = {top, __name__.partition(".")[0]}
    for _, path in files:  # which grows
        for name in [] if not homes else sorted(_imports(path) - looked):
            looked.add(name)
            files += [(home, found) for home in homes for found in _beside(home, name)]
    return tuple(files)


_CODE_SUFFIXES = (".py", ".so", ".pyd")
_INSTALLED = ("site-packages", "dist-packages")
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\w+)[\w.]*[ \t]+import\b|import[ \t]+([^#;\n]+))", re.MULTILINE)


def _imports(path: Path) -> set[str]:
    """The first parts of the names of all modules that a file imports."""
    found = _IMPORT.findall(path.read_text(errors="replace"))
    return {name.split(".")[0].split(" as ")[0].strip() for one, more in found for name in (one or more).split(",")}


def _beside(home: Path, name: str) -> list[Path]:
    """The files of a module or package of that name in a directory."""
    alone = home / f"{name}.py"
    return [alone] if alone.is_file() else sorted(_code(home / name))


def _code(folder: Path) -> Iterator[Path]:
    """The files in a package that are run: Python's, and compiled ones."""
    return (path for path in folder.rglob("*") if path.suffix in _CODE_SUFFIXES and path.is_file())


def names_beside(home: Path, top: str) -> list[str]:
    """The names of a module or package in a directory, and of those there that it imports, and so on."""
    names, looked = [top], {top, __name__.partition(".")[0]}
    for name in names:  # which grows
        found = {imported for path in _beside(home, name) for imported in _imports(path)}
        names += sorted(found - looked)
        looked |= found
    return [name for name in names if _beside(home, name)]


@cache
def installed_as(module: str) -> tuple[str, ...]:
    """What pip has noted of the distribution that a module was installed with: its name and version, and the hashes of
    its files, data and helpers beside it among them. Not of what differs between machines: scripts, and notes."""
    file = getattr(sys.modules.get(module), "__file__", None)
    top = module.partition(".")[0]
    package = [*getattr(sys.modules.get(top), "__path__", ())]
    homes = [Path(root).parent for root in package] or ([Path(file).parent] if file else [])
    return tuple(
        line for home in homes for record in home.glob("*.dist-info/RECORD") for line in _recorded_files(record, top)
    )


def _recorded_files(record: Path, top: str) -> list[str]:
    lines = record.read_text(errors="replace").splitlines()
    if not any(line.startswith((f"{top}.", f"{top}/")) for line in lines):
        return []
    files = (line for line in lines if "sha256=" in line and not line.startswith(("..", "/", f"{record.parent.name}/")))
    return [record.parent.name, *sorted(files)]
