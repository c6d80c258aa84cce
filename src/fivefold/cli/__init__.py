"""The command line: `fivefold COMMAND --help`. All commands are in `cli/commands.py`.

What imports this package, as the script `fivefold` does, imports no command yet: `fivefold --version` needs none.
"""

import sys
from typing import TYPE_CHECKING

from fivefold.version import __version__

if TYPE_CHECKING:
    import typer

    from fivefold.cli.commands import app as app
    from fivefold.cli.commands import program as program


def main(other_app: "typer.Typer | None" = None) -> None:
    """Run the command line, or another program's app (`commands.run`)."""
    if other_app is None and sys.argv[1:] == ["--version"]:
        print(f"fivefold {__version__}")
        return
    from fivefold.cli.commands import run

    run(other_app)


def __getattr__(name: str) -> object:
    if name not in ("app", "program"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fivefold.cli import commands

    return getattr(commands, name)
