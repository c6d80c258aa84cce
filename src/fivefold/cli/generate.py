"""`fivefold generate`: text from a trained model."""

import json
from dataclasses import asdict
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from fivefold.support.dtypes import dtype_of
from fivefold.support.errors import UserError

SHORT = 'Generate text.  [dim]fivefold generate runs/demo --prompt "def "[/]'


def generate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|DIR", help="A run, a checkpoint, or a Hugging Face directory; a URL.", show_default=False
        ),
    ],
    prompt: Annotated[list[str] | None, typer.Option(help="The prompt; may be given several times.")] = None,
    tokens: Annotated[str | None, typer.Option(help="The prompt as token ids: 1,2,3.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", help="The largest number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(help="Of the sampling; 0: always take the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from this many most likely tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely tokens with this total probability; 1: all.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="Random seed: the same one samples the same text.")] = 0,
    layout: Annotated[str, typer.Option(help="tp and pp: processes of this machine that share the model.")] = "dp=1",
    step: Annotated[int | None, typer.Option(help="Which checkpoint; default: the newest complete one.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout: Annotated[float, typer.Option(help="Time limit, in seconds, of a layout with several ranks.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Continue a prompt, with the weights of a run or of a Hugging Face directory.

    Tokens are sampled; --temperature 0 takes the most likely one each time. The
    same seed samples the same tokens in any layout, up to rounding, and is said
    at the end, on standard error. Keys and values of earlier tokens are cached.

    [dim]Examples:[/]

      fivefold generate runs/demo --prompt "def main"

      fivefold generate runs/demo --prompt "import" --seed 7 --top-k 20 --layout tp=2,pp=2

      fivefold generate runs/demo --prompt "import" --temperature 0

      fivefold generate ~/models/Llama-3.2-1B --prompt "Once upon a time" -n 50 --json
    """
    from fivefold.generation.request import Request, Sampling
    from fivefold.generation.request import generate as run
    from fivefold.support.places import place_of

    if bool(prompt) == bool(tokens):
        raise UserError("give either --prompt or --tokens")
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    request = Request(place_of(source), step, layout, dtype_of(dtype), device, count, sampling, timeout)
    console = Console(highlight=False, soft_wrap=True)

    def stream(text: str) -> None:
        if not as_json:
            encoding = console.encoding  # which may know fewer letters than the model
            console.file.write(text.encode(encoding, "replace").decode(encoding))
            console.file.flush()

    answers = run(request, prompt or [], _numbers(tokens), stream)
    if as_json:
        how = msgspec.to_builtins(sampling)
        typer.echo(json.dumps([asdict(answer) | {"sampling": how} for answer in answers]))
    elif temperature:
        typer.echo(f"sampled with {sampling}", err=True)


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UserError(f"--tokens {text!r} is not a list of numbers; write for example --tokens 1,2,3") from None
