"""`import fivefold as ff`: every public name, loaded when it is used, without torch."""

import ast
import doctest
import inspect
from pathlib import Path

import msgspec
import pytest

import fivefold as ff
from fivefold import api
from tests.commands import fivefold


def test_what_type_checkers_read_is_what_is_loaded() -> None:
    names = {name for name in vars(api) if not name.startswith("_")}
    assert names == set(ff.__all__)
    for name in names:
        assert inspect.unwrap(getattr(ff, name)) is inspect.unwrap(getattr(api, name))
    assert len(ff.__all__) == 30


def test_every_name_is_there_and_documented() -> None:
    for name in ff.__all__:
        found = getattr(ff, name)
        assert callable(found), name
        text = inspect.getdoc(found)
        assert text, f"{name} has no docstring"
        assert text != inspect.getdoc(msgspec.Struct), f"{name} has none but that of all structs"
    assert set(ff.__all__) <= set(dir(ff))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        ff.nothing  # noqa: B018


def test_functions_are_typed() -> None:
    for name in ff.__all__:
        if not inspect.isclass(getattr(ff, name)):
            signature = inspect.signature(getattr(ff, name))
            assert signature.return_annotation is not inspect.Signature.empty, name
            for parameter in signature.parameters.values():
                assert parameter.annotation is not inspect.Parameter.empty, f"{name}: {parameter}"


HELP = """
import pydoc, sys, types
import fivefold.planner.search, fivefold.verifier.compare as compare, fivefold.trainer as train
import fivefold as ff
for name in ff.__all__:
    found = getattr(ff, name)
    assert isinstance(found, (types.FunctionType, type)), (name, type(found))
    said = pydoc.plain(pydoc.render_doc(found))
    assert isinstance(found, type) or f'function {name} in module' in said, said[:200]
assert fivefold.planner.search.__name__ == 'fivefold.planner.search'
assert compare.__name__ == 'fivefold.verifier.compare'
assert fivefold.render.blocks.Result is ff.Result
"""


def test_help_shows_functions_and_not_packages_whatever_was_imported_first(tmp_path: Path) -> None:
    """In a process whose server has imported every module."""
    (tmp_path / "probe.py").write_text(HELP)
    done = fivefold(module="probe", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


FUNCTIONS = [name for name in ff.__all__ if inspect.isfunction(getattr(ff, name))]


DESCRIPTIONS = {"preset": ff.ModelSpec, "read_job": ff.Job, "schedule": ff.Schedule, "ui": None}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_return_results_but_those_that_make_descriptions(name: str) -> None:
    returned = inspect.signature(getattr(ff, name)).return_annotation
    if name in DESCRIPTIONS:
        assert returned is DESCRIPTIONS[name]
    else:
        assert issubclass(returned, ff.Result)
        assert returned.to_dict is not ff.Result.to_dict


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_s_docstring_has_examples_and_all_arguments(name: str) -> None:
    text = inspect.getdoc(getattr(ff, name)) or ""
    examples = doctest.DocTestParser().get_examples(text)
    assert f"ff.{name}(" in text, f"{name} has no example"
    for example in examples:
        for call in ast.walk(ast.parse(example.source)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in FUNCTIONS:
                given = {word.arg: None for word in call.keywords if word.arg}
                inspect.signature(getattr(ff, call.func.attr)).bind(*call.args, **given)
    missing = [word for word in inspect.signature(getattr(ff, name)).parameters if f"`{word}`" not in text]
    assert not missing, f"{name} does not say what {missing} are"


STARTING = {
    "compare_runs",
    "curve",
    "doctor",
    "dryrun",
    "experts",
    "train",
    "trace",
    "verify",
    "verify_adapter",
    "check_certificate",
}  # ranks, or torch: test_starting.py
EXAMPLES = [name for name in ff.__all__ if ">>> " in (inspect.getdoc(getattr(ff, name)) or "") and name not in STARTING]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_print_what_they_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_examples(name)


def run_examples(name: str) -> None:
    example = doctest.DocTestParser().get_doctest(inspect.getdoc(getattr(ff, name)) or "", {"ff": ff}, name, None, None)
    outcome = doctest.DocTestRunner().run(example)
    assert outcome.attempted > outcome.failed == 0
    assert not any(doctest.SKIP in line.options for line in example.examples)


def test_all_functions_have_examples_that_are_run() -> None:
    assert {*FUNCTIONS} - {"ui"} <= {*EXAMPLES} | STARTING  # which serves until it is interrupted


def test_schedules_draw_themselves_in_a_notebook() -> None:
    result = ff.draw("1f1b", "zb-h1", pp=4, microbatches=8, slow={1: 1.5})
    assert [one.schedule.name for one in result.simulations] == ["1f1b", "zb-h1"]
    assert result.svg().count("<svg") == 1
    assert "rank 3" in str(result)
    schedule = ff.schedule("zb-v", pp=4, microbatches=8)
    assert isinstance(schedule, ff.Schedule)
    assert "<svg" in schedule._repr_html_()
    assert ff.draw(schedule).to_dict() == ff.draw("zb-v", pp=4, microbatches=8).to_dict()
    with pytest.raises(ff.UserError, match="did you mean 'zb-v'"):
        ff.draw("zbv", pp=4, microbatches=8)
    with pytest.raises(ff.UserError, match="there is no schedule to draw"):
        ff.draw()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ff.plan("tiny", "2xCPU", batch=8, seq=64, by="speed"), "by='speed' is not a ranking"),
        (lambda: ff.plan("tiny", "2xCPU", batch=8, seq=64, top=0), "top=0 must be at least 1"),
        (lambda: ff.planner_accuracy("nowhere"), "nowhere has no .csv files"),
        (lambda: ff.models(seq=0), "seq=0 must be at least 1"),
        (lambda: ff.verify("dp=1", ["model.layers=2"], model=ff.preset("tiny")), "a ModelSpec is the whole model"),
    ],
)
def test_bad_arguments_are_sentences(call, said: str) -> None:
    with pytest.raises(ff.UserError, match=said):
        call()


def test_serving_asks_the_same_from_python_as_from_the_command_line() -> None:
    from fivefold.cli.plan import serve as of_the_command_line
    from fivefold.planner.serve import serve

    command, function = inspect.signature(of_the_command_line).parameters, inspect.signature(serve).parameters
    assert command["prompt"].default == function["prompt"].default
    assert command["answer"].default == function["output"].default
