"""What is wrong with a plugin is a sentence with a code, before any process starts."""

import sys
from pathlib import Path

import pytest

import fivefold as ff
from fivefold.cli.commands import _is_first_to_say
from fivefold.launch.heartbeat import BEATS_ENV
from fivefold.support import plugins
from fivefold.support.errors import UserError

GOOD = """
import msgspec
from fivefold.optim.adamw import AdamW
from fivefold.optim.base import OptimizerConfig

class Mine(OptimizerConfig, frozen=True, kw_only=True, tag="mine:Mine"):
    states = ("momentum",)
    gain: float = 1.0

    def update(self, masters, grads, states, rate, decay, step):
        pass

    def stock(self, groups, **options):
        pass
"""
LINE = 'class Mine(OptimizerConfig, frozen=True, kw_only=True, tag="mine:Mine"):'


@pytest.fixture
def refused(tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> object:
    """The problems of a job that names a plugin, of which the module has this text."""
    monkeypatch.chdir(tmp_path)

    def problems(text: str, name: str = "mine:Mine") -> list[tuple[str, str]]:
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(UserError) as error:
            ff.read_job(None, [f"optimizer.name={name}"])
        return [(getattr(problem, "code", ""), str(problem)) for problem in error.value.coded]

    return problems


def test_one_that_lacks_nothing_is_taken(tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the current directory, which Python need not have on its path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(GOOD)
    sys.path[:] = [place for place in sys.path if place not in ("", str(tmp_path))]
    before = plugins.imported_plugins()
    job = ff.read_job(None, ["optimizer.name=mine:Mine", "optimizer.gain=2"])
    assert (job.optimizer.name, job.plugins, job.problems()) == ("mine:Mine", ["mine:Mine"], [])
    assert {*plugins.imported_plugins()} - {*before} == {"mine:Mine"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((LINE, LINE.replace(', tag="mine:Mine"', "")), "has another name in jobs; write `class Mine("),
        ((LINE, LINE.replace("frozen=True, ", "frozen=False, ")), "frozen"),
        (('states = ("momentum",)', 'states = "momentum"'), "has states='momentum', and not a tuple of names, "),
        (('states = ("momentum",)', "states = {'momentum': (1, 3)}"), "has its parameter's shape, and no others"),
        (('states = ("momentum",)', "states = (3,)"), "has states=(3,), and not a tuple of names"),
        (('states = ("momentum",)', 'states = ("m", "m")'), "has states=('m', 'm'); each has a name of its own"),
        (('states = ("momentum",)', 'states = ("model",)'), "master and model are the weights"),
        (("def update", "def change"), "has no method update(self, masters, grads, states, rate, decay, step)"),
        (("rate, decay, step)", "rate)"), "has update(self, masters, grads, states, rate), and not update(self, m"),
        (("def stock", "def other"), "has no method stock(self, groups, **options), a torch.optim.Opt"),
        (("gain: float = 1.0", "gain: float"), "has settings without a default: gain"),
        (("gain: float = 1.0", "fuses = True"), "has fuses=True and no method fused_update"),
        ((LINE, LINE.replace("(OptimizerConfig", "(AdamW")), "has a rule of its own, update, and AdamW's fused_update"),
        (("gain: float = 1.0", "gain: complex = 1j"), "has settings that a job file cannot hold: "),
    ],
)  # fmt: skip
def test_a_class_that_lacks_something_is_told_what(refused: object, change: tuple[str, str], said: str) -> None:
    [(code, sentence)] = refused(GOOD.replace(*change))  # type: ignore[operator]
    assert said in sentence
    assert code in ("plugin.protocol", "plugin.import")


def test_all_that_it_lacks_is_told_at_once(refused: object) -> None:
    text = GOOD.replace("def update", "def change").replace("def stock", "def other").replace('("momentum",)', "3")
    assert [code for code, _ in refused(text)] == ["plugin.protocol"] * 3  # type: ignore[operator]


@pytest.mark.parametrize(("text", "code", "said"), [
    ("1 / 0", "plugin.import", "mine raised ZeroDivisionError when it was imported: division by zero"),
    ("raise SystemExit(3)", "plugin.import", "mine raised SystemExit when it was imported: 3"),
    ("raise GeneratorExit(3)", "plugin.import", "mine raised GeneratorExit when it was imported: 3"),
    ("raise KeyboardInterrupt", "plugin.import", "mine raised KeyboardInterrupt when it was imported: "),
    ("def broken(:", "plugin.import", "mine raised SyntaxError when it was imported: "),
    ("import no_such_package_at_all", "plugin.import", "no_such_package_at_all"),
    ("import mine_too.deep", "plugin.import", "mine_too"),
    ("\x00", "plugin.import", "null bytes"),
    ("raise UnicodeError('a\\nb\\x1b[31m')", "plugin.import", "a\\nb\\x1b[31m"),
    ("", "plugin.name", "has no Mine; known: none"),
    ("from os import path, sep\nclass Other: ...", "plugin.name", "has no Mine; known: Other"),
    ("globals().update({f'x{n}': n for n in range(20)})", "plugin.name", "... (8 more)"),
    ("Mime = 3", "plugin.name", "has no Mine; did you mean 'Mime'"),
    ("def __getattr__(name): raise OSError(name)", "plugin.import", "mine raised OSError"),
    ("Mine = 3", "plugin.kind", "is a int, and not a subclass of fivefold.optim.base:OptimizerConfig"),
    ("class Mine: pass", "plugin.kind", "is the class Mine, and not a subclass of"),
    ("from fivefold.optim.adamw import AdamW as Mine", "plugin.protocol", "has another name in jobs"),
])  # fmt: skip
def test_a_module_that_is_none_is_one_sentence(refused: object, text: str, code: str, said: str) -> None:
    [(its, sentence)] = refused(text)  # type: ignore[operator]
    assert its == code
    assert said in sentence
    assert sentence.isprintable()


def test_ctrl_c_while_a_module_is_imported_is_no_problem_of_it(refused: object) -> None:
    with pytest.raises(KeyboardInterrupt):
        refused("import signal\nsignal.raise_signal(signal.SIGINT)\nfor _ in range(9): ...")  # type: ignore[operator]


def test_what_a_module_prints_does_not_stand_in_what_a_command_prints(
    refused: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused("print('loud')\nMine = 3")  # type: ignore[operator]
    assert capsys.readouterr() == ("", "loud\n")


def test_names_may_have_letters_of_any_language(
    tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "größe.py").write_text("Größe = 3", encoding="utf-8")
    assert plugins.load("größe:Größe") == 3


@pytest.mark.parametrize(
    "name",
    [".mine:Mine", "..mine:Mine", "mine:", ":Mine", "mine:Mine:More", "mine/../mine:Mine", "mine .x:Mine", "mine:Mi-ne",
     "mine.:Mine", "9mine:Mine", "mine:Mine.inner", "\u202emine:Mine", "mine\u2028:Mine", "m\u00efne\ud800:Mine",
     "file:///mine.py:Mine"],
)  # fmt: skip
def test_a_name_that_is_none_is_one_sentence(name: str) -> None:
    with pytest.raises(UserError, match="is not of the form") as refused:
        plugins.load(name)
    assert refused.value.codes == ["plugin.form"]
    assert refused.value.problems[0].isprintable()


@pytest.mark.parametrize("name", ["no_such_package:X", "fivefold.no_such:X", "m\u00efne:Mine", "__main__:Mine"])
def test_a_module_that_is_not_there_is_one_sentence(name: str) -> None:
    with pytest.raises(UserError) as refused:
        plugins.load(name, "optimizer.name")
    assert refused.value.codes == ["plugin.module"]
    assert len(refused.value.problems) == 1


def test_a_plain_name_is_looked_up_and_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lion.py").write_text("1 / 0")
    with pytest.raises(UserError, match="'lion' is not a choice"):
        ff.read_job(None, ["optimizer.name=lion"])


def test_ranks_of_one_launcher_say_a_sentence_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BEATS_ENV, raising=False)
    assert [_is_first_to_say("one"), _is_first_to_say("one")] == [True, True]
    monkeypatch.setenv(BEATS_ENV, str(tmp_path / "beats"))
    assert [_is_first_to_say(word) for word in ("one", "one", "two", "one")] == [True, False, True, False]
    monkeypatch.setenv(BEATS_ENV, str(tmp_path / "gone" / "beats"))
    assert _is_first_to_say("one")
