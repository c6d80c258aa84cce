"""Conversations: a line of JSONL is one, rendered by a model's chat template, with loss on the assistant's turns alone.

    {"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}       ShareGPT's names

The text of a conversation is tokenized once, as a whole, so that the ids are those that the model sees at inference. A
token carries loss if its first character is the assistant's. The first token of all never does: nothing is before it.
"""

import datetime
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from fivefold.data.chat_template import ChatTemplate, Span
from fivefold.data.documents import LOOK_AHEAD_BYTES, MAX_PROBLEMS, UNREADABLE, numbered_lines, type_name, unreadable
from fivefold.data.text_sources import Meter, TextSource
from fivefold.data.tokenizer import BATCH_CHARACTERS, BATCH_PIECES, Encoded, FileTokenizer, Tokenizer
from fivefold.support.errors import Problem, UserError
from fivefold.support.progress import prefetch
from fivefold.support.text import did_you_mean, either

EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
# Of the template, and so true of the next conversation, too; a process that took too much has ended.
_OF_THE_TEMPLATE = {"chat.time", "chat.memory", "chat.long", "chat.template", "chat.prefix", "chat.loss"}


class Chat(NamedTuple):
    """A conversation as text."""

    text: str
    spans: list[Span]  # of characters that carry loss
    place: str  # file and line


def encode_chats(
    sources: Sequence[TextSource], template: ChatTemplate, tokenizer: FileTokenizer, meter: Meter
) -> Generator[Encoded, None, None]:
    """Tokenized conversations, a batch at a time. They are read, rendered and encoded in a background thread."""
    chats = _chats(sources, template, meter)

    def step() -> Encoded | None:
        batch = _take(chats)
        return _encoded(batch, tokenizer, meter.read()) if batch else None

    with closing(prefetch(repeat(step))) as results:
        for encoded in results:
            if encoded is None:
                return
            yield encoded


def check_options(prompt_field: str | None, chat_template: Path | None, date: str, *, chat: bool) -> None:
    """What is given for conversations, or against them."""
    given = {"chat_template": chat_template is not None, "date": bool(date)}
    if not chat:
        alone = [name for name, is_given in given.items() if is_given]
        if alone:
            raise UserError(Problem("chat.option", f"{name} is for conversations; give --chat, too") for name in alone)
        return
    if prompt_field is not None:
        raise UserError(
            f"prompt_field={prompt_field!r} is of records; in a conversation the assistant's turns alone carry loss",
            "chat.prompt_field",
        )
    if date:
        try:
            datetime.date.fromisoformat(date)
        except ValueError:
            raise UserError(f"date={date!r} is not a date, such as 2026-01-31", "chat.date") from None


