"""Reference pages, written from the code when the site is built.

    for path, text in pages().items():    # {"reference/cli/plan.md": "# fivefold plan\n...", ...}
        ...

Commands come from the tree that parses them, functions from `dir(fivefold)`, settings from the fields of a job and the
comments beside them, and tables from the results that `fivefold list` shows.
"""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import typer

import fivefold as ff
from fivefold.cli import app
from fivefold.data import SOURCES as DATA_SOURCES
from fivefold.hardware import cluster
from fivefold.hardware.accelerators import ACCELERATORS
from fivefold.job.config import Job
from fivefold.losses import LOSSES
from fivefold.optim import OPTIMIZERS
from fivefold.render.blocks import Block, Result, Table, Text
from fivefold.schedules.registry import RECORDS
from fivefold.schedules.result import compare
from fivefold.spec import presets
from fivefold.support.plugins import Sections

SECTIONS: dict[str, Sections[Any]] = {"optimizer": OPTIMIZERS, "loss": LOSSES, "data": DATA_SOURCES}
OF_MODELS = {
    "model.preset": "the name of a built-in model, of which the settings below are changes: `model=llama3-8b`",
    "model.config": "a Hugging Face config.json or its directory, in place of a preset",
}
HUGE = 10**8  # an upper end from here on is no limit that anybody meets
PP, MICROBATCHES = 4, 8  # of the pictures of schedules


def pages() -> dict[str, str]:
    """All reference pages, by their path within MkDocs' sources."""
    made = {f"reference/cli/{name}.md": text for name, text in _commands()}
    made["reference/commands.md"] = _command_list()
    made["reference/python.md"] = _python()
    made["reference/settings.md"] = _settings()
    made["reference/models.md"] = _models()
    made["reference/accelerators.md"] = _accelerators()
    made["reference/schedules.md"] = _schedules()
    return made


def pictures() -> dict[str, str]:
    """The pictures of these pages, in light and in dark."""
    drawn = {record.name: ff.draw(record.name, pp=PP, microbatches=MICROBATCHES) for record in RECORDS}
    return {f"reference/pictures/{name}{dark * '.dark'}.svg": picture.svg(dark=dark) or ""
            for name, picture in drawn.items() for dark in (False, True)}  # fmt: skip


# ---- Markdown -------------------------------------------------------------------------------------------------------


def cell(text: Any) -> str:
    """Text of which nothing is markup but what stands in backticks. Entities stand for signs that Markdown reads."""
    parts = str(text).replace("\n", " ").split("`")
    return "".join(code(part) if at % 2 else _entities(part) for at, part in enumerate(parts))


def code(text: Any) -> str:
    return f"<code>{_entities(str(text))}</code>" if str(text) else ""


def _entities(text: str) -> str:
    return re.sub(r"[&\\*_<>\[\]|$`~]", lambda match: f"&#{ord(match[0])};", text)


def rows(heads: list[str], lines: list[list[str]]) -> str:
    """A table of cells that are Markdown already; `>head` is aligned to the right."""
    rule = ["---:" if head.startswith(">") else "---" for head in heads]
    table = [[head.lstrip(">~") for head in heads], rule, *lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in table) + "\n"


def markdown(blocks: typing.Iterable[Block]) -> str:
    """The blocks of a result."""
    return "".join(map(_block, blocks))


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return f"{cell(block.text)}\n\n"
    if not isinstance(block, Table):
        raise TypeError(f"a reference page has no place for a {type(block).__name__}")
    title = f"**{cell(block.title)}**\n\n" if block.title else ""
    caption = f"{cell(block.caption)}\n\n" if block.caption else ""
    heads = [f"{'>' if column.right else ''}{column.head}" for column in block.columns]
    return title + rows(heads, [[cell(one.text) for one in line] for line in block.cells]) + caption


def plain(text: str) -> str:
    """A text of the command line without its emphasis, [dim]...[/]."""
    return re.sub(r"\[/?[a-z ]*\]", "", text)


# ---- commands -------------------------------------------------------------------------------------------------------


