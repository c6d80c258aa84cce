"""Which device a rank computes on."""

import pytest
import torch

from fivefold.launch.device import choose_device
from tests.refusals import refusal


@pytest.fixture
def two_gpus(monkeypatch) -> None:
    for name, answer in (("is_available", True), ("device_count", 2), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


@pytest.mark.parametrize(
    ("wanted", "devices"),
    [
        ("auto", ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),  # ranks beyond the GPUs share them
        ("cuda", ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        ("mixed", ["cuda:0", "cuda:1", "cpu", "cpu"]),  # or compute on the CPU
        ("cpu", ["cpu"] * 4),
    ],
)
@pytest.mark.usefixtures("two_gpus")
def test_ranks_of_a_node_with_two_gpus(wanted, devices) -> None:
    assert [str(choose_device(wanted, rank)) for rank in range(4)] == devices


def test_ranks_of_a_node_without_gpus(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [str(choose_device(wanted, 1)) for wanted in ("auto", "mixed", "cpu")] == ["cpu"] * 3
    assert refusal(lambda: choose_device("cuda")).codes == ["train.device.gpu"]
