"""What users bring in modules of their own: an optimizer, a data source, a loss.

    fivefold train job.toml optimizer.name=my_package.lion:Lion

A plain name is one of a table. `package.module:Name` names a class of somebody else's module, and to import it runs its
code. So only who writes the job may cause that: a job file, KEY=VALUE and Job objects. What a checkpoint, a run's
directory, a peer or the page names (`trusted=False`) is used if this process has imported it already, for its user
(`fivefold train RUN --plugin package.module:Name`, or a program's own import), and never causes an import.

Modules are looked for where Python looks (installed packages, PYTHONPATH), and then in the current directory, which a
console script does not have on its path, and where nothing else is found (`plugin_finder.py`).
"""

import hashlib
import importlib
import inspect
import opcode
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import msgspec

from fivefold.support.errors import Problem, TrainingError, UserError
from fivefold.support.plugin_calls import place_of, problems_of, raised_problem
from fivefold.support.plugin_files import installed_as, source_files
from fivefold.support.plugin_finder import FINDER
from fivefold.support.text import did_you_mean, nearest

_PLUGIN_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_PLUGIN_OPTION = re.compile(r" --plugin ([^\s,]+)")
_MAX_LISTED = 12  # names of a module, where one is asked for that it does not have
_imported: dict[str, Any] = {}  # by name, what this process uses: imported for its user, or by the program itself


def is_plugin(name: object) -> bool:
    """Whether it names a class of a module, and not an entry of a table."""
    return isinstance(name, str) and ":" in name


class Base(Protocol):
    """Classes that users may derive from."""

    @staticmethod
    def shortcomings(kind: Any, name: str) -> Iterator[str]:
        """What a class lacks that a job calls `name`, as sentences without subject: "has no method update"."""


class Description(Base, Protocol):
    """Those whose settings are a section of a job."""

    __struct_fields__: ClassVar[tuple[str, ...]]

    def problems(self) -> Iterable[str]:
        """What is wrong with the settings, beyond their types and ranges."""


T = TypeVar("T", bound=Base)
D = TypeVar("D", bound=Description)
K = TypeVar("K")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """What a setting of a job may name: a class of the table, or a plugin that keeps to the same base."""

    setting: str  # such as optimizer.name
    base: type[T]
    table: Mapping[str, type[T]]

    @property
    def section(self) -> str:
        return self.setting.rpartition(".")[0]

    def named(self, name: Any, *, trusted: bool) -> type[T]:
        """The class of that name; a plugin's module is imported if the name is `trusted`."""
        if not is_plugin(name):
            if isinstance(name, str) and name in self.table:
                return self.table[name]
            hint = did_you_mean(str(name), list(self.table))
            raise UserError(f"{self.setting}={name!r} is not a choice; {hint}", f"{self.setting}.choice")
        found = load(name, self.setting, self._own) if trusted else _present(name)
        fits = isinstance(found, type) and issubclass(found, self.base)
        if not fits and name not in _imported:
            raise UserError(untrusted_problem(self.setting, name))
        if not fits:
            what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
            wanted = f"a subclass of {self.base.__module__}:{self.base.__name__}"
            raise UserError(Problem("plugin.kind", f"{self.setting}={name} is {what}, and not {wanted}"))
        return _check_protocol(self.setting, name, found, self.base)

    def _own(self, found: Any) -> bool:
        """Whether it is a user's class for this setting."""
        fits = isinstance(found, type) and issubclass(found, self.base)
        return fits and found.__module__.partition(".")[0] != __name__.partition(".")[0]

    def class_problems(self, given: T) -> list[str]:
        """Why an object that a program gives cannot be used, where its class is not in the table."""
        try:
            if type(given) not in self.table.values():
                _adopt(self.section, type(given), self.base)
        except UserError as error:
            return error.coded
        return []


