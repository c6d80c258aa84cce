"""What a block keeps, against the papers' closed forms."""

import pytest

from fivefold.cost.activations import saved_activations
from fivefold.cost.software import SoftwareProfile
from fivefold.layout.layout import Layout
from fivefold.spec.presets import preset

GPT = preset("gpt3-175b", dropout=0.1)
LLAMA = preset("llama3-8b")
FUSED = SoftwareProfile(name="fused softmax", attention="fused")
FLASH = SoftwareProfile(name="flash", attention="flash2")
S, B = 2048, 1


def bytes_of(layout: str, software: SoftwareProfile = FUSED) -> float:
    return saved_activations(GPT, Layout.parse(layout), software, B, S).total


def korthikanti(tp: int, sp: bool, scores: bool = True) -> float:
    """arXiv 2205.05198, table 2: sbh (10 + 24/t + 5as/ht), and with sequence parallelism all of it over t."""
    s, b, h, a = S, B, GPT.hidden, GPT.heads
    shared = 10 / tp if sp else 10.0
    return s * b * h * (shared + 24 / tp + (5 * a * s / (h * tp) if scores else 0.0))


@pytest.mark.parametrize(("layout", "tp", "sp"), [("tp=1", 1, False), ("tp=8", 8, False), ("tp=8,sp", 8, True)])
def test_a_gpt_block_keeps_what_the_paper_counts(layout: str, tp: int, sp: bool) -> None:
    assert bytes_of(layout) == pytest.approx(korthikanti(tp, sp), rel=0.005)


def test_selective_recompute_of_attention_drops_the_scores() -> None:
    software = FUSED.but(selective="attention")
    assert bytes_of("tp=8,sp,recompute=selective", software) == pytest.approx(
        korthikanti(8, True, scores=False), rel=0.005
    )


def test_full_recompute_keeps_the_input_alone() -> None:
    assert bytes_of("tp=8,recompute=full") == 2 * S * GPT.hidden
    assert bytes_of("tp=8,sp,recompute=full") == 2 * S * GPT.hidden / 8


def test_flash_keeps_no_scores_and_torch_keeps_the_most() -> None:
    sizes = [
        saved_activations(LLAMA, Layout(), FUSED.but(attention=kernel), 1, 8192).scores
        for kernel in ("flash2", "fused", "torch")
    ]
    assert sizes[0] == 0 < sizes[1] < sizes[2]


def test_cp_divides_everything() -> None:
    whole, half = (saved_activations(LLAMA, Layout(cp=cp), FLASH, 1, 8192).total for cp in (1, 2))
    assert half == whole / 2


def test_an_eager_norm_keeps_float32_copies() -> None:
    eager, fused = (
        saved_activations(LLAMA, Layout(), FLASH.but(norm=norm), 1, 8192).norm for norm in ("eager", "fused")
    )
    assert eager == 5 * fused