def with_places(tokenizer: Tokenizer) -> FileTokenizer:
    """A tokenizer that tells where in a text its tokens begin."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer
    raise UserError(
        f"the tokenizer {tokenizer.name!r} has no chat template, and a model no tokens of turns: give the model's own "
        "directory, with --tokenizer DIR",
        "chat.tokenizer",
    )


def check_kinds(sources: Sequence[TextSource]) -> None:
    """Conversations are lines of JSONL, and stand in no other kind of file."""
    if others := [source.path for source in sources if source.kind != "jsonl"]:
        raise UserError(
            Problem("chat.kind", f"{path} is not JSONL: with --chat, each line of a .jsonl (or .jsonl.gz) is {EXAMPLE}")
            for path in others[:MAX_PROBLEMS]
        )


# ---- records --------------------------------------------------------------------------------------------------------


def _chats(sources: Sequence[TextSource], template: ChatTemplate, meter: Meter) -> Iterator[Chat]:
    """All of them in order. After a first problem none is yielded: the input is read a little further, to name ten."""
    problems: list[Problem] = []
    first = 0  # bytes read at the first of them
    for item in _items(sources, template, meter):
        if not isinstance(item, Problem):
            if not problems:
                yield item
            elif meter.read() - first > LOOK_AHEAD_BYTES:
                break
            continue
        first = first if problems else meter.read()
        problems.append(item)
        if item.code in _OF_THE_TEMPLATE:
            break
        if len(problems) == MAX_PROBLEMS:
            stopped = f"stopped after {MAX_PROBLEMS} problems; there may be more"
            problems.append(Problem("problems.more", stopped))
            break
    if problems:
        raise UserError(problems)


def _items(sources: Sequence[TextSource], template: ChatTemplate, meter: Meter) -> Iterator[Chat | Problem]:
    for source in sources:
        try:
            with meter.open(source) as stream:
                for place, line in numbered_lines(source.path, stream):
                    yield line if isinstance(line, Problem) else _chat(place, line, template)
        except UNREADABLE as error:
            yield unreadable(source.path, error)


def _chat(place: str, line: bytes, template: ChatTemplate) -> Chat | Problem:
    try:
        text, spans = template.render(*conversation(line))
        if not any(end > begin for begin, end in spans):
            return Problem("chat.loss", f"{place}: {_nothing(template)}")
        return Chat(text, spans, place)
    except UserError as error:
        [code], [sentence] = error.codes, error.problems
        return Problem(code, f"{place}: {sentence}")


def _nothing(template: ChatTemplate) -> str:
    how = "its generation tags enclose nothing" if template.tags else "it writes nothing for an assistant's turn"
    return f"{template.where} leaves no character with loss: {how}"


def conversation(line: bytes) -> tuple[list[dict[str, Any]], Any]:
    """The messages of a record, and its tools."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"not JSON: {error}; a line is one conversation: {EXAMPLE}", "chat.record") from None
    if not isinstance(record, dict):
        raise UserError(f"a line is {type_name(record)}, and not a conversation: {EXAMPLE}", "chat.record")
    field = next((name for name in ("messages", "conversations") if name in record), None)
    if field is None:
        names = f"its fields are {either([*record])}" if record else "it is empty"
        raise UserError(f"no conversation: {names}, and a line is {EXAMPLE}", "chat.record")
    turns = record[field]
    if not isinstance(turns, list) or not turns:
        what = "an empty list" if turns == [] else type_name(turns)
        raise UserError(f"no conversation: {field} is {what}, and a line is {EXAMPLE}", "chat.record")
    messages = [_message(turn, f"message {place}", field) for place, turn in enumerate(turns, 1)]
    if not any(message["role"] == "assistant" for message in messages):
        roles = either(sorted({message["role"] for message in messages}))
        raise UserError(f"no turn of the assistant, and so nothing to learn: its roles are {roles}", "chat.assistant")
    return messages, record.get("tools")


def _message(turn: Any, place: str, field: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise UserError(f"{place} is {type_name(turn)}, and not an object with a role and a content", "chat.message")
    if field == "conversations" and "from" in turn:
        given, content = turn["from"], turn.get("value")
        role = SHAREGPT_ROLES.get(given) if isinstance(given, str) else None
        if role is None:
            hint = did_you_mean(str(given), [*SHAREGPT_ROLES])
            raise UserError(f"{place} is from {given!r}, whose role is not known; {hint}", "chat.role")
        turn = {"role": role, "content": content}
    role, content = turn.get("role"), turn.get("content")
    if not isinstance(role, str):
        what = "no role" if role is None else f"a role that is {type_name(role)}"
        raise UserError(f"{place} has {what}; it is one of 'system', 'user' and 'assistant'", "chat.role")
    if content is None and "tool_calls" in turn:
        return turn
    if not isinstance(content, str):
        what = "no content" if content is None else f"a content that is {type_name(content)}"
        raise UserError(f"{place} ({role}) has {what}; text alone is trained on", "chat.content")
    return turn


# ---- tokens ---------------------------------------------------------------------------------------------------------


def _take(chats: Iterator[Chat]) -> list[Chat]:
    batch: list[Chat] = []
    size = 0
    for chat in chats:
        batch.append(chat)
        size += len(chat.text)
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_PIECES:
            break
    return batch


def _encoded(batch: list[Chat], tokenizer: FileTokenizer, read: int) -> Encoded:
    """A piece for each stretch of tokens that all carry loss, or all carry none."""
    tokens, lengths, loss, ends = [], [], [], []
    for chat, (ids, begins) in zip(batch, tokenizer.encode_with_places([chat.text for chat in batch]), strict=True):
        mask = mask_of(chat.spans, begins)
        if not mask.any():
            raise UserError(f"{chat.place}: no token begins within an assistant's turn", "chat.loss")
        changes = np.flatnonzero(np.diff(mask)) + 1
        tokens.append(ids)
        lengths.append(np.diff(changes, prepend=0, append=len(ids)))
        loss.append(mask[np.concatenate(([0], changes))])
        ends.append(np.arange(len(changes) + 1) == len(changes))
    whole = [np.concatenate(part) for part in (tokens, lengths, loss, ends)]
    return Encoded(whole[0], whole[1], whole[2], whole[3], read)


def mask_of(spans: Sequence[Span], begins: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether tokens that begin at these characters carry loss."""
    borders = np.maximum.accumulate(np.array(spans, np.int64).reshape(-1))
    mask = np.searchsorted(borders, begins, side="right") % 2 == 1
    mask[:1] = False
    return mask