@dataclass(frozen=True)
class Sections(Registry[D]):
    """A section of a job in which a name decides which settings there are. Jobs without it have the table's first."""

    unknown: type[D]  # what a stored job has, whose plugin nobody has imported here: its settings, and no rule

    @property
    def key(self) -> str:
        return self.setting.rpartition(".")[2]

    @property
    def usual(self) -> type[D]:
        return next(iter(self.table.values()))

    def keys(self, *kinds: type[D]) -> list[str]:
        """What a job may write in the section; without `kinds`, for any class of the table."""
        fields = (kind.__struct_fields__ for kind in kinds or self.table.values())
        return [self.key, *dict.fromkeys(chain(*fields))]

    def of(self, settings: Any, *, trusted: bool) -> type[D]:
        """The class of a section as a job's table has it."""
        if not isinstance(settings, dict) or self.key not in settings:
            return self.usual
        return self.named(settings[self.key], trusted=trusted)

    def problems(self, given: D) -> list[str]:
        """Of its settings; and of its class, where a program gives an object of one that is not in the table."""
        known = not isinstance(given, self.unknown)
        return (self.class_problems(given) if known else []) or problems_of(given)

    def stored(self, settings: Mapping[str, Any]) -> D:
        """A section of a job that was stored. The first releases knew one class, and did not name it.

        The name never causes an import: a plugin that is not here keeps its settings alone, as an `unknown`.
        """
        own = {key: value for key, value in settings.items() if key != self.key}
        try:
            kind = self.of(settings, trusted=False)
        except UserError as error:
            name = settings[self.key]
            if not is_plugin(name) or error.codes != ["plugin.untrusted"]:
                raise
            fields = [(key, Any) for key in own if key not in self.unknown.__struct_fields__]
            options: dict[str, Any] = {"bases": (self.unknown,), "tag": name, "frozen": True, "kw_only": True}
            kind = cast(type[D], msgspec.defstruct(self.unknown.__name__, fields, **options))
        return msgspec.convert(own, kind)


def find_value(setting: str, name: str, kind: type[K], *, trusted: bool) -> K:
    """The object of a module that `setting` (layout.schedule) calls `name`."""
    found = load(name, setting, lambda other: isinstance(other, kind)) if trusted else _present(name)
    if isinstance(found, kind):
        return cast(K, _imported.setdefault(name, found))
    if name not in _imported:
        raise UserError(untrusted_problem(setting, name))
    what = f"is a {type(found).__name__}, and not a {kind.__module__}:{kind.__name__}"
    raise UserError(Problem("plugin.kind", f"{setting}={name} {what}"))


def _adopt(setting: str, kind: type[T], base: type[T]) -> type[T]:
    """Treats the class of an object that a program gives as if it had been named. Ranks also have to find it."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__" or _present(name) is not kind:
        where = "is not where ranks could import it; write it at the top level of a module of its own"
        raise UserError(Problem("plugin.module", f"{setting}={name} {where}"))
    return _check_protocol(setting, name, kind, base)


def _check_protocol(setting: str, name: str, kind: type[T], base: type[T]) -> type[T]:
    lacks = [*base.shortcomings(kind, name), *_misfits(kind, base)]
    if problems := [Problem("plugin.protocol", f"{setting}={name} {lack}") for lack in lacks]:
        raise UserError(problems)
    _imported[name] = kind
    return kind


def _present(name: str) -> Any:
    """What a stored name means here, if this process has it: imported for its user, or by the program itself.

    A module's table is looked at, and the module not asked: some import others when they are asked for a name.
    """
    module, _, attribute = name.partition(":")
    return _imported.get(name) or getattr(sys.modules.get(module), "__dict__", {}).get(attribute)


def imported_plugins() -> list[str]:
    """The plugins of this process; ranks that it starts import the same."""
    return sorted(_imported)


def options(names: Sequence[str]) -> str:
    """What a command line has behind the name of a stored run whose job names these."""
    return "".join(f" --plugin {name}" for name in names)


def _misfits(kind: type, base: type) -> Iterator[str]:
    """The members of a class that cannot be used like its base's."""
    for member, wanted in _members(base).items():
        own, theirs = getattr(kind, member), inspect.getattr_static(kind, member)
        if own is getattr(base, member):
            continue
        if isinstance(wanted, bool):
            if not isinstance(own, bool):
                yield f"has {member}={own!r}, and not True or False"
        elif isinstance(wanted, property):
            if inspect.isfunction(own):
                yield f"has a method {member}, which is a property of {base.__name__}; write @property above it"
        elif inspect.ismemberdescriptor(own):
            yield f"has a setting {member}, which is a method of {base.__name__}; give the setting another name"
        elif not callable(own):
            yield f"has {member}={own!r}, which is a method of {base.__name__}"
        elif inspect.iscoroutinefunction(own) or inspect.isasyncgenfunction(own):
            yield f"has an async {member}, which nobody awaits; write a plain def"
        elif lack := _uncallable(member, own, wanted, bound=isinstance(theirs, (staticmethod, classmethod))):
            yield lack


