"""`draw`, `compare schedules` and the benchmark, as a user types them."""

import json
from pathlib import Path

import pytest
from benchmarks import schedules as benchmark
from benchmarks.schedules import ScheduleCase
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.schedules.registry import CATALOGUE, build
from fivefold.schedules.text import save
from fivefold.support.errors import UserError


def run(command: str) -> str:
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(command: str) -> str:
    with pytest.raises(UserError) as caught:
        run(command)
    return str(caught.value)


def test_draw_shows_a_schedule_in_the_terminal() -> None:
    output = run("draw zb-v --pp 4 --microbatches 8")
    assert "makespan 25.5, bubble 5.88% of the makespan" in output
    assert "rank 3" in output


def test_draw_prints_json() -> None:
    result = json.loads(run("draw zb-v --pp 4 --microbatches 8 --json"))
    assert result["makespan"] == 25.5
    assert result["bubble_makespan"] == pytest.approx(1.5 / 25.5)
    assert result["bubble_span"] == pytest.approx(0)
    assert result["peak_activations"] == [4, 4, 4, 4]
    assert result["timeline"][0][0] == ["F0.0", 0, 0.5]


def test_times_are_those_of_a_whole_rank() -> None:
    result = json.loads(run("draw interleaved --pp 8 --microbatches 32 --chunks 4 --times f=1,i=1,w=1,comm=0.1 --json"))
    assert result["makespan"] - 96 == pytest.approx(11.45)
    larger = run("draw interleaved --pp 8 --microbatches 32 --chunks 4 --group 16 --times comm=0.1 --json")
    assert json.loads(larger)["makespan"] - 96 == pytest.approx(6.65)


def test_times_may_differ_by_stage() -> None:
    by_stage = json.loads(run("draw 1f1b --pp 3 -m 4 --times f=1:1.5:1,i=1:1.5:1,w=1:1.5:1 --json"))
    by_rank = json.loads(run("draw 1f1b --pp 3 -m 4 --slow 1=1.5 --json"))
    assert by_stage["timeline"] == by_rank["timeline"]


@pytest.mark.parametrize("suffix", ["svg", "png", "SVG"])
def test_draw_writes_pictures(tmp_path: Path, suffix: str) -> None:
    if suffix == "png":
        pytest.importorskip("PIL")
    path = tmp_path / f"compare.{suffix}"
    output = run(f"draw 1f1b zb-h1 auto --pp 4 --microbatches 8 --slow 1=1.5 -o {path}")
    assert path.stat().st_size > 10_000
    assert "1f1b: makespan 42" in output
    assert "zb-h1: makespan 38" in output
    assert "auto: makespan 37.5" in output


@pytest.mark.parametrize("suffix", ["txt", "json", "TXT", "JSON"])
def test_a_schedule_can_be_written_loaded_checked_and_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    run(f"draw zb-h2 --pp 4 --microbatches 8 -o {path}")
    assert json.loads(run(f"draw {path} --json"))["makespan"] == 27
    assert "zb-h2" in run(f"draw {path}")


def test_several_schedules_print_a_list_and_an_option_goes_to_those_that_take_it() -> None:
    rows = json.loads(run("draw 1f1b interleaved zb-h1 --pp 4 -m 8 --chunks 3 --json"))["schedules"]
    assert [row["makespan"] for row in rows] == pytest.approx([33, 27, 27])
    assert [row["chunks"] for row in rows] == [1, 3, 1]


def test_schedules_is_a_table_of_all_of_them() -> None:
    output = run("compare schedules --pp 4 --microbatches 8")
    assert all(name in output for name in CATALOGUE)
    assert "interleaved needs m >= p" in output
    assert next(line.split()[6] for line in output.splitlines() if line.startswith("1f1b")) == "1.5"  # sends of a rank


