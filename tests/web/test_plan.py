"""The Plan view's figures are those of `simulate` and `plan`; what cannot run comes with the nearest that can."""

import random
import subprocess
import sys

import pytest

import fivefold as ff
from fivefold.layout.layout import Layout
from fivefold.planner import plan as planning
from fivefold.planner.nearest import nearest, problems, steps, with_field
from fivefold.planner.plan import question
from fivefold.support.errors import UserError
from fivefold.web.plan import is_large, payload, search, why
from fivefold.web.question import Ask, without_option_dashes

QUESTIONS = (
    {"model": "llama3-8b", "cluster": "8xH100", "batch": "128", "seq": "8192"},
    {"model": "llama3-70b", "cluster": "8x8xH100", "batch": "512", "seq": "4096"},
    {"model": "llama3-405b", "cluster": "2048x8xH100", "batch": "2048", "seq": "8192"},
    {"model": "qwen3-30b-a3b", "cluster": "2x8xH100", "batch": "128", "seq": "4096"},
)


def a_layout(words: dict[str, str], random: random.Random) -> Layout:
    """One that can run: a few fields drawn at random, and the nearest legal layout."""
    workload = question(words["model"], words["cluster"], (), int(words["batch"]), int(words["seq"]))
    layout = nearest(workload, Layout(dp=workload.cluster.world, zero=1))
    for field in ("tp", "pp", "cp", "ep", "zero", "microbatches", "recompute", "schedule"):
        assert layout is not None
        value = random.choice([one for one in steps(workload, layout)[field] if not isinstance(one, int) or one <= 16])
        layout = nearest(workload, with_field(workload, layout, field, str(value)), field)
    assert layout is not None
    return layout


@pytest.mark.parametrize("seed", range(20))
def test_figures_are_those_of_simulate(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "nearest_fit", lambda option: None)  # its advice, a search, is another test's
    words = QUESTIONS[seed % len(QUESTIONS)]
    layout = str(a_layout(words, random.Random(seed)))
    page = payload(Ask(words | {"layout": layout}))
    result = ff.simulate(words["model"], layout, words["cluster"], batch=int(words["batch"]), seq=int(words["seq"]))
    whole = result.to_dict()
    assert page["problems"] == []
    assert page["wanted"]["text"] == page["shown"]["text"] == layout
    assert page["figures"] == {key: value for key, value in whole.items() if key != "advice"}
    assert page["ranks"][page["figures"]["memory_rank"]] == page["figures"]["memory_by_component"]
    assert page["device_memory_bytes"] == result.option.device_memory


def test_the_ranking_is_that_of_plan() -> None:
    words = {"model": "llama3.2-1b", "cluster": "2xH100", "batch": "64", "seq": "8192"}
    assert search(Ask(words)) == ff.plan("llama3.2-1b", "2xH100", batch=64, seq=8192, top=12).to_dict()


def test_reasons_are_those_of_plan_and_simulate() -> None:
    words = {"model": "llama3.2-1b", "cluster": "2xH100", "batch": "64", "seq": "8192"}
    for layout, fits in (("dp=2,zero=1,microbatches=32", True), ("dp=2,microbatches=2", False)):
        found = why(Ask(words | {"layout": layout}))
        told = ff.simulate("llama3.2-1b", layout, "2xH100", batch=64, seq=8192).advice
        assert found["advice"] == (without_option_dashes(told) or None)
        assert (found["advice"] is None) == fits
    planned = ff.plan("llama3.2-1b", "2xH100", batch=64, seq=8192, layout="dp=2,microbatches=2")
    assert found["neighbours"] == planned.to_dict()["neighbours"]


def test_the_page_begins_with_a_layout_that_can_run() -> None:
    large, small = {"model": "llama3-405b", "cluster": "2048x8xH100"}, {"model": "tiny", "cluster": "2xCPU"}
    for words in ({}, large, small | {"batch": "3"}):
        page = payload(Ask(words))
        assert page["problems"] == []
        assert page["figures"]["step_seconds"] > 0


