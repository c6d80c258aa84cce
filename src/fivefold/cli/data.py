"""`fivefold data`: turn text into token files, and check them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fivefold.support.text import bytes_text, si

SHORT = "Token files.  [dim]fivefold data prepare essays/ -o tokens/; fivefold data check tokens/[/]"

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help="Token files for training.")


@app.command(short_help="Tokenize text, JSONL or parquet.  [dim]fivefold data prepare essays/ -o tokens/[/]")
def prepare(
    inputs: Annotated[list[Path], typer.Argument(help="Text files, .jsonl, .jsonl.gz, .parquet, or directories.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to make.")],
    tokenizer: Annotated[str, typer.Option(help="A Hugging Face tokenizer.json, or 'bytes'.")] = "bytes",
    eos: Annotated[str | None, typer.Option(help="End-of-document token or its id, if not found by itself.")] = None,
    text_field: Annotated[str, typer.Option(help="Field of a record that holds its text.")] = "text",
    prompt_field: Annotated[str | None, typer.Option(help="Field whose text comes first and carries no loss.")] = None,
    valid: Annotated[float, typer.Option(help="Share of documents to hold out for validation.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Chooses the documents that are held out.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing token directory.")] = False,
) -> None:
    """Tokenize files into shards with an index and checksums.

    One document per text file or record, each followed by an end-of-document
    token. A record may give "segments": \\[{"text": ..., "loss": false}, ...]
    instead of its text: segments without loss are context only. For bytes, the
    disk and SHA-256 limit the speed; for a tokenizer, its library does.

    [dim]Examples:[/]

      fivefold data prepare essays/ more.jsonl.gz -o tokens/ --valid 0.05

      fivefold data prepare web.parquet -o tokens/ --tokenizer tokenizer.json

      fivefold data prepare chats.jsonl -o tokens/ --prompt-field question
    """
    from fivefold.data.prepare import prepare as run
    from fivefold.support.progress import bar

    with bar("tokenizing") as progress:
        done = run(
            inputs,
            out,
            tokenizer=tokenizer,
            eos=int(eos) if eos and eos.isascii() and eos.isdigit() else eos,
            text_field=text_field,
            prompt_field=prompt_field,
            valid=valid,
            seed=seed,
            overwrite=overwrite,
            progress=progress,
        )
    Console(highlight=False).print(
        f"{done.out}: {si(done.tokens)} tokens of {done.documents} documents ({done.valid_documents} held out) from "
        f"{bytes_text(done.bytes_read)} in {done.seconds:.1f} s, {done.megabytes_per_second:.0f} MB/s"
        + (f"; {done.empty_documents} empty documents left out" if done.empty_documents else ""),
        soft_wrap=True,
        markup=False,
    )


@app.command(short_help="Hash every file and scan every id.  [dim]fivefold data check tokens/[/]")
def check(path: Annotated[Path, typer.Argument(help="A directory made by 'fivefold data prepare'.")]) -> None:
    """Hash every file against the index, and look for ids beyond the vocabulary.

    [dim]Example:[/]

      fivefold data check tokens/
    """
    from fivefold.data.integrity import verify
    from fivefold.data.tokens import TokenStore
    from fivefold.support.progress import bar

    store = TokenStore.open(path)
    with bar("hashing") as progress:
        verify(store, progress=progress)
    files = store.index.files()
    size = bytes_text(sum(file.bytes for file in files))
    Console(highlight=False).print(f"{path}: {len(files)} files, {size}, all as written", markup=False)
