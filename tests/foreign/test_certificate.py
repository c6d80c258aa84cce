"""Certificates: what they say, what makes one hold when it is repeated, and what a stranger's may not do."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from fivefold.foreign.adapter import parse_layout
from fivefold.foreign.certificate import Certificate, digest_of
from fivefold.foreign.compare import Deviation
from fivefold.foreign.evidence import Cause
from fivefold.foreign.layout_proof import REPLICAS, LayoutProof
from fivefold.foreign.repeated import RepeatedCertificate, read_certificate
from fivefold.foreign.verify import check_certificate
from fivefold.render.blocks import show, to_text
from tests.refusals import refusal

LOSS = Deviation("loss", "", 1, 0, 1e-16, 1e-10)


def proof(layout: str, error: float, *causes: Cause, bound: float = 1e-10, **changes: Any) -> LayoutProof:
    gradient = Deviation("gradient", "a", 1, 0, error, bound)
    return LayoutProof(parse_layout(layout), 2, 1.0, **{"deviations": [LOSS, gradient], "causes": causes, **changes})


TWICE, FOURFOLD = Cause("x 2", "", "https://x.org"), Cause("x 4", "", "https://x.org")
RIGHT, WRONG = proof("dp=2", 3e-16), proof("dp=4", 0.5, TWICE)
RANDOM = proof("dp=8", 0.0, compared=REPLICAS)


def certificate(*proofs: LayoutProof, **changes: Any) -> Certificate:
    usual = {
        "adapter": "mine.py", "adapter_digest": "0" * 64, "dtype": "float64", "device": "cpu", "steps": 2, "seed": 1,
        "random": "", "parameters": 10, "versions": {"torch": "2.13.0"}, "proofs": proofs or (RIGHT,), "created": "now",
    }  # fmt: skip
    return Certificate(**{**usual, **changes})


def repeated(then: Certificate, now: Certificate) -> RepeatedCertificate:
    return RepeatedCertificate(json.loads(json.dumps(then.to_dict())), now)


@pytest.mark.parametrize(
    ("imported", "named"),
    [
        ({"accelerate": "1", "transformers": "5"}, "transformers 5"),
        ({"megatron-core": "0.16", "transformers": "5"}, "megatron-core 0.16"),
        ({}, "torch 2.13.0"),
    ],
)
def test_the_headline_names_the_framework_and_not_what_it_imports(imported: dict[str, str], named: str) -> None:
    assert certificate(versions={"torch": "2.13.0"} | imported).framework == named


# ---- what a stranger's certificate may not do -----------------------------------------------------------------------


def stranger(folder: Path, named: str, **changes: Any) -> Path:
    """A certificate that someone has written by hand, with the right digests."""
    source = folder / named.rpartition(":")[0] if ":" in named else folder / named
    digest = hashlib.sha256(source.read_bytes()).hexdigest() if source.is_file() else "0" * 64
    body = certificate(adapter=named, adapter_digest=digest).to_dict() | changes
    body["sha256"] = digest_of(body)
    file = folder / "certificate.json"
    file.write_text(json.dumps(body))
    return file


@pytest.mark.parametrize("named", ["evil.py:X", "evil.py", "huggingface:x:X", "./evil.py"])
def test_a_certificate_does_not_name_the_code_that_is_run(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the user does, or the name of an adapter that ships; a file that lies there is not imported."""
    monkeypatch.chdir(tmp_path)
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass X: pass\n"
    for name in ("evil.py", "huggingface:x"):
        (tmp_path / name).write_text(trap)
    error = refusal(lambda: check_certificate(stranger(tmp_path, named)))
    assert error.codes == ["certificate.adapter"]
    assert not (tmp_path / "ran").exists()


def test_the_object_in_the_file_is_compared_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class A: pass\nclass B: pass\n")
    file, mine = stranger(tmp_path, "mine.py:A"), str(tmp_path / "mine.py")
    for given in (f"{mine}:B", mine):
        error = refusal(lambda given=given: check_certificate(file, given))
        assert error.codes == ["certificate.adapter"]
        assert error.problems[0].endswith(f"--adapter {mine}:A")


def test_files_beside_the_adapter_are_compared_and_none_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("a = 1\n")
    error = refusal(lambda: check_certificate(stranger(tmp_path, "mine.py", files={"helper.py": "0" * 64}),
                                              str(tmp_path / "mine.py")))  # fmt: skip
    assert error.codes == ["certificate.adapter"]
    assert "helper.py, which mine.py imports" in error.problems[0]
    for path in ("../helper.py", "/etc/passwd"):
        file = stranger(tmp_path, "mine.py", files={path: "0" * 64})
        assert refusal(lambda file=file: read_certificate(file)).codes == ["certificate.format"]


