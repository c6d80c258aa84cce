"""What people get who install the package: its metadata, its files, and a description that any index can show."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import fivefold

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("of_the_package", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fivefold.version.__version__"}
    assert f'__version__ = "{fivefold.__version__}"' in (ROOT / "src/fivefold/version.py").read_text()
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
    assert "version" not in yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_description_is_a_sentence_that_fits_a_line() -> None:
    said = PROJECT["project"]["description"]
    assert said.endswith(".")
    assert said.count(".") == 1
    assert len(said) < 110


ADDRESS = "https://host/owner/name"
PAGE = """[a](docs/a.md) [b](docs/b.md#part) ![c](docs/c.png) [d](#here) [e](https://x/y)
[![f](docs/f.svg)](docs/f.md) [`g`](recipes) ![h](https://x/h.png)
"""
SHOWN = f"""[a]({ADDRESS}/blob/HEAD/docs/a.md) [b]({ADDRESS}/blob/HEAD/docs/b.md#part) ![c]({ADDRESS}/raw/HEAD/docs/c.png) [d](#here) [e](https://x/y)
[![f]({ADDRESS}/raw/HEAD/docs/f.svg)]({ADDRESS}/blob/HEAD/docs/f.md) [`g`]({ADDRESS}/blob/HEAD/recipes) ![h](https://x/h.png)
"""  # noqa: E501


def test_links_and_pictures_of_the_readme_lead_to_the_repository_from_a_package_index(setup: ModuleType) -> None:
    """An index resolves no relative address, and strips data: addresses and most of HTML."""
    assert setup.absolute(PAGE, ADDRESS) == SHOWN
    assert setup.absolute(PAGE, "") == PAGE
    readme = (ROOT / "README.md").read_text()
    assert "<img" not in readme
    shown = setup.absolute(readme, ADDRESS)
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", shown) == []
    for path in re.findall(rf"\({ADDRESS}/(?:raw|blob)/HEAD/([^)#]*)", shown):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://host/owner/name.git", ADDRESS),
        ("https://host/owner/name/", ADDRESS),
        ("https://user:token@host/owner/name", ADDRESS),
        ("git@host:owner/name.git", ADDRESS),
        ("ssh://git@host/owner/name.git", ADDRESS),
        ("/home/me/clone", ""),
        ("file:///home/me/clone", ""),
        ("", ""),
    ],
)
def test_the_address_is_that_of_the_origin_without_a_token(setup: ModuleType, origin: str, address: str) -> None:
    assert setup.web_address(origin) == address


def test_the_address_is_that_of_the_workflow_or_of_the_sdist(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "HERE", tmp_path)
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert setup.repository() == ""
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://host")
    assert setup.repository() == ADDRESS
    (tmp_path / "PKG-INFO").write_text("Name: fivefold\nProject-URL: Issues, x\nProject-URL: Repository, https://y\n")
    assert setup.repository() == "https://y"


def test_data_files_are_part_of_the_package() -> None:
    """Whatever lies in the source beside Python is installed."""
    folder = ROOT / "src" / "fivefold"
    kept = {
        path for pattern in PROJECT["tool"]["setuptools"]["package-data"]["fivefold"] for path in folder.glob(pattern)
    }
    lies = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert lies == kept


def test_the_examples_of_the_checkout_are_those_of_the_package() -> None:
    """There they are links; an sdist has copies."""
    jobs = sorted((ROOT / "examples").glob("*.toml"))
    assert jobs
    for job in jobs:
        assert job.read_text() == (ROOT / "src" / "fivefold" / "examples" / job.name).read_text()
        assert job.is_symlink() or not (ROOT / ".git").exists()


def test_the_workflow_may_read_and_runs_what_make_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert not any("permissions" in job for job in workflow["jobs"].values())
    used = {step["uses"] for step in steps if "uses" in step}
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", name) for name in used), used
    assert all(step["with"]["persist-credentials"] is False for step in steps if "checkout@" in step.get("uses", ""))
    assert not any("${{" in step.get("run", "") for step in steps)  # which a pull request's title could write
    made = {step["run"].removeprefix("make ") for step in steps if step.get("run", "").startswith("make ")}
    assert made == {"check", "test", "wheel-test", "docs"}
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made <= set(known)
