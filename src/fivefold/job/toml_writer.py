"""A job as a file: `to_toml` writes every setting, for machines; `commented_toml` is for people: what was decided,
each with its reason, and nothing that has its default.

commented_toml(job, {"optimizer.lr": "Llama 3 70B (...)"}, head=["llama3-70b on 8x8xH100: ..."])

`read_job` reads both back as the same job.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from fivefold.job.config import SECTIONS, Job
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.parsing import toml_value
from fivefold.support.text import printable

LINE_WIDTH = 110
USUAL_KINDS = {field.name: type(field.default) for field in msgspec.structs.fields(Job)}


def to_toml(job: Job) -> str:
    """The resolved job as a file that `fivefold train` runs again."""
    lines: list[str] = []
    sections = msgspec.to_builtins(job)
    if "chunks" not in job.layout.given():
        del sections["layout"]["chunks"]  # it is the schedule's own, and follows another one
    for section, table in sections.items():
        nested = {key: value for key, value in table.items() if isinstance(value, dict)}
        for name, values in [(section, table), *((f"{section}.{key}", value) for key, value in nested.items())]:
            lines.append(f"[{name}]")
            plain = {key: value for key, value in values.items() if value is not None and not isinstance(value, dict)}
            lines += [f"{key} = {toml_value(value)}" for key, value in plain.items()]
            lines.append("")
    return "\n".join(lines)


def commented_toml(
    job: Job, why: Mapping[str, str], head: Sequence[str] = (), hints: Mapping[str, str] | None = None
) -> str:
    """TOML of the settings that differ from their defaults, or that `why` gives a reason for.

    `hints` are comments at the beginning of a section.
    """
    lines = [line for paragraph in head for line in comment(paragraph)]
    tables = {"model": model_table(job.model)}
    for section in SECTIONS:
        tables[section] = dict(_written_settings(job, section, why))
    for section, table in tables.items():
        hint = (hints or {}).get(section, "")
        if not table and not hint:
            continue
        lines += ["", f"[{section}]", *comment(hint)]
        nested = {key: value for key, value in table.items() if isinstance(value, dict)}
        for key, value in table.items():
            if key not in nested:
                lines += _line(key, value, why.get(f"{section}.{key}", ""))
        for name, values in nested.items():
            lines += ["", f"[{section}.{name}]", *(f"{key} = {_text(value)}" for key, value in values.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def model_table(spec: ModelSpec) -> dict[str, Any]:
    """`preset` and what changes it; all the numbers, where no preset has this name."""
    if spec.name in PRESETS:
        usual = preset(spec.name)
        changed = {
            field: value
            for field in spec.__struct_fields__
            if (value := getattr(spec, field)) != getattr(usual, field) and value is not None
        }
        if preset(spec.name, **changed) == spec:  # not where a number would be derived anew
            return {"preset": spec.name} | _plain(changed)
    return _plain(msgspec.structs.asdict(spec))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(values).items() if value is not None}


def _written_settings(job: Job, section: str, why: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    value = getattr(job, section)
    if section == "layout":
        yield from value.given().items()
        return
    usual = type(value)()
    config = value.__struct_config__
    if config.tag_field and type(value) is not USUAL_KINDS[section]:  # which optimizer, loss or data source
        yield config.tag_field, config.tag
    for field in value.__struct_fields__:
        if getattr(value, field) != getattr(usual, field) or f"{section}.{field}" in why:
            yield field, getattr(value, field)


def _line(key: str, value: Any, why: str) -> list[str]:
    """The reason stands behind the setting if there is room, and else above it."""
    setting = f"{key} = {_text(value)}"
    if not why:
        return [setting]
    if len(beside := f"{setting:22}  {''.join(comment(why))}") <= LINE_WIDTH:
        return [beside]
    return [*comment(why), setting]


def comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(printable(text), LINE_WIDTH - 2, break_on_hyphens=False)]


def _text(value: Any) -> str:
    """As TOML reads it; a small number as people write it: 1.5e-4."""
    if isinstance(value, float) and 0 < abs(value) < 1e-2:
        digits = next(n for n in range(18) if float(f"{value:.{n}e}") == value)
        number, exponent = f"{value:.{digits}e}".split("e")
        return f"{number}e{int(exponent)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return toml_value(value)
