"""`fivefold data`: turn text into token files, and check them."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import Json, command
from fivefold.cli.renamed import ExplainsUnknown
from fivefold.render.blocks import console_of
from fivefold.support.text import bytes_text, si

SHORT = "Prepare and check token files.  [dim]fivefold data prepare essays/ -o tokens/; fivefold data check tokens/[/]"

app = typer.Typer(
    cls=ExplainsUnknown, no_args_is_help=True, rich_markup_mode="rich", help="Prepare and check token files."
)


@command(app, "prepare", "Tokenize text, JSONL or parquet.  [dim]fivefold data prepare essays/ -o tokens/[/]")
def prepare(
    inputs: Annotated[list[Path], typer.Argument(help="Text files, .jsonl, .jsonl.gz, .parquet, or directories.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to create.")],
    tokenizer: Annotated[
        str, typer.Option(help="A Hugging Face tokenizer.json or its directory, or 'bytes'.")
    ] = "bytes",
    eos: Annotated[str | None, typer.Option(help="End-of-document token or id, if the tokenizer names none.")] = None,
    text_field: Annotated[str, typer.Option(help="Field of a record that holds its text.")] = "text",
    prompt_field: Annotated[
        str | None, typer.Option(help="Field with the prompt, which comes first and carries no loss.")
    ] = None,
    valid: Annotated[float, typer.Option(help="Fraction of documents to hold out for validation.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed that selects the held-out documents.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Lines of JSONL are conversations: loss on the assistant's turns alone.")
    ] = False,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja template in place of the tokenizer's own.", show_default=False)
    ] = None,
    date: Annotated[str, typer.Option(help="Today, for templates that write it: 2026-01-31.", show_default=False)] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing token directory.")] = False,
    as_json: Json = False,
) -> None:
    """Tokenize files into shards with an index and checksums.

    One document per text file or record, each followed by an end-of-document
    token. A record may give "segments": \\[{"text": ..., "loss": false}, ...]
    instead of its text: segments without loss are context only. Speed is limited by
    the disk and SHA-256 for bytes, and by the tokenizer's library otherwise.

    With --chat a line is a conversation, {"messages": \\[{"role": ..., "content":
    ...}, ...]}. The model's chat template renders it, in a process of limited time
    and memory; data.source=packed trains on whole conversations.

    [dim]Examples:[/]

      fivefold data prepare essays/ more.jsonl.gz -o tokens/ --valid 0.05

      fivefold data prepare web.parquet -o tokens/ --tokenizer tokenizer.json

      fivefold data prepare questions.jsonl -o tokens/ --prompt-field question

      fivefold data prepare --chat chats.jsonl -o chats/ --tokenizer runs/llama
    """
    from fivefold.data.prepare import prepare as run
    from fivefold.support.progress import bar

    with bar("tokenizing") as progress:
        result = run(
            inputs,
            output,
            tokenizer=tokenizer,
            eos=int(eos) if eos and eos.isascii() and eos.isdigit() else eos,
            text_field=text_field,
            prompt_field=prompt_field,
            valid=valid,
            seed=seed,
            overwrite=overwrite,
            progress=progress,
            chat=chat,
            chat_template=chat_template,
            date=date,
        )
    if as_json:
        typer.echo(json.dumps(asdict(result) | {"out": str(result.out)}))
        return
    console_of().print(
        f"{result.out}: {si(result.tokens)} tokens of {result.documents} documents ({result.valid_documents} held out) "
        f"from {bytes_text(result.bytes_read)} in {result.seconds:.1f} s, {result.megabytes_per_second:.0f} MB/s"
        + (f"; {result.empty_documents} empty documents left out" if result.empty_documents else ""),
        markup=False,
    )
    if chat:
        console_of().print(
            f"{result.loss_tokens / result.tokens:.0%} of the tokens carry loss, and the longest conversation has "
            f"{result.longest}; train with: data.source=packed data.path={shlex.quote(str(result.out))}",
            markup=False,
        )


@command(app, "check", "Hash every file and scan every id.  [dim]fivefold data check tokens/[/]")
def check(
    path: Annotated[Path, typer.Argument(help="A directory made by 'fivefold data prepare'.")], as_json: Json = False
) -> None:
    """Hash every file, compare it with the index, and look for ids beyond the vocabulary.

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
    size = sum(file.bytes for file in files)
    if as_json:
        typer.echo(json.dumps({"directory": str(path), "files": len(files), "bytes": size}))
        return
    console_of().print(f"{path}: {len(files)} files, {bytes_text(size)}, all as written", markup=False)
