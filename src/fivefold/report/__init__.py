"""What a command has found, and how it is shown: one result object, rendered for the terminal, as JSON, SVG and HTML.

class PlanResult(Result):
    def blocks(self): yield Text("..."); yield Table(["~layout", ">step"], rows)
    def to_dict(self): return {...}
    def scene(self): return Scene(...)      # where a picture helps: for svg(), -o x.svg and -o x.dark.png

show(result, as_json=False)                 # on the terminal, at whatever width it has
"""

from fivefold.report.blocks import Block, Cell, Drawing, Result, Table, Text, mark
from fivefold.report.show import show

__all__ = ["Block", "Cell", "Drawing", "Result", "Table", "Text", "mark", "show"]