def _members(base: type) -> dict[str, Any]:
    """The methods, properties and switches of a base, by name."""
    found: dict[str, Any] = {}
    for owner in base.__mro__:
        if owner.__module__.partition(".")[0] == __name__.partition(".")[0]:
            found = {**vars(owner), **found}
    own = {name: value for name, value in found.items() if not name.startswith("_") and name != "shortcomings"}
    return {name: it for name, it in own.items() if isinstance(it, (bool, property)) or inspect.isfunction(it)}


def _uncallable(member: str, own: Any, wanted: Any, *, bound: bool) -> str:
    """Why a method cannot be called with what the base's is called with; empty where it can."""
    try:
        has, needs = inspect.signature(own), inspect.signature(wanted)
    except (TypeError, ValueError):  # of a builtin
        return ""
    many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = [it for it in needs.parameters.values() if it.kind not in many][bound:]
    options = {"__any": None} if any(it.kind is it.VAR_KEYWORD for it in needs.parameters.values()) else {}
    try:
        has.bind(*given, **options)
    except TypeError:
        names = ", ".join(str(it.replace(annotation=it.empty, default=it.empty)) for it in has.parameters.values())
        asked = ", ".join(str(it.replace(annotation=it.empty)) for it in needs.parameters.values())
        return f"has {member}({names}), and not {member}({asked})"
    return ""


def untrusted_problem(setting: str, name: str) -> Problem:
    """Why a name that was stored or sent is not imported, and what its user can do."""
    why = f"{setting}={name} is stored, and names a module that would be imported; what is stored never causes that"
    change = f", or {setting}={name}" if setting.count(".") == 1 else ""  # a pattern is changed as a whole
    return Problem("plugin.untrusted", f"{why}. If you trust it: --plugin {name}{change}")


def untrusted_in(error: UserError) -> list[str]:
    """The plugins that the problems of an error would have allowed, each once."""
    problems = (problem for problem in error.coded if getattr(problem, "code", "") == "plugin.untrusted")
    return list(dict.fromkeys(name for problem in problems for name in _PLUGIN_OPTION.findall(problem)))


def load(name: str, setting: str = "--plugin", fits: Callable[[Any], bool] = lambda found: False) -> Any:
    """Import what a user has named; where there is no such name, those are listed that `fits` takes."""
    if name in _imported:
        return _imported[name]
    if not _PLUGIN_NAME.fullmatch(name):
        form = "is not of the form package.module:Name"
        raise UserError(Problem("plugin.form", f"{setting}={name!r} {form}, for example my_package.lion:Lion"))
    module_name, _, attribute = name.partition(":")
    if module_name == "__main__":
        own = "is of the program that runs, and ranks import it; write it into a module of its own"
        raise UserError(Problem("plugin.module", f"{setting}={name} {own}"))
    FINDER.admit(module_name, Path.cwd())
    try:
        with redirect_stdout(sys.stderr):  # what a module prints must not stand in a command's JSON or TOML
            module = importlib.import_module(module_name)
            missing = not hasattr(module, attribute)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            where = f"where Python looks (installed packages, PYTHONPATH), and not in {os.getcwd()}"
            raise UserError(Problem("plugin.module", f"{setting}={name}: no module {error.name} {where}")) from None
        raise UserError(Problem("plugin.import", f"{setting}={name}: {module_name} raised {error!r}")) from None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not _by_statement(error):
            raise  # Ctrl-C
        raised = f"{module_name} raised {type(error).__name__} when it was imported: {error}"
        raise UserError(Problem("plugin.import", f"{setting}={name}: {raised}")) from None
    if missing:
        nothing = f"{module_name} ({getattr(module, '__file__', None)}) has no {attribute}"
        raise UserError(Problem("plugin.name", f"{setting}={name}: {nothing}; {_hint(attribute, module, fits)}"))
    _imported[name] = getattr(module, attribute)
    return _imported[name]


