"""An accelerator as a TOML file that `Cluster.parse("8xFILE.toml")` reads."""

import msgspec

from fivefold.hardware.accelerators import Accelerator


def to_toml(accelerator: Accelerator, comments: list[str]) -> str:
    lines = [f"# {comment}" for comment in comments]
    table = msgspec.to_builtins(accelerator)
    nested = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines += [f"{key} = {_value(value)}" for key, value in table.items() if key not in nested and value is not None]
    for key, values in nested.items():
        lines += ["", f"[{key}]", *(f"{name} = {_value(value)}" for name, value in values.items() if value is not None)]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    return msgspec.json.encode(value).decode()  # scalars read the same in TOML
