"""What tp sends for a branch follows from the groups of its matmuls; what no ops could compute is a sentence."""

from collections.abc import Iterator

import pytest

from fivefold.cost.block_collectives import BlockCollectives
from fivefold.layout.layout import Layout
from fivefold.spec.kinds import Mixer, trial
from fivefold.spec.mlps import Dense
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Matmul, Operation, Scores, group_problems
from fivefold.spec.pattern import Layer
from fivefold.spec.presets import preset

E, TOKENS = 64, 128


class Linears(Mixer, frozen=True, kw_only=True, tag="linears:Linears"):
    """A mixer of any linears: name, what it reads, inputs, outputs, rule."""

    place = "linears"
    module = "linears:Layer"

    own: tuple[tuple[str, str, int, int, str], ...] = ()
    experts: int = 0
    scores: bool = False

    def operations(self, spec: ModelSpec, tp: int) -> Iterator[Operation]:
        for name, reads, inputs, outputs, rule in self.own:
            yield Matmul("linears", name, reads, inputs, outputs, rule, experts=self.experts)  # type: ignore[arg-type]
        if self.scores:
            yield Scores(4, 4, 16, 16)


NORM = "linears_norm"
UP, DOWN = ("up", NORM, E, E, "colwise"), ("down", "up", E, E, "rowwise")
WHOLE = (("a", NORM, E, 8, "replicated"), ("b", "a", 8, E, "replicated"))
TWO_SUMS = (UP, ("gate", "other", 8, E, "rowwise"), DOWN)
TWO_GROUPS = (
    UP,
    ("v", NORM, E, E, "colwise"),
    DOWN,
    ("again", "down", E, 32, "colwise"),
    ("out", "x", 32, E, "rowwise"),
)
LATENT = (("q", NORM, E, E, "colwise"), ("kv", NORM, E, 24, "replicated"), ("kv_up", "kv", 16, E, "colwise"), DOWN)


@pytest.mark.parametrize(
    ("own", "forward", "backward"),
    [
        ((UP, DOWN), [("all-gather", E), ("reduce-scatter", E)],
         [("all-gather", E), ("all-gather", E), ("reduce-scatter", E)]),
        (WHOLE, [], []),
        (TWO_SUMS, [("all-gather", E), ("reduce-scatter", E), ("reduce-scatter", E)],
         [("all-gather", E), ("all-gather", E), ("all-gather", E), ("reduce-scatter", E)]),
        (TWO_GROUPS, [("all-gather", E), ("all-gather", E), ("reduce-scatter", E), ("reduce-scatter", E)],
         [*[("all-gather", E)] * 3, ("reduce-scatter", E), ("all-gather", E), ("reduce-scatter", E)]),
        (LATENT, [("all-gather", E), ("all-gather", 24), ("reduce-scatter", E)],
         [("all-gather", E), ("all-gather", E), ("reduce-scatter", E), ("reduce-scatter", 24)]),
    ],
    ids=["columns and rows", "replicated", "two sums", "two groups", "latents"],
)  # fmt: skip
def test_what_tp_sends_is_what_the_linears_need(own: tuple, forward: list, backward: list) -> None:
    kind = Linears(own=own)
    assert list(group_problems(kind.operations(preset("tiny"), 1))) == []  # type: ignore[arg-type]
    layer = Layer(mixer=kind, mlp=Dense())
    spec = preset("tiny", pattern=[layer])
    sent = BlockCollectives(spec, Layout(tp=2, sp=True), TOKENS, 2, 4, layer)
    for found, wanted in ((sent.mixer(), forward), (sent.mixer_back(), backward)):
        assert [(one.kind, one.payload // (2 * TOKENS)) for one in found] == wanted


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ((UP,), "its last linear is colwise, and the stream needs the sum of a rowwise one"),
        ((("a", NORM, E, E, "rowwise"),), "linears.a is rowwise and reads linears_norm, of which every rank has all"),
        (
            (UP, ("b", "up", E, E, "colwise"), DOWN),
            "linears.b is colwise and reads up, of which a rank has its columns",
        ),
        ((UP, ("b", "up", E, E, "replicated"), DOWN), "linears.b is replicated and reads up, of which a rank has its"),
        ((("a", NORM, E, E, "per_head"),), "linears.a is per_head, and a linear is colwise, rowwise or replicated"),
    ],
)
def test_what_makes_no_groups_is_a_sentence(own: tuple, said: str) -> None:
    [problem] = group_problems(Linears(own=own).operations(preset("tiny"), 1))  # type: ignore[arg-type]
    assert said in problem
    [problem] = trial(Linears(own=own), preset("tiny"), 0)
    assert problem.startswith("linears:Linears.operations under tp: ")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Linears(own=(UP, DOWN), experts=4), "linears:Linears does not send tokens to any"),
        (Linears(own=(UP, DOWN), scores=True), "has attends=False, and 1 Scores; attention has attends=True, and one"),
        (
            Linears(own=(("k", NORM, E, 48, "colwise_kv"), DOWN)),
            "with tp=colwise_kv and 48 outputs, and the model's kv heads have 64; heads of its own are colwise",
        ),
    ],
)
def test_what_plans_would_count_wrong_is_a_sentence(kind: Linears, said: str) -> None:
    assert any(said in problem for problem in trial(kind, preset("tiny"), 0))
