"""`report`: one file that holds all it shows, fetches nothing, and has the figures of the command."""

import base64
import gzip
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fivefold as ff
from fivefold.cli import app
from fivefold.schedules.registry import CATALOGUE
from fivefold.support.errors import UserError
from fivefold.tracing.lanes import read_lanes
from fivefold.tracing.result import TraceResult
from fivefold.tracing.summary import TraceSummary
from fivefold.web import report as file
from fivefold.web import report as reporting
from fivefold.web.mesh import payload as meshing
from fivefold.web.mesh import rank as one_rank
from fivefold.web.plan import payload as planning
from fivefold.web.plan import why as reasons
from fivefold.web.question import Ask
from fivefold.web.redact import _places, without_paths
from fivefold.web.report import verify_payload
from fivefold.web.schedule import every, payload
from fivefold.web.schedule import made as made_anew
from tests.tracing.test_summary import by_hand
from tests.web.a_run import a_run, log

QUESTION = ("tiny", "2xCPU")
SMALL = {"batch": 8, "seq": 64}


def held(path: Path) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="payload">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


def nothing_is_fetched(page: str) -> bool:
    outside = re.sub(r"data:[\w/+]+;base64,[\w+/=]+", "", page)
    return not re.findall(r'(?:src|href)="(?!#)[^"]+"|@import|url\(', outside) and "default-src 'none'" in page


def proof(layout: str = "dp=2", **more: Any) -> dict[str, Any]:
    worst = {"name": "embedding", "step": 1, "error": 1e-16, "note": "", "holds": True}
    sent = {"calls": 3, "payload": 10, "wire": 10}
    return {
        "layout": layout, "model": "tiny", "variant": "", "dtype": "float64", "passed": True, "problems": [],
        "details": "", "bound": 1e-10, "losses": [{"layout": 5.5, "reference": 5.5}], "norms": [], "seconds": 0.5,
        "worst_gradient": worst, "worst_parameter": worst, "routing_replayed": False, "peak_bytes": 1.0,
        "traffic_per_step": [{"axis": "dp", "kind": "all-reduce", "counted": sent, "expected": sent, "holds": True}],
        "held": [{"rank": 0, "name": "parameters", "expected": 8, "counted": 8, "holds": True}],
    } | more  # fmt: skip


def test_a_plan_is_reported_as_it_was_found(tmp_path: Path) -> None:
    found = ff.plan(*QUESTION, **SMALL)
    written = ff.report(found, tmp_path / "plan.html", "fivefold plan tiny")
    page = held(tmp_path / "plan.html")
    view, _ = page["views"]
    assert view["parts"]["search"] == json.loads(json.dumps(found.to_dict()))
    assert view["payload"]["figures"] == view["parts"]["search"]["best"] | {"memory_limit_bytes": found.chosen.limit}
    assert view["parts"]["why"]["neighbours"] == view["parts"]["search"]["neighbours"]
    assert page["made"]["command"] == "fivefold plan tiny"
    assert written.to_dict() == {
        "file": str(tmp_path / "plan.html"), "title": "tiny on 2xCPU", "views": ["plan", "mesh"],
        "bytes": (tmp_path / "plan.html").stat().st_size,
    }  # fmt: skip
    assert nothing_is_fetched((tmp_path / "plan.html").read_text())


def test_a_layout_that_was_given_is_held_against_the_choice(tmp_path: Path) -> None:
    found = ff.plan(*QUESTION, layout="tp=2,microbatches=8", **SMALL)
    ff.report(found, tmp_path / "plan.html")
    view, mesh = held(tmp_path / "plan.html")["views"]
    assert view["payload"]["shown"]["text"] == mesh["payload"]["shown"]["text"] == "tp=2,microbatches=8"
    assert "%" in view["parts"]["why"]["against"]


