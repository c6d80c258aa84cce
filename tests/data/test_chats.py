"""Conversations become tokens: what the template writes, with loss on the assistant's turns alone."""

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.data import chat_template
from fivefold.data.chat_template import Answer, ChatTemplate
from fivefold.data.index import read_index
from fivefold.data.integrity import verify
from fivefold.data.prepare import PrepareSummary, prepare
from fivefold.data.tokens import TokenStore
from tests.data.chat_model import CHATML, ROLES, TAGGED, chat_model, turns
from tests.refusals import refusal, same_words

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
Jsonl = Callable[..., Path]

TWO = turns("ask", "yes", "and?", "also\nyes")


def made(folder: Path, lines: Path, template: str = CHATML, **options: Any) -> PrepareSummary:
    return prepare([lines], folder / "chats", tokenizer=chat_model(folder / "model", template), chat=True, **options)


def shown(folder: Path, number: int = 0) -> list[tuple[str, bool]]:
    """A conversation's stretches of text, and whether they carry loss."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    split = TokenStore.open(folder / "chats").split("train")
    window = split.read(0, split.tokens)
    here = window.documents == number
    found: list[tuple[str, bool]] = []
    for token, loss in zip(window.tokens[here].tolist(), window.loss[here].tolist(), strict=True):
        text = tokenizer.id_to_token(token)
        if found and found[-1][1] == loss:
            found[-1] = found[-1][0] + text, loss
        else:
            found.append((text, loss))
    return found


def test_turns_are_found_by_rendering_prefixes(tmp_path: Path, jsonl: Jsonl) -> None:
    summary = made(tmp_path, jsonl(TWO, turns("again", "no")))
    assert shown(tmp_path) == [
        ("<|im_start|>user\nask<|im_end|>\n<|im_start|>assistant\ny", False),  # a token begins in the head of the turn
        ("es<|im_end|>\n", True),
        ("<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n", False),
        ("also\nyes<|im_end|>\n", True),
    ]
    assert (summary.documents, summary.loss_tokens) == (2, 4 + 9 + 4)
    split = TokenStore.open(tmp_path / "chats").split("train")
    assert summary.tokens == split.tokens
    assert summary.longest == max(np.bincount(split.read(0, split.tokens).documents))


def test_turns_are_those_of_generation_tags(tmp_path: Path, jsonl: Jsonl) -> None:
    made(tmp_path, jsonl(TWO), TAGGED)
    assert [text for text, loss in shown(tmp_path) if loss] == ["es<|im_end|>", "also\nyes<|im_end|>"]
    # Within a macro, in a loop, and one within another, where counting what has been written would not find them.
    macro = (
        "{% macro say(m) %}{% generation %}{{ m.content }}{% generation %}!{% endgeneration %}{% endgeneration %}"
        "{% endmacro %}{% for m in messages %}{% set text = say(m) if m.role == 'assistant' else m.content %}"
        "[{{ text }}]{% endfor %}"
    )
    prepare(
        [jsonl(TWO)], tmp_path / "chats", tokenizer=chat_model(tmp_path / "model", macro), chat=True, overwrite=True
    )
    assert [text for text, loss in shown(tmp_path) if loss] == ["yes!", "also\nyes!"]


def test_the_masks_are_those_of_transformers(tmp_path: Path, jsonl: Jsonl) -> None:
    transformers = pytest.importorskip("transformers")
    chats = [TWO, turns("été", "oh, 東"), turns("a", "b", "c", "d")]
    made(tmp_path, jsonl(*chats), TAGGED)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "model" / "tokenizer.json"))
    theirs.chat_template = TAGGED
    split = TokenStore.open(tmp_path / "chats").split("train")
    window = split.read(0, split.tokens)
    for number, chat in enumerate(chats):
        mine = theirs.apply_chat_template(
            chat["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        here = window.documents == number
        assert window.tokens[here].tolist() == mine["input_ids"]
        differ = window.loss[here] != np.array(mine["assistant_masks"], bool)
        # Theirs count a token that begins before the turn and ends in it; no prompt ends with half of a token.
        assert differ.sum() == (number == 0)


def test_the_command_says_how_much_carries_loss(tmp_path: Path, jsonl: Jsonl) -> None:
    words = [
        "data",
        "prepare",
        "--chat",
        jsonl(TWO),
        "-o",
        tmp_path / "chats",
        "--tokenizer",
        chat_model(tmp_path / "m"),
    ]
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "400"})
    split = TokenStore.open(tmp_path / "chats").split("train")
    share = split.loss_tokens(0, split.tokens) / split.tokens
    assert f"{share:.0%} of the tokens carry loss, and the longest conversation has {split.tokens}; " in done.stdout
    assert f"train with: data.source=packed data.path={tmp_path / 'chats'}" in done.stdout


def test_other_names_are_read(tmp_path: Path, jsonl: Jsonl) -> None:
    share = {"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "yes"}], "id": 3}
    made(tmp_path, jsonl(share, turns("ask", "yes"), gzip=True))
    assert shown(tmp_path, 0) == shown(tmp_path, 1)


def test_special_tokens_tools_and_a_date_reach_the_template(tmp_path: Path, jsonl: Jsonl) -> None:
    template = "{{ eos_token }}{{ strftime_now('%d %b %Y') }}{% if tools %}{{ tools | tojson }}{% endif %}" + ROLES
    made(tmp_path, jsonl({**turns("q", "a"), "tools": ["<é>"]}), template, date="2026-01-31")
    whole = "".join(text for text, _ in shown(tmp_path))
    assert whole.startswith('<|im_end|>31 Jan 2026["<é>"]<|im_start|>')


def test_a_file_of_its_own_and_one_that_is_given_go_first(tmp_path: Path, jsonl: Jsonl) -> None:
    model = chat_model(tmp_path / "model", "")
    (model / "chat_template.jinja").write_text(TAGGED)
    prepare([jsonl(TWO)], tmp_path / "own", tokenizer=model, chat=True)
    (tmp_path / "other.jinja").write_text(CHATML)
    prepare([jsonl(TWO)], tmp_path / "given", tokenizer=model, chat=True, chat_template=tmp_path / "other.jinja")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = [{"name": "tool_use", "template": ""}, {"name": "default", "template": CHATML}]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "chat_template.jinja").unlink()
    prepare([jsonl(TWO)], tmp_path / "named", tokenizer=model, chat=True)
    own, given, named = (read_index(tmp_path / name).chat_template for name in ("own", "given", "named"))
    assert own != given == named


def test_the_index_says_so_and_other_indices_are_as_they_were(tmp_path: Path, jsonl: Jsonl) -> None:
    made(tmp_path, jsonl(TWO))
    verify(TokenStore.open(tmp_path / "chats"))
    assert read_index(tmp_path / "chats").chats
    prepare([jsonl({"text": "x"})], tmp_path / "text")
    assert "chat_template" not in (tmp_path / "text" / "index.json").read_text()
    assert not read_index(tmp_path / "text").chats
    index = tmp_path / "chats" / "index.json"
    index.write_text(index.read_text().replace('"chat_template": "', '"chat_template": "Z'))
    assert refusal(lambda: read_index(tmp_path / "chats")).codes == ["data.index.damaged"]


# ---- refusals -------------------------------------------------------------------------------------------------------

NESTED = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}" + CHATML
)
FORGETS = (
    "{% for m in messages %}{{ m.role }}{% if loop.last or m.role == 'user' %}: {{ m.content }}{% endif %}{% endfor %}"
)
PROMPTS = ROLES + "{% if add_generation_prompt %}<|im_start|>think{% endif %}"
GOOD = [turns("ask", "yes")]
CASES: dict[str, tuple[str, str | None, list[Any]]] = {
    "a template that loops": ("chat.time", NESTED, GOOD),
    "one long operation": ("chat.time", "{{ 7 ** (10 ** 9) }}", GOOD),
    "much memory": ("chat.memory", "{{ 'x' * (10 ** 10) }}", GOOD),
    "a long text": ("chat.long", "{% for a in range(90000) %}{{ 'x' * 9999 }}{% endfor %}", GOOD),
    "internals": ("chat.template", "{{ messages.__class__.__mro__ }}", GOOD),
    "internals by format": ("chat.template", "{{ '{0.__class__.__mro__}'.format(messages) }}", GOOD),
    "a change": ("chat.template", "{{ messages.append(messages) }}", GOOD),
    "an include": ("chat.template", "{% include '/etc/passwd' %}", GOOD),
    "no end": ("chat.template", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", GOOD),
    "deep tools": ("chat.record", CHATML, [b'{"messages": [], "tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"]),
    "a mistake": ("chat.template", "{% for m in %}", GOOD),
    "a sum of unlikes": ("chat.template", "{{ messages + 1 }}", GOOD),
    "a date": ("chat.template", "{{ strftime_now('%Y') }}", GOOD),
    "nothing written": ("chat.loss", "", GOOD),
    "empty tags": ("chat.loss", "{% generation %}{% endgeneration %}", GOOD),
    "two users": (
        "chat.refused",
        ALTERNATE,
        [*GOOD, {"messages": [*GOOD[0]["messages"], *turns("a")["messages"] * 2]}],
    ),
    "earlier turns forgotten": ("chat.prefix", FORGETS, [turns("a", "b", "c", "d")]),
    "another prompt": ("chat.prefix", PROMPTS, GOOD),
    "no template": ("chat.template.missing", None, GOOD),
    "no conversations": (
        "chat.record chat.record chat.record chat.record chat.message chat.role chat.role chat.content chat.content "
        "chat.assistant problems.more",
        CHATML,
        [
            *GOOD,
            b"{",
            ["text"],
            {"text": "x"},
            {"messages": []},
            {"messages": ["hi"]},
            {"messages": [{"content": "x"}]},
            {"conversations": [{"from": "humam", "value": "x"}]},
            {"messages": [{"role": "user"}]},
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            turns("only a question"),
            b"never seen",
        ],
    ),
}
# What ends the process is said of the first conversation: no second one is tried.
SLOW = ("a template that loops", "one long operation")


def refused(name: str, folder: Path, jsonl: Jsonl) -> Any:
    codes, template, lines = CASES[name]
    model, file = chat_model(folder / "model", template), jsonl(*lines)
    error = refusal(lambda: prepare([file], folder / "out", tokenizer=model, chat=True))
    assert error.codes == codes.split()
    assert not [path for path in folder.iterdir() if "out" in path.name]  # nothing was written
    return error


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time, not of the clock: a busy machine gives the same answers."""
    monkeypatch.setattr("fivefold.data.chat_template.SECONDS", 1.0)


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused(name: str, tmp_path: Path, jsonl: Jsonl) -> None:
    refused(name, tmp_path, jsonl)


