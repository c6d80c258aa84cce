"""`fivefold verify` compares a layout with one process; `fivefold dryrun` runs any rank of a layout without GPUs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fivefold.cli.options import (
    Html,
    Json,
    ModelWords,
    Picture,
    Seq,
    check_whole_layout,
    command_line,
    counting_bar,
    options_given,
    refuse,
    split_job_and_changes,
    stoppable,
    write_page,
)
from fivefold.render.blocks import TEXT_SUFFIXES, check_writable, console_of, show
from fivefold.support.errors import UserError
from fivefold.support.files import write

if TYPE_CHECKING:
    from fivefold.foreign.certificate import Certificate
    from fivefold.foreign.repeated import RepeatedCertificate
    from fivefold.verifier.verify import CurveResult

VERIFY = "Verify a layout against one process.  [dim]fivefold verify --layout dp=2,tp=2,zero=3[/]"
DRYRUN = (
    "Run any rank of any world without GPUs.  [dim]fivefold dryrun llama3-70b --layout dp=8,tp=8,zero=3,sp --batch 8[/]"
)


_Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE] [KEY=VALUE]...",
        help="Settings of the job, as for train; with --curve a job file; with --html what --json printed.",
        show_default=False,
    ),
]
_Batch = Annotated[
    int | None, typer.Option(help="Sequences per step; default: 8, or with --all twice --world if more.")
]
_Sample = Annotated[
    int | None, typer.Option(help="With --all: only this many, chosen to cover every pair of settings.")
]
_Repeat = Annotated[int, typer.Option(help="Repeat each check N times in the same processes, to catch rare failures.")]
_Curve = Annotated[bool, typer.Option("--curve", help="Train a job both ways instead, and compare the loss curves.")]
_Adapter = Annotated[
    str | None,
    typer.Option(
        "--adapter", metavar="FILE[:NAME]",
        help="Verify training code of your own, by a Python file that builds and steps it; words are its layouts.",
    ),
]  # fmt: skip
_Check = Annotated[
    Path | None, typer.Option("--check", metavar="CERTIFICATE", help="Repeat what --adapter certified with -o.")
]
_Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Write the result: .json, .txt; of --adapter also a badge: .svg, .png."),
]
_Timeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds for one layout, 120; with --adapter for each of its steps, 300; with --curve for each run, 3600.",
        show_default=False,
    ),
]


def verify(
    context: typer.Context,
    words: _Words = None,
    layout: Annotated[str | None, typer.Option(help="The layout to verify.", show_default="dp=2")] = None,
    model: Annotated[str, typer.Option(help="A preset; tiny ones are made narrower still.")] = "tiny",
    dtype: Annotated[str, typer.Option(help="Compute dtype: float32, bfloat16 or float64.")] = "float64",
    steps: Annotated[int, typer.Option(help="Optimizer steps; default with --adapter: 2.")] = 3,
    seq: Annotated[int, typer.Option(help="Tokens per sequence.")] = 32,
    batch: _Batch = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Device; on cuda, ranks may share a GPU.")] = "cpu",
    everything: Annotated[bool, typer.Option("--all", help="Verify every legal layout of --world ranks.")] = False,
    world: Annotated[int | None, typer.Option(help="With --all: how many ranks; default: 4.")] = None,
    sample: _Sample = None,
    jobs: Annotated[
        int, typer.Option(help="With --all: layouts to verify in parallel, on a machine with enough cores.")
    ] = 1,
    repeat: _Repeat = 1,
    curve: _Curve = False,
    adapter: _Adapter = None,
    check: _Check = None,
    seed: Annotated[int, typer.Option(help="With --adapter: of weights, dropout, and which batches.")] = 1234,
    timeout: _Timeout = None,
    output: _Output = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Verify that a layout computes what one process computes, and sends what it should.

    Starts the ranks on this machine and trains both from the same weights on
    the same data, which has unequal loss masks, a rank without any, and packed
    documents. Every step's loss, gradient norm and gradients are compared, and
    the parameters at the end; for experts also the routing, with the
    load-balancing losses turned on unless they are set.
    Collectives are counted and compared with closed forms. Exit code 0 if all
    agree, 1 if not.

    With --curve, a job is trained under its layout and in one process, and the losses
    are compared. A third run is the control: one process again, with the samples
    of every batch in another order, so that only the order of additions differs. The
    layout passes if it differs at most three times as much as the control. Nothing is
    saved. Exit code 0 if it passes, 1 if not.

    [dim]Examples:[/]

      fivefold verify --layout dp=2,tp=2,zero=3

      fivefold verify --layout cp=4,cp_kind=ulysses --model tiny-qwen3

      fivefold verify --layout dp=2,ep=2,zero=1 --model tiny-moe

      fivefold verify --layout dp=2,tp=2,ep=4 --model tiny-moe

      fivefold verify --layout tp=2,sp model.kv_heads=1 --dtype float32

      fivefold verify --layout dp=2,tp=2,pp=2,microbatches=4,schedule=zb-h1

      fivefold verify --all --world 4

      fivefold verify --all --world 8 --sample 30 --jobs 2 --json

      fivefold verify --layout dp=2,tp=2,zero=2 --repeat 100

    With --html, also write the proof as a self-contained page, or that of a file:

      fivefold verify --layout dp=2,tp=2,zero=3 --html proof.html

      fivefold verify --all --json > sweep.json; fivefold verify sweep.json --html sweep.html

      fivefold verify --curve job.toml layout=cp=4,cp_kind=ulysses train.steps=50

    Your own training code, on any framework, from an adapter of a page (docs/others.md):

      fivefold verify --adapter my_adapter.py -o certificate.json

      fivefold verify --adapter my_adapter.py -o badge.svg

      fivefold verify --adapter huggingface dp=2 fsdp=2

      fivefold verify --check certificate.json --adapter my_adapter.py

    Over NCCL, on a GPU that the ranks share (no figure of speed):

      fivefold verify --all --sample 60 --device cuda train.share_gpu=nccl train.compile=off
    """
    from fivefold.verifier.verify import verify as prove

    if adapter is None or check is not None:  # of the three results, a certificate alone can be drawn
        check_writable(output, *TEXT_SUFFIXES)
    if adapter is not None or check is not None:
        with stoppable("nothing is proven"):
            proof = _foreign(context, adapter, check, words or [], timeout)
        show(proof, as_json=as_json, output=output, remarks=[*_file_to_copy(adapter), *_certificate_page(proof, html)])
        return
    refuse(options_given(context, {"seed": "--seed"}), "is for --adapter; a job has train.seed")
    check_whole_layout(layout, words or [])
    file, changes = split_job_and_changes(words)
    if curve:
        show(_curve(context, file, changes, timeout), as_json=as_json, output=output)
        return
    if file is not None:
        _page(Path(file), changes or options_given(context, _PROOF_OPTIONS | _JOB_OPTIONS), html, as_json=as_json)
        return
    with stoppable("nothing is proven"), counting_bar() as progress:
        result = prove(
            layout, changes, model=model, dtype=dtype, steps=steps, seq=seq, batch=batch, device=device,
            everything=everything, world=world, sample=sample, jobs=jobs, repeat=repeat,
            timeout=120.0 if timeout is None else timeout, progress=progress,
        )  # fmt: skip
    show(result, as_json=as_json, output=output, remarks=[] if html is None else [write_page(result, html)])


