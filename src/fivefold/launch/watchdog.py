"""Ends this rank if it hangs: prints its stacks, and what NCCL has not finished.

    with watch(600):         # in a rank: if nothing moves for 600 s, it prints its stacks and ends
        ...

What moves is counted in `heartbeat.py`. Time is counted only while the watchdog itself runs: a job that was suspended
and continues has not hung.
"""

import faulthandler
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fivefold.launch.heartbeat import CHECK_INTERVAL, TIMEOUT_MARGIN, Heart, StallDetector, my_heart, share
from fivefold.launch.waits import waits_there
from fivefold.support.errors import PeerLost, TrainingError

STACK_ENV = (
    "FIVEFOLD_STACK"  # names the file into which faulthandler writes; a rank says why it ends in .cause beside it
)
BUILD_TIMEOUT = 3600.0  # seconds that building a model and compiling its first step may take without a beat
_MAX_SHOWN = 3  # operations that are named
_CUDA_QUERY_TIMEOUT = 5.0  # seconds for CUDA to answer which operations it has not finished


@contextmanager
def watch(timeout: float, rank: int = 0, world: int = 1) -> Iterator[None]:
    """Watch this process while it does the work of a rank; end it once nothing has moved for `timeout` seconds."""
    heart, over = share(rank), threading.Event()
    heart.limit_by(timeout)
    heart.enter("its start", BUILD_TIMEOUT)
    more = timeout / 10 + TIMEOUT_MARGIN if world > 1 else 0.0
    threading.Thread(target=_watch, args=(heart, rank, more, over), name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        heart.limit_by(0.0)


def _watch(heart: Heart, rank: int, more: float, over: threading.Event) -> None:
    stillness, tick = StallDetector(), min(CHECK_INTERVAL, heart.timeout / 4)
    while not over.wait(tick):
        limit = heart.limit
        seconds = stillness.look(heart.count[0], 2 * tick)
        if limit and seconds > limit + more:
            _end(rank, f"rank {rank} has not moved for {seconds:.0f} s in {heart.place()}")


def _end(rank: int, sentence: str) -> None:
    """End this process: print its stacks, innermost frame last, and the sentence. The exit code says whether the rank
    itself hangs, or waits for peers inside torch."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident())
    working = my_heart().thread
    main = frames.pop(working if working in frames else threading.main_thread().ident or 0)
    for frame in (*frames.values(), main):
        traceback.print_stack(frame)
    code = PeerLost.code if waits_there(main.f_code.co_filename, main.f_lineno) else TrainingError.code
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    _tell_the_launcher(sentence)
    # CUDA is asked next, in a thread that is left behind if CUDA itself hangs. If it hangs with the GIL held, a timer
    # that does not need the GIL ends the process, though not with this code.
    faulthandler.dump_traceback_later(3 * _CUDA_QUERY_TIMEOUT, exit=True)
    asking = threading.Thread(target=_say_what_nccl_does, args=(rank,), daemon=True)
    asking.start()
    asking.join(_CUDA_QUERY_TIMEOUT)
    os._exit(code)


def _say_what_nccl_does(rank: int) -> None:
    if device := _on_the_device():
        print(f"rank {rank}: {device}", file=sys.stderr, flush=True)
        _tell_the_launcher(f"; {device}")


def _tell_the_launcher(words: str) -> None:
    """Add words to the cause that our launcher reads once this process has ended. Other launchers have no such file."""
    if stack := os.environ.get(STACK_ENV):
        with suppress(OSError), Path(stack).with_suffix(".cause").open("a") as file:
            file.write(words)


def _on_the_device() -> str:
    """A sentence on what NCCL has not finished on this rank, the oldest first, from PyTorch's flight recorder."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace_json", None)
    try:
        entries = json.loads(dump(True, True))["entries"] if dump else []
        waiting = [_operation(entry) for entry in entries if entry["state"] != "completed"]
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError):  # it differs between releases of PyTorch
        return ""
    more = f" and {len(waiting) - _MAX_SHOWN} more" if len(waiting) > _MAX_SHOWN else ""
    return f"NCCL has not finished {', '.join(waiting[:_MAX_SHOWN])}{more}" if waiting else ""


def _operation(entry: dict[str, Any]) -> str:
    """How the flight recorder's entry is named: 'all_reduce of [512] Float, call 6 of mesh_tp'."""
    name = str(entry["profiling_name"]).removeprefix("nccl:")
    group_number, group_name = entry["process_group"]
    group = group_name if group_name != "undefined" else f"group {group_number}"
    number = entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"]
    tensors = " ".join(map(str, (*entry["input_sizes"], *entry["input_dtypes"][:1])))
    return f"{name} of {tensors}, call {number} of {group}"
