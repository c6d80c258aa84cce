"""A directory appears complete or not at all.

Everything is written into a hidden directory beside the wanted one, which one rename then puts into its place. An
exception or an interrupt removes the hidden directory; a killed process leaves it behind, without an index.
"""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fivefold.data.index import is_prepared
from fivefold.support.errors import UserError


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse a place where something stands that is not ours to replace."""
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise UserError(f"{out} exists and is not a directory; name a new directory for the tokens")
    if not any(out.iterdir()):
        return
    if not is_prepared(out):
        raise UserError(f"{out} exists and holds other files; name a new or an empty directory for the tokens")
    if not overwrite:
        raise UserError(f"{out} already holds prepared tokens; name another directory, or give --overwrite")


@contextmanager
def staged(out: Path, overwrite: bool) -> Iterator[Path]:
    """A directory to write into; it takes the place of `out` when the block ends well."""
    token = secrets.token_hex(4)
    hidden = out.parent / f".{out.name}.{token}.partial"
    try:
        hidden.mkdir(parents=True)  # mkdir and not mkdtemp: the result must be readable by whoever the umask allows
        yield hidden
        check_free(out, overwrite)  # again: another process may have been faster
        # Two renames and not one: only an empty directory can be renamed over. Readers hold their files open.
        old = out.parent / f".{out.name}.{token}.old" if out.is_dir() and any(out.iterdir()) else None
        if old:
            os.rename(out, old)
        os.rename(hidden, out)
        if old:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}{_space(out.parent)}") from error
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _space(place: Path) -> str:
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return ""
    return f" ({free / 1e9:.1f} GB are free there)"
