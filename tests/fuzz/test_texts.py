"""Layouts, clusters and times, which are given as short texts: read, or refused in sentences."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fivefold.hardware.cluster import Cluster
from fivefold.layout.layout import Layout
from fivefold.schedules.costs import DURATION_KEYS, Durations, parse_slow
from fivefold.schedules.registry import CATALOGUE
from fivefold.schedules.schedule import Placement
from fivefold.spec.presets import preset
from tests.fuzz.cases import ODD, fuzz, survives

WORDS = [str(value) for value in ODD if len(str(value)) < 6000]
NUMBERS = ["0", "1", "2", "3", "4", "8", "126", "10000000", "1000000000", "-2", "²", "1_000", "0x10", " 2 "]
FIELDS = [*Layout.__struct_fields__, "x", "", "split", "sp"]
SETTINGS = st.tuples(
    st.sampled_from(FIELDS),
    st.sampled_from(["=", "=", "=", "", "=="]),
    st.sampled_from([*NUMBERS, *NUMBERS, *CATALOGUE, *WORDS, "full", "ring", "true", "1,2", "/dev/null", "a.txt"]),
).map("".join)
MODELS = [
    preset("tiny"),
    preset("gpt3-175b"),
    preset("tiny", heads=97, hidden=97 * 64, kv_heads=1),
    msgspec.structs.replace(preset("tiny"), layers=0),
]


@fuzz
@given(
    st.one_of(st.lists(SETTINGS, max_size=6).map(",".join), st.text(max_size=80)),
    st.sampled_from(MODELS),
    st.sampled_from([None, 1, 8, 131_072]),
    st.sampled_from([None, 1, 127, 8192, 10**9]),
)
def test_layouts(text: str, model, world: int | None, size: int | None) -> None:
    def question() -> None:
        layout = Layout.parse(text)
        assert Layout.parse(str(layout)) == layout
        if not model.problems():
            layout.problems(model, world=world, seq=size, batch=size)

    survives(question)


CLUSTERS = st.lists(
    st.sampled_from(["x", "x", "8", "1", "0", "-1", "999999999", "1.5", "9" * 5000, "H100", "A100-80", "CPU", "+", " ",
                     "×", "mine.toml", "~nouser/x.toml", "a" * 300 + ".toml", "\0.toml", "/dev/zero", "*"]),
    max_size=8,
).map("".join)  # fmt: skip


@fuzz
@given(st.one_of(CLUSTERS, st.text(max_size=40)))
def test_clusters(text: str) -> None:
    survives(lambda: Cluster.read(text).world)


TIMES = st.tuples(
    st.sampled_from([*DURATION_KEYS, "x", "", "0", "1", "99999999999999999999"]),
    st.sampled_from(["=", "=", ""]),
    st.sampled_from([*NUMBERS, *WORDS, "1:1", "1e400", "1e308"]),
).map("".join)


@fuzz
@given(st.one_of(st.lists(TIMES, max_size=5).map(",".join), st.text(max_size=60)))
def test_times(text: str) -> None:
    survives(lambda: Durations.parse(text).costs(Placement.single(4)))
    survives(lambda: Durations(slow=parse_slow(text)).costs(Placement.single(4)))
