"""Places for checkpoints: paths and URLs, and what is neither."""

from pathlib import Path

import pytest

from fivefold.support.storage_place import DRIVERS, RemotePlace, place_of, remote_of
from tests.refusals import refusal


def test_a_url_has_as_much_of_a_path_as_checkpoints_need() -> None:
    place = remote_of("s3://bucket/runs/demo/")
    assert str(place) == "s3://bucket/runs/demo"
    assert (place / "checkpoints").parent == place
    assert (place.name, str(place.with_name("other"))) == ("demo", "s3://bucket/runs/other")
    assert place_of(place) is place
    assert place_of(Path("s3://bucket/a")) == RemotePlace("s3", "bucket/a")  # Path has made one slash of two
    assert str(remote_of("file:///tmp/a")) == "file:///tmp/a"
    assert str(remote_of("abfs://box@name.dfs.core.windows.net/a").parent) == "abfs://box@name.dfs.core.windows.net"


@pytest.mark.parametrize("text", ["runs/demo", "/tmp/a:b", "~"])
def test_what_is_no_url_is_a_path(text: str) -> None:
    assert place_of(text) == Path(text).expanduser()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *((f"{kind}://bucket/a", "url.protocol") for kind in ("http", "ftp", "zip", "S3", "python")),
        *((f"{chain}::s3://bucket/a", "url.protocol") for chain in ("simplecache", "reference", "zip")),
        ("s3://bucket/a::file:///etc", "url.protocol"),
        *((f"{text}/a", "url.password") for text in ("s3://key:hidden@bucket", "abfs://box:hidden@name")),
        *((f"s3://bucket/{odd}", "url.plain") for odd in ("../other", "/a", "*", "a?versionId=1", "a\n", "a" * 2000)),
        ("s3://", "url.plain"),
        ("file://tmp/a", "url.relative"),
    ],
)
def test_what_could_be_more_than_a_place_is_refused(text: str, code: str) -> None:
    error = refusal(lambda: place_of(text))
    assert error.codes == [code]
    assert "hidden" not in str(error)


def test_what_is_to_be_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.support.storage_place.not_installed", lambda package: package == "s3fs")
    assert remote_of("s3://bucket/a").missing_package_message == 's3://bucket/a needs s3fs: pip install "fivefold[s3]"'
    assert remote_of("memory://a").missing_package_message is None
    assert all(len(remote_of(f"{kind}:///a" if kind == "file" else f"{kind}://a").protocol) for kind in DRIVERS)
