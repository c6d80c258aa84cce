"""A pair of halves: one runs at a time, in an order that does not depend on who is quicker; a failure ends both."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.parallel.overlap import PairRunner


def half(runner: PairRunner, said: list[str], name: str, stretches: int, seconds: float = 0.0) -> Callable[[], None]:
    def work() -> None:
        for number in range(stretches):
            said.append(f"{name}{number}")
            time.sleep(seconds)
            if number < stretches - 1:
                runner.yield_turn()

    return work


@pytest.mark.parametrize("slow", ["f", "b"])
def test_halves_take_turns_whoever_is_slow(slow: str) -> None:
    runner = PairRunner()
    for first, second, order in [
        (3, 3, "f0 b0 f1 b1 f2 b2"),
        (2, 4, "f0 b0 f1 b1 b2 b3"),
        (4, 1, "f0 b0 f1 f2 f3"),
        (1, 3, "f0 b0 b1 b2"),
    ]:
        said: list[str] = []
        naps = {name: 0.01 * (name == slow) for name in "fb"}
        runner.run(half(runner, said, "f", first, naps["f"]), half(runner, said, "b", second, naps["b"]))
        assert " ".join(said) == order
    runner.yield_turn()  # outside of pairs: nothing


def test_each_stretch_is_watched_by_itself() -> None:
    runner, said = PairRunner(), list[str]()

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        said.append(f"<{name}")
        yield
        said.append(f"{name}>")

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            with runner.watched(lambda: watch(name)):
                half(runner, said, name, 2)()

        return run

    runner.run(work("f"), work("b"))
    assert " ".join(said) == "<f f0 f> <b b0 b> <f f1 f> <b b1 b>"


class Broken(Exception):
    pass


@pytest.mark.parametrize(("failing", "order"), [("f", "f0 b0 f1 bx"), ("b", "f0 b0 f1 b1 fx")])
def test_the_error_of_one_half_ends_both_and_is_raised(failing: str, order: str) -> None:
    """The other one is unwound where it waits for its turn; afterwards the next pair runs."""
    runner, said = PairRunner(), list[str]()

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            try:
                half(runner, said, name, 2)()
                if name == failing:
                    raise Broken(name)
                runner.yield_turn()
                said.append(f"{name}2")
            except Broken:
                raise
            except BaseException:
                said.append(f"{name}x")
                raise

        return run

    for _ in range(2):
        said.clear()
        with pytest.raises(Broken, match=failing):
            runner.run(work("f"), work("b"))
        assert " ".join(said) == order
    runner.run(half(runner, said, "f", 1), half(runner, said, "b", 1))


def test_a_first_half_that_fails_at_once_leaves_the_second_unstarted() -> None:
    runner, said = PairRunner(), list[str]()

    def fails() -> None:
        raise Broken

    with pytest.raises(Broken):
        runner.run(fails, half(runner, said, "b", 2))
    assert said == []


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(f"{func} in {threading.current_thread().name}")
        return func(*args, **(kwargs or {}))


def test_modes_and_context_go_along_and_stay_with_their_half() -> None:
    """The second half has those of the caller; what a half adds the other does not see."""
    where: ContextVar[str] = ContextVar("where", default="nowhere")
    runner, found = PairRunner(), list[str]()
    outer, inner = Seen(), Seen()

    def first() -> None:
        where.set("first")
        with inner:
            torch.zeros(1)
            runner.yield_turn()
            torch.zeros(1)

    def second() -> None:
        found.append(where.get())
        assert not torch.is_grad_enabled()
        torch.ones(1)
        runner.yield_turn()
        torch.ones(1)

    where.set("caller")
    with torch.no_grad(), outer:
        runner.run(first, second)
    assert found == ["caller"]
    assert [op.split()[0] for op in inner.ops] == ["aten.zeros.default"] * 2
    assert [op.split()[0] for op in outer.ops] == [f"aten.{name}.default" for name in ("zeros", "ones") * 2]
    assert {op.split(" in ")[1] for op in outer.ops} == {"MainThread", "backward half"}


class Passing(torch.autograd.Function):
    """The identity, whose backward pass hands over."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, runner: PairRunner, said: list[str]) -> torch.Tensor:
        ctx.runner, ctx.said = runner, said
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.said.append("b")
        ctx.runner.yield_turn()
        return gradient, None, None


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_backward_pass_hands_over_from_whichever_thread_autograd_runs_it_in(device: str) -> None:
    """And a failure of the other half ends it there."""
    runner, said = PairRunner(), list[str]()
    for fails in (False, True):
        x = torch.ones(3, device=device, requires_grad=True)
        y = x
        for _ in range(3):
            y = Passing.apply(y, runner, said)

        def forward(fails: bool = fails) -> None:
            for _ in range(2):
                said.append("f")
                runner.yield_turn()
            if fails:
                raise Broken

        said.clear()
        if fails:
            with pytest.raises(Broken):
                runner.run(forward, y.sum().backward)
            assert ("".join(said), x.grad) == ("fbfb", None)
        else:
            runner.run(forward, y.sum().backward)
            assert "".join(said) == "fbfbb"
            assert torch.equal(x.grad, torch.ones(3, device=device))  # type: ignore[arg-type]
