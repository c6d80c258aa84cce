"""The corpus that is always there: the sources of Python's own standard library, as bytes.

A first run needs no download. The corpus is prepared once per Python release and kept in the user's cache.
"""

import hashlib
import os
import platform
import shutil
import sysconfig
from pathlib import Path

from fivefold.data.cache import user_cache
from fivefold.data.checked import Checked
from fivefold.data.checking import verify
from fivefold.data.index import is_prepared
from fivefold.data.prepare import prepare
from fivefold.data.progress import Report, quiet
from fivefold.data.tokens import TokenStore
from fivefold.support.errors import UserError

VALID = 0.05  # some 30 of 600 files: enough to tell learning from memorising

# Installed packages differ from machine to machine; tests and IDLE are long lists and tables rather than prose.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "__pycache__"}
_BUILD = "_sysconfigdata"  # how this very Python was compiled, with the paths of whoever did it


def stdlib_corpus(cache: Path | None = None, progress: Report = quiet) -> Path:
    """The directory of the prepared standard library, made if it is not there yet.

    Processes may ask at the same time: each prepares beside the place, the first rename wins, the others use it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = stdlib_files(root)
    if not files:
        raise UserError(
            f"the standard library in {root} has no .py sources (a stripped or zipped Python); "
            "prepare a text of your own with `fivefold data`"
        )
    out = user_cache("corpus", cache) / f"stdlib-{platform.python_version()}-{_fingerprint(root, files)}"
    try:
        verify(TokenStore.open(out), Checked(out, cache))
    except UserError:  # not there, or damaged; a cache is mended by making it again
        if out.exists() and not is_prepared(out):
            shutil.rmtree(out)  # ours by its name, and of no use
        try:
            prepare(files, out, valid=VALID, overwrite=is_prepared(out), progress=progress)
        except UserError:
            if not is_prepared(out):  # else another process was faster, and its result is the same to the byte
                raise
    return out


def stdlib_files(root: Path) -> list[Path]:
    """The library's sources in the order of their relative paths."""
    found = []
    for place, folders, names in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in _LEFT_OUT]
        found += [Path(place, name) for name in names if name.endswith(".py") and not name.startswith(_BUILD)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _fingerprint(root: Path, files: list[Path]) -> str:
    """Distributions patch the library: the same version with other files is another corpus."""
    lines = [f"{path.relative_to(root).as_posix()} {path.stat().st_size}" for path in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:10]
