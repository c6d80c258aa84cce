"""Chat templates: where a model keeps its own, and a process of limited time and memory that renders with it.

    with closing(ChatTemplate.of(Path("Llama-3.2-1B-Instruct/tokenizer.json"))) as template:
        text, spans = template.render([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])

`spans` are the characters that the model is to write: those that carry loss. A template says so itself with
{% generation %} tags. Of one without, each assistant turn is what the text of the messages up to it has more than the
text of those before it, with the generation prompt; both must begin the whole text, or it is no such difference.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from fivefold.data.tokenizer import SETTINGS_FILE, tokenizer_settings
from fivefold.support.errors import Problem, UserError, not_installed
from fivefold.support.files import read_regular
from fivefold.support.text import bytes_text, si

TEMPLATE_FILE = "chat_template.jinja"
NAMES_FILE = "special_tokens_map.json"

SECONDS = 5.0  # of processor time, for one conversation: a thousand times what published templates take
MEMORY = 1 << 30  # bytes of the process
LONGEST = 1 << 25  # characters of a text
_SAFE_JINJA = (3, 1, 6)  # ends two escapes from the sandbox
_PATIENCE = 120.0  # seconds of the clock, for a process that does nothing
_MAX_TEMPLATE_BYTES = 1 << 22  # the longest published ones have some 20 kB
_KEPT_ENV = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME")  # where Python finds its packages, and no secret

Span = tuple[int, int]


class Answer(msgspec.Struct):
    """What the process says of a conversation."""

    text: str = ""
    spans: list[Span] = []
    tags: bool = False
    error: str = ""
    said: str = ""
    turn: int = 0
    alone: str = ""
    whole: str = ""


def _release(text: str) -> tuple[int, ...]:
    """The numbers that a version begins with."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


class ChatTemplate:
    """A template that is being used; `close` ends its process."""

    def __init__(self, source: str, where: str, names: dict[str, str], today: str = ""):
        self.where, self.sha256 = where, sha256(source.encode()).hexdigest()
        if not_installed("jinja2"):
            how = 'jinja2, which is not installed: pip install "fivefold[train]"'
            raise UserError(f"chat templates need {how}", "install.jinja2")
        if _release(version("jinja2")) < _SAFE_JINJA:
            how = f"{'.'.join(map(str, _SAFE_JINJA))} or later, whose sandbox has no known hole"
            raise UserError(f"jinja2 {version('jinja2')} is installed, and chat templates need {how}", "install.jinja2")
        limits = {"seconds": SECONDS, "memory": MEMORY, "longest": LONGEST}
        self._rest = b""
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("template_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT_ENV if name in os.environ},
        )
        try:
            answer = self._ask({"template": source, "names": names, "today": today, **limits})
            self.tags = answer.tags
            if answer.error:
                raise UserError(self._problem(answer))
        except BaseException:
            self.close()
            raise

    @classmethod
    def of(cls, tokenizer: Path, given: Path | None = None, today: str = "") -> "ChatTemplate":
        """The template of a tokenizer.json's model, or `given` in its place; the model's special tokens with it."""
        settings = tokenizer_settings(tokenizer.parent)
        source, where = _read(given) if given is not None else _own(tokenizer.parent, settings)
        names = _special(tokenizer_settings(tokenizer.parent, NAMES_FILE)) | _special(settings)
        return cls(source, where, names, today)

    def render(self, messages: list[Any], tools: Any = None) -> tuple[str, list[Span]]:
        """The text, and which characters of it carry loss; UserError says why there is none."""
        answer = self._ask({"messages": messages, "more": {"tools": tools, "documents": None}})
        if answer.error:
            raise UserError(self._problem(answer))
        return answer.text, answer.spans

    def close(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was not yet sent
                    pipe.close()
        self._process.wait()

    # ---- the process -------------------------------------------------------------------------------------------------

    def _ask(self, request: dict[str, Any]) -> Answer:
        pipe = self._process.stdin
        assert pipe is not None
        try:
            pipe.write(msgspec.json.encode(request) + b"\n")
            pipe.flush()
            return msgspec.json.decode(self._line(), type=Answer)
        except (BrokenPipeError, EOFError):
            return Answer(error=self._end())
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # half of a character, for example
            return Answer(error="failed", said=f"its text cannot be sent: {error}")

    def _line(self) -> bytes:
        """The process's next line, or EOFError where it has ended or does not answer."""
        assert self._process.stdout is not None
        handle, parts, last = self._process.stdout.fileno(), [self._rest], time.monotonic() + _PATIENCE
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while b"\n" not in parts[-1]:
            if not poll.poll(max(0.0, last - time.monotonic()) * 1000) or not (part := os.read(handle, 1 << 20)):
                raise EOFError
            parts.append(part)
        end, _, self._rest = parts[-1].partition(b"\n")
        return b"".join([*parts[:-1], end])

    def _end(self) -> str:
        """Why a process is not there any more."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "time"
        return "time" if code == -signal.SIGPROF else "ended"

    def _problem(self, answer: Answer) -> Problem:
        where, turn = self.where, f"message {answer.turn + 1}"
        tags = "nearest: a template that marks them with {% generation %} tags, by --chat-template FILE"
        match answer.error:
            case "refused":
                return Problem("chat.refused", f"{where} refuses it: {answer.said!r}")
            case "time":
                slow = f"{where} takes more than {SECONDS:g} s of processor time for one conversation, and was ended"
                return Problem("chat.time", f"{slow}; another template can be given by --chat-template FILE")
            case "ended":
                what = f"the process that renders {where} ended with code {self._process.returncode}"
                return Problem("chat.ended", f"{what}, for want of memory or from outside; nothing has been written")
            case "memory":
                return Problem(
                    "chat.memory", f"{where} needs more than {bytes_text(MEMORY)} of memory for one conversation"
                )
            case "long":
                return Problem("chat.long", f"{where} writes more than {si(LONGEST)} characters for one conversation")
            case "prefix.prompt":
                what = f"{where} does not begin the whole text with that of the messages before {turn} and its prompt"
                return Problem("chat.prefix", f"{what}: {answer.alone!r} is not {answer.whole!r}; {tags}")
            case "prefix.turn":
                what = f"{where} writes {turn} otherwise where more messages follow: {answer.alone!r}, then"
                return Problem("chat.prefix", f"{what} {answer.whole!r}; {tags}")
        date = "; --date 2026-01-31 gives it a date, whenever it is run" if "strftime_now" in answer.said else ""
        return Problem("chat.template", f"{where} fails: {answer.said}{date}")


# ---- files ----------------------------------------------------------------------------------------------------------


def _own(directory: Path, settings: dict[str, Any]) -> tuple[str, str]:
    """A model's own template: a file of its own, or in the tokenizer's settings."""
    if (directory / TEMPLATE_FILE).is_file():
        return _read(directory / TEMPLATE_FILE)
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name: for tools, for retrieval
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if isinstance(found, str):
        return found, f"the chat template of {directory / SETTINGS_FILE}"
    raise UserError(
        f"{directory} has no chat template, neither {TEMPLATE_FILE} nor a chat_template in {SETTINGS_FILE}: base "
        "models have none; nearest: the template of the model's instruct variant, by --chat-template FILE",
        "chat.template.missing",
    )


def _read(path: Path) -> tuple[str, str]:
    try:
        return read_regular(path, _MAX_TEMPLATE_BYTES, links=True).decode(), f"the chat template {path}"
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", "file.read") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a chat template: it is not UTF-8", "chat.template") from None


def _special(table: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, which templates write."""
    found = {}
    for name, value in table.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
