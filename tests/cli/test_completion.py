"""Shells complete commands, options and the names that tables have; each shell is asked with the script we give it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli import app
from fivefold.cli.completion import ASKED, accelerators, labs, models, schedules
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.presets import PRESETS


def completed(line: str) -> list[str]:
    """What Tab offers at the end of a line."""
    words = line.split(" ")
    asked = {ASKED: "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return CliRunner().invoke(app, [], prog_name="fivefold", env=asked).stdout.split()


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("fivefold dr", ["draw", "dryrun"]),
        ("fivefold checkpoint res", ["reshard"]),
        ("fivefold plan --clu", ["--cluster"]),
        ("fivefold draw 1f1b --sends ", ["eager", "blocking"]),
        ("fivefold plan llama3-7", ["llama3-70b"]),
        ("fivefold compare zero llama3-7", ["llama3-70b"]),
        ("fivefold list models llama3-4", ["llama3-405b"]),
        ("fivefold list accelerators H20", ["H200"]),
        ("fivefold draw 1f1b zb-h", ["zb-h1", "zb-h2"]),
        ("fivefold lab start dec", ["decision"]),
        ("fivefold plan ./my", []),  # the shell completes files
    ],
)
def test_tab_offers(line: str, offers: list[str]) -> None:
    assert completed(line) == offers


def test_every_name_is_offered() -> None:
    assert models("") == sorted(PRESETS)
    assert set(schedules("")) == {*CATALOGUE, "mesh"}
    assert "H100" in accelerators("")
    assert "linear" in labs("")


# What a shell does on Tab, as far as it can be done without a terminal; zsh's own part needs one.
ASK = {
    "bash": 'COMP_WORDS=(fivefold dr); COMP_CWORD=1; _fivefold_completion fivefold; printf "%s\\n" "${COMPREPLY[@]}"',
    "fish": 'complete -C "fivefold dr"',
    "zsh": '_TYPER_COMPLETE_ARGS="fivefold dr" _FIVEFOLD_COMPLETE=complete_zsh fivefold',
}
LOAD = {
    "bash": 'eval "$(fivefold --show-completion bash)"',
    "fish": "fivefold --show-completion fish | source",
    "zsh": 'compdef() { :; }; eval "$(fivefold --show-completion zsh)"',
}


@pytest.mark.parametrize("shell", ASK)
def test_the_shell_itself_completes(shell: str, tmp_path: Path) -> None:
    if (found := shutil.which(shell)) is None:
        pytest.skip(f"{shell} is not here")
    env = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",  # which looks at the parent process: this one is Python
        "COLUMNS": "40",
    }
    said = subprocess.run(
        [found, "-c", f"{LOAD[shell]}\n{ASK[shell]}"], env=env, capture_output=True, text=True, timeout=120
    )
    # A line each: what follows a name is its description, and none is broken, as narrow as the terminal may be.
    lines = said.stdout.replace("_arguments '*: :((", "").splitlines()
    assert [re.split('["\\t]', line.lstrip('"'))[0] for line in lines if line] == ["draw", "dryrun"], said.stderr
