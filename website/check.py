"""python -m website.check [FOLDER]: reads a built site once more.

Every link leads to a file that is there, and to an anchor in it; nothing that a browser loads by itself is of another
host. Prints what is wrong, and else how large the site is.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from website.pages import ROOT

SITE = ROOT / "build" / "site"
LOADS = dict.fromkeys(("script", "img", "iframe", "source", "video", "audio"), "src") | {"object": "data"}
LOADED = ("stylesheet", "icon", "preload", "preconnect", "prefetch", "modulepreload", "manifest", "dns-prefetch")


class Page(HTMLParser):
    """The anchors of a page, the links that a reader follows, and what the browser loads."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and set(given.get("rel", "").split()) & {*LOADED}:
            self.loads.append(given.get("href", ""))
        elif tag in LOADS and given.get(LOADS[tag]):
            self.loads.append(given[LOADS[tag]])


def problems(folder: Path) -> Iterator[str]:
    """What is wrong with a site."""
    pages = {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    for path, page in pages.items():
        place = path.relative_to(folder)
        for target in page.loads:
            if urlsplit(target).netloc:
                yield f"{place} loads {target}, which is another host's"
        for target in (*page.links, *page.loads):
            yield from (f"{place}: {target}: {wrong}" for wrong in _dead(folder, path, target, pages))
    for path in sorted(folder.rglob("*.css")):
        text = path.read_text()
        for target in re.findall(r"""(?:url\(|@import )\s*["']?(https?:[^"')]+|//[^"')]+)""", text):
            yield f"{path.relative_to(folder)} loads {target}, which is another host's"


def _dead(folder: Path, path: Path, target: str, pages: dict[Path, Page]) -> Iterator[str]:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return
    there = path
    if parts.path:
        base = folder if parts.path.startswith("/") else path.parent
        there = (base / unquote(parts.path).lstrip("/")).resolve()
    there = there / "index.html" if there.is_dir() else there
    if not there.is_file():
        yield "there is no such file"
        return
    has_anchors = there in pages and there.parent.name != "widgets"  # whose address ends with the name of a view
    if parts.fragment and has_anchors and unquote(parts.fragment) not in pages[there].anchors:
        yield "the page has no such anchor"


def main(folder: Path) -> int:
    if not (folder / "index.html").is_file():
        print(f"there is no site in {folder}; make docs builds one")
        return 2
    found = list(problems(folder.resolve()))
    for problem in found:
        print(problem)
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    html = sum(path.suffix == ".html" for path in files)
    print(f"{folder}: {html} pages, {len(files)} files, {size / 1e6:.1f} MB, {len(found) or 'no'} problems")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else SITE))
