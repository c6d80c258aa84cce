"""Attention of another package, written in ops: cp sends what ours would, and it is counted and planned."""

import sys
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.support import plugins

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


@pytest.mark.parametrize(
    "layout", ["cp=2", pytest.param("tp=2,cp=2,cp_kind=ulysses,sp,recompute=full", marks=pytest.mark.slow)]
)
def test_under_cp_it_computes_and_sends_what_is_planned(package: Path, layout: str) -> None:
    result = ff.verify(layout, MODEL)
    assert result.ok, str(result)


def test_a_package_without_an_init_is_digested_with_all_its_files(package: Path) -> None:
    (package / "__init__.py").unlink()
    (package / "kinds.py").write_text(KIND.replace("own_attention:Plain", "own_attention.kinds:Plain"))
    ff.read_job(None, ['model.pattern=[{mixer="own_attention.kinds:Plain", mlp="dense"}]', "model.layers=1"])
    before = plugins.digest()
    (package / "layer.py").write_text(LAYER.replace("bias=False", "bias=True"))
    plugins._source_digest.cache_clear()
    assert plugins.digest() != before
    plugins._source_digest.cache_clear()
