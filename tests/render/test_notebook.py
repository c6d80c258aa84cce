"""Results in a notebook: what a cell keeps of them, with and without Jupyter's kernel around."""

import builtins

import pytest

import fivefold as ff
from fivefold.render.blocks import Svg


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rich takes for Jupyter: a shell of this name behind `get_ipython`."""
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)


def test_a_result_in_a_kernel_is_the_same_text(kernel: None) -> None:
    """rich would display each line in the cell, and leave the text empty."""
    from rich.console import Console

    assert Console().is_jupyter
    result = ff.draw("1f1b", pp=2, microbatches=4)
    assert "rank 1" in str(result)
    assert str(result).startswith("1f1b  p=2 m=4")


def test_a_cell_keeps_text_html_and_not_python_s_repr() -> None:
    for result in (ff.plan("tiny", "2xCPU", batch=8, seq=64), ff.schedule("1f1b", pp=2, microbatches=4)):
        kept = result._repr_mimebundle_(include=None, exclude=None)
        assert kept.keys() == {"text/plain", "text/html"}
        assert kept["text/html"] == result._repr_html_()
        assert len(kept["text/plain"]) < 12_000
        assert "Result(" not in kept["text/plain"]


def test_a_picture_is_a_picture_and_text_all_the_same() -> None:
    """GitHub shows image/svg+xml, and leaves SVG within HTML out."""
    for result in (ff.draw("1f1b", pp=2, microbatches=4), ff.plan("tiny", "2xCPU", batch=8, seq=64)):
        picture = result.svg()
        assert isinstance(picture, Svg)
        assert picture._repr_svg_().startswith("<svg ")
        assert picture._repr_svg_() == picture == str(picture)
        assert repr(picture).startswith("<a picture, ")  # what IPython keeps beside it
