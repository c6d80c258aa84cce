"""docs/finetune.md runs as written, from a model made on the spot to its answers; what it quotes is printed."""

import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.commands import executable, fivefold

PAGE = (Path(__file__).parents[1] / "docs" / "finetune.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
[SCRIPT] = [text for language, text in FENCES if language == "python"]
BLOCKS = [text for language, text in FENCES if not language]
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if re.match(r"(\$ )?fivefold ", line)]


def as_the_script(python: str) -> None:
    sys.executable = python


def run(line: str, folder: Path) -> str:
    done = fivefold(*shlex.split(line.removeprefix("$ "))[1:], cwd=folder, timeout=600)
    assert done.returncode == 0, line + done.stderr
    return done.stdout


def test_the_page_has_its_path() -> None:
    assert [" ".join(line.removeprefix("$ ").split()[1:3]) for line in COMMANDS] == [
        "data prepare", "hf import", "train runs/toy/job.toml", "hf export", "generate toy-chat"
    ]  # fmt: skip


@pytest.mark.slow  # its parts are tested smaller: tests/data/test_chats.py, tests/trainer/test_packed_chats.py
def test_a_model_made_on_the_spot_learns_from_chats(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "toy.py").write_text(SCRIPT)
    before = partial(as_the_script, executable(tmp_path))
    done = fivefold(module=str(tmp_path / "toy.py"), cwd=tmp_path, timeout=600, before=before)
    assert done.returncode == 0, done.stderr
    said = {line: run(line, tmp_path) for line in COMMANDS}
    for block in BLOCKS:
        command, *quoted = block.splitlines()
        if command.startswith("$ "):
            assert said[command].splitlines() == quoted
    # An export keeps the template, with which transformers renders the turns.
    assert (tmp_path / "toy-chat" / "chat_template.jinja").read_text() in SCRIPT.replace('"\n    "', "")


def test_quoted_sentences_are_those_of_the_source() -> None:
    """The note and the error of the page, word by word but for numbers and names."""
    packing, template = (
        (Path(__file__).parents[1] / "src/fivefold/data" / name).read_text()
        for name in ("packed_row.py", "chat_template.py")
    )
    for words in ("are longer than data.seq=", "they are cut to their first", "(data.long=drop leaves out all)"):
        assert words in PAGE, words
        assert words in packing, words
    for words in ("s of processor time for one conversation, and was ended", "another template can be given by"):
        assert words in PAGE, words
        assert words in template, words
