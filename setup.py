"""What a package can say only where it is built: the address of its source, and a README whose links lead there.

All else is in pyproject.toml. The address is that of the GitHub workflow that builds, or of the clone's origin; a wheel
that is built from an sdist takes the sdist's. Where none is known, none is stated, and links stay as they are.
"""

import os
import re
import subprocess
from email.parser import HeaderParser
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
PAGES = {
    "Repository": "",
    "Documentation": "/tree/HEAD/docs",
    "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Issues": "/issues",
}


def repository() -> str:
    """The web address of the source, without a slash at its end; empty where none is known."""
    if (told := HERE / "PKG-INFO").exists():
        urls = HeaderParser().parsestr(told.read_text(encoding="utf-8")).get_all("Project-URL") or []
        return next((url.partition(", ")[2] for url in urls if url.startswith("Repository, ")), "")
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
    if not (HERE / ".git").exists():  # a copy within another repository, whose address is not this one's
        return ""
    return web_address(_origin())


def web_address(origin: str) -> str:
    """Of a remote like https://HOST/OWNER/NAME.git or git@HOST:OWNER/NAME.git; a path on a disk has none. What stands
    before an @ is dropped: it may be a token."""
    found = re.fullmatch(r"(?:https://(?:[^@/]*@)?|(?:ssh://)?git@)([\w.-]+)[:/]([\w./-]+?)(?:\.git)?/?", origin)
    return f"https://{found[1]}/{found[2]}" if found else ""


def _origin() -> str:
    try:
        asked = ["git", "config", "--get", "remote.origin.url"]
        return subprocess.run(asked, cwd=HERE, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git here
        return ""


def absolute(page: str, address: str) -> str:
    """A page of the repository for readers who see it elsewhere: an index resolves no relative link."""
    if not address:
        return page
    page = re.sub(r"(!\[[^]]*\]\()(?!https?://|#)", rf"\1{address}/raw/HEAD/", page)
    return re.sub(r"((?<!!)\[(?:[^][]|!\[[^]]*\]\([^)]*\))*\]\()(?!https?://|#)", rf"\1{address}/blob/HEAD/", page)


if __name__ == "__main__":
    source = repository()
    setup(
        project_urls={name: source + page for name, page in PAGES.items()} if source else {},
        long_description=absolute((HERE / "README.md").read_text(encoding="utf-8"), source),
        long_description_content_type="text/markdown",
    )
