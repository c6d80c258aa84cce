"""Hugging Face directories that were made to do harm, or by accident: refused in a sentence, at once, and nothing
outside them is read."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from fivefold.checkpoint.hf_extras import own_file
from fivefold.checkpoint.hf_files import HuggingFace
from fivefold.cli import app
from fivefold.model.hf_names import sources
from fivefold.spec.hf import to_hf_config
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError

SPEC = preset("tiny")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A sound one."""
    (tmp_path / "hf").mkdir()
    tensors = {next(sources(SPEC, one)).name: torch.zeros(one.shape) for one in SPEC.parameters()}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(to_hf_config(SPEC, "float32")))
    return tmp_path / "hf"


def refused(directory: Path, said: str) -> None:
    """By every command that takes such a directory."""
    for words in (["hf", "import", str(directory), "-o", str(directory.parent / "run")],
                  ["generate", str(directory), "--tokens", "1,2", "-n", "1"]):  # fmt: skip
        start = time.monotonic()
        done = CliRunner().invoke(app, words)
        assert isinstance(done.exception, UserError), (words, done.output, done.exception)
        assert said in "\n".join(done.exception.problems), (words, done.exception.problems)
        assert time.monotonic() - start < 30
        assert not (directory.parent / "run").exists()


def test_the_sound_one_is_read(directory: Path) -> None:
    assert HuggingFace(directory).spec.layers == SPEC.layers
    done = CliRunner().invoke(app, ["generate", str(directory), "--tokens", "1,2", "-n", "1"], catch_exceptions=False)
    assert done.exit_code == 0


@pytest.mark.parametrize("name", ["../away.safetensors", "ABSOLUTE", "..", "sub/../../away.safetensors", "", "a\0b"])
def test_a_weight_map_does_not_lead_out_of_the_directory(directory: Path, name: str) -> None:
    (directory / "model.safetensors").rename(directory.parent / "away.safetensors")
    name = str(directory.parent / "away.safetensors") if name == "ABSOLUTE" else name
    (directory / "sub").mkdir()
    names = {next(sources(SPEC, one)).name: name for one in SPEC.parameters()}
    (directory / INDEX).write_text(json.dumps({"weight_map": names}))
    refused(directory, f"names the file {name!r}, which is not one of its own")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", INDEX, "tokenizer.json"])
def test_a_link_does_not_lead_out_of_the_directory(directory: Path, name: str) -> None:
    away = directory.parent / "away"
    if (directory / name).exists():
        (directory / name).rename(away)
    else:
        away.write_text("{}")
    (directory / name).symlink_to(away)
    with pytest.raises(UserError, match="leads out of"):
        own_file(directory, name)
    if name != "tokenizer.json":
        refused(directory, f"{name} leads out of {directory}")


def test_links_of_the_hub_s_cache_are_followed(directory: Path) -> None:
    hub = directory.parent / "models--x"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots" / "abc").mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (directory / name).rename(hub / "blobs" / f"of-{name}")
        (hub / "snapshots" / "abc" / name).symlink_to(Path("../../blobs") / f"of-{name}")
    assert HuggingFace(hub / "snapshots" / "abc").files
    (hub / "snapshots" / "abc" / "more.safetensors").symlink_to("../../../elsewhere")
    with pytest.raises(UserError, match="leads out of"):
        HuggingFace(hub / "snapshots" / "abc")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", INDEX])
@pytest.mark.parametrize("what", ["fifo", "directory", "loop"])
def test_what_is_no_file_is_named_and_nobody_waits_for_it(directory: Path, name: str, what: str) -> None:
    place = directory / name
    place.unlink(missing_ok=True)
    {"fifo": os.mkfifo, "directory": Path.mkdir, "loop": lambda path: path.symlink_to(path.name)}[what](place)
    with pytest.raises(UserError, match=r"is not a regular file|leads out of"):
        own_file(directory, name)
    with pytest.raises(UserError, match=r"is not a regular file|leads out of"):
        HuggingFace(directory)


@pytest.mark.parametrize("broken", [0, 1])  # a link without its end is missing, too
def test_files_that_an_index_names_without_end_are_counted_and_not_looked_for_one_by_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    names = {f"t{number}": f"model-{number:06d}.safetensors" for number in range(100_000)} | {"a": "model.safetensors"}
    (directory / INDEX).write_text(json.dumps({"weight_map": names}))
    for number in range(broken):
        (directory / f"model-{number:06d}.safetensors").symlink_to("gone")
    looked: list[str] = []
    monkeypatch.setattr("fivefold.checkpoint.hf_files.own_file", lambda at, name: looked.append(name) or at / name)
    with pytest.raises(UserError) as error:
        HuggingFace(directory)
    few = "model-000000.safetensors, model-000001.safetensors, model-000002.safetensors ..."
    assert error.value.problems == [f"{directory} lacks 100000 files that {INDEX} names: {few}"]
    assert len(looked) <= 4


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers without end": ({"num_hidden_layers": 2 * 10**6}, "layers"),
    "more layers than tensors": ({"num_hidden_layers": 3000}, "3000"),
    "a size that overflows": ({"hidden_size": 2**63 - 1}, "hidden"),
    "a vocabulary that overflows": ({"vocab_size": 2**62}, "vocab"),
    "a size that is none": ({"intermediate_size": -1}, "ffn"),
    "a size of another type": ({"num_attention_heads": {}}, "num_attention_heads"),
    "a number of 400 digits": ({"hidden_size": 10**400}, "bits"),
}


@pytest.mark.parametrize("how", CONFIGS)
def test_a_config_that_its_files_do_not_bear_out_is_refused_at_once(directory: Path, how: str) -> None:
    change, said = CONFIGS[how]
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    refused(directory, said)


@pytest.mark.parametrize("token", [{}, "2", [1, {}], [[1]], 1.5, True])
def test_an_end_of_text_that_is_no_token_is_a_sentence(directory: Path, token: Any) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    done = CliRunner().invoke(app, ["generate", str(directory), "--tokens", "1,2", "-n", "1"])
    assert isinstance(done.exception, UserError)
    assert "is not a token's number" in done.exception.problems[0]


TEXTS: dict[str, Callable[[Path], object]] = {
    "deep": lambda place: place.write_text("[" * 100_000),
    "no text": lambda place: place.write_bytes(b"\xff\xfe"),
    "another kind": lambda place: place.write_text("[1, 2]"),
    "empty": lambda place: place.write_text(""),
}


@pytest.mark.parametrize("how", TEXTS)
@pytest.mark.parametrize("name", ["config.json", INDEX, "generation_config.json"])
def test_texts_that_are_none_are_sentences(directory: Path, how: str, name: str) -> None:
    TEXTS[how](directory / name)
    done = CliRunner().invoke(app, ["generate", str(directory), "--tokens", "1,2", "-n", "1"])
    if (name, how) == ("generation_config.json", "another kind"):
        assert done.exit_code == 0  # it says nothing of an end
    else:
        assert isinstance(done.exception, UserError), done.exception
