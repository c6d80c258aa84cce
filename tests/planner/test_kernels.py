"""Kernels: a roofline with waves."""

import pytest

from fivefold.cost.kernels import Device
from fivefold.hardware.accelerators import find_accelerator

H100 = Device.of(find_accelerator("H100"))
A100 = Device.of(find_accelerator("A100-80"))


def rate(device: Device, m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k / device.gemm(m, n, k)


def test_a_large_gemm_reaches_the_device_s_share_of_its_peak() -> None:
    assert rate(H100, 16384, 16384, 16384) == pytest.approx(H100.rate(), rel=0.05)


def test_a_wave_that_is_hardly_filled_costs_a_whole_one() -> None:
    """108 tiles of 256 x 128 are one wave of an A100, and one more tile is a second one."""
    full, over = A100.gemm(256 * 12, 128 * 9, 8192), A100.gemm(256 * 12, 128 * 9 + 128, 8192)
    assert over > 1.3 * full


def test_hidden_14400_is_less_efficient_than_13824() -> None:
    """What vLLM-sized misses teach: 14,400 is no multiple of the tile, and its last wave is emptier."""
    tokens = 2048
    assert rate(A100, tokens, 14400 // 8, 14400) < rate(A100, tokens, 13824 // 8, 13824)


def test_a_thin_gemm_is_bound_by_its_weights_bytes() -> None:
    seconds = H100.gemm(1, 28672, 8192)
    assert seconds == pytest.approx(2 * 28672 * 8192 / H100.bandwidth, rel=0.05)


def test_fp8_is_faster_and_absent_from_an_a100() -> None:
    assert H100.gemm(8192, 8192, 8192, "fp8") < 0.7 * H100.gemm(8192, 8192, 8192)
    with pytest.raises(Exception, match="A100-80 has no fp8 rate"):
        A100.gemm(8192, 8192, 8192, "fp8")


@pytest.mark.parametrize("kernel", ["flash1", "flash2"])
def test_flash_beats_scores_in_memory_and_more_so_the_longer_the_sequence(kernel: str) -> None:
    ratios = []
    for seq in (2048, 16384):
        flash = sum(A100.attention(kernel, 1, 16, 128, seq, seq / 2))  # type: ignore[arg-type]
        ratios.append(sum(A100.attention("torch", 1, 16, 128, seq, seq / 2)) / flash)
    assert ratios[0] > 1.5
    assert ratios[1] >= ratios[0]


def test_attention_over_twice_the_keys_takes_twice_as_long() -> None:
    short, long = H100.attention("flash3", 1, 64, 128, 8192, 4096), H100.attention("flash3", 1, 64, 128, 8192, 8192)
    assert long[0] == pytest.approx(2 * short[0], rel=0.02)
    assert long[1] == pytest.approx(2 * short[1], rel=0.02)
