"""A student's file in a rank: imported by its path, its modules held as shards, its messages written down.

The checks of the labs (`linear/check.py` and its like) are adapters of `fivefold verify --adapter`, and use this.
"""

import errno
import json
import os
import re
import resource
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.foreign.adapter import AdapterFile, import_adapter, product
from fivefold.labs.ends import line_of
from fivefold.labs.groups import GROUPS, groups_of
from fivefold.labs.messages import ANSWER, BARRIER, BUILDS, FOLDER, IMPORTS, PROGRESS, STEPS, LabMessage
from fivefold.labs.probes import ALONE, file_of
from fivefold.parallel.traffic_counter import SPACES, bytes_of, group_of, kind_of, name_of, named_args
from fivefold.support.errors import UserError

_ADDRESS = re.compile(r" <\S+ object at 0x\w+>")  # of the group that an error names
_LARGEST = 64 << 20  # bytes of a file that a rank writes: what it prints goes into one, too


@cache
def answer() -> Any:
    """The student's module. Only ranks import it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST, _LARGEST))
    file = _places()[0]
    _note(IMPORTS)
    with own_errors():
        found = import_adapter(AdapterFile(file))
    _note(BUILDS)
    return found


@cache
def _places() -> tuple[Path, str, Path]:
    """The student's file, where messages go, and what this rank is at, as they were before the answer was imported."""
    return Path(os.environ[ANSWER]), os.environ.get(FOLDER, ""), Path(os.environ[PROGRESS]) / os.environ["RANK"]


def _note(stage: str) -> None:
    """What this rank is at, should the answer end it."""
    _places()[2].write_text(stage)


def called(name: str, *args: Any, **kwargs: Any) -> Any:
    """A function or class of the student's, called; what it raises is told with the line of their file."""
    module = answer()
    file = Path(str(module.__file__))
    if not hasattr(module, name):
        raise UserError(f"{file.name} has no {name}; the statement and the starter have it", "lab.name")
    with own_errors(file):
        return getattr(module, name)(*args, **kwargs)


@contextmanager
def own_errors(file: Path | None = None) -> Iterator[None]:
    """An exception that has come through the student's file is theirs, and told in a sentence."""
    file = file or _places()[0]
    try:
        yield
    except UserError:
        raise
    except NotImplementedError as error:
        raise UserError(f"{_where(error, file)} is not written yet", "lab.hole") from error
    except (SystemExit, KeyboardInterrupt) as error:
        wrong = f"{_where(error, file)} ends its rank ({error!r}); it has to return to its caller"
        raise UserError(wrong, "lab.exit") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            much = f"{_where(error, file)} writes or prints more than {_LARGEST >> 20} MB, the limit of a lab"
            raise UserError(much, "lab.output") from error
        text = _ADDRESS.sub("", f"{error}")
        raise UserError(f"{_where(error, file)} raised {type(error).__name__}: {text}", "lab.raised") from error


def _where(error: BaseException, file: Path) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return line_of(frames[-1].name, file.name, frames[-1].lineno) if frames else file.name


# ---- groups ----------------------------------------------------------------------------------------------------------


class Grouped:
    """A check that gives the answer a group: all ranks, or a part of them (`groups.py`)."""

    layout: dict[str, Any]
    group: Any

    def world(self, layout: dict[str, Any]) -> int:
        return product(layout) * int(layout.get("ep", 1)) * int(layout.get(GROUPS, 1))

    def join(self, layout: dict[str, Any]) -> None:
        self.layout, self.group = layout, _own_group(int(layout.get(GROUPS, 1)))
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the group, by the check itself."""
        found = tensor.detach().clone()
        dist.all_reduce(found, group=self.group)
        return found


@cache
def _own_group(count: int) -> Any:
    if count == 1:
        return dist.group.WORLD
    made = [(ranks, dist.new_group(ranks)) for ranks in groups_of({GROUPS: count}, dist.get_world_size())]
    return next(group for ranks, group in made if dist.get_rank() in ranks)


# ---- shards ---------------------------------------------------------------------------------------------------------


def load_shards(model: nn.Module, made_anew: nn.Module, names: Iterable[str] = ()) -> None:
    """Give a model the shards that the student's constructors take of other full weights. `names` are of parameters
    that every rank has to have."""
    values = dict(made_anew.named_parameters())
    for name in names:
        wanted = f"this rank's part of it has to be an nn.Parameter called {name.rpartition('.')[2]}"
        if name not in values:
            raise UserError(f"the model on rank {dist.get_rank()} has no parameter {name}: {wanted}", "lab.parameter")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


def unlike(shape: tuple[int, ...], seed: int) -> Tensor:
    """Weights of an ordinary size, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64) / max(1, shape[-1]) ** 0.5


def probe(layout: Mapping[str, Any], name: str, tensor: Tensor) -> None:
    """Keep what is computed on the way, for the parent to compare (`probes.py`)."""
    if layout:
        expect(isinstance(tensor, Tensor), f"{name} is {kind_of_value(tensor)}", "a tensor")
        expect(tensor.dtype == torch.float64, f"{name} is {kind_of_value(tensor)}", "float64, as what goes in is")
    if folder := _places()[1]:
        text = ",".join(f"{key}={value}" for key, value in layout.items()) or ALONE
        file = file_of(Path(folder), text, dist.get_rank(), name)
        if not file.exists():  # later steps have other weights, and one process then computes parts of the batch alone
            np.save(file, tensor.detach().numpy())


