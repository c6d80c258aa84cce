"""Places for checkpoints: paths and URLs, and what is neither."""

from pathlib import Path

import pytest

from fivefold.job.config import read_job
from fivefold.support.errors import UserError
from fivefold.support.places import DRIVERS, RemotePlace, place_of, remote_of


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
    ("text", "said"),
    [
        *((f"{kind}://bucket/a", "is not a place for checkpoints") for kind in ("http", "ftp", "zip", "S3", "python")),
        *((f"{chain}::s3://bucket/a", "take one of s3://, gs://") for chain in ("simplecache", "reference", "zip")),
        ("s3://bucket/a::file:///etc", "is not a place"),
        ("s3://key:hidden@bucket/a", "credentials come from the environment"),
        ("abfs://box:hidden@name/a", "credentials come from the environment"),
        ("s3://bucket/../other", "'..' in it"),
        ("s3://bucket//a", "'' in it"),
        ("s3://bucket/*", "'*' in it"),
        ("s3://bucket/a?versionId=1", "in it"),
        ("s3://bucket/a\n", "in it"),
        ("s3://", "write for example s3://bucket/runs"),
        ("s3://b/" + "a" * 2000, "its length"),
        ("file://tmp/a", "write file:///tmp/a"),
    ],
)
def test_what_could_be_more_than_a_place_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        place_of(text)
    assert said in str(refused.value)
    assert "hidden" not in str(refused.value)


def test_a_job_says_what_is_wrong_with_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = read_job(None, ["checkpoint.url=zip://a"]).problems()
    assert problem.startswith("checkpoint.url: 'zip://a' is not a place for checkpoints; take one of s3://")
    (problem,) = read_job(None, ["checkpoint.url=memory://a", "layout=dp=2"]).problems()
    assert problem == "checkpoint.url=memory://a is the memory of one process, and the layout has 2"
    monkeypatch.setattr("fivefold.support.places.absent", lambda package: package == "s3fs")
    assert remote_of("s3://bucket/a").missing == 's3://bucket/a needs s3fs: pip install "fivefold[s3]"'
    assert remote_of("memory://a").missing is None
    assert all(len(remote_of(f"{kind}:///a" if kind == "file" else f"{kind}://a").protocol) for kind in DRIVERS)