def test_the_words_of_refusals(tmp_path: Path, jsonl: Jsonl) -> None:
    said = {name: refused(name, tmp_path, jsonl).problems for name in CASES if name not in SLOW}
    foreign = re.compile(r"(not JSON: |fails: ).*?(?=;|$)")  # words of libraries
    plain = {name: [foreign.sub(r"\1...", one.replace(str(tmp_path), "DIR")) for one in said[name]] for name in said}
    same_words(__file__, plain)


def test_options_that_do_not_fit(tmp_path: Path, jsonl: Jsonl) -> None:
    file, model = jsonl(*GOOD), chat_model(tmp_path / "model")
    text = tmp_path / "a.txt"
    text.write_text("x")
    cases: list[tuple[str, Path, dict[str, Any]]] = [
        ("chat.option chat.option", file, {"chat": False, "chat_template": text, "date": "2026-01-31"}),
        ("chat.prompt_field", file, {"prompt_field": "prompt"}),
        ("chat.date", file, {"date": "31.1.2026"}),
        ("chat.tokenizer", file, {"tokenizer": "bytes"}),
        ("chat.kind", text, {}),
        ("file.read", file, {"chat_template": tmp_path / "none.jinja"}),
        ("file.read", tmp_path / "fake.jsonl.gz", {}),
    ]
    (tmp_path / "fake.jsonl.gz").write_bytes(b"plain")
    for codes, given, options in cases:
        settings = {"tokenizer": model, "chat": True, **options}
        assert refusal(lambda given=given, of=settings: prepare([given], tmp_path / "out", **of)).codes == codes.split()