@pytest.mark.parametrize(
    "changes",
    [
        {"layouts": []}, {"layouts": [{"passed": True}]}, {"layouts": [{"layout": {}, "passed": True}]},
        {"layouts": [{"layout": {"dp": 2}}]}, {"device": "tpu"}, {"dtype": "int4"}, {"steps": True}, {"versions": []},
        {"seed": -5}, {"steps": 0},
        {"adapter": "a\x1b[2J.py"}, {"adapter": "a" * 10_000}, {"adapter_sha256": "z"}, {"files": {"a.py": 3}},
    ],
)  # fmt: skip
def test_a_certificate_that_says_nothing_or_odd_things_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    assert refusal(lambda: read_certificate(stranger(tmp_path, "mine.py", **changes))).codes == ["certificate.format"]


# ---- what one says, and whether it holds ----------------------------------------------------------------------------


def test_the_summary_says_what_was_compared() -> None:
    assert certificate(RIGHT).summary == "1 layout = one process within 3.0e-16 (float64, torch 2.13.0)"
    alone = certificate(RANDOM, random="draws").summary
    assert alone == "in 1 layout only replicas and masks were compared, and agree (float64, torch 2.13.0)"
    assert certificate(RIGHT, RANDOM).summary.startswith("1 layout = one process within 3.0e-16; in 1 layout only")
    assert "replicas agree" in to_text(certificate(RANDOM, random="draws").blocks())
    assert certificate(RIGHT, WRONG).summary == "1 of 2 layouts differs from one process (torch 2.13.0)"


BROKEN = proof("dp=2", 0.0, deviations=[], broken="rank 1 failed")


def test_what_could_not_run_does_not_differ() -> None:
    assert certificate(RIGHT, BROKEN).summary == "1 of 2 layouts could not run (torch 2.13.0)"
    assert certificate(WRONG, BROKEN).summary.startswith("1 of 2 layouts differs from one process, and 1 could not run")
    assert repeated(certificate(BROKEN), certificate(BROKEN)).holds
    late = proof("dp=2", 0.5, broken="rank 1 failed")
    said = to_text(certificate(late).blocks())
    assert said.index("the gradient of a is off by 0.5") < said.index("and then rank 1 failed")


HELD = {
    "the same": (RIGHT, RIGHT, {}, ""),
    "another error within the bound": (RIGHT, proof("dp=2", 9e-11), {}, ""),
    "beyond the bound of then": (RIGHT, proof("dp=2", 1e-3, bound=1.0), {}, "off by 0.001"),
    "it fails now": (RIGHT, proof("dp=2", 0.5, TWICE), {}, "passed then, differs now"),
    "it passes now": (WRONG, proof("dp=4", 0.0), {}, "differs then, passed now"),
    "another cause": (WRONG, proof("dp=4", 0.5, FOURFOLD), {}, "for another cause"),
    "less was compared": (RIGHT, proof("dp=2", 0.0, deviations=[LOSS]), {}, "the gradient was compared then"),
    "only replicas": (RIGHT, proof("dp=2", 0.0, compared=REPLICAS), {}, "values were compared then"),
    "it could run": (proof("dp=2", 0.5, TWICE), BROKEN, {}, "differs then, could not run now"),
    "another dtype": (RIGHT, RIGHT, {"dtype": "float32"}, "dtype float64 then, float32 now"),
    "another model": (RIGHT, RIGHT, {"parameters": 11}, "parameters 10 then, 11 now"),
}


@pytest.mark.parametrize("case", HELD)
def test_a_certificate_holds_if_nothing_that_it_says_has_changed(case: str) -> None:
    then, now, changes, words = HELD[case]
    again = repeated(certificate(then), certificate(now, **changes))
    assert (again.holds, again.ok) == (not words, not words)
    said = to_text(again.blocks())
    assert words in said
    assert ("the certificate holds" in said) == (not words)


def test_a_certificate_of_failures_that_holds_is_no_good_news() -> None:
    again = repeated(certificate(RIGHT, WRONG), certificate(RIGHT, WRONG))
    assert again.holds
    assert not again.ok
    words = "the certificate holds, and is one of a failure: 1 of 2 layouts differs from one process"
    assert words in to_text(again.blocks())
    assert again.to_dict()["verdict"] == words


def test_a_page_has_the_versions_bounds_and_digests() -> None:
    said = to_text(certificate(files={"helper.py": "1" * 64}).record())
    for words in ("2.13.0", "1.0e-10", "0" * 64, "helper.py", "1" * 64, "seed", "threads"):
        assert words in said


def test_a_badge_says_how_many_layouts(tmp_path: Path) -> None:
    file = tmp_path / "badge.svg"
    show(certificate(RIGHT), output=file)
    badge = file.read_text()
    assert "1 layout = one process" in badge
    assert "within 3.0e-16" in badge  # its title
    with pytest.raises(BaseException, match="1"):  # exit code 1, and a badge that says so
        show(certificate(RIGHT, WRONG), output=file)
    assert "1 of 2 layouts" in file.read_text()
