"""What people get who install the package: its metadata, its files, and a description that any index can show."""

import re
import tomllib
from pathlib import Path

import fivefold

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_one() -> None:
    assert PROJECT["project"]["version"] == fivefold.__version__
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()


def test_pictures_of_the_readme_show_on_a_package_index() -> None:
    """An index resolves no relative address and strips data: addresses. Text in a code block shows everywhere."""
    assert re.findall(r"!\[[^]]*\]\((?!https://)[^)]*\)|<img", (ROOT / "README.md").read_text()) == []


def test_data_files_are_part_of_the_package() -> None:
    """Whatever lies in the source beside Python is installed."""
    folder = ROOT / "src" / "fivefold"
    kept = {
        path for pattern in PROJECT["tool"]["setuptools"]["package-data"]["fivefold"] for path in folder.glob(pattern)
    }
    lies = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert lies == kept


def test_the_examples_of_the_checkout_are_those_of_the_package() -> None:
    jobs = sorted((ROOT / "examples").glob("*.toml"))
    assert jobs
    assert [job.resolve().parent for job in jobs] == [ROOT.resolve() / "src" / "fivefold" / "examples"] * len(jobs)
