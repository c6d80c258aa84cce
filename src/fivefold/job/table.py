"""A job as a table: KEY=VALUE arguments applied to it, and the model that it describes.

apply(table, "optimizer.lr=3e-4", problems)
model_of(table.get("model", {}), data, problems, of_its_own=True)
"""

from itertools import chain
from typing import Any

import msgspec

from fivefold.data.base import DataSource, vocab_of
from fivefold.layout.layout import Layout
from fivefold.spec.blocks import Experts, LatentSpec, RopeScaling, Yarn
from fivefold.spec.hf import read_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import PRESETS, TOY_PRESETS, preset
from fivefold.support.errors import Problem, UserError
from fivefold.support.parsing import parse_toml, path_of, read, unknown_key

Table = dict[str, Any]


def apply(table: Table, change: str, problems: list[str]) -> None:
    """Apply one `section.key=value` of the command line to the table."""
    key, equals, text = change.partition("=")
    if not equals or not key:
        problems.append(Problem("change.form", f"{change!r} is not of the form section.key=value"))
        return
    if any("\ud800" <= letter <= "\udfff" for letter in change):  # surrogates, as which Python keeps undecodable bytes
        problems.append(Problem("change.text", f"{change!r} is not of a text in UTF-8; give it other characters"))
        return
    *sections, last = key.split(".")
    for section in sections:
        if isinstance(table.get(section), str):  # a layout or model by its short name, then changed field by field
            table[section] = _expand(section, table[section], problems)
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            problems.append(Problem("change.table", f"{key}: {section} is a value, not a table"))
            return
    table[last] = _value(text)


def _value(text: str) -> Any:
    """A TOML value (`1e-4`, `true`, `[1, 2]`), or else plain text, as bare words are."""
    try:
        table = parse_toml(f"value = {text}")
        return table["value"] if len(table) == 1 else text  # further lines would be ignored silently
    except (ValueError, RecursionError):
        return text


def _expand(section: str, text: str, problems: list[str]) -> Table:
    """The table that a layout string or a preset's name stands for."""
    if section == "layout":
        try:
            return Layout.parse(text).given()
        except UserError as error:
            problems += error.coded
            return {}
    return {"preset": text} if section == "model" else {}


# ---- model ----------------------------------------------------------------------------------------------------------
# The model of a job: a preset, a Hugging Face config, or all its numbers.


KIND_KEY = "kind"  # tells tables apart where a key may hold one of several
_TABLE_KINDS = {"experts": (Experts,), "mla": (LatentSpec,), "rope_scaling": (RopeScaling, Yarn)}
NESTED_KEYS = {
    key: [*chain(*(kind.__struct_fields__ for kind in kinds)), KIND_KEY] for key, kinds in _TABLE_KINDS.items()
}  # settings


def model_of(value: Any, data: DataSource | None, problems: list[str], *, of_its_own: bool) -> ModelSpec | None:
    """`model = "tiny"`, or a table: a `preset` or a Hugging Face `config` and what changes it, or all the numbers.

    Without a model in the file (not `of_its_own`), the command line's settings change tiny. A toy has the vocabulary of
    the job's data, unless it is given.
    """
    table = {"preset": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        problems.append(Problem("model.type", f"model={value!r} is neither a preset's name nor a table"))
        return None
    bases = [key for key in ("preset", "config") if key in table]
    if len(bases) > 1:
        both = f"model.preset={table['preset']!r} and model.config={table['config']!r}"
        problems.append(Problem("model.preset.config", f"{both} exclude each other"))
        return None
    if not bases and not of_its_own:
        bases, table = ["preset"], {"preset": "tiny"} | table
    known = ["preset", "config", *ModelSpec.__struct_fields__]
    problems += [unknown_key("model", key, known) for key in table if key not in known]
    fields = {key: value for key, value in table.items() if key in ModelSpec.__struct_fields__}
    try:
        base: Table = {}
        if "config" in bases:
            base = msgspec.structs.asdict(read_hf_config(path_of(str(table["config"]))))
        elif bases:  # a preset leaves out what is derived from others, so that it follows them
            name = str(table["preset"])
            preset(name)  # names the nearest where there is none
            vocab = vocab_of(data) if data is not None and name in TOY_PRESETS else None
            base = {"name": name} | PRESETS[name] | ({} if vocab is None else {"vocab": vocab})
    except UserError as error:
        problems += error.coded
        return None
    for key in NESTED_KEYS.keys() & fields.keys():
        given, usual = fields[key], msgspec.to_builtins(base.get(key)) or {}
        if isinstance(given, dict) and given.get(KIND_KEY, usual.get(KIND_KEY)) == usual.get(KIND_KEY):
            fields[key] = usual | given  # a preset's, and what changes it
        elif given is not None and not isinstance(given, dict):
            write = f"write model.{key}.{NESTED_KEYS[key][0]}=... and the like, or take a preset without {key}"
            problems.append(Problem(f"model.{key}.type", f"model.{key}={given!r} is not a table; {write}"))
            return None
    return read(ModelSpec, base | fields, "model", problems)