def _foreign(
    context: typer.Context, adapter: str | None, check: Path | None, words: list[str], timeout: float | None
) -> "Certificate | RepeatedCertificate":
    """Verify somebody's own training code, or repeat what was certified of it."""
    from fivefold.foreign.verify import STEPS_OF_PROOF, TIMEOUT, check_certificate, verify_adapter

    options = _PROOF_OPTIONS | _JOB_OPTIONS
    ours = {name: option for name, option in options.items() if name not in _ADAPTER_OPTIONS}
    refuse(options_given(context, ours | {"curve": "--curve"}), "is for jobs of Fivefold, and --adapter for other code")
    limit = TIMEOUT if timeout is None else timeout
    layout = context.params["layout"]
    with counting_bar() as progress:
        if check is not None:
            given = [
                *options_given(context, {name: f"--{name}" for name in ("layout", "steps", "device", "seed")}),
                *words,
            ]
            refuse(given, "is what a certificate says itself; leave it out with --check")
            return check_certificate(check, adapter or "", timeout=limit, progress=progress)
        layouts = [*([layout] if layout else []), *words]
        steps = context.params["steps"] if options_given(context, {"steps": "--steps"}) else STEPS_OF_PROOF
        return verify_adapter(
            str(adapter), layouts, steps=steps, seed=context.params["seed"], device=context.params["device"],
            timeout=limit, progress=progress,
        )  # fmt: skip


