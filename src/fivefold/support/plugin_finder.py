"""Finds the modules of plugins that lie in the directory in which a user works, and nothing else there.

A console script does not have that directory on its path, and it must not: it may be a run's, or hold files of
strangers, and whatever is missing (an optional package) would then be taken from there, long after the plugin was
imported. So the plugin's own name is looked for in it, and the names that its files import and that lie beside it;
after all places where Python looks.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from fivefold.support.plugin_files import names_beside


class PluginFinder(MetaPathFinder):
    def __init__(self) -> None:
        self.homes: dict[str, Path] = {}  # by the name of a module without dots

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        home = self.homes.get(fullname) if path is None else None
        return None if home is None else PathFinder.find_spec(fullname, [str(home)])

    def admit(self, module: str, home: Path) -> None:
        """A plugin's module, if it lies there, and what it imports of what lies beside it."""
        for name in names_beside(home, module.partition(".")[0]):
            self.homes.setdefault(name, home)
        if self not in sys.meta_path:
            sys.meta_path.append(self)


FINDER = PluginFinder()
