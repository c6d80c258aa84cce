"""The model of a job: a preset, a Hugging Face config, or all its numbers."""

from itertools import chain
from typing import Any

import msgspec

from fivefold.data.index import read_index
from fivefold.job.changes import Table
from fivefold.spec.attention import LatentAttention, RopeScaling, Yarn
from fivefold.spec.experts import Experts
from fivefold.spec.hf_config import read_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import PRESETS, TOYS, preset
from fivefold.support.documents import path_of
from fivefold.support.errors import UserError
from fivefold.support.reading import read, unknown_key

TAG = "kind"  # tells tables apart of which a model may have one or another
_TABLES = {"experts": (Experts,), "mla": (LatentAttention,), "rope_scaling": (RopeScaling, Yarn)}
NESTED = {key: [*chain(*(one.__struct_fields__ for one in kinds)), TAG] for key, kinds in _TABLES.items()}  # settings


def model_of(value: Any, of_its_own: bool, data: Any, problems: list[str]) -> ModelSpec | None:
    """`model = "tiny"`, or a table: a `preset` or a Hugging Face `config` and what changes it, or all the numbers.

    Where the file says nothing of a model (`of_its_own`), what the command line says changes tiny. A toy has the
    vocabulary of the job's data, unless it is given.
    """
    table = {"preset": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        problems.append(f"model={value!r} is neither a preset's name nor a table")
        return None
    bases = [key for key in ("preset", "config") if key in table]
    if len(bases) > 1:
        problems.append(f"model.preset={table['preset']!r} and model.config={table['config']!r} exclude each other")
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
            base = {"name": name} | PRESETS[name] | (_vocabulary(data) if name in TOYS else {})
    except UserError as error:
        problems += error.problems
        return None
    for key in NESTED.keys() & fields.keys():
        given, whole = fields[key], msgspec.to_builtins(base.get(key)) or {}
        if isinstance(given, dict) and given.get(TAG, whole.get(TAG)) == whole.get(TAG):
            fields[key] = whole | given  # a preset's, and what changes it
        elif given is not None and not isinstance(given, dict):
            problems.append(
                f"model.{key}={given!r} is not a table; write model.{key}.{NESTED[key][0]}=... and the like, or take a "
                f"preset without {key}"
            )
            return None
    return read(ModelSpec, base | fields, "model", problems)


def _vocabulary(data: Any) -> Table:
    """Of prepared data, if it can be read; what is wrong with it is told where the data is opened."""
    path = data.get("path") if isinstance(data, dict) else None
    try:
        return {"vocab": read_index(path_of(path)).vocab} if isinstance(path, str) and path else {}
    except UserError:
        return {}
