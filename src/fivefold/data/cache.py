"""The user's cache: the standard corpus, and which files have been hashed. What is in it can be made again."""

import os
import tempfile
from pathlib import Path

from fivefold.support.errors import UserError


def user_cache(name: str, home: Path | None = None) -> Path:
    """A directory of ours in the user's cache, or where that cannot be written, a private one for temporary files."""
    try:
        place = (home or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")) / "fivefold" / name
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK):
            return place
    except (OSError, RuntimeError):  # the latter: no home directory at all
        pass
    # A read-only home (a container, a cluster node). The name is fixed so that the ranks of a machine share it, so
    # others can make it too: what they could put there would be trained on.
    mine = Path(tempfile.gettempdir()) / f"fivefold-{os.getuid()}"
    mine.mkdir(parents=True, exist_ok=True, mode=0o700)
    if mine.is_symlink() or mine.stat().st_uid != os.getuid():
        raise UserError(f"{mine} belongs to somebody else; set XDG_CACHE_HOME to a directory that can be written to")
    place = mine / name
    place.mkdir(exist_ok=True)
    return place
