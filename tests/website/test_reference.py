"""Reference pages have what the code has: every command with its options, every public name, every setting."""

import re
from functools import cache
from html import unescape
from pathlib import Path

import msgspec
import pytest
from website.check import main, problems

import fivefold as ff
from fivefold.hardware.accelerators import ACCELERATORS
from fivefold.job.config import SECTION_KEYS, Job
from fivefold.job.table import KIND_KEY
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.presets import PRESETS
from website import reference

made = cache(reference.pages)


def page(name: str) -> str:
    """A page's text, with signs for their entities."""
    return unescape(made()[f"reference/{name}.md"])


def test_every_command_has_its_options() -> None:
    for path, command in reference.tree():
        text = page(f"cli/{path[0]}")
        section = text.partition(f"# fivefold {' '.join(path)}\n")[2].partition("\n# fivefold")[0]
        assert section, path
        for option in command.params if not getattr(command, "commands", {}) else []:
            names = option.opts if option.param_type_name == "option" else [option.metavar or option.name.upper()]
            assert all(f"<code>{name}</code>" in section for name in names), (path, names)
        assert len(path) > 1 or f"(cli/{path[0]}.md" in page("commands")


def test_every_public_name_is_explained() -> None:
    text = page("python")
    for name in dir(ff):
        if not name.startswith("__"):
            heading, _, rest = text.partition(f"\n### {name}\n\n")[2].partition("\n")
            assert heading, name
            assert re.sub(r"```python|[()*\s]", "", heading + rest), name
    anchors = {heading.lower() for heading in re.findall(r"^### (\w+)$", text, re.M)}
    assert set(re.findall(r"\(#(\w+)\)", text)) <= anchors


def test_a_signature_is_that_of_the_function() -> None:
    assert reference.signature("preset", ff.preset) == "ff.preset(name: str, **changes: Any) -> ModelSpec"
    assert "    *,\n    nproc: int | None = None,\n" in reference.signature("train", ff.train)
    assert not re.search(r"-> fivefold\.|: fivefold\.", page("python"))


def test_every_setting_is_listed_with_its_default_and_comment() -> None:
    text = page("settings")
    for section, keys in SECTION_KEYS.items():
        for key in keys:
            alone = key == KIND_KEY and section != "model.rope_scaling"  # a table of which there is one kind
            assert alone or f"<code>{section}.{key}</code>" in text, key
    assert {field.name for field in msgspec.structs.fields(Job)} == set(re.findall(r"^## (\w+)$", text, re.M))
    row = re.search(r"^\| <code>checkpoint.every</code> .*$", text, re.M)
    assert row is not None
    assert "<code>100</code>" in row[0]
    assert "steps between checkpoints" in row[0]


class Commented:
    """For the test below."""

    plain: int
    beside: int = 1  # what is beside
    # What is above.
    above: int = 2
    shared: int = 3
    # Of this one alone,
    # in two lines.
    both: int = 4  # and beside
    after: int = 5


def test_comments_of_fields_are_found_beside_and_above_them() -> None:
    found = reference._comments_in("    plain: int\n" + Path(__file__).read_text().partition("    plain: int\n")[2])
    assert {name: found[name] for name in Commented.__annotations__} == {
        "plain": "",
        "beside": "what is beside",
        "above": "What is above.",
        "shared": "What is above.",
        "both": "Of this one alone, in two lines. and beside",
        "after": "",
    }


def test_catalogues_are_whole() -> None:
    for name, known in (("models", PRESETS), ("accelerators", ACCELERATORS), ("schedules", CATALOGUE)):
        assert [one for one in known if not re.search(rf"\b{re.escape(one)}\b", page(name))] == []


BROKEN = """<html><body id="top"><a href="other.html#nowhere">a</a><a href="gone.html">b</a><a href="#top">c</a>
<a href="https://elsewhere.example/">d</a><img src="https://elsewhere.example/x.png"><script src="none.js"></script>"""


def test_a_built_site_with_dead_links_or_foreign_pictures_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "index.html").write_text(BROKEN)
    (tmp_path / "other.html").write_text('<p id="here"></p>')
    (tmp_path / "style.css").write_text("p { background: url(https://elsewhere.example/y.png) }")
    assert sorted(problems(tmp_path)) == [
        "index.html loads https://elsewhere.example/x.png, which is another host's",
        "index.html: gone.html: there is no such file",
        "index.html: none.js: there is no such file",
        "index.html: other.html#nowhere: the page has no such anchor",
        "style.css loads https://elsewhere.example/y.png, which is another host's",
    ]
    assert main(tmp_path) == 1
    assert "2 pages, 3 files, 0.0 MB, 5 problems" in capsys.readouterr().out
    assert main(tmp_path / "nowhere") == 2