def _file_to_copy(adapter: str | None) -> list[str]:
    """Where an adapter that ships lies: most adapters begin as a copy of one."""
    from fivefold.foreign.adapter import AdapterFile

    place = AdapterFile.of(adapter) if adapter else None
    return [f"the file of {place.text}, to copy for your own: {place.file}"] if place and place.ships else []


def _certificate_page(proof: "Certificate | RepeatedCertificate", html: Path | None) -> list[str]:
    """Write the page of a certificate, if one is wanted; what is to be said of it."""
    from fivefold.foreign.certificate import Certificate
    from fivefold.render.html import Section, to_page

    if html is None:
        return []
    certificate = proof if isinstance(proof, Certificate) else proof.now
    sections = [Section("Layouts", [*proof.blocks()]), Section("The record", [*certificate.record()])]
    write(html, to_page("Training code against one process", sections, {}))
    return [f"page written to {html}"]


# {parameter: option}: options that only a proof has, and options of the job that is proven or trained.
_PROOF_OPTIONS = {"everything": "--all"} | {name: f"--{name}" for name in ("world", "sample", "jobs", "repeat", "html")}
_JOB_OPTIONS = {
    name: f"--{name}" for name in ("layout", "model", "dtype", "steps", "seq", "batch", "device", "timeout")
}


_ADAPTER_OPTIONS = {"layout", "steps", "device", "timeout", "html"}
_SETTINGS = {"layout": "layout", "model": "model", "steps": "train.steps", "seq": "data.seq", "batch": "train.batch",
             "dtype": "train.dtype", "device": "train.device"}  # fmt: skip


def _curve(context: typer.Context, file: str | None, changes: list[str], timeout: float | None) -> "CurveResult":
    """Compare loss curves. Job options that were given become settings of the job that is trained."""
    from fivefold.verifier.verify import curve

    refuse(options_given(context, _PROOF_OPTIONS), "cannot be combined with --curve, which compares loss curves")
    settings = [
        f"{key}={context.params[name]}" for name, key in _SETTINGS.items() if options_given(context, {name: name})
    ]
    with console_of(stderr=True).status("three runs: one process, its control, the layout"):
        return curve(file, changes + settings, timeout=3600.0 if timeout is None else timeout)


def _page(file: Path, options: list[str], html: Path | None, *, as_json: bool) -> None:
    """Write the page of a proof from the output of `verify --json`; `options` are those that were given."""
    from fivefold.web.report import report

    others = [option for option in options if option != "--html"]
    if html is None:
        raise UserError(
            f"verify proves a layout, as in --layout dp=2; {file} is for --html, if `fivefold verify --json` wrote it, "
            "or for --curve, if it is a job file",
            "option.missing",
        )
    refuse(others, f"says what to prove, but {file} is a finished proof; leave one of them out")
    if file.is_dir():
        raise UserError(
            f"{file} is a directory; give what `fivefold verify --json` wrote, or a run to `inspect`", "file.read"
        )
    show(report(file, html, command_line()), as_json=as_json)


