"""Adapters and layouts as text: what is read, and what is refused."""

import sys
from pathlib import Path

import pytest

from fivefold.foreign.adapter import Adapter, AdapterFile, layout_text, parse_layout, plain, product, shipped_names
from tests.refusals import refusal

ROOT = Path(__file__).parents[2]
PLAIN = str(Path(__file__).with_name("plain.py"))


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an adapter lies is put on the path; other tests have files of these names, too."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_layouts_are_words_with_numbers() -> None:
    layout = parse_layout("dp=2, tp=4,sp,schedule=ZBV")
    assert layout == {"dp": 2, "tp": 4, "sp": 1, "schedule": "ZBV"}
    assert product(layout) == 8
    assert layout_text(layout) == "dp=2,tp=4,sp=1,schedule=ZBV"
    assert parse_layout({"dp": 2, "sp": True}) == {"dp": 2, "sp": 1}
    assert (layout_text({}), product({})) == ("one process", 1)


@pytest.mark.parametrize("layout", ["dp=0", "tp=-2", "dp=two", "=2", "tp=", {"dp": 2.5}, {"a b": 1}, 5])
def test_layouts_that_are_none_are_refused(layout: object) -> None:
    error = refusal(lambda: parse_layout(layout))  # type: ignore[arg-type]
    assert error.codes == ["adapter.layout"]


def test_files_and_the_adapters_that_ship() -> None:
    assert "huggingface" in shipped_names()
    shipped = AdapterFile.of("huggingface")
    assert (shipped.ships, shipped.text, shipped.name) == (True, "huggingface", "")
    own = AdapterFile.of(f"{PLAIN}:Dropout")
    assert (own.ships, own.text, own.name) == (False, "plain.py:Dropout", "Dropout")
    assert len(own.digest) == 64


CASES = {
    "hugingface": ("adapter.file", "huggingface"),
    "no/such.py": ("adapter.file", "no/such.py"),
    "no/such.py:Name": ("adapter.file", "no/such.py"),
    "tests": ("adapter.file", "is a directory"),
    "README.md": ("adapter.file", "should be a file that ends in .py"),
    f"{PLAIN}:Dropuot": ("adapter.name", "Dropout"),
}


@pytest.mark.parametrize("text", CASES)
def test_what_is_not_there_is_refused_with_the_nearest(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, hint = CASES[text]
    error = refusal(lambda: Adapter(AdapterFile.of(text)))
    assert error.codes == [code]
    assert hint in error.problems[0]


def test_everything_that_an_adapter_lacks_is_said_at_once() -> None:
    error = refusal(lambda: Adapter(AdapterFile.of(f"{PLAIN}:Lacking")))
    assert set(error.codes) == {"adapter.protocol"}
    said = "\n".join(error.problems)
    for words in ("no function batch(step)", "build of", "step(model, batch)", "LAYOUTS", "DTYPE", "TERMS", "KNOWN"):
        assert words in said
    assert len(error.problems) == 7


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        ("import nothing_of_this_name", "adapter.package", "nothing_of_this_name"),
        ("a = 1\nb = a / 0", "adapter.import", "line 2"),
        ("def (", "adapter.import", "line 1"),
        ("", "adapter.protocol", "batch"),
    ],
)
def test_files_that_cannot_be_imported(tmp_path: Path, source: str, code: str, words: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    error = refusal(lambda: Adapter(AdapterFile.of(str(file))))
    assert code in error.codes
    assert words in "\n".join(error.problems)


def test_a_wrong_line_is_named_once_and_layouts_are_a_list(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def (")
    error = refusal(lambda: Adapter(AdapterFile.of(str(file))))
    assert error.problems[0].count("line 1") == 1
    file.write_text('LAYOUTS = "dp=2"')
    error = refusal(lambda: Adapter(AdapterFile.of(str(file))))
    assert any("LAYOUTS of the adapter mine.py is a str" in problem for problem in error.problems)


def test_wrappers_leave_no_trace_in_names() -> None:
    assert plain("module.module.layers.0._checkpoint_wrapped_module.norm.weight") == "layers.0.norm.weight"
    assert plain("_orig_mod.head.weight") == "head.weight"
