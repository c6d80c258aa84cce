"""The textbook in docs/learn: code that it quotes is in the source, output that it quotes is printed by the command
above it, its pictures are those that tools/learn_pictures.py draws, and its labs and mistakes are those of the labs.

    docs/learn/tensor.md quotes src/fivefold/parallel/tensor.py below a link to that file; `...` leaves lines out.
"""

import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tools.learn_pictures import SCENES, TRIED, pictures

from fivefold.labs.catalogue import LABS
from fivefold.planner.plan import simulate
from fivefold.render.scene import Scene, TextMark, text_width
from tests.commands import fivefold
from tests.guides import printed, quoted, searched_once, words
from tests.labs.mistakes import MISTAKES

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "learn").glob("*.md"))
CHAPTERS = [page for page in PAGES if page.stem != "index"]
QUOTED: dict[str, list[str]] = {}  # of all pages
for _page in PAGES:
    for _command, _lines in quoted(_page).items():
        QUOTED.setdefault(_command, []).extend(_lines)
named = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
WIDTH = 80  # of the terminal whose output is quoted
MEASURED = re.compile(r"\S*e-\d+\b|\bin \d+\.\d s on \d+ ranks|\d+\.\d s\b")  # other digits on another machine


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    with searched_once():
        yield


def costly(command: str) -> bool:
    """What starts ranks or searches the layouts of several nodes."""
    return command.startswith(("verify ", "dryrun ", "accuracy")) or "x8xH100" in command


