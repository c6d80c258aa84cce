"""What tests of conversations share: a tokenizer with the words of turns, its templates, and conversations."""

import json
import random
import string
from pathlib import Path
from typing import Any

ROLES = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML = ROLES + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


def chat_model(directory: Path, template: str | None = CHATML) -> Path:
    """A tokenizer of characters, with some words of its own, as a model's directory has it."""
    import tokenizers

    directory.mkdir(parents=True, exist_ok=True)
    letters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n", "é"]
    vocab = {letter: number for number, letter in enumerate(letters)}
    merges = [("a", "s"), ("\n", "y")]  # the second joins what a turn's head ends with and what its answer begins with
    vocab |= {"".join(pair): len(vocab) + number for number, pair in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "model_max_length": 10**30, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def turns(*contents: str) -> dict[str, Any]:
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": content} for place, content in enumerate(contents)]
    return {"messages": messages}


def some_chats(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Of unlike lengths: 40 to 120 tokens, mostly."""
    draw = random.Random(seed)
    words = ["one", "two", "as", "yes", "no", "three", "and"]
    texts = lambda: " ".join(draw.choices(words, k=draw.randint(1, 5)))  # noqa: E731
    return [turns(*(texts() for _ in range(2 * draw.randint(1, 2)))) for _ in range(count)]


def write_chats(path: Path, chats: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return path
