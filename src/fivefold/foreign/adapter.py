"""An adapter: a Python file, or an object in one, that says how somebody's own training code is built, fed and stepped.

    LAYOUTS = ["dp=2", "tp=2,sp"]                 # what to verify; dp, fsdp, tp, pp and cp multiply to the ranks
    def batch(step): return tokens, labels        # the global batch, the same on every rank and in every layout
    def build(layout): return model               # {"tp": 2, "sp": 1}; {} is one process. The process group is up
                                                  # build(layout, device) is given "cpu" or "cuda", too
    def step(model, batch): return {"loss": ...}  # forward, backward, reductions; gradients stay, and are not clipped

    # where the usual does not do
    def named(model): ...          # (name, parameter); names are those of one process. Usual: named_parameters()
    def load(model, full): ...     # give the model the weights in `full`, a dict by name. Usual: tensors and DTensors
    def grad(parameter): ...       # its gradient. Usual: parameter.grad
    def update(model): ...         # clip and step the optimizer; {"grad_norm": ...}, or None
    def world(layout): ...         # how many ranks it has
    TERMS = {"aux loss": switch}   # switch(model, False) leaves a term of the loss out, switch(model, True) undoes it
    KNOWN = {"microbatches": 4}    # what a factor may be named after; or a function of the layout
    DTYPE = "float64"              # or float32, bfloat16
    DEVICES = ("cpu", "cuda")      # where it runs

Nothing of Fivefold needs to be imported. The tensors of a batch are put on the device; the environment variable
FIVEFOLD_DEVICE has it while the file is imported. A loss may be None on ranks that do not know it. The model may be a
list of modules, as chunks of a pipeline are.
"""

import hashlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.support.errors import Problem, UserError
from fivefold.support.text import did_you_mean

Layout = dict[str, int | str]  # as an adapter reads it

MULTIPLY = ("dp", "dp_replicate", "dp_shard", "fsdp", "tp", "pp", "cp")
DTYPES = ("float64", "float32", "bfloat16")
SHIPPED = Path(__file__).resolve().parent / "adapters"  # a plain name is one of these files
_ARGUMENTS = {
    "batch": ["step"], "build": ["layout"], "step": ["model", "batch"], "named": ["model"], "load": ["model", "full"],
    "grad": ["parameter"], "update": ["model"], "world": ["layout"],
}  # fmt: skip
_DEVICES = ("cpu", "cuda")
_NEEDED = ("batch", "build", "step")


@dataclass(frozen=True)
class AdapterFile:
    """Where an adapter is: a file, and the name of an object in it, if it is not the file itself."""

    file: Path
    name: str = ""

    @classmethod
    def of(cls, text: str) -> "AdapterFile":
        """FILE[:NAME], or the plain name of one that ships. Nothing is imported."""
        path, _, name = text.rpartition(":") if ":" in text else (text, "", "")
        shipped = SHIPPED / f"{path}.py"
        file = shipped if path.isidentifier() and shipped.exists() else Path(path)
        if file.is_file() and file.suffix == ".py":
            return cls(file.resolve(), name)
        if file.exists():
            what = "a directory" if file.is_dir() else "no Python file"
            raise UserError(f"--adapter {path} is {what}; it should be a file that ends in .py", "adapter.file")
        if path.isidentifier():
            hint = did_you_mean(path, shipped_names())
            raise UserError(f"--adapter {path} is neither a file nor an adapter that ships; {hint}", "adapter.file")
        raise UserError(f"--adapter {text} should be FILE or FILE:NAME, and {path} is not a file", "adapter.file")

    @property
    def ships(self) -> bool:
        return self.file.parent == SHIPPED

    @property
    def text(self) -> str:
        """As somebody else would write it: without the directory, which is of this machine alone."""
        file = self.file.stem if self.ships else self.file.name
        return f"{file}:{self.name}" if self.name else file

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.file.read_bytes()).hexdigest()


def shipped_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.py") if path.stem != "__init__")


# ---- layouts as text ------------------------------------------------------------------------------------------------


