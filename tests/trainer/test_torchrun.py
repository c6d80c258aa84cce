"""The lines of `fivefold launch --torchrun --elastic`: four agents, of which one is lost and comes back."""

import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from fivefold.trainer.restart_time import RECOVERIES_FILE, RestartTime
from tests.cli.test_checkpoint import FAST, tokens  # noqa: F401 - a fixture
from tests.cli.test_cli import losses
from tests.cluster.hosts import Task
from tests.commands import fivefold

JOB = [*FAST, "train.dtype=float64", "train.batch=12", "model.layers=2", "checkpoint.every=10",
       "optimizer.schedule_steps=1000000"]  # fmt: skip
LAYOUT = "dp=2,tp=2,pp=2,microbatches=2"


class Agents:
    """Of one run, on this machine; each is a node of two ranks."""

    def __init__(self, folder: Path, words: list[str], stack: ExitStack):
        self.folder, self.stack, self.all = folder, stack, list[Task]()
        options = ["--torchrun", "--elastic", "--nodes=4", "--host=localhost", "-o", "line.sh"]
        done = fivefold("launch", *words, f"layout={LAYOUT}", "elastic.least=6", *options, cwd=folder)
        assert done.returncode == 0, done.stderr
        with socket.create_server(("localhost", 0)) as server:
            self.port = server.getsockname()[1]
        line = (folder / "line.sh").read_text()
        assert "--nnodes=3:4" in line
        line = line.replace("localhost:29400", f"localhost:{self.port}").replace("=3600", "=3600,last_call_timeout=5")
        (folder / "line.sh").write_text(line.replace("\ntorchrun ", "\nexec torchrun "))  # to be told itself

    def start(self) -> Task:
        self.all.append(self.stack.enter_context(Task(["bash", "line.sh"], self.folder, None)))
        return self.all[-1]

    def start_host(self) -> None:
        """The one at which the others meet: all are on localhost, and the first to come opens the port."""
        self.start()

        def listens() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("localhost", self.port)) == 0

        self.until(listens)

    @property
    def steps(self) -> int:
        metrics = self.folder / "runs/run/metrics.jsonl"
        return metrics.read_text().count('"kind":"step"') if metrics.exists() else 0

    @property
    def recoveries(self) -> list[RestartTime]:
        file = self.folder / "runs/run" / RECOVERIES_FILE
        lines = file.read_bytes().splitlines() if file.exists() else []
        return [msgspec.json.decode(line, type=RestartTime) for line in lines]

    def until(self, seen: Callable[[], object], seconds: float = 400.0) -> None:
        deadline = time.monotonic() + seconds
        while not seen():
            said = "\n\n".join(agent.output[-4000:] for agent in self.all)
            assert time.monotonic() < deadline, said
            time.sleep(0.1)


@pytest.mark.slow
def test_an_agent_is_lost_and_another_joins(tokens: Path, tmp_path: Path) -> None:  # noqa: F811
    words = [f"data.path={tokens}", *JOB]
    with ExitStack() as stack:
        agents = Agents(tmp_path, [*words, "train.steps=1000000"], stack)
        agents.start_host()
        lost = [agents.start() for _ in range(3)][-1]
        agents.until(lambda: agents.steps > 20)
        lost.__exit__()  # SIGKILL to the agent and its ranks
        agents.until(lambda: len(agents.recoveries) == 1)
        agents.start()
        agents.until(lambda: len(agents.recoveries) == 2)
        agents.until(lambda: agents.steps > agents.recoveries[1].step + 20)
        left = [agent for agent in agents.all if agent is not lost]
        for agent in left:
            agent.process.send_signal(signal.SIGTERM)
        for agent in left:
            agent.wait()
        fewer, more = agents.recoveries
        assert (fewer.ranks, fewer.step > 20) == (6, True)
        assert (more.ranks, more.layout) == (8, LAYOUT)
        # Every step once, and each as if nothing had happened: the same samples, in other orders of addition.
        found = losses(tmp_path / "runs/run")
        assert list(found) == list(range(1, len(found) + 1))
    alone = fivefold("train", *words, f"train.steps={len(found)}", "run.name=alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert found == pytest.approx(losses(tmp_path / "runs/alone"), rel=1e-10)
    print(fewer, more, sep="\n")
