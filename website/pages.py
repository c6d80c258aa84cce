"""The pages of the documentation as Markdown: their links, anchors and commands, and where each lies on the site.

    page = read("docs/planner.md")
    links(page)                    # [Link("experts.md", 10, 20), ...]
    anchors(page)                  # {"from-a-plan-to-a-job", ...}
    commands(page)                 # [["plan", "llama3-70b", "--cluster", "8x8xH100"], ...]
    site_path("README.md")         # project/readme.md

It needs nothing but Python: tests of the sources run without MkDocs.
"""

import posixpath
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
# Pages outside of docs/, and where the site has them.
OUTSIDE = {
    "README.md": "project/readme.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "proofs/README.md": "project/proofs.md",
}
FILES = "files"  # where the site has other files that pages link to: examples, recipes, transcripts
PICTURES = (".svg", ".png")

_FENCE = re.compile(r"^([ ]*)(```+|~~~+)([^\n`]*)\n(.*?)^[ ]*\2[ ]*$", re.M | re.S)
_INLINE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.S)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?)[ #]*$", re.M)
_COMMENT = re.compile(r"<!--.*?-->", re.S)


class Link(NamedTuple):
    """Where a link leads, and where that stands in the text."""

    target: str
    start: int
    end: int


class Fence(NamedTuple):
    """A fenced block: its language, its text, and its line."""

    language: str
    text: str
    line: int


def read(path: str) -> str:
    return (ROOT / path).read_text()


def sources() -> list[str]:
    """The paths of all pages, from the repository's root."""
    inside = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / DOCS).rglob("*.md"))
    return [*OUTSIDE, *inside]


def prose(text: str) -> str:
    """The text with code blanked: what is left stands where it stood."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return _INLINE.sub(blank, _FENCE.sub(blank, text))


def fences(text: str) -> list[Fence]:
    return [Fence(one[3].strip(), one[4], text.count("\n", 0, one.start()) + 1) for one in _FENCE.finditer(text)]


def links(text: str) -> list[Link]:
    """All links and pictures, also those whose text is code."""
    unfenced = _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    outside = prose(text)
    found = (Link(match[1], match.start(1), match.end(1)) for match in _LINK.finditer(unfenced))
    return [link for link in found if outside[link.start : link.end] == link.target]


def anchors(text: str) -> set[str]:
    """The names that a link to the page may end with. As on GitHub, the second heading of a name has -1."""
    found: set[str] = set()
    unfenced = _FENCE.sub("", text)
    for heading in _HEADING.findall(_COMMENT.sub("", unfenced)):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = first = slug(re.sub(r"[`*]", "", plain))
        number = 0
        while name in found:
            number += 1
            name = f"{first}-{number}"
        found.add(name)
    return found


def slug(heading: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it; MkDocs gives the separator."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def is_outside(target: str) -> bool:
    """Whether a link leads to another host."""
    return bool(re.match(r"[a-z][a-z0-9+.-]*:", target))


def repository_path(page: str, target: str) -> str:
    """The path, from the repository's root, of what a page links to; the page itself for an anchor alone."""
    path = target.partition("#")[0]
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page


def site_path(path: str) -> str:
    """Where the site has a file of the repository: a path within MkDocs' sources."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    if path.startswith(DOCS) and path.endswith((".md", *PICTURES)):
        return path.removeprefix(DOCS)
    return f"{FILES}/{path}/index.md" if (ROOT / path).is_dir() else f"{FILES}/{path}.md"


def commands(text: str) -> list[list[str]]:
    """The words of every `fivefold` command in the page's fenced blocks, without the program's name."""
    return [words for fence in fences(text) if fence.language in ("", "sh", "bash", "console")
            for words in commands_in(fence.text)]  # fmt: skip


def commands_in(block: str) -> list[list[str]]:
    """The commands of a block. A line begins with one, perhaps after `$ `; what a command prints does not."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        if re.match(r"\s*(\$ )?fivefold ", line):
            found += [words[1:] for words in _separated(line.strip().removeprefix("$ ")) if words[:1] == ["fivefold"]]
    return found


def _separated(line: str) -> Iterator[list[str]]:
    """A shell's line as its commands, without redirections and comments."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    reader.whitespace_split = True
    words: list[str] = []
    skips = False
    for word in reader:
        if set(word) <= set(";&|"):
            yield words
            words = []
        elif set(word) <= set("<>&"):
            skips = True  # the next word is a file
            words = words[:-1] if words[-1:] == ["2"] else words
        elif skips:
            skips = False
        else:
            words.append(word)
    yield words
