"""What a rank says that has not moved: what NCCL has not finished, as PyTorch's flight recorder tells it."""

import json
import sys
import types
from pathlib import Path

import pytest

from fivefold.launch import watchdog
from fivefold.launch.exits import End
from fivefold.launch.supervisor import Supervisor
from fivefold.launch.waits import timed_wait, waits_there
from fivefold.support.errors import PeerLost

ENTRY = {
    "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce", "collective_seq_id": 5, "p2p_seq_id": 0,
    "is_p2p": False, "input_sizes": [[3]], "input_dtypes": ["Double"], "state": "started",
}  # fmt: skip


def told(monkeypatch: pytest.MonkeyPatch, entries: object) -> str:
    module = types.ModuleType("torch._C._distributed_c10d")
    vars(module)["_dump_nccl_trace_json"] = lambda collectives, active: json.dumps({"entries": entries}).encode()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return watchdog._on_the_device()


def test_what_is_not_finished_is_named_with_its_shape_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"is_p2p": True, "p2p_seq_id": 7, "process_group": ["6", "undefined"]}
    send = ENTRY | other | {"profiling_name": "nccl:send 0->1"}
    done = ENTRY | {"state": "completed"}
    assert told(monkeypatch, [done, ENTRY, send]) == (
        "NCCL has not finished all_reduce of [3] Double, call 5 of default_pg, "
        "send 0->1 of [3] Double, call 7 of group 6"
    )
    assert told(monkeypatch, [ENTRY] * 5).endswith("and 2 more")
    assert told(monkeypatch, [done]) == ""
    assert told(monkeypatch, [{"state": "started"}]) == ""  # another release of PyTorch


def test_a_wait_for_the_device_is_a_wait_for_others() -> None:
    code = timed_wait.__code__
    line = next(number for _, _, number in code.co_lines() if number and waits_there(code.co_filename, number))
    assert line
    assert not waits_there(__file__, 1)
    assert waits_there("/site-packages/torch/autograd/graph.py", 1)


def test_a_rank_leaves_its_words_where_its_launcher_reads_why_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher names them, where all ranks only waited; under torchrun and Slurm nobody would read them."""
    monkeypatch.delenv(watchdog.STACK_ENV, raising=False)
    watchdog._tell_the_launcher("nobody reads this")
    monkeypatch.setenv(watchdog.STACK_ENV, str(tmp_path / "1.stack"))
    told(monkeypatch, [ENTRY])
    watchdog._tell_the_launcher("rank 1 has not moved for 15 s in step 3")
    watchdog._say_what_nccl_does(1)
    said = Supervisor(2, tmp_path).read_file("1.cause")
    assert said.startswith("rank 1 has not moved for 15 s in step 3; NCCL has not finished all_reduce of [3] Double")
    assert End(1, "died", "exit code 3", code=PeerLost.code, cause=said).waited == f"waited: {said}"
