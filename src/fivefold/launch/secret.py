"""The secret of a run: what a process has to know to be one of its ranks.

It is FIVEFOLD_SECRET where that is set, as our launcher does. Else it is in run.dir, which the machines of a run share,
in a file that only the user can read. A file that others may know or may have written is refused, and never ignored.
"""

import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fivefold.support.errors import UserError

SECRET = "FIVEFOLD_SECRET"
_NAME = ".secret"
_LEAST = 16  # characters
_WAY_OUT = f"or set {SECRET} to {_LEAST} random characters or more, the same on all machines"


def kept(directory: Path, env: Mapping[str, str] = os.environ) -> str:
    """Where the secret is, for people: two ranks that have different ones look in two places."""
    return SECRET if SECRET in env else str((directory / _NAME).absolute())


def run_secret(directory: Path, env: Mapping[str, str] = os.environ) -> bytes:
    """By which the ranks of a run below `directory` (its run.dir) know each other; the first to come makes it."""
    if (given := env.get(SECRET)) is not None:
        if len(given) < _LEAST:
            raise UserError(f"{SECRET} has {len(given)} characters, and a secret has {_LEAST} or more")
        return os.fsencode(given)
    path = directory / _NAME
    try:
        if not os.path.lexists(path):
            _make(path)
        stream = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # noqa: SIM115
    except OSError as error:
        raise UserError(
            f"{path}, by which the ranks of a run know each other, cannot be read or made ({error.strerror}): make "
            f"run.dir a directory that all machines share, {_WAY_OUT}"
        ) from None
    with stream:
        about = os.fstat(stream.fileno())
        reasons = [
            (stat.S_ISREG(about.st_mode), "is no regular file"),
            (about.st_uid == os.geteuid(), f"belongs to user {about.st_uid}, and this process to {os.geteuid()}"),
            (not about.st_mode & 0o077, f"is open to other users: its mode is {about.st_mode & 0o777:o}, not 600"),
        ]
        wrong = next((why for right, why in reasons if not right), "")
        secret = b"" if wrong else stream.read(4096).strip()
    if wrong or len(secret) < _LEAST:
        wrong = wrong or f"holds {len(secret)} characters, and a secret has {_LEAST} or more"
        raise UserError(f"{path} cannot be trusted to keep a secret: it {wrong}; delete it, {_WAY_OUT}")
    return secret


def _make(path: Path) -> None:
    """Whole or not at all: a rank that comes later must not read half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=_NAME)  # with mode 600
    try:
        with open(handle, "w") as stream:
            stream.write(secrets.token_hex(32))
            stream.flush()
            os.fsync(handle)
        with suppress(FileExistsError):  # another rank was quicker
            os.link(draft, path)
    finally:
        os.unlink(draft)