def test_a_plan_has_the_mesh_and_the_schedule_of_its_layout(tmp_path: Path) -> None:
    layout = "dp=2,tp=2,pp=4,zero=1,sp,microbatches=8"
    question = {"batch": 64, "seq": 8192, "layout": layout}
    found = ff.plan("llama3-8b", "2x8xH100", **question)
    assert ff.report(found, tmp_path / "plan.html").views == ("plan", "mesh", "schedule")
    _, mesh, schedule = held(tmp_path / "plan.html")["views"]
    words = {"model": "llama3-8b", "cluster": "2x8xH100", "batch": "64", "seq": "8192", "layout": layout}
    served = json.loads(json.dumps(meshing(Ask(words))))
    assert mesh["payload"] == served
    assert [one["part"]["rank"] for one in mesh["parts"]["ranks"]] == [*range(16)]
    assert mesh["parts"]["ranks"][5] == json.loads(json.dumps(one_rank(Ask(words | {"rank": "5"}))))
    timed = ff.simulate("llama3-8b", layout, "2x8xH100", batch=64, seq=8192).simulation
    assert timed is not None
    assert schedule["payload"]["drawn"]["figures"]["makespan"] == timed.makespan
    assert (schedule["payload"]["clock"], schedule["payload"]["microbatches"]) == ("s", 8)


def test_a_model_of_a_file_is_one_more_choice(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[model]\npreset = "tiny"\nlayers = 3\n')
    ff.report(ff.plan(tmp_path / "job.toml", "2xCPU", software="nemo", **SMALL), tmp_path / "plan.html")
    page = held(tmp_path / "plan.html")["views"][0]["payload"]
    assert page["question"]["layers"] == 3
    assert page["question"]["model"] in [one["name"] for one in page["choices"]["models"]]
    assert page["question"]["software"] in page["choices"]["software"]


UNLIKE = {"layout": "tp=8,pp=2,microbatches=8", "batch": 64, "seq": 1024}


@pytest.mark.parametrize(
    ("made", "name", "said"),
    [
        (lambda: ff.plan("llama3.2-1b", "1x8xH100+1x8xA100-80", **UNLIKE), "x.html", r"decision\.html"),
        (lambda: ff.draw("gpipe", pp=16, microbatches=1024), "x.html", "at most 8192"),
        (lambda: ff.models(), "x.html", "no report of a ModelList"),
        (lambda: ff.plan(*QUESTION, **SMALL), "x.pdf", r"should end in \.html"),
    ],
)
def test_what_cannot_be_reported_is_said(tmp_path: Path, made: Callable[[], object], name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ff.report(made(), tmp_path / name)


def test_the_largest_question_is_small_enough_to_send() -> None:
    """Of its parts, the ranking is as long for the smallest."""
    words = {"model": "llama3-405b", "cluster": "2048x8xH100", "batch": "2048", "seq": "8192"}
    layout = {"layout": "dp=16,tp=8,pp=128,zero=1,sp,microbatches=128,recompute=full"}
    assert len(file.html_page("405B", [file.page_view("plan", planning(Ask(words | layout)))])) < 1_500_000


def test_a_schedule_stands_beside_the_others_for_its_numbers(tmp_path: Path) -> None:
    found = ff.draw("zb-v", pp=4, microbatches=8, times="f=1,i=1,w=1,comm=0.1", slow="1=1.5")
    ff.report(found, tmp_path / "s.html")
    (view,) = held(tmp_path / "s.html")["views"]
    figures = {key: found.to_dict()[key] for key in ("makespan", "bubble_makespan", "peak_activations")}
    assert {key: view["payload"]["drawn"]["figures"][key] for key in figures} == figures
    words = {"schedule": "zb-v", "pp": "4", "microbatches": "8", "times": "f=1,i=1,w=1,comm=0.1", "slow": "1=1.5"}
    served = json.loads(json.dumps(payload(Ask(words))))
    for key in ("asked", "steps", "kinds", "drawn"):
        assert view["payload"][key] == served[key], key
    words.pop("schedule")
    assert view["parts"]["every"] == json.loads(json.dumps(every(Ask(words))))
    assert view["parts"]["made"] == json.loads(json.dumps(made_anew(Ask(words))))


def further(view: dict[str, Any]) -> dict[str, Any]:
    """The answers to other questions that a view holds."""
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(view["held"]["gzip"])))
    assert set(view["held"]["keys"]) - found.keys() == {view["held"]["keys"][0]}  # its own
    return found


