"""An optimizer of another package that puts parameters into groups of its own, matrices outside of the layers, too."""

from pathlib import Path

import pytest

import fivefold as ff
from tests.refusals import refusal

EVERYTHING = """
from fivefold.optim.groups import ParamGroup
from fivefold.optim.muon import Muon

class Everything(Muon, frozen=True, kw_only=True, tag="everything:Everything"):
    def group(self, parameter):
        whole = len(parameter.shape) == 2 and parameter.kind != "norm"
        return ParamGroup("matrix", 0.3, 0.5) if whole else ParamGroup("element", 0.0, 2.0)
"""
CHOSEN = ["optimizer.name=everything:Everything", "model.tied=true", 'optimizer.groups=[{match="*.q.*", lr_factor=3}]']


@pytest.fixture
def everything(tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "everything.py").write_text(EVERYTHING)
    return tmp_path / "everything.py"


@pytest.mark.parametrize(
    "layout",
    ["dp=2,pp=2,zero=1,microbatches=2", pytest.param("tp=2,pp=2,microbatches=2", marks=pytest.mark.slow),
     pytest.param("dp=2,tp=2,zero=3", marks=pytest.mark.slow)],
)  # fmt: skip
def test_embeddings_and_heads_are_matrices_where_it_says_so(everything: Path, layout: str) -> None:
    """Also one that the first and the last stage share: both update it, and alike."""
    result = ff.verify(layout, CHOSEN)
    assert result.ok, str(result)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (
            'ParamGroup("matrix", 0.3)',
            'rule="matrix" for layers.0.attention_norm.weight, a norm of shape [64]',
        ),
        (
            'ParamGroup("row", 0.3)',
            "group gave ParamGroup(rule='row', weight_decay=0.3, lr_factor=1.0), and",
        ),
        ('ParamGroup("element", -1)', "group gave ParamGroup(rule='element', weight_decay=-1, lr_factor=1.0), and"),
        ('("element", 0.1)', "group gave ('element', 0.1), and not a fivefold.optim.groups:ParamGroup"),
    ],
)
def test_a_group_that_is_none_is_said_before_a_process_starts(everything: Path, group: str, words: str) -> None:
    text = EVERYTHING.replace('ParamGroup("matrix", 0.3, 0.5) if whole else ParamGroup("element", 0.0, 2.0)', group)
    everything.write_text(text)
    error = refusal(lambda: ff.verify("dp=2", CHOSEN[:1]))
    assert error.codes == ["plugin.result"]
    assert words in error.problems[0]