_Cluster = Annotated[
    str,
    typer.Option("--cluster", "-c", help="The cluster whose memory it must fit; default: the job's, or H100s."),
]
_Kernels = Annotated[
    Literal["cuda", "cpu"],
    typer.Option(help="Which kernels' saved activations to count; cpu matches train.count on CPUs."),
]
_Imbalance = Annotated[
    float | None,
    typer.Option(help="With experts: tokens routed to this rank / mean of its ep group; default: 1."),
]


def dryrun(
    words: ModelWords,
    layout: Annotated[str | None, typer.Option(help="dp=128,tp=8,pp=16,...; default: the job file's.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step; default: one for each microbatch.")] = None,
    seq: Seq = None,
    rank: Annotated[int | None, typer.Option(help="Rank to run; default: 0.")] = None,
    ranks: Annotated[str, typer.Option(help="Several ranks to run: 0,127,9001.")] = "",
    all_stages: Annotated[bool, typer.Option("--all-stages", help="Run one rank of every pipeline stage.")] = False,
    stages: Annotated[str, typer.Option(help="Run one rank of these pipeline stages: 0,3; or all.")] = "",
    cluster: _Cluster = "",
    kernels: _Kernels = "cuda",
    weights: Annotated[Path | None, typer.Option(help="Check that a Hugging Face directory has every weight.")] = None,
    imbalance: _Imbalance = None,
    output: Picture = None,
    as_json: Json = False,
) -> None:
    """Run one step of one rank: the same model, layers, pipeline, FSDP2 and optimizer.

    PyTorch's fake process group gives it a world of any size, and fake tensors
    need no memory. What it counts (bytes held and sent, FLOPs, messages) is shown
    next to the planner's figures, which are computed independently. Exit code 1 if the step
    does not fit into a device.

    [dim]Examples:[/]

      fivefold dryrun llama3-70b --layout dp=8,tp=8,zero=3,sp --rank 9 --batch 8

      fivefold dryrun llama3-405b --rank 9001 --batch 2048
          --layout dp=128,tp=8,pp=16,zero=1,sp,schedule=interleaved,chunks=8,microbatches=16

      fivefold dryrun llama3-8b --layout dp=2,pp=4,zero=1,microbatches=8 --batch 16 --all-stages -o memory.svg

      fivefold dryrun deepseek-v3 --layout dp=128,pp=16,ep=64,zero=1,microbatches=16,recompute=full
          --batch 2048 --rank 700 --imbalance 1.2

      fivefold dryrun job.toml --json
    """
    from fivefold.dry.run import dryrun as run

    check_whole_layout(layout, words)
    is_given = {"--rank": rank is not None, "--ranks": bool(ranks), "--stages": bool(stages) or all_stages}
    if len(given := [option for option, is_set in is_given.items() if is_set]) > 1:
        raise UserError(f"{' and '.join(given)} choose ranks in different ways; give one of them", "option.conflict")
    pipeline_ranks: Any = "all" if all_stages or stages == "all" else _numbers("--stages", stages, "all, or 0,3")
    with counting_bar() as progress:
        result = run(
            words[0], layout, changes=words[1:], batch=batch, seq=seq, kernels=kernels, weights=weights,
            rank=rank if rank is not None else _numbers("--ranks", ranks, "0,127,9001"), stages=pipeline_ranks,
            cluster=cluster, imbalance=imbalance, progress=progress,
        )  # fmt: skip
    show(result, as_json=as_json, output=output)


def _numbers(option: str, text: str, example: str) -> list[int] | None:
    """The numbers of an option; None if it is empty."""
    if not text:
        return None
    pieces = [piece.strip() for piece in text.split(",") if piece.strip()]
    if not pieces or not all(piece.isdigit() for piece in pieces):
        raise UserError(f"{option} {text} should be numbers with commas between them, like {example}", "option.numbers")
    return [int(piece) for piece in pieces]