def _by_statement(error: BaseException) -> bool:
    """Whether the last line that an error has come through raised it; a signal's handler does so between two lines."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == opcode.opmap["RAISE_VARARGS"]


def _hint(attribute: str, module: ModuleType, fits: Callable[[Any], bool]) -> str:
    """What may have been meant of a module: of what would do there, else of its own, else of all that it has."""
    public = {word: value for word, value in vars(module).items() if not word.startswith("_")}
    own = [word for word, value in public.items() if getattr(value, "__module__", "") == module.__name__]
    names = [word for word in public if fits(public[word])] or own or [*public]
    more = [f"... ({len(names) - _MAX_LISTED} more)"] if len(names) > _MAX_LISTED else []
    return did_you_mean(attribute, nearest(attribute, names) or [*names[:_MAX_LISTED], *more])


def resolve_class(place: str) -> Any:
    """What is at "package.module:Name", as a class of this process names it: code says so, and no file or peer."""
    module, _, name = place.partition(":")
    with redirect_stdout(sys.stderr):
        return getattr(importlib.import_module(module), name)


# What autograd raises in backward for what a forward pass has done.
_OF_FORWARD = re.compile(r"modified by an inplace operation|backward through the graph a second time")
# What a machine or a peer causes, whoever's code it meets: by the names of torch's classes, which is not imported here.
_OF_MACHINES = {"OutOfMemoryError", "AcceleratorError", "DistError"}


def plugin_error(error: BaseException) -> UserError | None:
    """What an error is to its user that has come through a plugin's file; None where it has not, or is a machine's.

    For what is raised where no member is asked: in the forward pass of a module, in an update of weights. A SystemExit
    is also one: the process would end as if it had done its work. What autograd raises in backward about what a forward
    pass has done has come through no file of it: then all blocks of plugins are named.
    """
    machine = isinstance(error, OSError | MemoryError) or _OF_MACHINES & {kind.__name__ for kind in type(error).__mro__}
    if machine or isinstance(error, UserError | TrainingError) or not isinstance(error, Exception | SystemExit):
        return None
    places = ((name, place_of(error, name)) for name in imported_plugins())
    found = max(((place.depth, name, place.member) for name, place in places if place), default=None)
    if found is not None:
        return UserError(raised_problem(found[1], found[2], error))
    blocks = [name for name, it in sorted(_imported.items()) if hasattr(it, "operations")]  # kinds of mixers and MLPs
    if not blocks or not isinstance(error, RuntimeError) or not _OF_FORWARD.search(str(error)):
        return None
    what = f"{type(error).__name__}: {str(error).partition(' Hint:')[0]}"
    backward = f"{', '.join(blocks)}: the backward pass of a model of these blocks raised {what}"
    return UserError(Problem("plugin.raised", backward))


def digest() -> str:
    """Of the source of what was imported, so that ranks with other code do not join; empty where nothing was."""
    if not _imported:
        return ""
    lines = (f"{name} {source}\n" for name, source in digests().items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def digests() -> dict[str, str]:
    """Of the source of each plugin of this process."""
    return {name: _source_digest(name.partition(":")[0]) for name in imported_plugins()}


def _source_digest(module: str) -> str:
    sha256 = hashlib.sha256()
    for root, path in source_files(module):
        text = path.read_bytes()
        sha256.update(f"{path.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    sha256.update("\n".join(installed_as(module)).encode())
    return sha256.hexdigest()
