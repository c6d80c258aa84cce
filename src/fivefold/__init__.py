"""Fivefold: one model, one data order, one loss curve, whatever the layout.

    import fivefold as ff

    ff.plan("llama3-70b", "8x8xH100").chosen.layout
    ff.draw("zb-v", pp=4, microbatches=8)         # a picture in a notebook; print() shows it in a terminal

Every name of fivefold/api.py is loaded when first used, so importing the package takes no time and needs no torch.
Functions take descriptions as objects or as text ("llama3-70b", "8x8xH100", "dp=2,tp=2"), print nothing, raise
UserError for bad input, and return results that print as tables, show themselves in a notebook and have `to_dict()`.
`ui` alone has no result: it prints the address of its page, and serves it until it is interrupted.
"""

from typing import TYPE_CHECKING

from fivefold.version import __version__ as __version__

if TYPE_CHECKING:
    from fivefold.api import *  # noqa: F403
else:

    def _homes() -> dict[str, str]:
        """The module of each name: the imports of api.py, which are read and not run."""
        import ast
        from pathlib import Path

        _, *imports = ast.parse(Path(__file__).with_name("api.py").read_text()).body
        return {alias.name: line.module for line in imports for alias in line.names}

    def __getattr__(name: str) -> object:
        import importlib

        if name == "__all__":
            return sorted(_homes())
        if (home := _homes().get(name)) is None:
            renamed = "; it is now planner_accuracy" if name == "truth" else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{renamed}")
        return globals().setdefault(name, _blaming(getattr(importlib.import_module(home), name)))

    def _blaming(found):
        """A function, whose user reads a sentence also where a plugin's own code fails inside of it."""
        import functools

        if isinstance(found, type):
            return found

        @functools.wraps(found)
        def call(*given, **options):
            try:
                return found(*given, **options)
            except (Exception, SystemExit) as error:
                from fivefold.support.plugins import plugin_error

                if (of_plugin := plugin_error(error)) is None:
                    raise
                raise of_plugin from error

        return call

    def __dir__() -> list[str]:
        return [*_homes(), "__all__", "__version__"]
