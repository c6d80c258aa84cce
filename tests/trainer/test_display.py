"""What a person reads of a run is what happened."""

import io
from itertools import pairwise

from rich.console import Console

from fivefold.trainer.outputs import Display, chart
from fivefold.trainer.records import Evaluation, Step
from fivefold.trainer.run import verdict


def step(number: int, loss: float | None, mfu: float | None = None) -> Step:
    return Step(
        step=number, loss=loss, grad_norm=0.5, lr=3e-4, tokens=2048, loss_tokens=2000, seconds=0.25,
        tokens_per_second=8192, mfu=mfu, memory=3 << 29,
    )  # fmt: skip


def test_lines_name_every_number() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=200), steps=20, marks={}, log_every=10)
    for number in range(1, 21):
        display.on_step(step(number, 20 - number, mfu=0.421))
    display.on_evaluation(Evaluation(step=20, held_out_loss=1.2345, samples=3, loss_tokens=9))
    rest = "grad norm 0.50  lr 3.00e-04  8.19k tokens/s  MFU 42.1%  memory 1.50 GiB"
    steps = [f"step {number:>2}/20  loss {20 - number:.3f}  {rest}" for number in (1, 10, 20)]
    assert out.getvalue().splitlines() == [*steps, "held-out loss 1.2345 after step 20"]


def test_a_terminal_gets_a_panel_with_the_curve() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    display = Display(console, steps=20, marks={"unigram": 3.1}, log_every=10)
    for number in range(1, 6):
        display.on_step(step(number, 6 - number))
    display.live.refresh()  # type: ignore[union-attr]
    display.close()
    assert "step 5/20" in out.getvalue()
    assert "unigram" in out.getvalue()


def test_no_braille_where_it_cannot_be_printed() -> None:
    display = Display(Console(file=io.TextIOWrapper(io.BytesIO(), "ascii")), 5, {}, 1)
    display.losses = [3.0, 2.0, 1.0]
    assert list(display.curve()) == []


def test_the_chart_falls_with_the_loss_and_marks_stand_at_their_height() -> None:
    rows = chart([4.0, 3.0, 2.0, 1.0, 0.0], {"middle": 2.0}, width=20, height=5)
    assert [row.split()[0] for row in (rows[0], rows[2], rows[4])] == ["4.00", "2.00", "0.00"]
    assert rows[2].endswith("middle")
    curve = [[x for x, cell in enumerate(row[8:28]) if 0x2800 < ord(cell) < 0x2900] for row in rows]
    assert all(min(upper) < min(lower) for upper, lower in pairwise(curve))


def test_the_verdict_compares_with_the_entropies() -> None:
    marks = {"unigram": 3.1, "bigram": 2.4}
    said = {
        loss: verdict(Evaluation(step=1, held_out_loss=loss, samples=1, loss_tokens=1), marks)
        for loss in (2.0, 3.0, 4.0)
    }
    assert said == {
        2.0: "below the bigram entropy 2.4000",
        3.0: "below the unigram entropy 3.1000, not yet below the bigram entropy 2.4000",
        4.0: "not yet below the unigram entropy 3.1000",
    }


def test_a_step_without_a_loss_is_a_gap_in_the_curve_and_no_zero() -> None:
    rows = chart([4.0, 4.0, None, None, 3.0, 3.0], {}, width=30, height=5)
    assert [row.split()[0] for row in (rows[0], rows[4])] == ["4.00", "3.00"], "no 0 stretches the axis"
    dotted = {x for row in rows for x, cell in enumerate(row[8:38]) if 0x2800 < ord(cell) < 0x2900}
    assert dotted == {*range(10), *range(20, 30)}
    out = io.StringIO()
    display = Display(Console(file=out, width=200), steps=3, marks={}, log_every=1)
    display.on_step(step(1, None))
    assert "step 1/3  no loss  grad norm" in out.getvalue()
    display.on_step(step(2, 2.0))
    assert list(display.curve()) == [], "one value is no curve"