def test_a_page_of_a_schedule_can_be_played_without_a_server(tmp_path: Path) -> None:
    """It holds what the server would answer, for the whole catalogue, with half and twice as many microbatches."""
    ff.report(ff.draw("zb-v", pp=2, microbatches=4, times="f=1,i=1,w=1,comm=0.1"), tmp_path / "s.html")
    (view,) = held(tmp_path / "s.html")["views"]
    answers = further(view)
    assert view["held"]["by"] == ["schedule", "microbatches"]
    assert len(answers) == 3 * len(CATALOGUE) - 1
    words = {"pp": "2", "times": "f=1,i=1,w=1,comm=0.1"}
    served = json.loads(json.dumps(payload(Ask(words | {"schedule": "gpipe", "microbatches": "8"}))))
    for key in ("asked", "drawn", "refused"):
        assert answers["gpipe 8"]["payload"][key] == served[key], key
    listed = json.loads(json.dumps(every(Ask(words | {"microbatches": "8"}))))
    assert answers["zb-v 8"]["parts"]["every"] == listed
    assert answers["gpipe 8"]["payload"]["asks"]["every"] == {"schedule": "zb-v", "microbatches": "8"}
    assert answers["dualpipe-v 2"]["payload"]["refused"]
    assert view["held"]["offers"]["steps"]["microbatches"] == [2, 4, 8]


def test_a_page_of_a_plan_holds_the_layouts_that_it_lists(tmp_path: Path) -> None:
    found = ff.plan(*QUESTION, **SMALL)
    ff.report(found, tmp_path / "plan.html")
    view = held(tmp_path / "plan.html")["views"][0]
    answers = further(view)
    near = [str(one.layout) for one in found.neighbours if one.slower is not None]
    assert set(view["held"]["keys"]) == {*near, *(str(option.layout) for option in found.options)}
    words = {"model": QUESTION[0], "cluster": QUESTION[1], "batch": "8", "seq": "64"}
    for layout, answer in answers.items():
        served = json.loads(json.dumps(planning(Ask(words | {"layout": layout}))))
        for key in ("figures", "shown", "ranks"):
            assert answer["payload"][key] == served[key], key
        asked = Ask(words | {"layout": layout, "best": str(found.chosen.layout)})
        assert answer["parts"]["why"] == json.loads(json.dumps(reasons(asked)))


def test_several_schedules_have_a_tab_each_and_may_be_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    list(ff.draw("1f1b", pp=2, microbatches=4).save(file))
    file.write_text(file.read_text().replace("schedule 1f1b", "schedule mine"))
    found = ff.draw("gpipe", "auto", file, pp=2, microbatches=4)
    assert ff.report(found, tmp_path / "s.html").title == "gpipe, auto, mine: p=2, m=4"
    views = held(tmp_path / "s.html")["views"]
    assert [(view["module"], view["title"]) for view in views] == [
        ("schedule", "gpipe"), ("schedule", "auto"), ("schedule", "mine")
    ]  # fmt: skip
    for view, one in zip(views, found.simulations, strict=True):
        assert view["payload"]["drawn"]["figures"]["makespan"] == one.makespan
    assert [row["schedule"] for row in views[0]["parts"]["every"]["schedules"]] == ["gpipe", "auto"]
    assert views[0]["parts"]["made"]["schedule"] == "mine"
    ff.report(ff.draw(file), tmp_path / "one.html")
    (view,) = held(tmp_path / "one.html")["views"]
    assert "mine" in [row["schedule"] for row in view["parts"]["every"]["schedules"]]


def test_a_large_schedule_stands_alone(tmp_path: Path) -> None:
    written = ff.report(ff.draw("1f1b", pp=32, microbatches=128), tmp_path / "s.html")
    assert written.size < reporting.MAX_REPORT_BYTES
    (view,) = held(tmp_path / "s.html")["views"]
    assert view["parts"] == {}


def test_the_largest_schedule_of_the_page_is_small_enough_to_send(tmp_path: Path) -> None:
    found = ff.draw("zb-v", "1f1b", pp=16, microbatches=64)
    assert ff.report(found, tmp_path / "s.html").size < reporting.MAX_REPORT_BYTES