def test_schedules_prints_json() -> None:
    result = json.loads(run("compare schedules --pp 4 --microbatches 8 --json"))
    by_name = {row["schedule"]: row for row in result["schedules"]}
    assert list(by_name) == list(CATALOGUE)
    makespans = {name: by_name[name]["makespan"] for name in ("1f1b", "zb-h1", "zb-h2", "zb-v")}
    assert makespans == {"1f1b": 33, "zb-h1": 27, "zb-h2": 27, "zb-v": 25.5}
    assert by_name["1f1b"]["peak_activations"] == [4, 3, 2, 1]
    assert all(0 <= row["bubble_span"] <= 1 for row in by_name.values())


def test_schedules_says_which_are_refused_and_why() -> None:
    assert "dualpipe-v is refused: dualpipe-v needs at least 2p=8" in run("compare schedules --pp 4 --microbatches 6")
    rows = json.loads(run("compare schedules --pp 4 --microbatches 6 --json"))["schedules"]
    assert "at least 2p=8" in next(row["refused"] for row in rows if row["schedule"] == "dualpipe-v")


def test_the_published_rates_are_a_table() -> None:
    rows = [line.split() for line in run("compare schedules --published").splitlines()[1:]]
    assert len(rows) == 12
    assert all(row[-1] == row[-2] for row in rows)
    assert len(json.loads(run("compare schedules --published --json"))) == 4


def test_the_benchmark_is_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ScheduleCase("interleaved", 16, 128, 4) in benchmark.CASES
    monkeypatch.setattr(benchmark, "CASES", (ScheduleCase("interleaved", 2, 4, 2), ScheduleCase("zb-h1", 4, 8)))
    benchmark.schedules()
    assert "interleaved  2  4  2" in capsys.readouterr().out
    benchmark.schedules(as_json=True)
    rows = json.loads(capsys.readouterr().out)
    assert [row["compute_actions"] for row in rows] == [32, 96]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("draw zbh1 --pp 4 -m 8", "unknown schedule 'zbh1'; did you mean 'zb-h1'?"),
        ("draw 1f1b --pp 4", "1f1b needs --microbatches"),
        ("draw 1f1b", "1f1b needs --pp and --microbatches"),
        ("draw 1f1b --pp 0 -m 8", "pp=0 must be at least 1"),
        ("draw interleaved --pp 4 -m 9 --group 4", "group size N=4 leaves a last group of 1"),
        ("draw interleaved --pp 8 -m 32 --group 99", "group size N=99 is above"),
        ("draw dualpipe-v --pp 4 -m 7", "at least 2p=8"),
        ("draw 1f1b --pp 4 -m 8 --times q=1", "times: 'q' is not a time"),
        ("draw 1f1b --pp 4 -m 8 --times f=fast", "times: f=fast is not a time"),
        ("draw 1f1b --pp 4 -m 8 --times comm=1:2", "times: comm=1:2 is not a time"),
        ("draw 1f1b --pp 4 -m 8 --times bandwidth=0", "bandwidth=0 carries nothing"),
        ("draw 1f1b --pp 4 -m 8 --times f=1:2", "f has 2 times, and there are 4 stages"),
        ("draw 1f1b --pp 4 -m 8 --slow 9=2", "rank 9 cannot be slowed"),
        ("draw 1f1b --pp 4 -m 8 --slow fast", "should be a rank and a factor"),
        ("draw 1f1b --pp 4 -m 8 -o picture.gif", "picture.gif should end in .svg, .png"),
        ("draw 1f1b zb-h1 --pp 4 -m 8 -o both.txt", "can hold one schedule, and 2 are given"),
        ("draw missing.txt", "missing.txt cannot be read"),
        ("draw 1f1b --pp 4 -m 8 -o /nonexistent/x.svg", "x.svg cannot be written: there is no directory /nonexistent"),
        ("draw nothing -o /nonexistent/x.svg", "there is no directory"),  # it is said before anything is built
        ("draw 1f1b --pp 4 -m 8 --times f=1,f=2", "times: f is given for the second time"),
        ("draw 1f1b --pp 4 -m 8 --slow 1=2,1=3", "slow: rank 1 is given for the second time"),
        ("draw 1f1b --pp 4 -m 8 --slow \u00b2=2", "should be a rank and a factor"),
        ("draw 1f1b --pp 4 -m 8 --times bandwidth=1e-300,bytes=1e10", "= inf on the link"),
        ("draw 1f1b --pp 4 -m 8 --times f=1e308", "f=1e+308 is not a duration"),
        ("draw auto --pp 4 -m 8 --times f=1e308", "f=1e+308 is not a duration"),
        ("draw 1f1b --pp 4 -m 8 --chunks 3", "1f1b has 1 chunk per rank, not 3"),
        ("draw 1f1b --pp 4 -m 8 --group 4", "1f1b has no group size N"),
        ("draw 1f1b --pp 4 -m 8 --memory 3", "1f1b takes no memory limit"),
        ("draw 1f1b zb-h1 --pp 4 -m 8 --memory 3", "1f1b takes no memory limit"),
        ("draw auto --pp 4 -m 8 --memory 0", "memory=0 must be at least 1"),
        ("compare schedules --pp 0", "pp=0 must be at least 1"),
        ("compare schedules -m 0", "microbatches=0 must be at least 1"),
        ("compare schedules --chunks 0", "chunks=0 must be at least 1"),
        ("compare schedules --slow 9=2", "rank 9 cannot be slowed: ranks are 0 to 3"),
        (
            "compare schedules --published --pp 99",
            "cannot be combined with --published",
        ),
        (
            "compare schedules --published --no-overlap",
            "cannot be combined with --published",
        ),
        ("draw 1f1b --pp 4 -m 8 --sends blocking --no-overlap", "deadlocks"),
    ],
)
def test_bad_input_gets_a_sentence(command: str, sentence: str) -> None:
    said = refusal(command)
    assert sentence in said
    assert "\n" not in said


