"""The navigation: that of mkdocs.yml, in which a line FOLDER/* stands for all pages of a folder.

A folder's index says in which order its chapters come: that in which it links to them. Reference pages, which are
written from the code, come as their module has them.
"""

import posixpath
from collections.abc import Callable
from typing import Any

from website.pages import DOCS, ROOT, is_outside, links, read, repository_path, site_path


def whole(nav: list[Any], generated: Callable[[str], list[str]]) -> list[Any]:
    """The navigation with the pages of folders, and without sections that are empty. `generated` has the pages of a
    folder that is not in docs/."""
    found: list[Any] = []
    for item in nav:
        if isinstance(item, dict):
            ((title, inside),) = item.items()
            inner = whole(inside, generated) if isinstance(inside, list) else inside
            found += [{title: inner}] if inner else []
        elif item.endswith("/*"):
            folder = item.removesuffix("/*")
            found += chapters(folder) if (ROOT / DOCS / folder).is_dir() else generated(folder)
        else:
            found.append(item)
    return found


def in_order(nav: list[Any]) -> list[str]:
    """All pages of a navigation that are not written from the code."""
    found: list[str] = []
    for item in whole(nav, lambda folder: []):
        inside = next(iter(item.values())) if isinstance(item, dict) else item
        found += in_order(inside) if isinstance(inside, list) else [inside]
    return found


def chapters(folder: str) -> list[str]:
    """The pages of a folder of docs/: its index, and those that the index names, in its order."""
    index = f"{DOCS}{folder}/index.md"
    if not (ROOT / index).is_file():
        return []
    targets = [link.target for link in links(read(index)) if not is_outside(link.target)]
    named = [site_path(repository_path(index, target)) for target in targets]
    inside = [path for path in named if posixpath.dirname(path) == folder and path.endswith(".md")]
    return list(dict.fromkeys([f"{folder}/index.md", *inside]))