def test_a_run_is_reported_with_its_trace(tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "demo", traced=True)
    assert ff.report(tmp_path / "runs" / "demo", tmp_path / "run.html").title == "demo"
    (one,) = held(tmp_path / "run.html")["views"]
    assert [shown["records"] for shown in one["payload"]["shown"]] == [20]
    assert set(one["parts"]) == {"trace"}
    a_run(tmp_path / "runs" / "other")
    assert set(ff.report(tmp_path / "runs", tmp_path / "run.html").title.split(", ")) == {"demo", "other"}
    with pytest.raises(UserError):
        ff.report(tmp_path / "runs" / "demo" / "checkpoints", tmp_path / "run.html")


def test_a_run_s_report_names_no_place_and_no_host(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "runs" / "demo", traced=True)
    (tmp_path / "runs" / "no run").mkdir()
    log(folder, [["error: rank 0 (pp 0): cannot read /data/of/mine/shard-3.bin: it is cut short"]])
    facts = {"data": str(tmp_path / "corpus"), "ranks": 2}
    (folder / "environment.json").write_text(json.dumps(facts))
    ff.report(tmp_path / "runs", tmp_path / "run.html", f"fivefold inspect {tmp_path}/runs")
    text = (tmp_path / "run.html").read_text()
    for secret in (str(tmp_path), "/data/of/mine", f"rank 0 on {socket.gethostname()}"):
        assert secret not in text, secret
    (run,) = held(tmp_path / "run.html")["views"][0]["payload"]["shown"]
    assert (run["directory"], run["environment"]) == ("demo", {"data": "corpus", "ranks": 2})
    said = [one["text"] for one in run["events"]]
    assert "2 ranks" in said
    assert "rank 0 (pp 0): cannot read shard-3.bin: it is cut short" in said


def test_a_run_s_report_names_no_place_however_it_is_spelt(tmp_path: Path) -> None:
    home = tmp_path / "jane; doe, (of: us)" / "my runs"
    folder = a_run(home / "a demo", traced=True)
    said = [
        f"error: {folder}/checkpoints/step-3 cannot be read: it is cut short",
        f"error: see file://{tmp_path}/jane%20doe/a.txt",
        f"error: '{home}/other run/b c.txt' is gone",
        r"error: C:\Users\jane doe\d.txt is gone",
        "error: ~jane/corpus/e.txt is gone",
    ]
    log(folder, [said])
    (folder / "environment.json").write_text(json.dumps({"data": f"file://{home}/my corpus", f"{home}/k": 1}))
    ff.report(home, tmp_path / "run.html", f"fivefold inspect '{home}'")
    text = (tmp_path / "run.html").read_text()
    for secret in ("jane", "of: us", str(tmp_path), "my runs/", "corpus/", "file:", "Users"):
        assert secret not in json.dumps(held(tmp_path / "run.html")), secret
    assert str(tmp_path) not in text
    (run,) = held(tmp_path / "run.html")["views"][0]["payload"]["shown"]
    assert (run["directory"], run["environment"]) == ("a demo", {"data": "my corpus", "k": 1})
    told = [one["text"] for one in run["events"] if one["kind"] == "fault"]
    assert told == [
        "rank 0: step-3 cannot be read: it is cut short", "rank 0: see a.txt", "rank 0: 'b c.txt' is gone",
        "rank 0: d.txt is gone", "rank 0: e.txt is gone",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/home/jane doe/my runs/x.bin", "x.bin"),
        ("read /home/jane doe/my runs/x.bin: bad", "read x.bin: bad"),
        ("read '/home/jane doe/a b/c d.txt' now", "read 'c d.txt' now"),
        ('File "/home/jane doe/p.py", line 3', 'File "p.py", line 3'),
        ("`/home/a b/c d`", "`c d`"),
        ("/home/jane (old)/runs/x.bin is bad: yes", "x.bin is bad: yes"),
        ("file:///home/jane/x.bin", "x.bin"),
        ("see file:///home/jane%20doe/runs/x.bin, then", "see x.bin, then"),
        ("File:/home/jane/x", "x"),
        ("file://host7/share/me/x", "x"),
        ("ssh://jane@host/home/jane/x", "x"),
        (r"C:\Users\jane doe\runs\x.bin", "x.bin"),
        (r"cannot open C:\Users\jane\x.bin: no", "cannot open x.bin: no"),
        (r"'C:\\Users\\jane doe\\x y.bin'", "'x y.bin'"),
        ("D:/data/jane/x.bin", "x.bin"),
        (r"\\server\share\dir\x.bin", "x.bin"),
        ("//server/share/x", "x"),
        ("~/x", "x"),
        ("~jane/a/x", "x"),
        ("/home/jane", "..."),
        ("HOME=/Users/jane", "HOME=..."),
        ("PATH=/usr/bin:/home/jane/bin", "PATH=bin:bin"),
        ("node7:/export/me/x", "node7:x"),
        ("-I/home/jane/inc -L/home/jane/lib", "-Iinc -Llib"),
        ("in /a/b and /c/d", "in b and d"),
        ("read /data/me/x.bin at 3 tokens/s", "read x.bin at 3 tokens/s"),
        ('{"a":"/x/y","b":"/z/w"}', '{"a":"y","b":"w"}'),
        ("https://me:pw@example.org/a", "https://example.org/a"),
        ("a\n/home/me/x\nb", "a\nx\nb"),
        ("/a/b:12: error", "b:12: error"),
    ],
)
def test_of_a_path_its_last_part_is_left(text: str, left: str) -> None:
    assert without_paths(text) == left
    assert without_paths({"text": [text], "k": 1}) == {"text": [left], "k": 1}