OF_A_FILE = {"pp": "--pp is 2, and"} | {
    name: f"as it stands, and --{name} cannot change it" for name in ("chunks", "group", "memory")
}


@pytest.mark.parametrize("option", OF_A_FILE)
def test_options_that_contradict_or_cannot_change_a_file_are_refused(tmp_path: Path, option: str) -> None:
    path = tmp_path / "mine.txt"
    save(build("1f1b", 4, 8), path)
    assert OF_A_FILE[option] in refusal(f"draw {path} --{option} 2")


def test_a_file_that_cannot_be_written_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken.svg").mkdir()
    assert "taken.svg cannot be written: Is a directory" in refusal(f"draw 1f1b --pp 2 -m 2 -o {tmp_path}/taken.svg")


def test_times_per_stage_that_fit_some_schedules_are_explained_once() -> None:
    output = " ".join(run("compare schedules --times f=1:1:1.5:1").split())
    assert output.count("f has 4 times, and there are 8 stages") == 1
    assert "interleaved, bfs, zb-v, v-half, v-min, dualpipe-v are refused: f has 4 times" in output


def test_the_table_says_what_it_was_made_for() -> None:
    output = run("compare schedules --pp 4 -m 9 --chunks 3 --times comm=0.1,bytes=1048576,bandwidth=1e9 --slow 1=1.5")
    assert "p=4, m=9, N=5, f=1,i=1,w=1,comm=0.1,bytes=1048576,bandwidth=1000000000" in output
    chunks = {line.split()[0]: line.split()[1] for line in reversed(output.splitlines()) if line.strip()}
    assert (chunks["1f1b"], chunks["interleaved"]) == ("1", "3")
    assert "13.50 MiB" in output  # 1f1b: 6 messages per microbatch over 4 ranks, 9 microbatches


def test_a_broken_schedule_file_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    save(build("1f1b", 2, 2), path)
    path.write_text(path.read_text().replace("F1.1", "F1.x"))
    assert f"{path}, line 10: 'F1.x' is not an action" in refusal(f"draw {path}")
