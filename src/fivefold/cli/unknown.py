"""Settings that are typed as options, `fivefold train --steps 5`: the answer is what to type."""

import sys
from typing import Any

from typer.core import TyperGroup

from fivefold.support.errors import UserError


class Explaining(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # By its name: the class is click's in some releases of Typer, and Typer's own copy in others.
            if type(error).__name__ == "NoSuchOption" and (problems := _explained(error)):
                raise UserError(problems) from None
            raise


def _explained(error: Any) -> list[str]:
    """What to write for each option that the command does not have; nothing if the first is no setting either."""
    from fivefold.job.aliases import option_meant
    from fivefold.job.config import KEYS

    params = error.ctx.command.params
    known = [name for one in params for name in (*one.opts, *one.secondary_opts) if name.startswith("--")]
    takes = next((one.metavar for one in params if "KEY=VALUE" in (one.metavar or "")), "")
    found: dict[str, str | None] = {}
    for at, word in enumerate(sys.argv):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name not in (*known, "--help"):
            words = [*([value] if equals else []), *sys.argv[at + 1 :]]
            found[name] = option_meant(name, words, known, takes, KEYS)
    return [sentence for sentence in found.values() if sentence] if found.get(error.option_name) else []