def run_through(layout: Mapping[str, Any], module: nn.Module, methods: Mapping[str, str], *given: Any) -> Any:
    """What a module's `forward` gives. `methods` it has to call: by name, under which what they give is kept, or "".

    They stand around its methods while it runs, so that what is compared is what the training of a model would call.
    """
    own, called = vars(module), set[str]()
    before = {name: own[name] for name in methods if name in own}

    def around(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            called.add(name)
            if methods[name]:
                probe(layout, methods[name], found)
            return found

        return run

    for name in methods:
        method = getattr(module, name, None)
        expect(callable(method), f"{type(module).__name__}.{name} is {kind_of_value(method)}", "what forward calls")
        own[name] = around(name, method)  # type: ignore[arg-type]
    try:
        output = module(*given)
    finally:
        for name in methods:
            del own[name]
        own.update(before)
    left_out = [name for name in methods if name not in called]
    calls = f"forward of {type(module).__name__} never calls {', '.join(left_out)}"
    expect(not left_out, calls, "the one of the starter, which calls " + ", ".join(methods))
    return output


def expect(holds: bool, found: str, wanted: str) -> None:
    """Refuse what an answer returns."""
    if not holds:
        raise UserError(f"{found} on rank {dist.get_rank()}; it should be {wanted}", "lab.value")


def kind_of_value(value: Any) -> str:
    """`None`, `a list`, `torch.float32`"""
    if isinstance(value, Tensor):
        return str(value.dtype)
    return "None" if value is None else f"a {type(value).__name__}"


# ---- messages -------------------------------------------------------------------------------------------------------


class _Recorder(TorchDispatchMode):
    """Writes each message to a file before it starts: a rank that hangs has written what it waits in."""

    def __init__(self, file: int):
        super().__init__()
        self.file = file

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in SPACES and (message := _message(func, named_args(func, args, kwargs))) is not None:
            os.write(self.file, (json.dumps(message.to_dict()) + "\n").encode())
        return func(*args, **(kwargs or {}))


def _message(func: Any, given: Mapping[str, Any]) -> LabMessage | None:
    name = name_of(func)
    kind: str | None = "receive" if name.startswith("recv") else _rare(name) or kind_of(func)
    if kind is None:
        return None
    group = group_of(dict(given))
    ranks = sorted(dist.get_process_group_ranks(group))
    payload = 0 if kind == BARRIER else max(bytes_of(side) for side in given.values())
    if kind == "all-gather" and func.namespace != "c10d":  # whose result is not among the arguments
        payload *= len(ranks)
    peer = given.get("src", given.get("dst"))
    return LabMessage(kind, payload, tuple(ranks), None if peer is None else dist.get_global_rank(group, int(peer)))


def _rare(name: str) -> str | None:
    """Collectives that a trainer has no use for, or does not count, and a student may call."""
    if name.startswith((BARRIER, "monitoredbarrier")):
        return BARRIER
    return next((kind for kind in ("gather", "scatter", "reduce") if name == kind), None)


_FILE: list[int] = []  # of the step that is recorded
TIMERS: list[Callable[[], AbstractContextManager[None]]] = []  # what `lab bench` puts around it instead


def mark(kind: str, payload: int = 0) -> None:
    """Note a place among the messages (`messages.MARKS`)."""
    if _FILE:
        os.write(_FILE[-1], (json.dumps({"kind": kind, "payload": payload}) + "\n").encode())


def mark_waits(name: str) -> None:
    """From now on a call of this function of torch.distributed that blocks is marked, and each wait for one that does
    not: neither is an operation of the dispatcher."""
    function = getattr(dist, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        if work is None:
            mark("wait")
        return work and _MarkedWork(work)

    if not hasattr(function, "marked"):
        called.marked = True  # type: ignore[attr-defined]
        setattr(dist, name, called)


class _MarkedWork:
    def __init__(self, work: Any):
        self._work = work

    def wait(self, *args: Any) -> Any:
        mark("wait")
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def recorded(layout: Mapping[str, Any], again: bool = False) -> Iterator[None]:
    """Messages of a step go to FOLDER, into a file of this layout and rank; only those of the last step are left.
    `again`: they are added to those of the same step."""
    if layout:
        _note(STEPS)
    if TIMERS:
        with TIMERS[-1](), own_errors():
            yield
        return
    folder = _places()[1]
    if not folder or not layout:
        yield
        return
    name = ",".join(f"{key}={value}" for key, value in layout.items())
    mode = os.O_APPEND if again else os.O_TRUNC
    _FILE.append(os.open(Path(folder) / f"{name}-{dist.get_rank()}.jsonl", os.O_WRONLY | os.O_CREAT | mode))
    try:
        with _Recorder(_FILE[-1]), own_errors():
            yield
        mark("end")
    finally:
        os.close(_FILE.pop())