def test_without_jinja_the_extra_is_named(tmp_path: Path, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.data.chat_template.not_installed", lambda name: name == "jinja2")
    error = refusal(lambda: made(tmp_path, jsonl(*GOOD)))
    assert (error.codes, 'pip install "fivefold[train]"' in str(error)) == (["install.jinja2"], True)


def test_no_process_is_left_and_none_has_secrets(tmp_path: Path, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*words: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(real(*words, **options))
        assert "A_SECRET" not in options["env"]
        return started[-1]

    monkeypatch.setenv("A_SECRET", "x")
    monkeypatch.setattr(subprocess, "Popen", popen)
    made(tmp_path, jsonl(*GOOD))
    for name in ("a template that loops", "two users"):
        refused(name, tmp_path, jsonl)
    assert len(started) == 3
    assert all(one.poll() is not None and one.stdout is not None and one.stdout.closed for one in started)
    assert all(not os.path.exists(f"/proc/{one.pid}") for one in started)


def test_a_release_with_a_known_hole_renders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "version", lambda name: "3.1.5")
    refused = refusal(lambda: ChatTemplate(CHATML, "it", {}))
    assert refused.codes == ["install.jinja2"]
    assert "jinja2 3.1.5 is installed" in str(refused)


def test_a_process_that_is_ended_from_outside_is_not_told_to_want_memory() -> None:
    template = ChatTemplate(CHATML, "it", {})
    template._process.kill()
    assert template._end() == "ended"
    assert template._problem(Answer(error="ended")).code == "chat.ended"
