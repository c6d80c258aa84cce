"""A report without names: of hosts, of users, and of the folders that have these in their paths."""

import getpass
import os
import platform
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from fivefold.web.redact import without_paths

_LEAST = 2  # characters of a name that can be found in other words' midst
_USER = "the user"


def host_names(known: Iterable[str] = ()) -> list[str]:
    """The names of the hosts that are known, in the order of their ranks, and of this one."""
    return list(dict.fromkeys([*known, platform.node(), socket.gethostname()]))


def user_names() -> list[str]:
    names = [
        os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "SLURM_JOB_USER", "SLURM_JOB_ACCOUNT")
    ]
    with suppress(OSError, KeyError, ImportError):
        names.append(getpass.getuser())
    return [name for name in dict.fromkeys(names) if name and name != "root"]


def anonymous(value: Any, hosts: list[str], users: list[str]) -> Any:
    """The value with hosts as "node 1", "node 2", users as "the user", and paths cut to their last part."""
    numbers = {name: f"node {number}" for number, name in enumerate(hosts, 1) if len(name) >= _LEAST}
    short = {name.partition(".")[0]: text for name, text in numbers.items()}
    names = short | numbers | {name: _USER for name in users if len(name) >= _LEAST}
    return _without_names(without_paths(value), _pattern(names), names)


def _pattern(names: dict[str, str]) -> re.Pattern[str] | None:
    longest = sorted((name for name in names if len(name) >= _LEAST), key=len, reverse=True)
    return re.compile(rf"(?<![\w.-])(?:node )?({'|'.join(map(re.escape, longest))})(?![\w-])") if longest else None


def _without_names(value: Any, pattern: re.Pattern[str] | None, names: dict[str, str]) -> Any:
    if pattern is None:
        return value
    if isinstance(value, str):
        return pattern.sub(lambda match: names[match[1]], value)
    if isinstance(value, dict):
        return {key: _without_names(inner, pattern, names) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_names(inner, pattern, names) for inner in value]
    return value
