"""Hints for unknown commands and options: the new name of an old command, and how to write a setting that was typed as
an option, `fivefold train --steps 5`."""

import sys
from typing import Any

from typer.core import TyperGroup

from fivefold.support.errors import UserError

MOVED_COMMANDS = {
    "simulate": "plan MODEL --layout LAYOUT",
    "report": "plan --html or draw --html or inspect --html or verify --html",
    "report plan": "plan MODEL --html FILE",
    "report schedule": "draw SCHEDULE --html FILE",
    "report run": "inspect RUN --html FILE",
    "report verify": "verify --html FILE",
    "zero": "compare zero",
    "context": "compare cp",
    "mixed": "compare mixed",
    "schedules": "compare schedules",
    "resume": "train RUN",
    "curve": "verify --curve",
    "experts": "inspect RUN",
    "models": "list models",
    "accelerators": "list accelerators",
    "truth": "accuracy",
    "checkpoint show": "inspect RUN",
    "checkpoint verify": "checkpoint ls RUN --verify",
    "import": "hf import",
    "import hf": "hf import",
    "export": "hf export",
    "export hf": "hf export",
    "bench steps": "bench train --cases",
    "bench overhead": "bench peers --overhead",
    "bench scaling": "bench peers --scaling",
    "bench recovery": "bench checkpoint --recovery",
}
MOVED_BENCHMARKS = ("attention", "mixed", "overlap", "pipeline", "plan", "schedules")  # `python -m benchmarks.X`
_SERVE_OPTIONS = ("--prompt", "--answer", "--concurrent", "--ttft", "--tpot")
_RENAMED_OPTIONS = {
    ("plan", option): f"`fivefold plan {option}` is now `fivefold serve {option}`" for option in _SERVE_OPTIONS
}
_RENAMED_OPTIONS["plan", "--inference"] = "`fivefold plan --inference` is now `fivefold serve`"
_RENAMED_OPTIONS["bench peers", "--least"] = "`--least` is now `--min-ranks`"
_RENAMED_OPTIONS["data prepare", "--out"] = "`--out` is now `--output`"
_SECTIONS_BY_COMMAND = {"serve": ("model",)}  # whose settings it takes, if not those of all sections


class ExplainsUnknown(TyperGroup):
    """A group of commands whose errors about unknown commands and options say what to type instead."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and (sentence := sentence_for_renamed([*_path(ctx), *args[:2]])):
            raise UserError(sentence, "command.moved")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # Compared by name: the class is click's in some releases of Typer, and Typer's own copy in others.
            if type(error).__name__ == "NoSuchOption" and (problems := _explain(error)):
                raise UserError(problems, "option.unknown") from None
            raise


def sentence_for_renamed(words: list[str]) -> str | None:
    """A sentence with the new name of an old command that these words begin with; None if there was none."""
    for old in (" ".join(words[:2]), words[0]):
        group, _, name = old.partition(" ")
        if group == "bench" and name in MOVED_BENCHMARKS:
            return f"`fivefold {old}` is now `python -m benchmarks.{name}`, in a clone of the project"
        if old in MOVED_COMMANDS:
            now = "` or `fivefold ".join(MOVED_COMMANDS[old].split(" or "))
            return f"`fivefold {old}` is now `fivefold {now}`"
    return None


def _path(ctx: Any) -> list[str]:
    """The names of a command and of the groups above it, without the program's."""
    return [*_path(ctx.parent), ctx.info_name] if ctx.parent else []


def _explain(error: Any) -> list[str]:
    """A sentence for each unknown option that is a setting; none if the option of the error is not one."""
    from fivefold.job.aliases import option_meant
    from fivefold.job.config import SECTION_KEYS

    if sentence := _RENAMED_OPTIONS.get((" ".join(_path(error.ctx)), error.option_name)):
        return [sentence]
    params = error.ctx.command.params
    known = [name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("--")]
    sections = {name: SECTION_KEYS[name] for name in _SECTIONS_BY_COMMAND.get(error.ctx.command.name, SECTION_KEYS)}
    takes = next((param.metavar for param in params if "KEY=VALUE" in (param.metavar or "")), "")
    sentences: dict[str, str | None] = {}
    for index, word in enumerate(sys.argv):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name not in (*known, "--help"):
            words = [*([value] if equals else []), *sys.argv[index + 1 :]]
            sentences[name] = option_meant(name, words, known, takes, sections)
    return [sentence for sentence in sentences.values() if sentence] if sentences.get(error.option_name) else []
