"""Generates text for prompts, in this process or on the ranks of a layout."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fivefold.checkpoint.find import find, job_of, run_of
from fivefold.checkpoint.manifest import Checkpoint
from fivefold.data.base import DataSource, prepared_by
from fivefold.data.index import read_index
from fivefold.data.integrity import check_file
from fivefold.data.tokenizer import ByteTokenizer, end_tokens, load_tokenizer
from fivefold.generation.sampling import Sampler, Sampling
from fivefold.job.config import Job, TrainConfig
from fivefold.launch import processes
from fivefold.launch.local import check_sharing
from fivefold.layout.layout import Layout
from fivefold.spec.hf import END_NAMED_IN
from fivefold.spec.kinds import WANTED_CACHE
from fivefold.support.dtypes import DTYPES
from fivefold.support.errors import Problem, UserError
from fivefold.support.plugin_calls import ask
from fivefold.support.ranges import MAX_SECONDS, misfit, within
from fivefold.support.storage_place import Place

# ---- text -----------------------------------------------------------------------------------------------------------
# Prompts to tokens and back: bytes, or a tokenizer.json.


class GeneratedText:
    """Encodes prompts and decodes generated tokens."""

    def __init__(self, file: Path | None):
        """`file`: a tokenizer.json; None: a token is a byte."""
        self.file = file
        if file is None:
            self.end = ByteTokenizer.end
            return
        import tokenizers

        self.end = load_tokenizer(file).end
        self.tokenizer = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        raw = text.encode("utf-8", "surrogateescape")  # an argument from a shell may not be UTF-8
        if self.file is None:
            return list(raw)
        ids: list[int] = self.tokenizer.encode(raw.decode("utf-8", "replace"), add_special_tokens=False).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        ids = [token for token in ids if token != self.end]
        if self.file is None:
            return bytes(token for token in ids if token < 256).decode(errors="replace")
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def text_of_run(checkpoint: Checkpoint, job: Job) -> GeneratedText:
    """The tokenizer of a run. An imported run that was not trained since has no data."""
    return text_of(run_of(checkpoint), job.data if checkpoint.manifest.data else None, job.model.vocab)


def text_of(directory: Place, data: DataSource | None, vocab: int) -> GeneratedText:
    """The tokenizer in the directory of a run or of a Hugging Face model; else that of the `data` it was trained on."""
    if isinstance(directory, Path) and (directory / "tokenizer.json").is_file():
        return GeneratedText(directory / "tokenizer.json")
    for prepared in prepared_by(data) if data is not None else ():
        file = read_index(prepared).tokenizer_file
        if file and (finding := check_file(prepared, file)):
            raise UserError(finding.sentence, "data.file.damaged")
        return GeneratedText(prepared / file.name if file else None)
    if vocab == ByteTokenizer.vocab:
        return GeneratedText(None)
    raise UserError(
        f"{directory} has no tokenizer.json, and its vocabulary of {vocab} is not that of bytes; put the file there, "
        "or give the prompt as numbers: --tokens 1,2,3",
        "generate.tokenizer",
    )


# ---- request --------------------------------------------------------------------------------------------------------


_LAYOUT_SETTINGS = {"tp", "pp", "split", "ep", "dispatch"}


@dataclass(frozen=True)
class Request:
    source: Place
    step: int | None
    layout: str
    dtype: str
    device: str
    count: int
    sampling: Sampling
    timeout: float
    share_gpu: str = "gloo"  # the backend of ranks that share a GPU


@dataclass(frozen=True)
class Completion:
    prompt: str
    text: str
    prompt_tokens: list[int]
    tokens: list[int]


def generate(
    request: Request, prompts: list[str], numbers: list[int] | None, stream: Callable[[str], None]
) -> list[Completion]:
    """The completions of all prompts. `stream` is called with text as it is generated.

    `numbers` is a prompt in tokens, for models without a tokenizer.
    """
    job, weights, words, directory = _model(request, needs_text=numbers is None)
    prompt_tokens = [numbers] if numbers is not None else [words.encode(prompt) for prompt in prompts if words]
    _check(request, job, prompt_tokens)

    def decode(ids: list[int]) -> str:
        return words.decode(ids) if words else " ".join(map(str, ids))

    named = end_tokens(directory, END_NAMED_IN) if isinstance(directory, Path) else set[int]()
    ends = named or ({words.end} if words else set())
    generated: Iterable[Iterable[int]]
    if job.layout.world == 1:
        from fivefold.generation.generator import single_process_generator

        generator = single_process_generator(job, weights, max(map(len, prompt_tokens)) + request.count)
        generated = (generator.generate(ids, request.count, Sampler(request.sampling), ends) for ids in prompt_tokens)
    else:
        arguments = (job, weights, prompt_tokens, request.count, request.sampling, ends)
        function = "fivefold.generation.generator:generate_rank"
        generated = processes.run(job.layout.world, function, *arguments, timeout=request.timeout)[0]
    answers = []
    for ids, tokens in zip(prompt_tokens, generated, strict=True):
        answer: list[int] = []
        prompt, shown = decode(ids), ""
        stream(prompt if words else f"{prompt} ")
        for token in tokens:
            answer.append(token)
            text = decode(answer)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character may have several tokens
                stream(text[len(shown) :])
                shown = text
        text = decode(answer)
        stream(text[len(shown) :] + "\n")
        answers.append(Completion(prompt, text, ids, answer))
    return answers


def _model(request: Request, *, needs_text: bool) -> tuple[Job, Place, GeneratedText | None, Place]:
    """The job to generate with, its weights, its tokenizer, and the directory of the run or Hugging Face model."""
    layout = Layout.parse(request.layout)
    if strange := sorted(set(layout.given()) - _LAYOUT_SETTINGS):
        named = ", ".join(strange)
        raise UserError(
            f"--layout {request.layout}: {named} does not help to generate; tp and pp do, and ep within tp",
            "generate.layout",
        )
    source = request.source
    weights: Place
    directory: Place
    if isinstance(source, Path) and (source / "config.json").is_file():
        from fivefold.checkpoint.hf_files import HuggingFace

        spec, weights, directory = HuggingFace(source).spec, source, source
        words = text_of(source, None, spec.vocab) if needs_text else None
    else:
        checkpoint = find(source, request.step)
        if damage := checkpoint.damage():
            raise UserError(damage, "checkpoint.damaged")
        made_by = job_of(checkpoint)
        spec, weights, directory = made_by.model, checkpoint.path, run_of(checkpoint)
        words = text_of_run(checkpoint, made_by) if needs_text else None
    if request.dtype not in DTYPES:
        raise UserError(f"--dtype {request.dtype} is not one of {', '.join(DTYPES)}", "option.choice")
    if request.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {request.device} is not one of auto, cpu, cuda", "option.choice")
    if request.share_gpu not in ("gloo", "nccl"):
        raise UserError(f"--share-gpu {request.share_gpu} is neither gloo nor nccl", "option.choice")
    # Not compiled: every length of text is another shape.
    fields = {"dtype": request.dtype, "device": request.device, "compile": "off", "share_gpu": request.share_gpu}
    train = msgspec.convert(fields, TrainConfig)
    job = Job(model=spec, layout=msgspec.structs.replace(layout, microbatches=1), train=train)
    return job, weights, words, directory


def _check(request: Request, job: Job, prompts: list[list[int]]) -> None:
    problems = request.sampling.problems()
    for kind in (kind for kind in job.model.branches if ask(kind, "cache", job.model, 1, wanted=WANTED_CACHE) is None):
        problems.append(
            f"{kind.name} of {job.model.name} keeps nothing of earlier tokens, so it cannot go on from them"
        )
    problems += job.layout.problems(job.model, seq=job.data.seq, batch=job.layout.microbatches)
    try:
        check_sharing(job.train, job.layout.world)
    except UserError as error:
        problems += [problem.replace("train.share_gpu=", "--share-gpu ") for problem in error.problems]
    limits = {"--count": within(1, 10_000_000), "--timeout": within(0.001, MAX_SECONDS)}
    given = {"--count": request.count, "--timeout": request.timeout}
    outside = (misfit(name, given[name], allowed) for name, allowed in limits.items())
    problems += [Problem("option.range", sentence) for sentence in outside if sentence]
    vocab, longest = job.model.vocab, max(map(len, prompts), default=0)
    if any(not prompt for prompt in prompts):
        problems.append("an empty prompt has no token to continue; give at least one")
    if strange := [token for prompt in prompts for token in prompt if not 0 <= token < vocab]:
        problems.append(f"token {strange[0]} is not in the vocabulary of {vocab}: 0 to {vocab - 1}")
    if job.model.positions == "learned" and longest + request.count > job.model.context:
        problems.append(
            f"{longest} tokens and {request.count} more are beyond the {job.model.context} positions of "
            f"{job.model.name}; nearest: --count {max(1, job.model.context - longest)}"
        )
    if problems:
        raise UserError(problems, "generate.request")
