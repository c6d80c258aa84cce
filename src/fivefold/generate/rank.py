"""One rank of a model that generates text on several ranks."""

from pathlib import Path

from fivefold.generate.choose import Chooser
from fivefold.generate.generator import Generator
from fivefold.generate.sampling import Sampling
from fivefold.job.config import Job
from fivefold.launch.device import choose_device
from fivefold.launch.ranks import Rank
from fivefold.parallel.mesh import Mesh


def speak(
    rank: Rank, job: Job, weights: str, prompts: list[list[int]], count: int, sampling: Sampling, end: set[int]
) -> list[list[int]]:
    if rank.world > 1:
        rank.join("gloo")
    device = choose_device(job.train.device, rank.number)
    mesh = Mesh.of(job.layout, device) if rank.world > 1 else Mesh(job.layout, device)
    generator = Generator(job, mesh, Path(weights), max(map(len, prompts)) + count)
    return [list(generator.speak(prompt, count, Chooser(sampling), end)) for prompt in prompts]


def alone(job: Job, weights: Path, length: int) -> Generator:
    return Generator(job, Mesh(job.layout, choose_device(job.train.device)), weights, length)