BASE = QUESTIONS[2] | {"layout": "dp=128,tp=8,pp=16,zero=1,sp,microbatches=16"}


def test_dp_follows_and_microbatches_stay_as_large() -> None:
    page = payload(Ask(BASE | {"move": "tp=16"}))
    assert page["wanted"]["text"] == "dp=64,tp=16,pp=16,zero=1,sp,microbatches=32"
    assert page["figures"]["microbatch"] == 1
    page = payload(Ask(BASE | {"move": "dp=256"}))
    assert (page["problems"], page["wanted"]["fields"]["dp"], page["wanted"]["world"]) == ([], 256, 16384)


@pytest.mark.parametrize(
    ("move", "said"),
    [
        ("tp=3", "does not divide the 128 attention heads"),
        ("dp=4096", "does not divide over dp=4096"),
        ("microbatches=3", "does not divide over dp=128 x microbatches=3"),
        ("ep=2", "llama3-405b has none"),
        ("cp=8192", "ranks"),
    ],
)
def test_what_cannot_run_has_its_reasons_and_a_neighbour(move: str, said: str) -> None:
    page = payload(Ask(BASE | {"move": move}))
    assert any(said in sentence for sentence in page["problems"])
    shown = page["shown"]["text"]
    assert page["figures"]["layout"] == shown
    assert payload(Ask(BASE | {"layout": shown}))["problems"] == []
    assert page["changes"]


def test_the_nearest_keeps_what_was_moved_where_it_can() -> None:
    """dualpipe-v needs two microbatches for each pipeline rank: more of them come, and the schedule stays."""
    page = payload(Ask(BASE | {"move": "schedule=dualpipe-v"}))
    assert "need at least 32" in page["problems"][0]
    fields = page["shown"]["fields"]
    assert fields["schedule"] == "dualpipe-v"
    assert fields["microbatches"] >= 2 * fields["pp"]


def test_steps_are_what_the_model_allows() -> None:
    workload = question("llama3-70b", "9x8xH100", (), 144, 4096)
    found = steps(workload, Layout(dp=72))
    assert found["tp"] == [1, 2, 4, 8]  # of the divisors of 72, those that divide 64 heads
    assert found["microbatches"] == [1, 2]
    assert found["ep"] == [1]
    assert not problems(workload, Layout(dp=72, zero=1))


def test_a_question_that_has_no_answer() -> None:
    with pytest.raises(UserError, match="is heterogeneous"):
        payload(Ask({"model": "tiny", "cluster": "8xH100+8xA100"}))
    with pytest.raises(UserError, match="fits nowhere"):
        search(Ask({"model": "llama3-8b", "cluster": "H100", "batch": "1", "seq": "1024"}))


def test_payloads_need_neither_torch_nor_a_server() -> None:
    code = (
        "import sys; from fivefold.web.views import answer; from fivefold.web.question import Ask;"
        "answer('plan', '', Ask({'model': 'tiny', 'cluster': '2xCPU', 'batch': '8', 'seq': '64'}));"
        "answer('run', '', Ask({})); answer('accuracy', 'rows', Ask({'source': 'llama3'}));"
        "print([name for name in ('torch', 'starlette', 'uvicorn') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_a_schedule_of_many_passes_is_for_a_process_of_its_own() -> None:
    assert not is_large(Ask(BASE))
    assert is_large(Ask(BASE | {"layout": "dp=8,tp=8,pp=16,microbatches=2048"}))
    assert is_large(Ask(BASE | {"move": "schedule=auto"}))


def test_a_layout_is_held_against_the_choice() -> None:
    layout = "dp=4,tp=16,zero=3,sp,microbatches=64,recompute=full"
    words = {"model": "llama3-70b", "cluster": "8x8xH100", "layout": layout}
    found = why(Ask(words | {"best": "dp=64,zero=3,microbatches=4,recompute=full"}))
    assert found["against"].startswith("is ")
    assert why(Ask(words))["against"] is None