def parse_layout(text: str | Mapping[str, Any]) -> Layout:
    """`dp=2,sp,schedule=ZBV` as a dict; a word alone is 1. A dict stays what it is, as far as it is plain."""
    if not isinstance(text, str | Mapping):
        raise UserError(f"a layout is {text!r}; it should be like tp=2,sp,schedule=1F1B", "adapter.layout")
    if isinstance(text, str):
        pairs = [word.partition("=") for word in text.replace(" ", "").split(",") if word]
        items: Iterable[tuple[str, Any]] = [(key, value if equals else "1") for key, equals, value in pairs]
    else:
        items = [(str(key), int(value) if isinstance(value, bool) else value) for key, value in text.items()]
        text = layout_text(dict(items))
    layout: Layout = {}
    for key, value in items:
        if not key.isidentifier() or not isinstance(value, int | str) or value == "":
            raise UserError(
                f"the layout {text} should be like tp=2,sp,schedule=1F1B: {key}={value!r} is not", "adapter.layout"
            )
        layout[key] = int(value) if isinstance(value, str) and value.lstrip("-").isdigit() else value
    for key in MULTIPLY:
        size = layout.get(key, 1)
        if not isinstance(size, int) or size < 1:
            raise UserError(f"the layout {text} has {key}={size}; it should be a whole number from 1", "adapter.layout")
    return layout


