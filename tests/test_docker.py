"""The Dockerfile names what there is. It is not built here: no container engine."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINES = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)).splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line.strip()]


def words(step: str) -> list[str]:
    return [rest for name, rest in STEPS if name == step]


def test_what_is_copied_is_there_and_is_sent() -> None:
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    copied = {name for rest in words("COPY") for name in rest.split()[:-1]}
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_extras_python_and_entry_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = (rest.removeprefix("EXTRAS=") for rest in words("ARG"))
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    (base,) = words("FROM")
    assert f"Programming Language :: Python :: {base.split(':')[1].split('-')[0]}" in project["classifiers"]
    assert words("ENTRYPOINT") == ['["fivefold"]']
    assert "fivefold" in project["scripts"]
    named = {"README.md", "pyproject.toml", "setup.py", *project["license-files"]}  # which the build reads
    assert named <= {name for rest in words("COPY") for name in rest.split()}


def test_it_does_not_run_as_root_and_keeps_no_secret() -> None:
    assert words("USER") == ["1000"]
    assert [name for name, _ in STEPS].index("USER") < [name for name, _ in STEPS].index("ENTRYPOINT")
    assert not re.search(r"(?i)secret|token|password|key", " ".join(words("ENV") + words("ARG")))
