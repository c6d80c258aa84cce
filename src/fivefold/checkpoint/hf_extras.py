"""Files of a Hugging Face directory besides the weights, such as the tokenizer's.

They are copied with the weights: into the run of an import, into a run that starts from its weights, and into an
export. Files are copied as they are; nothing in them is executed.
"""

import os
from pathlib import Path

from fivefold.data.index import TOKENIZER_FILE
from fivefold.spec.hf import HF_CONFIG
from fivefold.support.errors import UserError
from fivefold.support.files import plain_name, read_regular
from fivefold.support.storage_place import Place

# tokenizer.json is a complete fast tokenizer; the others are of slow tokenizers, and a model has some of them.
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
CARRIED_FILES = (
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_MAX_BYTES = 1 << 26  # of a file: the largest tokenizer.json of published models has some 33 MB


def copy_extras(source: Place, to: Path, names: tuple[str, ...] = (*CARRIED_FILES, HF_CONFIG)) -> list[str]:
    """Copies the files of these names that a directory has, and returns their names."""
    present: list[str] = []
    if not isinstance(source, Path):  # object storage has only checkpoints
        return present
    for name in names:
        place = own_file(source, name)
        if not place.is_file():
            continue
        try:
            content = read_regular(place, _MAX_BYTES, links=True)
        except OSError as error:
            raise UserError(f"cannot read {place}: {error.strerror or error}", "file.read") from None
        (to / name).write_bytes(content)
        present.append(name)
    return present


def own_file(directory: Path, name: str) -> Path:
    """The path of a file in a directory that others made; it may be missing.

    Raises UserError if it is outside of the directory, or is not a regular file. The directories of the hub's cache
    have links to the `blobs` next to them, which are allowed.
    """
    if not plain_name(name):
        raise UserError(f"{directory} names the file {name[:200]!r}, which is not one of its own", "hf.file.outside")
    place, home = directory / name, directory.resolve()
    allowed = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    try:
        real = place.resolve()
    except RuntimeError:  # a link to itself
        real = Path()
    if not any(real.is_relative_to(parent) for parent in allowed):
        raise UserError(f"{place} leads out of {directory}, to {real}; put the file itself there", "hf.file.outside")
    if os.path.exists(real) and not real.is_file():
        raise UserError(f"{place} is not a regular file", "file.read")
    return place
