"""Nothing from outside is run: no call in the source would execute what a file or a peer says, but those named."""

import ast
from collections.abc import Iterable, Iterator

from tests.layers import SOURCE, modules, nodes

ALLOWED = {
    # The launcher's pipe to processes that it forks itself: inherited, never on disk, and closed to all others.
    ("launch/supervisor.py", "import pickle"),
    ("launch/supervisor.py", "pickle.loads"),
    # The benchmark's opponent reads files that the same process wrote a moment ago, in a directory of its own.
    ("bench/checkpoint_rank.py", "state_dict_loader"),
    ("bench/checkpoint_rank.py", "FileSystemReader"),
    # What a user's own job or --plugin names; a stored name, a peer's and the page's never come so far.
    ("support/plugins.py", "importlib.import_module"),
    # The file that its user gives to verify --adapter, in the ranks; a certificate's file is never run by itself.
    ("foreign/adapter.py", "importlib.util.spec_from_file_location"),
    ("foreign/adapter.py", "spec.loader.exec_module"),
    # Our own modules: public names, those that ranks have in common, the views of a table, the command of a rank.
    ("__init__.py", "importlib.import_module"),
    ("launch/supervisor.py", "importlib.import_module"),
    ("launch/local.py", "runpy.run_module"),
    ("web/worker.py", "importlib.import_module"),
    ("web/views.py", "importlib.import_module"),
}
PICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml"}
RUNS = {"eval", "exec", "compile", "os.system", "os.popen"}
IMPORTS = {"import_module", "exec_module", "load_module", "spec_from_file_location", "SourceFileLoader", "__import__",
           "reload", "resolve_name", "entry_points", "EntryPoint", "run_path", "run_module", "spec_from_loader",
           "SourcelessFileLoader", "ExtensionFileLoader", "zipimporter"}  # fmt: skip
KNOWN = {"torch", "importlib", "importlib.util", "importlib.metadata", "builtins", "runpy", "pkgutil"}  # by these alone
RUNS_LAST = {name.split(".")[-1] for name in RUNS}
GIVEN = {"weights_only", "shell", "allow_pickle"}
READS = {"FileSystemReader", "state_dict_loader", "load_state_dict_from_url", "unpickle", "Unpickler"}


def doors(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """What in a module's source would execute data."""
    for node in nodes:
        match node:
            case ast.Import(names):
                yield from (f"import {one.name}" for one in names if one.name.split(".")[0] in PICKLERS)
                yield from (f"{one.name} as {one.asname}" for one in names if one.name in KNOWN and one.asname)
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in PICKLERS:
                    yield f"import {module}"
                yield from (f"{module}.load" for one in names if (module, one.name) == ("torch", "load"))
                yield from (f"{module}.{one.name}" for one in names if one.name in IMPORTS)
                yield from (one.name for one in names if one.name in READS or one.name.endswith(("_object", "_list")))
            case ast.Call():
                yield from _of_call(node)


def _of_call(call: ast.Call) -> Iterator[str]:
    last = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg in GIVEN}
    odd = last in READS | IMPORTS or last.endswith(("_object", "_object_list"))
    odd |= last == "getattr" and ast.unparse(call.args[0]) in KNOWN - {"torch"}  # any function of theirs
    if odd or "True" in (given.get("shell"), given.get("allow_pickle")):
        yield ast.unparse(call.func)
    elif last in ("load", "loads") or last in RUNS_LAST:
        name = ast.unparse(call.func)
        reads = last in ("load", "loads") and name.split(".")[0] in (*PICKLERS, "dcp", "checkpoint")
        if reads or name in RUNS or (name == "torch.load" and given.get("weights_only") != "True"):
            yield name


def test_the_source_has_no_door_but_those_named() -> None:
    files = {name: str(path.relative_to(SOURCE / "fivefold")) for name, path in modules().items()}
    assert {(file, door) for name, file in files.items() for door in doors(nodes(name))} == ALLOWED


DOORS = """
import pickle
from pickle import loads
pickle.load(file)
torch.load(path)
from torch import load
import torch as other
torch.load(path, weights_only=False)
torch.load(path, mmap=True, weights_only=wanted)
dist.broadcast_object_list(box)
dist.all_gather_object(box, value)
dist.gather_object(value, box)
dist.scatter_object_list(a, b)
from torch.distributed import all_gather_object
dist.recv_object_list(box)
eval(text)
exec(text)
yaml.load(file)
subprocess.run(words, shell=True)
os.system(words)
np.load(file, allow_pickle=True)
state_dict_loader.load(a, storage_reader=FileSystemReader(path))
importlib.import_module(name)
import importlib as other
import builtins as other
from importlib import import_module
import_module(name)
__import__(name)
builtins.__import__(name)
importlib.util.spec_from_file_location(name, path)
loader.exec_module(module)
runpy.run_module(name)
from runpy import run_path
import runpy as other
importlib.reload(module)
from importlib import reload
pkgutil.resolve_name(name)
from pkgutil import resolve_name
importlib.metadata.entry_points(group=name)
from importlib.metadata import entry_points
getattr(importlib, name)(module)
getattr(builtins, 'ex' + 'ec')(text)
"""
NO_DOORS = """
model.eval()
torch.load(path, weights_only=True)
json.loads(text)
re.compile(x)
import torch.nn
"""


def test_each_door_is_seen_and_what_runs_nothing_is_none() -> None:
    assert [line for line in DOORS.split("\n") if line and not [*doors(ast.walk(ast.parse(line)))]] == []
    assert [line for line in NO_DOORS.split("\n") if [*doors(ast.walk(ast.parse(line)))]] == []
