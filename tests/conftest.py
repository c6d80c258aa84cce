"""Settings for every test."""

import ast
import gc
import json
import os
import signal
import sys
from collections.abc import Iterable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from hypothesis import settings

import fivefold
from fivefold.data.prepare import prepare
from fivefold.launch.supervisor import PRELOADED_MODULES
from fivefold.support.errors import Problem, UserError
from tests.commands import HAS_GPU, interpreter
from tests.layers import HEAVY, LAYERS, walk

# Machines that run tests are busy: a slow example is not a failure. `make prove` tries ten times as many examples.
settings.register_profile("patient", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile("patient")

# What nohup starts ignores SIGHUP, and what a script starts with & ignores SIGINT; some tests send them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread a process: OpenMP's threads spin while they wait, and take the cores of other ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whether there is a GPU is asked of NVML: the answer of the CUDA runtime would be the end of CUDA in forked ranks.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# CliRunner would build the tree of all commands for each call, which takes ten times as long as most of them.
typer.testing._get_command = cache(typer.testing._get_command)

# What the server imports that ranks and commands are forked from; each of them would for itself. torch imports late.
_SOURCE = Path(fivefold.__file__).parent
_OURS = [".".join(file.relative_to(_SOURCE.parent).with_suffix("").parts) for file in sorted(_SOURCE.rglob("*.py"))]
PRELOADED_MODULES += [
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
    "hypothesis",
]
_GPU = ("optim.kernels", "triton_kernels")  # need triton, which CPU builds of torch come without
PRELOADED_MODULES += ["pytest", "rich._emoji_codes", "torch.utils.serialization.config"]
# What takes longer to import than the tests that need it take: each worker of pytest-xdist imports all tests, and each
# rank that compiles imports PyTorch's compiler.
_LONG = ["transformers", "kubernetes_validate", "kubeflow_trainer_api.models"]
if not HAS_GPU:  # Inductor asks CUDA when it is imported, and then no child may use it
    _LONG += ["torch._dynamo.backends.debugging", "torch._inductor.pattern_matcher"]
_OWN = [name for name in _OURS if not name.endswith(("__", *_GPU)) and ".adapters." not in name]
PRELOADED_MODULES += [*_OWN, "tests.ranks", "tests.warm"]

_init = UserError.__init__


def _init_with_codes(self: UserError, problems: str | Iterable[str], code: str = "") -> None:
    """Where Fivefold itself refuses something, each sentence has a code (docs/problems.md)."""
    _init(self, problems, code)
    if sys._getframe(1).f_globals["__name__"].startswith("fivefold."):
        assert all(isinstance(sentence, Problem) for sentence in self.coded), f"without a code: {self.coded}"


UserError.__init__ = _init_with_codes  # type: ignore[method-assign]

# Modules that take longest come first: the last one to start decides when all is done. Names, without test_ and .py.
_FIRST = """
compiled verify lion loss ranks dryrun cli speeds experts layouts muon words checkpoint pipeline mixture elastic ends
gated_conv mixture_of_experts listeners generate faults pipelines standing equal trace corruption search doctor resume
loop schedule readme examples guide accuracy joining trust launch tables starting mixed train outputs parts server
resuming load tensor weights_of_others
"""
# Large searches, all published runs, schedules made by search: more than half of the time of all pure tests.
_LONGER = (
    *("test_accuracy.py", "test_search.py", "test_plan.py", "test_mixed.py", "test_auto.py", "test_rendezvous.py"),
    *("test_report.py", "test_goodput.py", "test_slurm.py", "test_schedule_files.py"),
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers of pytest-xdist share one server, and are forked from it: to import torch takes seconds."""
    few = config.option.markexpr.startswith(("pure", "waits"))
    every = not few and config.args_source is pytest.Config.ArgsSource.TESTPATHS
    python = interpreter([*([] if few else _LONG), *PRELOADED_MODULES, *(["tests.collected"] if every else [])])
    specs[:] = [type(spec)(f"{spec}//id={spec.id}//python={python}") for spec in specs]


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        vars(forkserver._forkserver)["ensure_running"] = lambda: None  # it runs


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which -m leaves nothing: to import all of them takes longer than many tests."""
    expression = config.option.markexpr
    if collection_path.is_dir():
        return True if f"not {collection_path.name}" in expression else None  # cluster and extras are folders, too
    marked = expression.split(" ")[0] if expression.startswith(("alone", "waits")) else ""
    only = marked and collection_path.name.startswith("test_")
    return True if only and f"mark.{marked}" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turns = {f"test_{name}.py": turn for turn, name in enumerate(_FIRST.split())}
    items.sort(key=lambda item: turns.get(item.path.name, len(turns)))
    asked = "pure" in config.option.markexpr  # to know it, each file is parsed
    for item in items:
        if asked and _pure(item.path):
            item.add_marker("pure")
        if item.path.parent.name == "gpu":
            item.add_marker("gpu")


def pytest_collection_finish() -> None:
    gc.freeze()  # else every collection goes through all that torch and the tests have imported


@cache
def _pure(path: Path) -> bool:
    """Whether a file tests a package that needs no torch, without torch, and quickly: what `make check` runs.

    The command line needs none either, but its commands start ranks; so do some results in test_tables.py.
    """
    packages = [layer.package for layer in LAYERS if layer.torch == "no" and layer.package != "cli"]
    first = path.relative_to(Path(__file__).parent).parts[0]  # a folder is named like the package that it tests
    names = (*packages, "test_layers.py", "test_api.py", "test_tools.py", "test_contributing.py", "test_doors.py")
    if first not in names or path.name in ("test_tables.py", *_LONGER):
        return False
    packages = {imported.module.split(".")[0] for imported in walk(ast.parse(path.read_text()), loads=True)}
    return not packages & HEAVY


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """60 little documents; every second begins with a prompt that carries no loss; a tenth is held out."""
    folder = tmp_path_factory.mktemp("corpus")
    with (folder / "text.jsonl").open("w") as file:
        for number in range(60):
            text = f"def f{number}(x):\n    return x + {number}\n" * (1 + number % 4)
            record: dict[str, object] = {"text": text}
            if number % 2 == 0:
                prompt = {"text": f"# a function that adds {number}\n", "loss": False}
                record = {"segments": [prompt, {"text": text, "loss": True}]}
            file.write(json.dumps(record) + "\n")
    prepare([folder / "text.jsonl"], folder / "tokens", valid=0.1)
    return folder / "tokens"
