"""Attention of another package, written in ops: cp sends what ours would, and it is counted and planned."""

import sys
from pathlib import Path

import pytest
import torch

import fivefold as ff
from fivefold.model.decoder import Decoder
from fivefold.support import plugins
from tests.verifier.cases import slow

KIND = """
from fivefold.spec.kinds import Mixer
from fivefold.spec.operations import Matmul, Scores


class Plain(Mixer, frozen=True, kw_only=True, tag="own_attention:Plain"):
    place = "own"
    module = "own_attention.layer:PlainLayer"
    cp = attends = True

    def operations(self, spec, tp):
        heads, dim = spec.heads // tp, spec.head_dim
        for name in "qkv":
            yield Matmul("own", name, "own_norm", spec.hidden, heads * dim, "colwise")
        yield Scores(heads, heads, dim, dim)
        yield Matmul("own", "o", "attended", heads * dim, spec.hidden, "rowwise")
"""
LAYER = """
from torch import nn

from fivefold.model.layers import Linear


class PlainLayer(nn.Module):
    def __init__(self, kind, spec, ops):
        super().__init__()
        self.ops, self.dim, width = ops, spec.head_dim, spec.heads * spec.head_dim
        self.q, self.k, self.v = (Linear(spec.hidden, width, bias=False) for _ in range(3))
        self.o = Linear(width, spec.hidden, bias=False)

    def mask(self, positions, dtype):
        return self.ops.attention_mask(positions, dtype=dtype)

    def forward(self, x, shared):
        made = self.ops.column_parallel(x, self.q, self.k, self.v)
        heads = (y.unflatten(-1, (-1, self.dim)).transpose(1, 2) for y in made)
        return self.ops.row_parallel(self.ops.attend(*heads, shared.mask).transpose(1, 2).flatten(2), self.o)
"""
MODEL = ["model.layers=2", "model.kv_heads=4", 'model.pattern=[{mixer="own_attention:Plain", mlp="dense"}]']


@pytest.fixture
def package(tmp_path: Path, forgotten: None) -> Path:
    home = tmp_path / "own_attention"
    home.mkdir()
    (home / "__init__.py").write_text(KIND)
    (home / "layer.py").write_text(LAYER)
    sys.path.insert(0, str(tmp_path))
    return home


@pytest.mark.parametrize("layout", ["cp=2", *slow(["tp=2,cp=2,cp_kind=ulysses,sp,recompute=full"])])
def test_under_cp_it_computes_and_sends_what_is_planned(package: Path, layout: str) -> None:
    result = ff.verify(layout, MODEL, steps=2, seq=16)
    assert result.ok, str(result)


@pytest.mark.parametrize(("change", "said"), [
    (("self.o = Linear(width, ", "self.o = Linear(width + 1, "), "has o.weight of shape ["),
    (("self.o = Linear", "self.out = Linear"), "has no parameter o.weight, which its operations read"),
    (("class PlainLayer", "class Other"), "could not be made: AttributeError"),
    (("(nn.Module)", ""), "gave a PlainLayer, and not a torch.nn.Module"),
])  # fmt: skip
def test_a_module_unlike_its_kind_is_a_sentence(package: Path, change: tuple[str, str], said: str) -> None:
    (package / "layer.py").write_text(LAYER.replace(*change))
    spec = ff.read_job(None, MODEL).model
    with torch.device("meta"), pytest.raises(ff.UserError) as error:
        Decoder(spec)
    assert said in str(error.value)
    assert "plugin.protocol" in error.value.codes


def test_a_package_without_an_init_is_digested_with_all_its_files(package: Path) -> None:
    (package / "__init__.py").unlink()
    (package / "kinds.py").write_text(KIND.replace("own_attention:Plain", "own_attention.kinds:Plain"))
    ff.read_job(None, ['model.pattern=[{mixer="own_attention.kinds:Plain", mlp="dense"}]', "model.layers=1"])
    before = plugins.digest()
    (package / "layer.py").write_text(LAYER.replace("bias=False", "bias=True"))
    assert plugins.digest() != before