def tree(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its path, groups before what is in them."""
    command = command or typer.main.get_command(app)
    for name, inner in getattr(command, "commands", {}).items():
        yield (*path, name), inner
        yield from tree(inner, (*path, name))


def _command_list() -> str:
    lines = []
    for path, command in tree():
        says, _, example = plain(command.short_help).partition("  ")
        if not getattr(command, "commands", {}):
            place = f"cli/{path[0]}.md" + (f"#fivefold-{'-'.join(path)}" if len(path) > 1 else "")
            lines.append([f"[{code(' '.join(path))}]({place})", cell(says), code(example)])
    return (
        "# Commands\n\nEvery command has `--help`. In all of them `--json` prints JSON, `--output` (`-o`) names the "
        "file to write, and `--quiet` (`-q`) prints only errors. Exit codes: 0 done, 1 failed or does not hold, "
        "2 refused, 3 a lost peer.\n\n" + rows(["command", "what it does", "example"], lines)
    )


def _commands() -> Iterator[tuple[str, str]]:
    """The page of each command, or of each group of them."""
    found: dict[str, list[str]] = {}
    for path, command in tree():
        found.setdefault(path[0], []).append(_command(path, command))
    for name, texts in found.items():
        yield name, "".join(texts)


def _command(path: tuple[str, ...], command: Any) -> str:
    title = f"{'#' * len(path)} fivefold {' '.join(path)}\n\n"
    if inside := getattr(command, "commands", {}):
        named = ", ".join(f"[{code(name)}](#fivefold-{'-'.join((*path, name))})" for name in inside)
        return f"{title}{_help(command.help or plain(command.short_help))}Commands: {named}.\n\n"
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join(f"{one.metavar or one.name.upper()}" for one in arguments)
    hints = typing.get_type_hints(command.callback)
    options = [_option(one, hints.get(one.name)) for one in command.params if one.param_type_name == "option"]
    given = [[code(one.metavar or one.name.upper()), cell(plain(one.help or ""))] for one in arguments]
    return (
        f"{title}```text\nfivefold {' '.join(path)} {usage} [OPTIONS]\n```\n\n".replace("  ", " ")
        + _help(command.help or "")
        + (rows(["argument", "what it is"], given) if given else "")
        + rows(["option", "value", "what it does"], options)
    )


def _help(text: str) -> str:
    """The paragraphs of a help text, in which lines that are indented are commands."""
    out, block = [], list[str]()
    for paragraph in [*plain(text).split("\n\n"), ""]:
        if paragraph.startswith("  "):
            block += [line.removeprefix("  ") for line in paragraph.splitlines()]
            continue
        if block:
            out.append("```sh\n" + "\n".join(block) + "\n```\n\n")
            block = []
        if re.match(r"\s*[-|]", paragraph):
            out.append(f"```text\n{paragraph}\n```\n\n")
        elif paragraph.strip():
            out.append(f"{cell(paragraph.strip())}\n\n")
    return "".join(out)


def _option(option: Any, hint: Any) -> list[str]:
    names = ", ".join(code(name) for name in (*option.opts, *option.secondary_opts))
    default = option.default
    shown = "" if default in (None, "", False, True) or callable(default) else f"; default: {code(default)}"
    value = "" if option.is_flag else option.metavar or type_text(hint)
    return [names, code(value), cell(plain(option.help or "").removesuffix(".")) + shown]


# ---- types ----------------------------------------------------------------------------------------------------------


def type_text(hint: Any) -> str:
    """A type in a reader's words: int, text, one of the words, a number in its range."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, *notes = typing.get_args(hint)
        limits = [note for note in notes if isinstance(note, msgspec.Meta)]
        return type_text(inner) + "".join(f", {_limits(limit)}" for limit in limits)
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " | ".join(map(str, inside))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(type_text(one) for one in inside if one is not type(None))
    if origin in (list, tuple):
        return f"{type_text(inside[0])}, ..." if inside else "list"
    names = {str: "text", bool: "true | false", None: "", Any: "any"}
    return names.get(hint, getattr(hint, "__name__", str(hint)).lower() if hint in (int, float) else _name(hint))


def _name(hint: Any) -> str:
    return "path" if getattr(hint, "__name__", "") == "Path" else getattr(hint, "__name__", str(hint))


def _limits(limit: msgspec.Meta) -> str:
    least, most = limit.ge, limit.le
    if most is None or most >= HUGE:
        return f"at least {least:g}" if least is not None else ""
    return f"{least:g} to {most:,}"


def signature(name: str, function: Any) -> str:
    """A call, one argument a line if it is long; types without the modules that they are from."""
    inner = inspect.signature(inspect.unwrap(function))
    words, kinds, seen_star = [], inspect.Parameter, False
    for one in inner.parameters.values():
        if one.kind is kinds.KEYWORD_ONLY and not seen_star:
            words.append("*")
        seen_star |= one.kind in (kinds.KEYWORD_ONLY, kinds.VAR_POSITIONAL)
        star = "*" * ((one.kind is kinds.VAR_POSITIONAL) + 2 * (one.kind is kinds.VAR_KEYWORD))
        default = "" if one.default is kinds.empty else f" = {_default(one.default)}"
        words.append(f"{star}{one.name}: {_annotation(one.annotation)}{default}")
    gives = f" -> {_annotation(inner.return_annotation)}"
    line = f"ff.{name}({', '.join(words)}){gives}"
    if len(line) <= 88:
        return line
    return f"ff.{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){gives}"


def _default(value: Any) -> str:
    return "..." if callable(value) else repr(value)


def _annotation(hint: Any) -> str:
    if hint is inspect.Signature.empty:
        return "Any"
    text = inspect.formatannotation(hint) if not isinstance(hint, str) else hint
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text)
    return text.replace("Optional[", "Optional[").replace("NoneType", "None")


