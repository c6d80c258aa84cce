"""What MkDocs calls while it builds the site (`hooks` of mkdocs.yml).

Pages outside of docs/, reference pages, linked files and widgets become files of the site; links between files of the
repository become links of the site; and LaTeX becomes MathML, so that a page needs no script for it.
"""

import posixpath
import re
import sys
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # MkDocs runs this file by its path

from latex2mathml.converter import convert
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

from website import reference, widgets
from website.nav import whole
from website.notebook import notebook
from website.pages import FILES, OUTSIDE, ROOT, is_outside, links, read, repository_path, site_path, slug, sources

STATIC = Path(__file__).parent / "static"
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".md": "markdown", ".sh": "sh"}
UNSOUGHT = "---\nsearch:\n  exclude: true\n---\n\n"  # the front matter of pages that search leaves out
LONGEST = 400_000  # characters of a linked file that the site shows
_MATH = re.compile(r'<(span|div) class="arithmatex">(.*?)</\1>', re.S)
_origin: dict[str, str] = {}  # the path in the repository, by the path on the site
# By what is in a page's path; the first counts. A title outweighs all words below it, so notebooks, which are named
# after what they show, stand behind the chapter.
SEARCH_WEIGHTS = {"learn/": 4.0, "reference/settings": 1.5, "reference/": 0.3, "notebooks/": 0.2}


def on_config(config: Any) -> Any:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    config.nav = whole(config.nav, _generated)
    return config


def _generated(folder: str) -> list[str]:
    """The reference pages of a folder, whose index stands elsewhere in the navigation."""
    return [path for path in _reference() if posixpath.dirname(path) == folder and not path.endswith("/index.md")]


@cache
def _reference() -> dict[str, str]:
    return reference.pages()


def on_files(files: Any, config: Any) -> Any:
    """All that is not a file of docs/."""
    made: dict[str, str | bytes] = {f"assets/{path.name}": path.read_bytes() for path in STATIC.iterdir()}
    made |= _reference() | reference.pictures()
    texts = {path: read(path) for path in sources()}
    for path, text in texts.items():
        _origin[site_path(path)] = path
        if path in OUTSIDE:
            made[site_path(path)] = text
    made |= _linked(texts)
    wanted = {widget.file: widget for text in texts.values() for widget in widgets.widgets(text)}
    made |= {name: widgets.made(widget) for name, widget in wanted.items()}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


@event_priority(-100)
def on_post_build(config: Any) -> None:
    """The index of search once more as a script: from the disk, a page may read no other file."""
    folder = Path(config.site_dir) / "search"
    (folder / "search_index.js").write_text(f"var __index = {(folder / 'search_index.json').read_text()}")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    place = page.file.src_uri
    # A question finds the chapter that answers it before tables in which its words stand often.
    if boost := next((weight for folder, weight in SEARCH_WEIGHTS.items() if folder in place), None):
        page.meta["search"] = {"boost": boost}
    to_root = "../" * place.count("/")
    if place in _origin:
        markdown = _with_site_links(markdown, _origin[place], place)
    return widgets.embedded(markdown, to_root)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    return _MATH.sub(lambda match: _mathml(match[2], page.file.src_uri), html)


def _mathml(text: str, place: str) -> str:
    """A formula of `\\(...\\)` or `\\[...\\]` as MathML."""
    text = unescape(text).strip()
    latex, display = text[2:-2].strip(), "block" if text.startswith("\\[") else "inline"
    try:
        formula = convert(latex, display=display)
    except Exception as error:
        raise ValueError(f"{place}: ${latex}$ is no LaTeX that can be shown: {error!r}") from error
    return f'<div class="formula">{formula}</div>' if display == "block" else str(formula)


def _with_site_links(text: str, path: str, place: str) -> str:
    """A page's text, whose links lead to where the site has the files, and say a page's title instead of its file."""
    for link in reversed(links(text)):
        if is_outside(link.target) or link.target.startswith("#"):
            continue
        anchor = link.target.partition("#")[2]
        there = site_path(repository_path(path, link.target))
        target = posixpath.relpath(there, posixpath.dirname(place)) + (f"#{anchor}" if anchor else "")
        text = text[: link.start] + target + text[link.end :]
        named = re.search(r"\[(?:docs/)?[\w-]+\.md\]\($", text[: link.start])
        if named and (title := _title(repository_path(path, link.target))):
            text = f"{text[: named.start()]}[{title}]({text[link.start :]}"
    return text


@cache
def _title(path: str) -> str:
    """The heading of a page."""
    found = re.match(r"# (.+)", read(path)) if path.endswith(".md") and (ROOT / path).is_file() else None
    return found[1] if found else ""


def _linked(texts: dict[str, str]) -> dict[str, str]:
    """Pages with the files that pages link to and the site would not have: code, recipes, transcripts."""
    wanted = {repository_path(path, link.target) for path, text in texts.items() for link in links(text)
              if not is_outside(link.target)}  # fmt: skip
    shown: dict[str, str] = {}
    for path in sorted(wanted):
        if site_path(path).startswith(f"{FILES}/"):
            _show(path, shown)
    return shown


def _show(path: str, shown: dict[str, str]) -> None:
    file = ROOT / path
    if path in OUTSIDE:
        return
    if file.is_dir():
        inside = sorted(one for one in file.iterdir() if not one.name.startswith((".", "__")) and _shows(one))
        for one in inside:
            _show(f"{path}/{one.name}", shown)
        here = posixpath.dirname(site_path(path))
        there = [posixpath.relpath(site_path(f"{path}/{one.name}"), here) for one in inside]
        names = "".join(f"- [{one.name}]({place})\n" for one, place in zip(inside, there, strict=True))
        shown[site_path(path)] = f"{UNSOUGHT}# {path}\n\n{names}"
    elif file.suffix == ".ipynb":
        _origin[site_path(path)] = path  # whose links are those of its cells
        shown[site_path(path)] = notebook(file.read_text())
    elif file.is_file():
        text = file.read_text()
        cut = "" if len(text) <= LONGEST else f"The first {LONGEST:,} of {len(text):,} characters:\n\n"
        fence = "`" * 8
        language = LANGUAGES.get(file.suffix, "text")
        shown[site_path(path)] = f"{UNSOUGHT}# {path}\n\n{cut}{fence}{language}\n{text[:LONGEST]}\n{fence}\n"


def _shows(path: Path) -> bool:
    return path.is_dir() or path.suffix in (*LANGUAGES, ".txt", ".json", ".csv", ".ipynb")