def stable(line: str) -> str:
    return MEASURED.sub("", line)


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=[pytest.mark.slow] * costly(one), id=one) for one in QUOTED]
)
def test_what_a_chapter_quotes_is_printed(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = QUOTED[command]
    assert lines
    if command.startswith("verify ") and not lines[0].startswith("error: "):
        done = fivefold(*shlex.split(command), cwd=tmp_path, env={"COLUMNS": str(WIDTH)}, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        found = {stable(words(line)) for line in done.stdout.splitlines()}
        lines = [stable(line) for line in lines]
    else:
        found = set(printed(command, WIDTH, monkeypatch))
    assert [line for line in lines if line and line != "..." and line not in found] == []


@pytest.mark.parametrize(
    "command",
    [pytest.param(one, marks=[pytest.mark.slow] * costly(one), id=one) for one in QUOTED if "verify " not in one],
)
def test_a_quoted_sentence_is_whole(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a terminal breaks is quoted with the line after it, and the one before."""
    wide, shown = printed(command, 400, monkeypatch), printed(command, WIDTH, monkeypatch)
    cut = []
    for line in filter(None, QUOTED[command]):
        missing = []  # of each place where the line stands: several sentences may end in the same word
        for at in [place for place, one in enumerate(shown) if one == line]:
            around = [pair for one, pair in _pairs(shown, at) if one and one not in QUOTED[command]]
            missing.append([pair for pair in around if any(pair in whole for whole in wide)])
        cut += min(missing, key=len, default=[])
    assert cut == []


def _pairs(lines: list[str], at: int) -> Iterator[tuple[str, str]]:
    """The lines around one, each joined with it."""
    if at + 1 < len(lines):
        yield lines[at + 1], f"{lines[at]} {lines[at + 1]}"
    if at:
        yield lines[at - 1], f"{lines[at - 1]} {lines[at]}"


def inline() -> dict[str, Path]:
    """Commands within sentences, but for those with something to fill in."""
    found = {}
    for page in PAGES:
        for command in re.findall(r"`fivefold ([a-z][^`]*)`", page.read_text()):
            if (
                " " in command
                and not re.search(r"\b[A-Z]{3,}\b", command)
                and not command.startswith(("lab ", "train "))
            ):
                found[" ".join(command.split())] = page
    return {command: page for command, page in found.items() if command not in QUOTED}


@pytest.mark.slow
@pytest.mark.parametrize("command", inline())
def test_a_command_in_a_sentence_runs(command: str, tmp_path: Path) -> None:
    done = fivefold(*shlex.split(command), cwd=tmp_path, timeout=600)
    said = done.stdout + done.stderr
    assert done.returncode == 0 or (done.returncode in (1, 2) and re.search("fits? nowhere|does not fit", said)), said


def stripped(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@named
def test_quoted_code_is_in_the_source(page: Path) -> None:
    text = page.read_text()
    for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        above = re.findall(r"\]\(\.\./\.\./(src/[^)#]+\.py)\)", text[: match.start()])
        assert above, f"{page.name} quotes code of no file"
        source, at = stripped((ROOT / above[-1]).read_text()), 0
        for part in re.split(r"^\s*\.\.\.\s*$", match[1], flags=re.MULTILINE):
            lines = stripped(part)
            starts = [i for i in range(at, len(source) - len(lines) + 1) if source[i : i + len(lines)] == lines]
            assert starts, f"not in {above[-1]}, in this order:\n{part}"
            at = starts[0] + len(lines)


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_a_chapter_is_whole(page: Path) -> None:
    """It has the picture, the code, the numbers, the questions, the mistakes, a lab that exists and papers to read."""
    text = page.read_text()
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    for part in ("The idea", "The math", "The code", "Questions", "Common mistakes", "The lab", "Further reading"):
        assert part in titles, part
    assert re.search(r"!\[[^\]]+\]\(\.\./pictures/[\w-]+\.svg\)", text)
    labs = re.findall(r"fivefold lab start (\w+)", text)
    assert labs
    assert set(labs) <= {lab.name for lab in LABS}
    assert 120 <= len(text.splitlines()) <= 250
    long = [line for line in text.splitlines() if len(line) > 140 and not line.startswith("$ fivefold")]
    assert long == []
    assert text.count("$$") % 2 == 0


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_a_mistake_is_one_that_its_lab_names(page: Path) -> None:
    said = [words for mistake in MISTAKES for words in mistake.words]
    section = page.read_text().split("## Common mistakes")[1].split("\n## ")[0]
    for quote in re.findall(r'"([^"]+)"', section):
        assert any(quote in one or one in quote for one in said), quote


def test_the_layouts_of_the_last_chapter_take_what_it_says() -> None:
    text = (ROOT / "docs" / "learn" / "choose.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| ([\d.]+) s \| ([\d.]+) GB \|", text, re.MULTILINE)
    assert [layout for layout, *_ in rows] == list(TRIED)
    for layout, seconds, memory in rows:
        option = simulate("llama3-70b", layout, "16x8xH100", batch=512).option
        assert (f"{option.seconds:.1f}", f"{option.footprint.total / 1e9:.1f}") == (seconds, memory), layout


def test_every_lab_belongs_to_a_chapter() -> None:
    text = "".join(page.read_text() for page in CHAPTERS)
    assert [lab.name for lab in LABS if f"fivefold lab start {lab.name} " not in text] == []


def test_the_index_links_every_chapter() -> None:
    text = (ROOT / "docs" / "learn" / "index.md").read_text()
    assert [page.name for page in CHAPTERS if f"]({page.name})" not in text] == []


def test_the_pictures_are_those_that_are_drawn() -> None:
    assert [path.name for path, svg in pictures().items() if path.read_text() != svg] == []


@pytest.mark.parametrize("name", SCENES)
def test_no_text_of_a_picture_covers_another(name: str) -> None:
    scene: Scene = SCENES[name]()
    boxes = []
    for mark in scene.shapes:
        if isinstance(mark, TextMark):
            wide = text_width(mark.text, mark.size)
            left = mark.x - {"start": 0.0, "middle": wide / 2, "end": wide}[mark.anchor]
            boxes.append((mark.y - mark.size / 2, left, left + wide, mark.y + mark.size / 2, mark.text))
    for top, left, right, bottom, text in boxes:
        assert left >= 0, text
        assert right <= scene.width, text
        assert top >= 0, text
        assert bottom <= scene.height, text
    for one, other in pairwise(sorted(boxes)):
        apart = one[2] <= other[1] or other[2] <= one[1] or one[3] <= other[0] + 1
        assert apart, (one[4], other[4])
