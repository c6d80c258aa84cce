"""Pictures of every view of `fivefold ui`, made by Chromium: python tools/screenshots.py [--to FOLDER] [NAME ...]

Needs playwright from the package index and a Chromium (Debian's, or the one that CHROMIUM names). A view adds lines to
SHOTS. Those of runs need `--runs`, and the runs that tools/demo_runs.py makes. The page is asked on this machine alone;
an error on its console fails the command.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Shot(NamedTuple):
    hash: str  # what the view shows, behind the # of the address
    ready: str  # a selector that appears when all is drawn
    width: int = 1280
    height: int = 860
    dark: bool = False
    clicks: tuple[str, ...] = ()  # selectors, one after the other
    hovers: tuple[tuple[str, float, float], ...] = ()  # selectors, and where in them the pointer rests
    picks: tuple[tuple[str, str], ...] = ()  # of lists: their selectors, and what is chosen
    whole: bool = False  # the whole page, and not only what a window shows
    to: str = ""  # a selector that the window is moved to


PLAN = "plan?model=llama3-70b&cluster=8x8xH100"
BIG = "plan?model=llama3-405b&cluster=2048x8xH100&batch=2048&seq=8192"
RANKED, JUDGED = '[data-testid="ranking"]', '[data-testid="neighbours-table"]'
SCHEDULE = "schedule?schedule=zb-v&pp=8&microbatches=16&times=comm=0.1"
MESH = "mesh?model=llama3-8b&cluster=2x8xH100&batch=64&layout=dp=2,tp=4,pp=2,zero=1,sp,microbatches=8&rank=5"
MESHES = "mesh?model=llama3-405b&cluster=2048x8xH100&batch=2048&seq=8192"
MANY = f"{MESHES}&layout=dp=64,tp=8,pp=16,cp=2,zero=1,sp,microbatches=32&rank=4203"
EXPERTS = (
    "mesh?model=qwen3-30b-a3b&cluster=8x8xH100&batch=512&layout=dp=16,tp=2,pp=2,ep=8,zero=1,sp,microbatches=8&rank=9"
)
LIT, STEP, PLAY = '[data-testid="collectives"]', '[data-testid="step"]', '[data-testid="play"]'
TIMELINE = '[data-testid="timeline"]'
ZOOM = '[data-testid="zoom-in"]'
EVERY = '[data-testid="take-auto"]'
BOTH = "run?runs=pipeline,slower-rate"  # of tools/demo_runs.py
FOLLOWED = '.view-run[data-loaded] [data-testid="trace-plot"] svg'
SHAPE = '[data-testid="select-accuracy-shape"]'
PREDICTED = ".view-accuracy [data-loaded]"  # half a minute: all published runs
SHOTS = {
    "plan": Shot(PLAN, JUDGED),
    "plan-dark": Shot(f"{BIG}&layout=dp=64,tp=8,pp=16,cp=2,zero=1,sp,microbatches=32", JUDGED, dark=True),
    "plan-whole": Shot(PLAN, JUDGED, clicks=('[data-testid="compare-0"]', '[data-testid="compare-1"]'), whole=True),
    "plan-cannot-run": Shot(f"{PLAN}&layout=dp=8,tp=16,pp=2,zero=1,sp,microbatches=16", JUDGED),
    "plan-phone": Shot(PLAN, JUDGED, width=390, height=844, whole=True),
    "plan-phone-dark": Shot(PLAN, JUDGED, width=390, height=844, dark=True),
    "mesh": Shot(MESH, LIT, height=1000, clicks=(STEP, STEP, PLAY)),
    "mesh-dark": Shot(MANY, LIT, height=1000, dark=True, clicks=('[data-testid="colour-pp"]',)),
    "mesh-experts": Shot(EXPERTS, LIT, whole=True, clicks=('[data-testid="collective-3"]',)),
    "mesh-phone": Shot(MESH, LIT, width=390, height=844, whole=True),
    "schedule": Shot(SCHEDULE, EVERY, height=1000, clicks=(ZOOM, ZOOM), hovers=((TIMELINE, 0.47, 0.3),)),
    "schedule-dark": Shot(
        "schedule?schedule=dualpipe-v&pp=16&microbatches=64&times=comm=0.05,ep=0.5", EVERY, dark=True
    ),
    "schedule-slow": Shot(f"{SCHEDULE}&slow=3=1.5", EVERY, whole=True),
    "schedule-phone": Shot(SCHEDULE, EVERY, width=390, height=844, whole=True),
    "run": Shot(BOTH, FOLLOWED, height=900),
    "run-trace": Shot("run?runs=pipeline", FOLLOWED, height=640, dark=True, to='[data-testid="trace-card"]'),
    "run-experts": Shot("run?runs=moe", FOLLOWED, height=660, to='[data-testid="fullest-plot"]'),
    "run-whole": Shot(BOTH, FOLLOWED, whole=True),
    "run-moe-whole": Shot("run?runs=moe", FOLLOWED, whole=True, dark=True),
    "run-phone": Shot("run?runs=pipeline", FOLLOWED, width=390, height=844, whole=True),
    "accuracy": Shot("accuracy", PREDICTED, height=900),
    "accuracy-dark": Shot("accuracy", PREDICTED, height=900, dark=True),
    "accuracy-times": Shot(
        "accuracy", PREDICTED, height=900, picks=(('[data-testid="select-accuracy-shape"]', "step times"),)
    ),
    "accuracy-whole": Shot("accuracy?kind=experts", PREDICTED, whole=True),
    "accuracy-phone": Shot("accuracy?source=torchtitan", PREDICTED, width=390, height=844, whole=True),
}


@contextmanager
def served(*runs: str) -> Iterator[str]:
    """The address of a server of its own."""
    words = [
        sys.executable,
        "-m",
        "fivefold",
        "ui",
        "--no-browser",
        *(word for run in runs for word in ("--runs", run)),
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found, "the server has not started"
        try:
            yield found[0]
        finally:
            server.terminate()


def chromium() -> str:
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    return found or sys.exit("there is no chromium; `apt-get install chromium` has one, or name it in CHROMIUM")


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield found
        found.close()


def take(chrome: Any, address: str, shot: Shot, path: Path) -> list[str]:
    """One picture; what the console had to complain about."""
    size = {"width": shot.width, "height": shot.height}
    scheme = "dark" if shot.dark else "light"
    context = chrome.new_context(viewport=size, color_scheme=scheme, device_scale_factor=2 if shot.width < 600 else 1.5)
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(address)
    page.wait_for_selector("#tabs a")
    page.evaluate("hash => { location.hash = hash }", shot.hash)
    page.wait_for_timeout(300)
    page.wait_for_selector(shot.ready, timeout=180_000)
    page.wait_for_function("() => !document.querySelector('.busy')", timeout=60_000)
    for selector in shot.clicks:
        page.click(selector)
    for selector, value in shot.picks:
        page.select_option(selector, value)
    page.evaluate("scrollTo(0, 0)")
    for selector, across, down in shot.hovers:
        size = page.locator(selector).bounding_box()
        page.mouse.move(size["x"] + across * size["width"], size["y"] + down * size["height"])
    if shot.to:
        page.evaluate("to => scrollTo(0, document.querySelector(to).getBoundingClientRect().top - 70)", shot.to)
    page.wait_for_timeout(400)
    page.screenshot(path=str(path), full_page=shot.whole)
    context.close()
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *SHOTS], help="of the pictures; none: all")
    parser.add_argument("--to", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--runs", action="append", default=[])
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)
    wrong = []
    with served(*asked.runs) as address, browser() as chrome:
        for name in asked.names or [
            name for name, shot in SHOTS.items() if asked.runs or not shot.hash.startswith("run")
        ]:
            path = asked.to / f"{name}.png"
            found = take(chrome, address, SHOTS[name], path)
            print(f"{path}: {'; '.join(found) or 'fine'}")
            wrong += found
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