def layout_text(layout: Mapping[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in layout.items()) or "one process"


def product(layout: Layout) -> int:
    return math.prod(int(layout.get(key, 1)) for key in MULTIPLY)


# ---- the adapter itself, in a rank ----------------------------------------------------------------------------------


class Adapter:
    """What the file gives, and what is usual for the rest. Importing it runs the user's code: only ranks do so."""

    def __init__(self, place: AdapterFile):
        self.given = given = import_adapter(place)
        if problems := list(_shortcomings(given, place.text)):
            raise UserError([Problem("adapter.protocol", problem) for problem in problems])
        self.batch: Callable[[int], Any] = given.batch
        self.step: Callable[[Any, Any], Any] = given.step
        self.update: Callable[[Any], Any] | None = getattr(given, "update", None)
        self.grad: Callable[[Any], Any] = getattr(given, "grad", lambda parameter: parameter.grad)
        self.own_grad = hasattr(given, "grad")
        self.own_load: Callable[[Any, Mapping[str, Any]], Any] | None = getattr(given, "load", None)
        self.terms: dict[str, Callable[[Any, bool], Any]] = dict(getattr(given, "TERMS", {}))
        self.dtype: str = getattr(given, "DTYPE", "float64")
        self.devices: tuple[str, ...] = tuple(getattr(given, "DEVICES", _DEVICES))
        self.layouts = [parse_layout(layout) for layout in given.LAYOUTS]

    def build(self, layout: Layout, device: str = "cpu") -> Any:
        """The model on the device, whether the adapter asks for that or knows it."""
        takes = _takes(self.given.build, 2)
        return self.given.build(dict(layout), device) if takes else self.given.build(dict(layout))

    def known(self, layout: Layout) -> dict[str, float]:
        """Numbers that a factor may be named after in this layout."""
        given = getattr(self.given, "KNOWN", {})
        numbers = given(dict(layout)) if callable(given) else given
        if not isinstance(numbers, dict) or not all(isinstance(value, int | float) for value in numbers.values()):
            raise UserError(
                f"KNOWN of the adapter gives {numbers!r}; it should be a dict of numbers", "adapter.protocol"
            )
        return {str(key): value for key, value in numbers.items()}

    def world(self, layout: Layout) -> int:
        if not layout:
            return 1
        size = self.given.world(layout) if hasattr(self.given, "world") else product(layout)
        if not isinstance(size, int) or size < 1:
            gave = f"world({layout}) of the adapter returned {size!r}; it should be how many ranks there are"
            raise UserError(gave, "adapter.world")
        return size

    def named(self, model: Any) -> dict[str, Any]:
        """Parameters by name. Several modules are one model."""
        if hasattr(self.given, "named"):
            pairs = list(self.given.named(model))
        else:
            modules = model if isinstance(model, list | tuple) else [model]
            if not all(hasattr(module, "named_parameters") for module in modules):
                kind = type(model).__name__
                raise UserError(
                    f"build() returned a {kind}, which has no named_parameters(); add named(model) to the adapter",
                    "adapter.named",
                )
            pairs = [pair for module in modules for pair in module.named_parameters()]
        names = [plain(name) for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(
                f"two parameters of this rank are called {twice[0]}; named(model) should give each the name that it "
                "has in one process",
                "adapter.named",
            )
        return dict(zip(names, (parameter for _, parameter in pairs), strict=True))


def plain(name: str) -> str:
    """A name without what wrappers put before it."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def import_adapter(place: AdapterFile) -> Any:
    """The object that a file gives: itself, or one of its names. It runs the user's code."""
    name = f"fivefold_adapter_{place.file.stem}"
    spec = importlib.util.spec_from_file_location(name, place.file)
    if spec is None or spec.loader is None:
        raise UserError(f"{place.file.name} is not a Python file", "adapter.file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look for their module there
    if not place.ships:  # files beside it, as when Python runs it; but torchtitan.py imports torchtitan, and not itself
        sys.path.insert(len(sys.path) if importlib.util.find_spec(place.file.stem) else 0, str(place.file.parent))
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(
            f"the adapter {place.text} needs {error.name}, which is not installed here", "adapter.package"
        ) from error
    except Exception as error:
        where = "" if isinstance(error, SyntaxError) else _last_line(error, place.file)  # which says so itself
        raise UserError(
            f"importing {place.text} raised {type(error).__name__}: {error}{where}", "adapter.import"
        ) from error
    if not place.name:
        return module
    if not hasattr(module, place.name):
        hint = did_you_mean(place.name, [key for key in vars(module) if not key.startswith("_")])
        raise UserError(f"{place.file.name} has no {place.name}; {hint}", "adapter.name")
    found = getattr(module, place.name)
    return found() if isinstance(found, type) else found


def _last_line(error: BaseException, file: Path) -> str:
    """Where in the adapter's own file it was raised."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return f" (line {lines[-1]})" if lines else ""


def _shortcomings(given: Any, name: str) -> Iterable[str]:
    """Everything that an adapter lacks, at once."""
    for member in _NEEDED:
        if not hasattr(given, member):
            yield f"the adapter {name} has no function {member}({', '.join(_ARGUMENTS[member])})"
    for member, arguments in _ARGUMENTS.items():
        function = getattr(given, member, None)
        if function is None:
            continue
        if not callable(function):
            yield f"{member} of the adapter {name} is a {type(function).__name__}, and not a function"
        elif not _takes(function, len(arguments)) and not (member == "build" and _takes(function, 2)):
            yield f"{member} of the adapter {name} should take {member}({', '.join(arguments)})"
    if (layouts := getattr(given, "LAYOUTS", None)) and not isinstance(layouts, list | tuple):
        yield f'LAYOUTS of the adapter {name} is a {type(layouts).__name__}; it should be a list: ["dp=2", "tp=2,sp"]'
    elif not layouts:
        yield f'the adapter {name} has no LAYOUTS, a list such as ["dp=2", "tp=2,sp"]'
    if (dtype := getattr(given, "DTYPE", "float64")) not in DTYPES:
        yield f"DTYPE of the adapter {name} is {dtype!r}; it should be one of {', '.join(DTYPES)}"
    known = getattr(given, "KNOWN", {})
    if not isinstance(getattr(given, "TERMS", {}), dict):
        yield f"TERMS of the adapter {name} should be a dict"
    if not isinstance(known, dict) and not callable(known):
        yield f"KNOWN of the adapter {name} should be a dict, or a function of the layout that gives one"
    devices = getattr(given, "DEVICES", _DEVICES)
    if not isinstance(devices, list | tuple) or not devices or set(devices) - set(_DEVICES):
        yield f'DEVICES of the adapter {name} is {devices!r}; it should be ("cpu",), ("cuda",) or both'
    if isinstance(known, dict) and (odd := [key for key, value in known.items() if not isinstance(value, int | float)]):
        yield f"KNOWN of the adapter {name} has {odd[0]}={known[odd[0]]!r}, which is not a number"
    if isinstance(given, dict):
        yield f"the adapter {name} is a dict; it should be a module, a class or an object"


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # builtins without a signature
        return True
    return True
