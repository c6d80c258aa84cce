"""`fivefold hf import` and `fivefold hf export`: Hugging Face directories to run directories, and back."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import Json, bytes_bar, command
from fivefold.cli.renamed import ExplainsUnknown
from fivefold.support.dtypes import DTYPE_BYTES, dtype_of
from fivefold.support.errors import UserError
from fivefold.support.plugins import options

if TYPE_CHECKING:
    from fivefold.checkpoint.manifest import Checkpoint
    from fivefold.job.config import Job

SHORT = "Import and export Hugging Face weights.  [dim]fivefold hf import DIR -o runs/llama[/]"
app = typer.Typer(
    cls=ExplainsUnknown,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Import and export Hugging Face directories.",
)

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kb": 10**3, "mb": 10**6, "gb": 10**9,
          "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}  # fmt: skip


@command(app, "import", "From config.json and safetensors.  [dim]fivefold hf import DIR -o runs/llama[/]")
def import_hf(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="config.json and *.safetensors.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Run directory to create.")],
    data: Annotated[
        Path | None, typer.Option(help="Tokens to train on, made with the model's tokenizer.", show_default=False)
    ] = None,
    job_file: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="JOB",
            help="Job file with the model, instead of config.json.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a run directory whose step 0 has the weights of a Hugging Face directory.

    Llama, Mistral, Qwen2.5, Qwen3 and GPT-2, in one file or many. Tensors are read
    one by one: the whole model is never in memory. The job.toml in the new directory
    fine-tunes the weights by a published recipe, which it names; `fivefold generate`
    generates text. Tokenizer, chat template and generation settings are kept for
    an export. Tokens of another tokenizer are refused. --model job.toml describes a
    model with a pattern for which transformers has no class.

    [dim]Examples:[/]

      fivefold hf import ~/models/Llama-3.2-1B -o runs/llama

      fivefold data prepare essays/ -o tokens/ --tokenizer runs/llama

      fivefold train runs/llama/job.toml data.path=tokens/

      fivefold data prepare --chat chats.jsonl -o chats/ --tokenizer Llama-3.2-1B

      fivefold hf import Llama-3.2-1B -o runs/chat --data chats/

      fivefold generate runs/llama --prompt "Once upon a time"
    """
    from fivefold.checkpoint.find import stored_job
    from fivefold.checkpoint.hf import import_hf as run_import
    from fivefold.checkpoint.hf_files import HuggingFace
    from fivefold.job.reading import read_job

    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory", "file.read")
    model = read_job(str(job_file), []).model if job_file else None
    count = HuggingFace(directory, model).spec.parameter_count
    with bytes_bar("importing", 4 * count) as advance:
        checkpoint = run_import(directory, output, advance, data, model)
    job, run = stored_job(checkpoint), shlex.quote(str(output))
    has_tokenizer = (output / "tokenizer.json").is_file()
    train = f"fivefold train {run}/job.toml" + (" data.path=TOKENS" if data is None else "")
    train += options(job.plugins)
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(checkpoint.path), "job": str(output / "job.toml"), "train": train}))
        return
    typer.echo(
        f"{checkpoint.path}; {output / 'job.toml'} fine-tunes it, in {job.train.dtype}, sequences of {job.data.seq} "
        f"tokens and a learning rate of {job.optimizer.lr:g}"
    )
    if data is None and has_tokenizer:
        typer.echo(f"prepare its data with: fivefold data prepare TEXT -o TOKENS --tokenizer {run}")
    typer.echo(f"train it with: {train}")


@command(app, "export", "For transformers' from_pretrained.  [dim]fivefold hf export runs/demo -o demo-hf[/]")
def export_hf(
    run: Annotated[
        str, typer.Argument(help="A run's directory, or one of its checkpoints; a URL.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to create.")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint; default: the newest complete one.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; default: as imported, else float32.")] = "",
    shard_size: Annotated[str, typer.Option(help="Largest size of one file: 4GB, 500MB.")] = "4GB",
    as_json: Json = False,
) -> None:
    """Write a checkpoint as config.json and safetensors; without a config.json if
    no model of transformers has the layers of its pattern.

    transformers.AutoModelForCausalLM.from_pretrained(DIR) gives the same logits.
    What an import brought along is exported again: dtype, tokenizer, chat template,
    generation settings, the tokens that begin and end a text. One file's tensors
    are in memory at a time, never the whole model.

    [dim]Examples:[/]

      fivefold hf export runs/demo -o demo-hf

      fivefold hf export runs/demo --step 100 -o demo-hf --dtype bfloat16 --shard-size 2GB
    """
    from fivefold.checkpoint.find import find, job_of
    from fivefold.checkpoint.hf import EXPORT_DTYPES, usual_dtype
    from fivefold.checkpoint.hf import export_hf as run_export

    if dtype and (dtype := dtype_of(dtype)) not in EXPORT_DTYPES:
        raise UserError(f"--dtype {dtype} is not one of {', '.join(EXPORT_DTYPES)}", "option.choice")
    checkpoint = find(run, step)
    if damage := checkpoint.damage():
        raise UserError(damage, "checkpoint.damaged")
    job = job_of(checkpoint)
    dtype = dtype or usual_dtype(checkpoint, job)
    limit, (tokenizer, end) = _parse_size(shard_size), _tokenizer_and_end(checkpoint, job)
    with bytes_bar("exporting", DTYPE_BYTES[dtype] * job.model.parameter_count) as advance:
        run_export(checkpoint, job.model, output, dtype, limit, tokenizer, end, advance)
    name, last_step = job.model.name, checkpoint.manifest.step
    figures = {"directory": str(output), "model": name, "step": last_step, "dtype": dtype}
    typer.echo(json.dumps(figures) if as_json else f"{output}: {name} after step {last_step}, in {dtype}")


def _parse_size(text: str) -> int:
    """Bytes of a size such as 4GB or 500MB."""
    digits = text.rstrip("kKmMgGiIbB")
    unit = text[len(digits) :].lower()
    try:
        size = float(digits) * _SIZES[unit]
    except (ValueError, KeyError):
        raise UserError(f"--shard-size {text} is not a size; write for example 4GB or 500MB", "option.type") from None
    if not size >= 1:
        raise UserError(f"--shard-size {text} holds nothing; write for example 4GB", "option.range")
    return int(size)


def _tokenizer_and_end(checkpoint: "Checkpoint", job: "Job") -> tuple[Path | None, int | None]:
    """The run's tokenizer.json, if it has one, and its end-of-text token, if that is known."""
    from fivefold.generation.request import text_of_run

    try:
        text = text_of_run(checkpoint, job)
    except UserError:  # the data is gone, or has its own tokens
        return None, None
    return text.file, text.end
