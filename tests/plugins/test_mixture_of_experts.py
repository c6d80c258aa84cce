"""A mixture of experts of another package, which derives from ours, sends over ep what ours sends, and is proven."""

from pathlib import Path

import pytest

import fivefold as ff
from fivefold.job.reading import read_job
from fivefold.model.decoder import Decoder
from tests.refusals import refusal
from tests.verifier.cases import slow

KINDS = """
from fivefold.spec.mlps import MixtureOfExperts

class ReGLU(MixtureOfExperts, frozen=True, kw_only=True, tag="reglu:ReGLU"):
    place = "network"
    module = "reglu.layer:Layer"
    reference = "reglu.reference:Plain"
"""
LAYER = """
from fivefold.model.moe import MoE

def reglu(gate, up):
    return gate.relu() * up

class Layer(MoE):
    def __init__(self, kind, spec, ops):
        super().__init__(kind, spec, ops)
        self.experts.activation = reglu
"""
REFERENCE = """
from fivefold.verifier.plain_moe import PlainMoE

class Plain(PlainMoE):
    def __init__(self, spec, balancing):
        super().__init__(spec, balancing)
        self.activation = lambda gate, up: up.where(gate > 0, 0) * gate
"""
SMALL = ["model.hidden=32", "model.ffn=32", "model.layers=2"]
MODEL = ["model.preset=tiny-moe", 'model.pattern=[{mixer="attention", mlp="reglu:ReGLU"}]', *SMALL]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "reglu"
    home.mkdir()
    for name, text in (("__init__", KINDS), ("layer", LAYER), ("reference", REFERENCE)):
        (home / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return home


@pytest.mark.parametrize("layout", ["dp=2,ep=2", *slow(["tp=2,ep=2,sp"])])
def test_where_its_tokens_travel_it_computes_what_its_own_reference_computes(layout: str) -> None:
    """Loss, norm, gradients, weights, where each token went, and what was sent, to the byte."""
    result = ff.verify(layout, MODEL[1:], model="tiny-moe", steps=2, seq=16, batch=4)
    assert result.ok, str(result)


def test_its_reference_is_not_ours(package: Path) -> None:
    (package / "__init__.py").write_text(KINDS.replace("    reference =", "    other ="))
    result = ff.verify("dp=1", MODEL[1:], model="tiny-moe", steps=1, seq=16, batch=4)
    assert not result.ok


def test_it_is_planned_as_ours_is() -> None:
    own, ours = (
        ff.plan(read_job(None, [*MODEL[:1], pattern, *SMALL]).model, "8xH100", batch=16, seq=256, fix="ep=4")
        for pattern in (MODEL[1], 'model.pattern=[{mixer="attention", mlp="moe"}]')
    )
    assert own.chosen.layout.ep == 4
    assert own.chosen.seconds == ours.chosen.seconds


def test_what_sends_tokens_to_experts_says_so_in_its_kind_and_its_module(package: Path) -> None:
    (package / "__init__.py").write_text(KINDS.replace("MixtureOfExperts", "MLP").replace("mlps", "kinds") + OPERATIONS)
    error = refusal(lambda: Decoder(read_job(None, MODEL).model))
    assert "its module derives from fivefold.model.moe:MoE, and its kind has routes=False" in str(error)


OPERATIONS = """
    def operations(self, spec, tp):
        yield from ()
"""


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("other.reference:Plain", "has reference='other.reference:Plain', which is not of its own package"),
        (
            "reglu.reference",
            "has reference='reglu.reference', and not the \"package.module:Class\" that `verify` holds",
        ),
    ],
)
def test_a_reference_elsewhere_is_refused_with_the_class(package: Path, reference: str, words: str) -> None:
    (package / "__init__.py").write_text(KINDS.replace("reglu.reference:Plain", reference))
    error = refusal(lambda: read_job(None, MODEL))
    assert error.codes == ["plugin.protocol"]
    assert words in error.problems[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            REFERENCE.replace("class Plain", "class Other"),
            "reglu.reference:Plain of reglu:ReGLU could not be made: Attr",
        ),
        (
            "class Plain:\n    def __init__(self, *given): pass",
            "gave a Plain, and not a fivefold.verifier.plain_moe:Pl",
        ),
    ],
)
def test_a_reference_that_is_none_is_one_sentence(package: Path, text: str, words: str) -> None:
    (package / "reference.py").write_text(text)
    error = refusal(lambda: ff.verify("dp=1", MODEL[1:], model="tiny-moe", steps=1))
    assert error.codes == ["plugin.protocol"]
    assert words in error.problems[0]
