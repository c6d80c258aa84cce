"""Job files and KEY=VALUE: read, or refused in sentences."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.job.config import SECTIONS
from fivefold.job.reading import job_from, read_job
from fivefold.job.toml_writer import to_toml
from fivefold.spec.model import ModelSpec
from tests.fuzz.cases import ODD, changed, damaged, fuzz, survives

TINY = to_toml(read_job(None, ["layout=dp=2,tp=2,zero=1,microbatches=2", "run.name=tiny"]))
TABLE: dict[str, Any] = msgspec.to_builtins(read_job())
FIELDS = [
    f"{section}.{field}"
    for section, kind in [("model", ModelSpec), *SECTIONS.items()]
    for field in getattr(kind, "__struct_fields__", ())
]
KEYS = [*FIELDS, "model", "layout", "run", "", "x", "model.x.y", "layout.x", "a" + ".a" * 500, "model.preset",
        "model.config", "model.rope_scaling.factor", "optimizer.lr", "optimizer.betas", "optimizer.name"]  # fmt: skip
VALUES = [*map(str, ODD), "dp=2,tp=x", "0x" + "f" * 5000, "[" * 5000, "tiny", "1,2,3", "zb-v", "mine.txt"]


def judge(path: Path | None, changes: list[str]) -> bool:
    """Read and judged; what is right reads back as it is."""

    def question() -> None:
        job = read_job(path, changes)
        if not job.problems():
            again = job_from(msgspec.to_builtins(job))
            assert again == job

    return survives(question)


def toml(value: Any) -> str:
    """Some value as a TOML file might have it, right or wrong."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key or chr(34) * 2} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("jobs") / "job.toml"


@fuzz
@given(st.one_of(damaged(TINY.encode()), st.binary(max_size=200)))
def test_a_file_of_other_bytes(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    judge(file, [])


@fuzz
@given(changed(TABLE))
def test_a_file_of_other_values(file: Path, table: dict[str, Any]) -> None:
    lines = [f"[{key}]\n" + "\n".join(f"{one} = {toml(it)}" for one, it in value.items() if it is not None)
             if isinstance(value, dict) else f"{key} = {toml(value)}" for key, value in table.items()]  # fmt: skip
    file.write_text("\n".join(sorted(lines, key=lambda line: line.startswith("["))), errors="replace")
    judge(file, [])


@fuzz
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)), min_size=1, max_size=4))
def test_changes_of_a_job(changes: list[tuple[str, str]]) -> None:
    judge(None, [f"{key}={value}" for key, value in changes])


@fuzz
@given(st.lists(st.text(max_size=60), min_size=1, max_size=3))
def test_changes_of_any_text(changes: list[str]) -> None:
    judge(None, changes)


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.slow)])
def test_flipped_bits_of_a_job_file(file: Path, step: int) -> None:
    """Every so manyth single-bit flip of a tiny run's job file; some are jobs still."""
    content, read = TINY.encode(), 0
    for bit in range(0, 8 * len(content), step):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        read += judge(file, [])
    assert 0 < read < (len(TINY) if step > 8 else 8 * len(TINY))
