"""A pickle read as plain data, as a person would read its listing: nothing that it names is imported, made or called.

    plain(data, {"torch.Size"})     # a call of torch.Size is Made("torch.Size", arguments)

Python's own reader runs what a file says. Here an opcode puts text, whole numbers, tuples, lists and dicts on a stack,
or a `Made`: the name of what would have been made, and of what. Names outside those given are refused, and so is every
opcode that the two kinds of pickle in old checkpoints do not have. Nothing recurses; memory is bounded by the file's.
"""

import pickletools
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

PERSISTENT = "persistent id"  # what a BINPERSID makes
_DEEPEST = 32  # marks within marks
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Name:
    text: str


@dataclass(eq=False)  # by itself: an object may be the key of a dict
class Made:
    """An object that a pickle describes."""

    kind: str
    arguments: tuple[Any, ...]
    state: Any = None


def plain(data: bytes, names: Set[str]) -> Any:
    """ValueError for anything else than data and objects of these names ("module.name")."""
    machine = _Machine(names)
    try:
        for opcode, argument, position in pickletools.genops(data):
            if opcode.name == "STOP":
                if position != len(data) - 1 or len(machine.stack) != 1 or machine.marks:
                    raise ValueError("something is left over")
                return machine.stack[0]
            machine.do(opcode.name, argument)
    except (IndexError, KeyError, TypeError, AttributeError):
        raise ValueError("it is not the listing of an object") from None
    raise ValueError("it does not end")


class _Machine:
    def __init__(self, names: Set[str]):
        self.names = names
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def do(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        if opcode in ("PROTO", "FRAME"):
            return
        if opcode in _VALUES:
            stack.append(argument)
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if opcode == "EMPTY_LIST" else {})
        elif opcode == "MARK":
            if len(self.marks) == _DEEPEST:
                raise ValueError("it is nested too deeply")
            self.marks.append(len(stack))
        elif opcode in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            self.memo[len(self.memo) if opcode == "MEMOIZE" else argument] = stack[-1]
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif opcode == "TUPLE":
            items = self._since_mark()
            stack.append(tuple(items))
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            stack[-count:] = [tuple(stack[-count:])]
        elif opcode in ("GLOBAL", "STACK_GLOBAL"):
            self._name(argument.split(" ") if opcode == "GLOBAL" else [stack.pop(-2), stack.pop()])
        else:
            self._fill(opcode)

    def _fill(self, opcode: str) -> None:
        """What makes an object, and what puts things into one."""
        stack = self.stack
        if opcode in ("REDUCE", "NEWOBJ"):
            arguments, kind = stack.pop(), stack.pop()
            if type(kind) is not Name or type(arguments) is not tuple:
                raise ValueError("it calls what is no name")
            stack.append(Made(kind.text, arguments))
        elif opcode == "BINPERSID":
            stack.append(Made(PERSISTENT, (stack.pop(),)))
        elif opcode == "BUILD":
            state = stack.pop()
            if type(stack[-1]) is not Made or stack[-1].state is not None:
                raise ValueError("it fills what is no new object")
            stack[-1].state = state
        elif opcode in ("APPENDS", "APPEND"):
            items = self._since_mark() if opcode == "APPENDS" else [stack.pop()]
            if type(stack[-1]) is not list:
                raise ValueError("it appends to what is no list")
            stack[-1].extend(items)
        elif opcode in ("SETITEMS", "SETITEM"):
            items = self._since_mark() if opcode == "SETITEMS" else [stack.pop(-2), stack.pop()]
            if type(stack[-1]) is not dict or any(type(key) not in (str, Made) for key in items[::2]):
                raise ValueError("it has a dict of other things than names")
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        else:
            raise ValueError(f"it has the opcode {opcode}")

    def _since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def _name(self, parts: list[Any]) -> None:
        if not all(type(part) is str for part in parts):  # nor printed: a few bytes can describe something vast
            raise ValueError("it names what is no text")
        if (name := ".".join(parts)) not in self.names:
            raise ValueError(f"it names {name[:200]}, which a checkpoint has no use for")
        self.stack.append(Name(name))
