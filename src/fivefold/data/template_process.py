"""The process in which a chat template is rendered: run as a file, it reads a template and conversations from standard
input, and writes texts to standard output, each a line of JSON.

A template comes with a model, and so from a stranger. Jinja's sandbox keeps it from attributes that lead into the
interpreter, and from changing what it is given. It is the only wall: what gets through it has this user's rights, and
releases before 3.1.6, which are known to have holes, are refused. What a sandbox does not see to is seen to here: the
processor time of a rendering, the memory of the process, the size of a text. A process that is ended for one of these
says nothing, and its parent (`data/chat_template.py`) says it in its place.

It imports nothing of Fivefold, so that it starts in a tenth of a second.
"""

import json
import resource
import secrets
import signal
import sys
from collections.abc import Callable
from datetime import date
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Span = tuple[int, int]  # of characters, [begin, end)

_BEGIN, _END = "<", ">"


class _Refused(Exception):
    """What a template raises of its own accord: of the roles that it does not take, for example."""


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what stands between them is what the model is to write.

    Both ends are marked in the text with a word that nobody can guess. Marks travel through macros, loops and blocks,
    where counting characters would not."""

    tags = {"generation"}  # noqa: RUF012
    word = secrets.token_hex(16)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{self.word}{_BEGIN}{caller()}{self.word}{_END}"


class Templates(ImmutableSandboxedEnvironment):
    """The names and filters that published templates use."""

    def __init__(self, today: str):
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"], cache_size=0
        )
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        if today:  # without it, templates fall back to a date of their own: the clock is no input of a preparation
            self.globals["strftime_now"] = date.fromisoformat(today).strftime


def _raise(message: object) -> None:
    raise _Refused(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def spans_of(marked: str) -> tuple[str, list[Span]]:
    """The text without marks, and where they stood. Of marks within marks, the outer ones."""
    pieces = marked.split(Generation.word)
    parts, spans, at, depth, begin = [pieces[0]], [], len(pieces[0]), 0, 0
    for piece in pieces[1:]:
        if piece[0] == _BEGIN:
            begin, depth = (begin if depth else at), depth + 1
        else:
            depth -= 1
            if not depth:
                spans.append((begin, at))
        parts.append(piece[1:])
        at += len(piece) - 1
    if depth:
        raise ValueError("a filter has cut what a generation tag encloses")
    return "".join(parts), spans


class Renderer:
    """One template, and the limits of each rendering."""

    def __init__(self, source: str, today: str, names: dict[str, Any], longest: int):
        self.template, self.names, self.longest = Templates(today).from_string(source), names, longest
        self.tags = "endgeneration" in source

    def render(self, messages: list[Any], more: dict[str, Any], *, prompt: bool = False) -> str:
        """The text, marks included. It is counted while it grows."""
        size, parts = 0, []
        names = {**self.names, **more, "messages": messages, "add_generation_prompt": prompt}
        for part in self.template.generate(names):
            size += len(part)
            if size > self.longest:
                raise OverflowError
            parts.append(part)
        return "".join(parts)

    def answer(self, messages: list[Any], more: dict[str, Any]) -> dict[str, Any]:
        text, spans = spans_of(self.render(messages, more))
        if not self.tags:
            spans = []
            for place, message in enumerate(messages):
                if message["role"] != "assistant":
                    continue
                before = self.render(messages[:place], more, prompt=True)
                after = self.render(messages[: place + 1], more)
                for kind, part in (("prompt", before), ("turn", after)):
                    if not text.startswith(part):
                        shared = next(
                            (at for at, (a, b) in enumerate(zip(text, part, strict=False)) if a != b), len(text)
                        )
                        around = slice(max(0, shared - 20), shared + 20)
                        return {"error": f"prefix.{kind}", "turn": place, "alone": part[around], "whole": text[around]}
                spans.append((len(before), max(len(before), len(after))))
        return {"text": text, "spans": spans}


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it returns, or why it did not. Only words go back: nothing of a template's is ever an object elsewhere."""
    try:
        return work()
    except _Refused as error:
        return {"error": "refused", "said": str(error)[:500]}
    except OverflowError as error:
        return {"error": "failed", "said": str(error)} if str(error) else {"error": "long"}
    except MemoryError:
        return {"error": "memory"}
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        return {"error": "failed", "said": f"{f'line {line}: ' if line else ''}{str(error)[:500]}"}
    except RecursionError:
        return {"error": "failed", "said": "it calls itself without end"}
    except Exception as error:  # of a template's own doing: a sum of a text and a number, say
        return {"error": "failed", "said": f"{type(error).__name__}: {str(error)[:500]}"}


def limited(seconds: float, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """With processor time that the kernel measures, and ends the process by: also in the middle of one operation, and
    however little of the processor it is given."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return attempt(work)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    first = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (first["memory"], first["memory"]))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    made: list[Renderer] = []

    def make() -> dict[str, Any]:
        made.append(Renderer(first["template"], first["today"], first["names"], first["longest"]))
        return {"tags": made[0].tags}

    reply(limited(first["seconds"], make))
    for line in sys.stdin if made else ():
        # Reading it is a part of the work: what is too deep or too large for that is said, too.
        reply(limited(first["seconds"], lambda given=line: made[0].answer(**json.loads(given))))  # type: ignore[misc]


if __name__ == "__main__":
    main()
