"""The plugins of examples/plugins, each installed as the package of its own that it is."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fivefold.support import plugins
from fivefold.support.plugin_finder import FINDER

HOMES = Path(__file__).parents[2] / "examples" / "plugins"


def install(plugin: Path, folder: Path) -> Path:
    """What `pip install` makes of a plugin's directory, in a directory of its own. No index is asked."""
    pytest.importorskip("setuptools")
    copy, target = folder / plugin.name, folder / "installed"
    shutil.copytree(plugin, copy)  # a build leaves files beside what it builds
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    words = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(copy)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the plugin of a name is installed."""
    known: dict[str, Path] = {}

    def found(name: str) -> Path:
        if name not in known:
            known[name] = install(HOMES / name, tmp_path_factory.mktemp(name))
        return known[name]

    return found


@pytest.fixture
def forgotten(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test imports is not there for the next one."""
    path, known, ours = [*sys.path], dict(plugins._imported), str(tmp_path_factory.getbasetemp())
    yield
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(ours):
            del sys.modules[name]
    sys.path[:] = path
    FINDER.homes.clear()
    plugins._imported.clear()
    plugins._imported.update(known)