# ---- Python API -----------------------------------------------------------------------------------------------------


def _python() -> str:
    names = [name for name in dir(ff) if not name.startswith("__")]
    functions = [name for name in names if not isinstance(getattr(ff, name), type)]
    kinds = {name: getattr(ff, name) for name in names if isinstance(getattr(ff, name), type)}
    results = {kind.__name__: kind for name in functions if (kind := _returned(getattr(ff, name)))}
    text = f"# Python API\n\n{inspect.cleandoc(_told(ff.__doc__))}\n\n## Functions\n\n"
    for name in sorted(functions):
        function = getattr(ff, name)
        gives = _returned(function)
        link = f"Returns [{code(gives.__name__)}](#{gives.__name__.lower()}).\n\n" if gives else ""
        text += f"### {name}\n\n```python\n{signature(name, function)}\n```\n\n{_told(inspect.getdoc(function))}{link}"
    text += "## Types\n\n" + "".join(_kind(name, kinds[name]) for name in sorted(kinds))
    text += "## Results\n\nWhat functions return. Each prints as tables, and shows itself in a notebook.\n\n"
    return text + "".join(_kind(name, kind) for name, kind in sorted(results.items()) if name not in kinds)


def _told(text: str | None) -> str:
    """A docstring as Markdown: examples after >>> and indented ones are code."""
    out, block = [], list[str]()
    for line in [*inspect.cleandoc(text or "").splitlines(), ""]:
        is_code = line.startswith((">>>", "...", "    ")) or (block and block[0].startswith(">>>") and line.strip())
        if is_code:
            block.append(line)
            continue
        if block:
            out.append("\n```python\n" + inspect.cleandoc("\n".join(block)) + "\n```\n")
            block = []
        out.append(cell(line))
    return "\n".join(out) + "\n\n"


def _returned(function: Any) -> type | None:
    found = typing.get_type_hints(inspect.unwrap(function)).get("return")
    return found if isinstance(found, type) and found.__module__.startswith("fivefold.") else None


def _kind(name: str, kind: type) -> str:
    """A class: what it is, its fields, and what else it has."""
    text = f"### {name}\n\n{_told(vars(kind).get('__doc__') if _documented(kind) else '')}"
    comments, hints = field_comments(kind), _hints(kind)
    if fields := _fields(kind):
        lines = [[code(one), code(_annotation(hints.get(one, ""))), cell(comments.get(one, ""))] for one in fields]
        text += rows(["field", "type", "what it is"], lines)
    members = [
        [code(member), cell(_first(inspect.getdoc(found)))] for member, found in _members(kind) if member not in fields
    ]
    return text + (rows(["also", "what it does"], members) if members else "")


