"""docs/others.md as a stranger follows it: from an empty directory to a certificate, which is repeated and refused."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.commands import fivefold

ROOT = Path(__file__).parents[2]
WRONG_AT_ONCE = {
    "-o nowhere/certificate.json": "there is no directory nowhere",
    "-o certificate.pdf": "should end in",
    "--html nowhere/page.html": "there is no directory nowhere",
    "dp=none": "dp=none",
    "--seed -1": "--seed=-1 must be at least 0",
    "--world 4": "--world is for jobs of Fivefold",
}


def adapters() -> tuple[str, str, str, str]:
    """The first adapter of the page, the one that it becomes, the same with an optimizer, and one of cut layers."""
    page = (ROOT / "docs/others.md").read_text()
    first, step, updated, cut = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    right = first.partition("def step")[0] + step
    return first, right, right + updated, cut


def test_from_the_page_to_a_certificate_that_is_repeated_and_refused(tmp_path: Path) -> None:
    wrong, right, *_ = adapters()
    mine = tmp_path / "my_adapter.py"
    mine.write_text(wrong)
    failed = fivefold("verify", "--adapter", mine.name, "dp=2", "--json", cwd=tmp_path)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    [layout] = json.loads(failed.stdout)["layouts"]
    cause = layout["causes"][0]
    means = "the samples of the batch enter x 0.86207 (4 samples), x 1.1905 (4 samples): a mean of 2 means"
    assert cause["text"].startswith(means)
    assert means in (ROOT / "docs/others.md").read_text()
    assert cause["read"].startswith("https://")
    assert {row["module"] for row in layout["modules"]} >= {"0", "1", "2"}
    gradient = next(row for row in layout["failed"] if row["quantity"] == "gradient")
    assert {"name", "step", "rank", "error", "tolerance", "elements"} <= gradient.keys()

    mine.write_text(right)
    words = ("--adapter", mine.name, "dp=2", "-o", "cert.json", "--html", "page.html")
    done = fivefold("verify", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 layout = one process within" in done.stdout
    certificate = json.loads((tmp_path / "cert.json").read_text())
    assert (certificate["passed"], certificate["seed"], certificate["device"]) == (True, 1234, "cpu")
    assert certificate["threads"] == 1  # as OMP_NUM_THREADS says, however many cores there are
    page = (tmp_path / "page.html").read_text()
    for digest in ("sha256", "adapter_sha256"):
        assert certificate[digest] in page

    again = fivefold("verify", "--check", "cert.json", "--adapter", mine.name, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "the certificate holds" in again.stdout
    assert fivefold("verify", "--check", "cert.json", cwd=tmp_path).returncode == 2  # the user names the file
    mine.write_text(f"{right}\n# another\n")
    refused = fivefold("verify", "--check", "cert.json", "--adapter", mine.name, cwd=tmp_path)
    assert refused.returncode == 2
    assert "is not the adapter of cert.json" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(("number", "layout"), [(2, "dp=2"), (3, "tp=2")])
def test_the_later_adapters_of_the_page_hold(number: int, layout: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(adapters()[number])
    done = fivefold("verify", "--adapter", "mine.py", layout, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_certificate_is_drawn_as_a_badge_and_no_other_result_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(adapters()[1])
    done = fivefold("verify", "--adapter", "mine.py", "dp=2", "--steps", "1", "-o", "badge.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 layout = one process" in (tmp_path / "badge.svg").read_text()
    for words in (["--check", "certificate.json", "--adapter", "mine.py"], ["--layout", "dp=2"]):
        refused = fivefold("verify", *words, "-o", "other.svg", cwd=tmp_path)
        assert refused.returncode == 2
        assert "should end in .json or .txt" in " ".join(refused.stderr.split())


@pytest.mark.parametrize("words", WRONG_AT_ONCE)
def test_what_cannot_be_is_said_before_any_work(words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    done = fivefold("verify", "--adapter", "mine.py", *words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert WRONG_AT_ONCE[words] in " ".join(done.stderr.split())
    assert not (tmp_path / "ran").exists()


def test_the_workflow_verifies_and_keeps_the_certificate() -> None:
    workflow = yaml.safe_load((ROOT / "examples/verify-workflow.yml").read_text())
    [job] = workflow["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    command = next(run for run in runs if run.startswith("fivefold verify"))
    assert command.split() == ["fivefold", "verify", "--adapter", "my_adapter.py", "-o", "certificate.json"]
    kept = job["steps"][-1]
    assert kept["if"] == "always()"
    assert kept["with"]["path"] == "certificate.json"
    assert workflow[True] == ["pull_request"]  # YAML reads the word `on` as true
