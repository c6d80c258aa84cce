"""One rank of a model that is spread over several."""

from pathlib import Path

from fivefold.generate.choose import Chooser
from fivefold.generate.speaker import Speaker
from fivefold.generate.taste import Taste
from fivefold.parallel.mesh import Mesh
from fivefold.prove.ranks import Rank
from fivefold.train.config import Job
from fivefold.train.device import choose_device


def speak(
    rank: Rank, job: Job, weights: str, prompts: list[list[int]], count: int, taste: Taste, end: set[int]
) -> list[list[int]]:
    if rank.world > 1:
        rank.join("gloo")
    device = choose_device(job.train.device, rank.number)
    mesh = Mesh.of(job.layout, device) if rank.world > 1 else Mesh(job.layout, device)
    speaker = Speaker(job, mesh, Path(weights), max(map(len, prompts)) + count)
    return [list(speaker.speak(prompt, count, Chooser(taste), end)) for prompt in prompts]


def alone(job: Job, weights: Path, length: int) -> Speaker:
    return Speaker(job, Mesh(job.layout, choose_device(job.train.device)), weights, length)