def test_long_and_deep_paths_do_not_fill_the_memory() -> None:
    """A hostile file's: every folder above half a million would be kept."""
    assert _places({"x": "/a" * 500_000}) == []
    deep = ["/" + f"{number}/" * 900 for number in range(100)]
    assert sum(map(len, _places([deep]))) < 2_000_000
    assert _places({"run": "/home/joe/my runs"}) == ["/home/joe/my runs", "/home/joe"]


def test_what_is_no_path_stays() -> None:
    for text in ("tokens/s", "a / b", "https://example.org/a/b", "dp=2,tp=2", "1/200", "and/or/not", "runs/demo",
                 "s3://bucket/a/b", "http://localhost:8080/a/b", "3 tokens/s, 4 GB/s", "./a/b", "../a/b", "x /s", "/s",
                 "step 3/200", "~5/6", "3 / 4 / 5", "C:", "10:/x"):  # fmt: skip
        assert without_paths(text) == text
    assert without_paths(["/a/b/c.txt", {"k": "in '/a/b/'"}, 3]) == ["c.txt", {"k": "in '...'"}, 3]


def test_a_trace_is_reported_as_it_was_written(tmp_path: Path) -> None:
    file = a_run(tmp_path / "demo", traced=True) / "trace.json"
    ff.report(TraceResult(TraceSummary(by_hand()), file), tmp_path / "trace.html")
    (one,) = held(tmp_path / "trace.html")["views"]
    assert one["name"] == "trace"
    assert one["payload"] == json.loads(json.dumps({"run": "trace"} | read_lanes(file)))


def test_a_trace_that_is_damaged_is_left_out_and_the_rest_is_reported(tmp_path: Path) -> None:
    (a_run(tmp_path / "demo", traced=True) / "trace.json").write_text('{"traceEvents": 1e999}')
    ff.report(tmp_path / "demo", tmp_path / "run.html")
    (view,) = held(tmp_path / "run.html")["views"]
    (run,) = view["payload"]["shown"]
    assert run["columns"]["step"]
    assert view["parts"] == {}
    assert any("trace.json is not a trace" in said for said in run["left_out"])


def test_a_proof_is_what_verify_says(tmp_path: Path) -> None:
    (tmp_path / "verify.json").write_text(json.dumps(proof()))
    assert ff.report(tmp_path / "verify.json", tmp_path / "proof.html").title == "dp=2 of tiny"
    (view,) = held(tmp_path / "proof.html")["views"]
    (one,) = view["payload"]["proofs"]
    assert {name: one[name] for name in ("layout", "bound", "held")} == {
        name: proof()[name] for name in ("layout", "bound", "held")
    }


