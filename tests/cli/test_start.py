"""What starts quickly: the version needs no command, and no package of others."""

import subprocess
import sys

from fivefold.version import __version__


def test_the_version_is_told_without_any_command() -> None:
    program = (
        "import sys; sys.argv[1:] = ['--version']; from fivefold.cli import main; main();"
        "print(*{'typer', 'rich', 'msgspec', 'numpy', 'fivefold.cli.commands'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == f"fivefold {__version__}\n\n"
