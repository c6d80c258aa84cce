"""Where checkpoints may be stored: a directory, or a URL of object storage.

    place_of("runs/demo")              # a Path
    place_of("s3://bucket/runs/demo")  # a RemotePlace: as much of a path as checkpoints need; no server is asked

Only the protocols listed here are taken. fsspec has more, and its chains (`simplecache::s3://`, `reference::`) treat
the data that they read as instructions.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from fivefold.support.errors import UserError, not_installed
from fivefold.support.parsing import path_of

# By protocol, the package that implements it and what pip installs for it; None: fsspec implements it itself.
_S3, _GCS, _AZURE = ("s3fs", '"fivefold[s3]"'), ("gcsfs", "gcsfs"), ("adlfs", "adlfs")
DRIVERS: dict[str, tuple[str, str] | None] = {
    "s3": _S3, "gs": _GCS, "gcs": _GCS, "az": _AZURE, "abfs": _AZURE, "file": None, "memory": None,
}  # fmt: skip
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_PLAIN_PART = re.compile(
    r"[\w.=+,@ -]+"
)  # a part of a path, without wildcards, which drivers expand, and without a query
_MAX_URL_BYTES = 900  # bytes of a URL; keys of objects may have 1024


@dataclass(frozen=True)
class RemotePlace:
    """A place on object storage."""

    protocol: str
    path: str  # bucket/prefix, as its driver takes it, without a slash at the end

    def __str__(self) -> str:
        return f"{self.protocol}://{self.path}"

    def __truediv__(self, name: str) -> "RemotePlace":
        return RemotePlace(self.protocol, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePlace":
        return RemotePlace(self.protocol, self.path.rpartition("/")[0])

    def with_name(self, name: str) -> "RemotePlace":
        return self.parent / name

    @property
    def missing_package_message(self) -> str | None:
        """A sentence that says which package has to be installed for it; None if none is missing."""
        driver = DRIVERS[self.protocol]
        for package, requirement in (("fsspec", '"fivefold[train]"'), *([driver] if driver else [])):
            if not_installed(package):
                return f"{self} needs {package}: pip install {requirement}"
        return None


Place = Path | RemotePlace


def place_of(text: str | Place) -> Place:
    """The place that a user means by a text. A URL that came as a Path has lost one of its two slashes."""
    if isinstance(text, RemotePlace):
        return text
    word = re.sub(rf"^({'|'.join(DRIVERS)}):/(?!/)", r"\1://", str(text)) if isinstance(text, Path) else text
    return remote_of(word) if "://" in word or "::" in word else path_of(text)


def remote_of(text: str) -> RemotePlace:
    """The place of a URL."""
    match = _URL.fullmatch(text)
    if match is None or match[1] not in DRIVERS or "::" in text:
        known = ", ".join(f"{protocol}://" for protocol in DRIVERS)
        raise UserError(f"{text!r} is not a place for checkpoints; take one of {known}", "url.protocol")
    protocol, path = match[1], match[2].rstrip("/")
    parts = path.split("/")
    if protocol == "file":  # file:///absolute/path
        if parts[0]:
            raise UserError(f"{text!r} has no absolute path; write file:///{path}", "url.relative")
        parts = parts[1:]
    bucket, user = parts[0], parts[0].rpartition("@")[0]
    if ":" in user or (user and protocol not in ("az", "abfs")):  # abfs://container@account.dfs.core.windows.net
        raise UserError(
            f"a {protocol}:// URL has something before an @, as if it were a password, and would be printed and kept; "
            "credentials come from the environment or the driver's own files",
            "url.password",
        )
    bad = [part for part in parts if not _PLAIN_PART.fullmatch(part) or part in (".", "..")]
    if bad or not bucket or len(text.encode()) > _MAX_URL_BYTES:
        why = f"{bad[0][:50]!r} in it" if bad else "its length"
        raise UserError(f"{text[:200]!r} is not a plain URL: {why}; write for example s3://bucket/runs", "url.plain")
    return RemotePlace(protocol, path)
