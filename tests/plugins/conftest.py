"""The plugins of examples/plugins, each installed as the package of its own that it is."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fivefold.support import plugins
from fivefold.support.plugin_finder import FINDER

HOMES = Path(__file__).parents[2] / "examples" / "plugins"


def install(plugin: Path, folder: Path) -> Path:
    """What `pip install` makes of a plugin's directory, in a directory of its own: the wheel, unpacked. pip itself
    would take three times as long to do it."""
    pytest.importorskip("setuptools")
    copy, target = folder / plugin.name, folder / "installed"
    shutil.copytree(plugin, copy)  # a build leaves files beside what it builds
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(folder)], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.fixture
def package(request: pytest.FixtureRequest, installed: Callable[[str], Path], forgotten: None) -> Path:
    """Where the plugin that the test's module calls PACKAGE is installed; Python looks there."""
    sys.path.insert(0, str(home := installed(request.module.PACKAGE)))
    return home


def is_short_and_without_torch(home: Path, name: str) -> None:
    """A package of its own, of a module or two that are short; what describes the plugin imports no torch."""
    files = sorted([*home.glob(f"{name}.py"), *home.glob(f"{name}/*.py")])
    assert sorted(home.glob("**/*.py")) == files
    assert 0 < len(files) < 3
    assert sum(len(file.read_text().splitlines()) for file in files) < 150
    program = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    path = ":".join([str(home), *sys.path])
    assert subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}).returncode == 0


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
