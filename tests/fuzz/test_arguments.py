"""Every option that takes a number, and the Python API, with numbers that make no sense: a sentence each."""

import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from tools.wheel_test import NEED_TORCH, WORKS
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.support.errors import UserError
from tests.fuzz.cases import survives

ABSURD = ["-1", str(2**63), "9" * 5000, "1e400", "nan", ""]
WORDS = NEED_TORCH | WORKS | {"ui": "--no-browser"}
MODES = {"bench train": {"--warm": "--cases"}, "bench peers": {"--min-ranks": "--scaling", "--batch": "--scaling"}}
# A seed may be any number, a target in seconds also one that nothing misses, and one may sample from all tokens.
FINE = {("data prepare", "--seed"), ("goodput", "--seed"), ("serve", "--ttft"), ("serve", "--tpot")}
NEED_A_RUN = ("inspect", "generate", "checkpoint", "hf")  # they look for it first


def options() -> Iterator[tuple[str, str]]:
    """(command, option) for all that take a number."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, (*path, name))
        if not getattr(command, "commands", None):
            hints = typing.get_type_hints(inspect.unwrap(command.callback))
            for one in command.params:
                kinds = {hints.get(one.name), *typing.get_args(hints.get(one.name))}
                if one.param_type_name == "option" and kinds & {int, float}:
                    yield " ".join(path), max(one.opts, key=len)

    yield from walk(typer.main.get_command(app), ())


OPTIONS = sorted({one for one in options() if one[0].split()[0] not in NEED_A_RUN} - FINE)


def test_the_options_are_found() -> None:
    assert {("plan", "--seq"), ("draw", "--pp"), ("verify", "--timeout"), ("train", "--nproc")} < set(OPTIONS)


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_an_option(command: str, option: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text")
    words = WORDS[command].split()
    if option in words:
        del words[words.index(option) : words.index(option) + 2]
    if option in MODES.get(command, {}):
        words.append(MODES[command][option])
    for value in ABSURD:
        said = CliRunner().invoke(app, [*command.split(), *words, option, value])
        refused = isinstance(said.exception, UserError) or said.exit_code == 2
        assert refused, (value, said.exit_code, said.exception, said.output)
        assert "Traceback" not in said.output


HUGE = 1 << 20_000  # Python does not even print it
API: list[Callable[[Any], object]] = [
    lambda it: ff.plan("tiny", "2xCPU", batch=it, seq=64),
    lambda it: ff.plan("tiny", "2xCPU", batch=8, seq=it),
    lambda it: ff.plan("tiny", "2xCPU", batch=8, seq=64, top=it),
    lambda it: ff.plan("tiny", "2xCPU", batch=8, seq=64, tokens=it),
    lambda it: ff.plan("tiny", it),
    lambda it: ff.plan("tiny", f"{it}x8xH100"),
    lambda it: ff.plan(str(it)),
    lambda it: ff.plan("tiny", "2xCPU", batch=8, seq=64, fix={"tp": it}),
    lambda it: ff.simulate("tiny", str(it), "2xCPU", batch=8, seq=64),
    lambda it: ff.simulate("tiny", f"dp={it}", "2xCPU", batch=8, seq=64),
    lambda it: ff.simulate("tiny", f"dp=2,microbatches={it}", "2xCPU", batch=8, seq=64),
    lambda it: ff.mesh(f"dp={it}"),
    lambda it: ff.mesh("dp=2", f"{it}x8xH100"),
    lambda it: ff.serve("tiny", prompt=it),
    lambda it: ff.draw(str(it)),
    lambda it: ff.draw("1f1b", pp=it, microbatches=4),
    lambda it: ff.draw("auto", pp=2, microbatches=it),
    lambda it: ff.draw("interleaved", pp=2, microbatches=4, chunks=it),
    lambda it: ff.draw("1f1b", pp=2, microbatches=4, times=f"f={it}"),
    lambda it: ff.dryrun("tiny", "dp=2", batch=it, seq=16),
    lambda it: ff.dryrun("tiny", "dp=2", batch=2, seq=it),
    lambda it: ff.verify("dp=2", steps=it),
    lambda it: ff.verify("dp=2", timeout=it),
    lambda it: ff.verify(f"dp={it}"),
    lambda it: ff.models(seq=it),
    lambda it: ff.read_job(str(it)),
    lambda it: ff.read_job(None, [f"model.layers={it}"]).problems(),
]


@pytest.mark.parametrize("value", [0, -1, 2**63, HUGE, float("inf"), float("nan"), "", "x\0", "a" * 5000], ids=range(9))
@pytest.mark.parametrize("ask", API, ids=range(len(API)))
def test_the_python_api(ask: Callable[[Any], object], value: Any) -> None:
    try:
        str(value)
    except ValueError:  # it can only be passed on as a number
        if "str(it)" in inspect.getsource(ask) or "{it}" in inspect.getsource(ask):
            return
    survives(lambda: ask(value))
