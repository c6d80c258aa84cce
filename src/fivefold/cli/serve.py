"""`fivefold plan --inference`: how to serve a model."""

import json

import typer
from rich.console import Console


def serve(
    words: list[str],
    cluster: str,
    prompt: int,
    answer: int,
    concurrent: int | None,
    precision: str,
    targets: tuple[float | None, float | None],
    as_json: bool,
) -> None:
    """Plan serving, and show it. `targets` are seconds to the first token, and per token after it."""
    from fivefold.hardware.cluster import Cluster
    from fivefold.job.from_model import job_of
    from fivefold.plan.serving import serve as serving
    from fivefold.plan.serving.tables import whole

    job, _ = job_of(words[0], words[1:])
    first, next_one = targets
    plan = serving.serve(
        job.model,
        Cluster.read(cluster),
        prompt=prompt,
        output=answer,
        sequences=concurrent,
        precision=precision or "bf16",
        ttft=first,
        tpot=next_one,
    )
    if as_json:
        typer.echo(json.dumps(plan.to_dict()))
        return
    console = Console(highlight=False)
    (console if console.is_terminal else Console(highlight=False, width=150)).print(whole(plan))