def _documented(kind: type) -> bool:
    """Whether the class has a docstring of its own, and not the one that dataclasses make of the signature."""
    return bool(kind.__doc__) and not str(kind.__doc__).startswith(f"{kind.__name__}(")


def _fields(kind: type) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return tuple(kind.__struct_fields__)
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def _hints(kind: type) -> dict[str, Any]:
    """The types of fields as they are written: what is imported for type checkers alone cannot be evaluated."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        found |= inspect.get_annotations(base)
    return found


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class of ours that say what they are for."""
    seen = set(Result.__dict__) - {"to_dict"}
    for base in kind.__mro__:
        if not base.__module__.startswith("fivefold."):
            continue
        for name, found in vars(base).items():
            inner = getattr(found, "__func__", found)
            is_member = isinstance(inner, types.FunctionType | property | functools.cached_property)
            if is_member and not name.startswith("_") and name not in seen and inspect.getdoc(inner):
                seen.add(name)
                yield f"{name}()" if callable(inner) else name, inner


def _first(text: str | None) -> str:
    return (text or "").split("\n\n")[0]


# ---- settings -------------------------------------------------------------------------------------------------------


def field_comments(kind: type) -> dict[str, str]:
    """What the source says beside each field of a class, or above it."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("fivefold."):
            found |= _comments_in(inspect.cleandoc("\n" + inspect.getsource(base)))
    return found


def _comments_in(source: str) -> dict[str, str]:
    """By field. A comment above is also of the fields that follow it and have none of their own."""
    found: dict[str, str] = {}
    above, in_comment, new = "", False, False
    for line in source.splitlines():
        said = re.match(r"    #(.*)", line)
        field = re.match(r"    (\w+)\s*:.*?(?:  # (.*))?$", line)
        if said:
            above, new = f"{above if in_comment else ''} {said[1].strip()}".strip(), True
        elif field and field[2]:
            found[field[1]] = f"{above if new else ''} {field[2]}".strip()
            above = ""
        elif field:
            found[field[1]], new = above, False
        elif line.strip():
            above = ""
        in_comment = bool(said)
    return {field: "" if said.startswith("----") else said for field, said in found.items()}


def _settings() -> str:
    text = (
        "# Settings of a job\n\nA job is a TOML file with these sections; `KEY=VALUE` on the command line changes any "
        "of them, as in `train.steps=200`. [Jobs](../jobs.md) explains how to use them. A setting without a default "
        "has to be given, or comes with the model's preset.\n\n"
    )
    for field in msgspec.structs.fields(Job):
        text += f"## {field.name}\n\n{_which(field.name)}"
        for name, kind in _choices(SECTIONS.get(field.name), field.type):
            heading = f"### {field.name}: {name}\n\n" if name else ""
            text += f"{heading}{_told(kind.__doc__ if _documented(kind) else '')}{_setting_rows(field.name, kind)}"
    return text


def _which(section: str) -> str:
    """The settings that say which other ones there are."""
    lines = [[code(setting), code("text"), "", said] for setting, said in OF_MODELS.items() if section == "model"]
    if chosen := SECTIONS.get(section):
        names = " | ".join((*chosen.table, "package.module:Name"))
        lines.append([code(chosen.setting), code(names), code(f'"{next(iter(chosen.table))}"'), "which one"])
    return rows(["setting", "value", "default", "what it is"], lines) if lines else ""


def _choices(sections: Sections[Any] | None, kind: Any) -> list[tuple[str, type]]:
    """The classes that a section may be, by the name that chooses one."""
    if sections is None:
        return [("", kind)]
    return [(name if len(sections.table) > 1 else "", one) for name, one in sections.table.items()]


def _setting_rows(section: str, kind: type[msgspec.Struct]) -> str:
    comments = field_comments(kind)
    lines, inner = list[list[str]](), ""
    if key := kind.__struct_config__.tag_field if section.count(".") else None:
        lines.append([code(f"{section}.{key}"), code(kind.__struct_config__.tag), "", "which table this is"])
    for field in msgspec.structs.fields(kind):
        default = field.default if field.default is not msgspec.NODEFAULT else None
        given = field.default is not msgspec.NODEFAULT or field.default_factory is not msgspec.NODEFAULT
        shown = code(_toml(default)) if given else ""
        name, says = f"{section}.{field.name}", comments.get(field.name, "")
        lines.append([code(name), code(type_text(field.type)), shown, cell(says)])
        for part in _tables(field.type):
            told = _told(part.__doc__) if _documented(part) else ""
            inner += f"**{code(name)}** ({code(part.__name__)})\n\n{told}{_setting_rows(name, part)}"
    return rows(["setting", "value", "default", "what it is"], lines) + inner


def _tables(hint: Any) -> list[type[msgspec.Struct]]:
    """The tables that a setting may be."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    inside = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else ()
    return [one for one in inside if isinstance(one, type) and issubclass(one, msgspec.Struct)]


