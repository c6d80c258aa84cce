"""Nodes that do not see a run's directory are named. tests/cluster has hosts that do not share it."""

from contextlib import closing
from pathlib import Path

import torch

from fivefold.layout.layout import Layout
from fivefold.parallel.control import Control
from fivefold.parallel.mesh import Mesh
from fivefold.support.errors import UserError
from fivefold.trainer import run
from tests.ranks import run_ranks


def test_blind_nodes_are_named_with_their_ranks_and_the_way_out() -> None:
    found = [("n1", "")] * 8 + [("n3", "/runs/x")] * 8 + [("n2", "/runs/x")] * 8
    said = run.blind_nodes(found)
    assert said.startswith(
        "n1 (rank 0) has made the run's directory, and n2 (ranks 16-23) does not see it at /runs/x; n3 (ranks 8-15) "
        "does not see it at /runs/x. "
    )
    assert (
        "set run.dir to a directory of a file system that all nodes share, or checkpoint.url to object storage" in said
    )
    assert run.blind_nodes([("n1", ""), ("n2", "")]) == ""


def look(rank: int, world: int, folders: list[Path]) -> list[str]:
    run._DIRECTORY_WAIT = 0.3
    with closing(Control(Mesh.of(Layout(dp=world), torch.device("cpu")), 10.0)) as control:
        marked = control.broadcast_value(run.mark(folders[0]) if rank == 0 else Path(), Path)
        try:
            run.check_shared(folders[rank] / marked.name, control)
        except UserError as error:
            return [*error.problems, "refused"]
        return []


def test_all_ranks_end_if_one_does_not_see_the_mark_and_nothing_is_left(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    assert run_ranks(3, look, [mine, mine, mine]) == [[], [], []]
    first, second, third = run_ranks(3, look, [mine, mine, other])
    assert first == third
    assert f"(rank 2) does not see it at {other}" in first[0]
    assert second == ["refused"]
    assert not list(mine.iterdir())
