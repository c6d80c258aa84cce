"""Ranks of this machine that are lost, and come back."""

import time
from pathlib import Path

import pytest

from fivefold.launch import local
from fivefold.launch.local import DevicePool, gpus_here


def looked(found: DevicePool) -> list[int]:
    """The places that a look finds back, once its trials have ended."""
    found.look(0.0)
    deadline = time.monotonic() + 60
    while found.trials and time.monotonic() < deadline:
        if back := found.look(0.0):
            return back
        time.sleep(0.01)
    return []


def test_a_place_that_answers_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_FAULT", "lose@rank=2,step=4,until=9")
    step = 4
    found = DevicePool(4, gpus=0, step=lambda: step)
    assert found.lose([1, 2]) == [2]
    assert found.here == [0, 1, 3]
    assert found.environment({}) == {}
    assert looked(found) == []
    step = 9
    assert looked(found) == [2]
    assert found.here == [0, 1, 2, 3]


def test_ranks_leave_lost_gpus_alone() -> None:
    found = DevicePool(4, gpus=4)
    assert found.environment({}) == {}
    found.lost = {1}
    assert found.environment({}) == {"CUDA_VISIBLE_DEVICES": "0,2,3"}
    assert found.environment({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == {"CUDA_VISIBLE_DEVICES": "4,6,7"}
    assert DevicePool(4, gpus=2)._device(3, {}) == "1"  # ranks that share GPUs


def test_gpus_are_named_by_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local, "_GPUS_DIR", tmp_path)
    assert gpus_here() == []
    (tmp_path / "0000:17:00.0").mkdir()
    (tmp_path / "0000:17:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 120\n")
    assert gpus_here() == ["NVIDIA H200"]