def _toml(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str) else f"{value}"


# ---- models, accelerators, schedules --------------------------------------------------------------------------------


def _models() -> str:
    specs = [presets.preset(name) for name in presets.PRESETS]
    numbers = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context")
    heads = ["model", *(f">{name.replace('_', ' ')}" for name in numbers), ">experts"]
    lines = [[code(one.name), *(f"{getattr(one, name):,}" for name in numbers),
              f"{one.experts.top_k} of {one.experts.count}" if one.experts else ""] for one in specs]  # fmt: skip
    sources = "".join(f"- `{name}*`: {cell(said)}\n" for name, said in presets.PRESET_SOURCES.items())
    return (
        "# Models\n\nThe built-in models. `fivefold list models NAME` shows what follows from the numbers of one; "
        "a Hugging Face `config.json` works wherever a name does.\n\n"
        f"{markdown(presets.models().blocks())}## Numbers\n\n{rows(heads, lines)}## Sources\n\n{sources}"
    )


def _accelerators() -> str:
    text = (
        "# Accelerators\n\nWhat `--cluster 2x8xNAME` may name, and what the planner takes of it. "
        "`fivefold calibrate -o mine.toml` measures another one.\n\n" + markdown(cluster.accelerators().blocks())
    )
    for name in ACCELERATORS:
        found: Result = cluster.accelerators(name)
        text += f"## {name}\n\n{markdown(found.blocks())}"
    return text


def _schedules() -> str:
    compared = compare(pp=8, microbatches=32)
    text = (
        "# Pipeline schedules\n\n`layout.schedule=NAME` chooses one; [schedules](../schedules.md) explains them, and "
        "`schedule=FILE` runs your own. `fivefold compare schedules --pp 8 --microbatches 32` says:\n\n"
        + markdown(compared.blocks())
        + f"Below, each with {PP} ranks and {MICROBATCHES} microbatches: `fivefold draw NAME --pp {PP} "
        f"--microbatches {MICROBATCHES}`.\n\n"
    )
    for record in RECORDS:
        facts = {
            "stages per rank": f"{record.chunks}{', or more' if record.any_chunks else ''}",
            "needs": record.needs or "nothing",
            "bubble": code(record.bubble) if record.bubble else "",
            "backward pass": "in two halves, I and W" if record.splits else "in one",
            "options": ", ".join(code(one) for one in record.options),
        }
        lines = [[name, said] for name, said in facts.items() if said]
        shown = "".join(
            f"![{record.name}: who computes what when](pictures/{record.name}{dark}.svg#only-{look})\n"
            for dark, look in (("", "light"), (".dark", "dark"))
        )
        text += f"## {record.name}\n\n{_told(_builder(record.build))}{rows(['fact', ''], lines)}{shown}\n"
    return text


def _builder(build: Any) -> str:
    """What the module of a schedule's builder says of it: the docstring of the function that its lambda calls."""
    names = [name for name in build.__code__.co_names if inspect.isfunction(build.__globals__.get(name))]
    function = build.__globals__[names[0]] if names else build
    return inspect.getdoc(function) or ""
