"""Schedule files, as text and as JSON: proven, or refused in sentences."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.schedules.registry import build
from fivefold.schedules.simulate import simulate
from fivefold.schedules.text import load, to_json, to_text
from tests.fuzz.cases import damaged, documents, fuzz, survives

SMALL = [build("1f1b", 2, 3), build("zb-v", 2, 4), build("interleaved", 2, 4)]
WORDS = ["schedule", "stages", "microbatches", "buffers", "peak", "slots", "messages implied", "rank", "0", "1", "2",
         "9", "999999999999", "-1", "F0.0", "B0.0", "F1.0", "B1.0", "I0.1", "W0.1", "SEND_A0.0", "RECV_A1.0", "F0",
         "STEP0", "GATHER0", "\n", "\n", "\n", "#", "F999999999999.0", "F0.0+B0.0", "\u2028"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("schedules")


def judge(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    survives(lambda: simulate(load(path)).makespan)


TEXTS = st.one_of(
    *(damaged(to_text(one).encode()) for one in SMALL),
    damaged(to_text(SMALL[0], implied=True).encode()),
    st.lists(st.sampled_from(WORDS), max_size=40).map(lambda words: " ".join(words).encode()),
    st.binary(max_size=200),
)


@fuzz
@given(TEXTS)
def test_texts(folder: Path, content: bytes) -> None:
    judge(folder / "mine.txt", content)


@fuzz
@given(st.one_of(*(documents(json.loads(to_json(one))) for one in SMALL)))
def test_json(folder: Path, content: bytes) -> None:
    judge(folder / "mine.json", content)
