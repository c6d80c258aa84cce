"""Other files of a Hugging Face directory, which go along with the weights: from there into a run, from a run into the
next one that starts from its weights, and into an export. Files are copied as they are; nothing in them is run.
"""

import os
from pathlib import Path

from fivefold.data.index import TOKENIZER
from fivefold.spec.hf import HF_CONFIG
from fivefold.support.errors import UserError
from fivefold.support.files import plain_name, read_regular
from fivefold.support.places import Place

# tokenizer.json has the whole of a fast tokenizer; of the others a model has those that its own tokenizer reads.
TOKENIZERS = (TOKENIZER, "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
CARRIED = (
    *TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_LARGEST = 1 << 26  # bytes of one: the largest tokenizer.json of published models has some 33 MB


def carry(source: Place, to: Path, names: tuple[str, ...] = (*CARRIED, HF_CONFIG)) -> list[str]:
    """Copy those of the files that a directory has; their names. One that is no file of its own is refused."""
    present: list[str] = []
    if not isinstance(source, Path):  # object storage has checkpoints alone
        return present
    for name in names:
        place = own_file(source, name)
        if not place.is_file():
            continue
        try:
            content = read_regular(place, _LARGEST, links=True)
        except OSError as error:
            raise UserError(f"cannot read {place}: {error.strerror or error}") from None
        (to / name).write_bytes(content)
        present.append(name)
    return present


def own_file(directory: Path, name: str) -> Path:
    """A file of a directory that others made: nothing elsewhere, and nothing that is no file. It may be missing.

    The hub's cache has links in its directories, to the `blobs` next to them.
    """
    if not plain_name(name):
        raise UserError(f"{directory} names the file {name[:200]!r}, which is not one of its own")
    place, home = directory / name, directory.resolve()
    homes = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    try:
        real = place.resolve()
    except RuntimeError:  # a link to itself
        real = Path()
    if not any(real.is_relative_to(allowed) for allowed in homes):
        raise UserError(f"{place} leads out of {directory}, to {real}; put the file itself there")
    if os.path.exists(real) and not real.is_file():
        raise UserError(f"{place} is not a regular file")
    return place
