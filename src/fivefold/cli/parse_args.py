"""What planning commands are asked about, from their words: a model, machines, choices that are not free."""

from pathlib import Path
from typing import Any

from fivefold.support.errors import UserError


def read_model(words: list[str]) -> tuple[Any, set[str]]:
    """A job from a model's name, a config or a job file, and changes; and the keys that were given."""
    from fivefold.job.config import read_job

    first, *changes = words
    named = {change.partition("=")[0] for change in changes}
    strange = [change for change in changes if "=" not in change]
    if strange:
        raise UserError(f"{strange[0]!r} is not a change; write KEY=VALUE, for example model.layers=40")
    if "=" in first:
        raise UserError(f"{first!r} is a change, and the model comes first; for example llama3-8b {first}")
    if first.endswith(".toml"):
        return read_job(first, changes), named | {"data.seq", "train.batch"}
    path = Path(first).expanduser()
    kind = "model.config" if path.exists() or first.endswith(".json") else "model"
    return read_job(None, [f"{kind}={first}", *changes]), named


def read_cluster(text: str) -> Any:
    """'8x8xH100', or a TOML file with a [cluster] table."""
    import tomllib

    from fivefold.hardware.cluster import Cluster

    path = Path(text).expanduser()
    if path.suffix == ".toml" and path.is_file():
        try:
            table = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{path} is no TOML file: {error}") from error
        if "cluster" in table or "group" in table:
            return Cluster.from_dict(table)
    return Cluster.parse(text)


def read_fixed(text: str) -> dict[str, Any]:
    """Choices of a layout that are not free, and the samples of a microbatch."""
    from fivefold.layout.layout import Layout

    fixed: dict[str, Any] = {}
    rest = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        key, _, value = part.partition("=")
        if key == "microbatch" and value.isdigit():
            fixed["samples"] = int(value)
        else:
            rest.append(part)
    if rest:
        layout = Layout.parse(",".join(rest))
        keys = [part.partition("=")[0].strip() for part in rest]
        fixed |= {key: getattr(layout, key) for key in keys if not key.isdigit()}
    return fixed