def test_a_sweep_keeps_a_row_for_each_and_tells_failures_in_full(tmp_path: Path) -> None:
    failing = proof("tp=2", passed=False, problems=["</script><b><script>alert(1)</script>\u2028"])
    sweep = {"passed": False, "sampled": 3001, "total": 4000, "pairs_met": 1.0, "with_experts": 0, "failed": 1}
    (tmp_path / "sweep.json").write_text(json.dumps(sweep | {"layouts": [proof()] * 3000 + [failing]}))
    written = ff.report(tmp_path / "sweep.json", tmp_path / "sweep.html")
    assert written.size < reporting.MAX_REPORT_BYTES
    page = held(tmp_path / "sweep.html")["views"][0]["payload"]
    assert len(page["sweep"]["rows"]) == 3001
    assert page["proofs"][0]["layout"] == "tp=2"
    text = (tmp_path / "sweep.html").read_text()
    assert "alert(1)</script>" not in text
    assert "</script><b>" not in text
    assert "\u2028" not in text


@pytest.mark.parametrize("text", ["[]", "{}", '{"layouts": 3}', '{"layout": 3}', "nothing"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json"):
        ff.report(tmp_path / "x.json", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_a_report_that_is_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "MAX_REPORT_BYTES", 1000)
    with pytest.raises(UserError, match=r"the limit is 0\.001 MB; report fewer"):
        ff.report(ff.plan(*QUESTION, **SMALL), tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_the_result_of_verify_has_the_form_that_is_read() -> None:
    """Its own classes, so that neither can change alone."""
    from fivefold.job.reading import read_job
    from fivefold.verifier.cases import LayoutCase
    from fivefold.verifier.compare import ValueComparison
    from fivefold.verifier.result import VerifyResult
    from fivefold.verifier.verdict import Verdict

    job = read_job()
    verdict = Verdict(job, 0.5, [(1.0, 1.0)], [(1.0, float("nan"))], [ValueComparison("loss", "", 1, 0.0, 1e-10)])
    for result in (VerifyResult([(LayoutCase(job, ""), verdict)], total) for total in (None, 7)):
        assert verify_payload(result.to_dict())["proofs"][0]["losses"] == [{"layout": 1.0, "reference": 1.0}]


def test_a_plan_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tiny", "--cluster", "2xCPU", "--batch", "8", "--seq", "64"]
    said = CliRunner().invoke(app, ["plan", *words, "--html", "plan.html"])
    assert "written to plan.html" in said.stdout
    ff.report(ff.plan(*QUESTION, **SMALL), "other.html")
    assert held(tmp_path / "plan.html")["views"] == held(tmp_path / "other.html")["views"]


def test_draw_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["draw", "1f1b", "--pp", "2", "--microbatches", "2"]
    assert "written to drawn.html" in CliRunner().invoke(app, [*words, "--html", "drawn.html"]).stdout
    ff.report(ff.draw("1f1b", pp=2, microbatches=2), "schedule.html")
    assert held(tmp_path / "drawn.html")["views"] == held(tmp_path / "schedule.html")["views"]
    assert "the page is --html x.html" in str(CliRunner().invoke(app, [*words, "-o", "x.html"]).exception)


def test_verify_writes_the_page_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v.json").write_text(json.dumps(proof()))
    assert "written to v.html" in CliRunner().invoke(app, ["verify", "v.json", "--html", "v.html"]).stdout
    assert held(tmp_path / "v.html")["views"][0]["name"] == "verify"
    for words, said in {
        ("v.json",): "v.json is for --html",
        ("v.json", "--html", "v.html", "--layout", "dp=2"): "--layout says what to prove, but v.json is a",
        (".", "--html", "v.html"): ". is a directory",
        ("--curve", "--html", "v.html"): "--html cannot be combined with --curve",
        ("--curve", "--all", "--jobs", "2"): "--all, --jobs cannot be combined with --curve",
    }.items():
        assert said in str(CliRunner().invoke(app, ["verify", *words]).exception), words


def test_inspect_writes_the_page_of_a_run_and_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "other"):
        a_run(tmp_path / "runs" / name)
    said = CliRunner().invoke(app, ["inspect", "runs/demo", "--html", "run.html"])
    assert "demo: written to run.html" in said.stdout
    assert "loss" in said.stdout
    said = CliRunner().invoke(app, ["inspect", "runs", "--html", "all.html", "--json"])
    assert set(json.loads(said.stdout)["title"].split(", ")) == {"demo", "other"}
    assert "is neither" in str(CliRunner().invoke(app, ["inspect", "nowhere", "--html", "x.html"]).exception)
