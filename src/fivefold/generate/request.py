"""Generates text for prompts, in this process or on the ranks of a layout."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fivefold.checkpoint.find import find, run_of
from fivefold.checkpoint.job import job_of
from fivefold.generate.sampling import Sampling
from fivefold.generate.text import Text, text_of, text_of_run
from fivefold.job.config import Job, TrainConfig
from fivefold.launch import ranks
from fivefold.layout.layout import Layout
from fivefold.spec.hf_config import HF_CONFIG, read_hf_config
from fivefold.support.errors import UserError

_ALLOWED = {"tp", "pp", "split"}


@dataclass(frozen=True)
class Question:
    source: Path
    step: int | None
    layout: str
    dtype: str
    device: str
    count: int
    sampling: Sampling
    timeout: float


@dataclass(frozen=True)
class Answer:
    prompt: str
    text: str
    prompt_tokens: list[int]
    tokens: list[int]

    def as_json(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("prompt", "text", "prompt_tokens", "tokens")}


def ask(
    question: Question, prompts: list[str], numbers: list[int] | None, stream: Callable[[str], None]
) -> list[Answer]:
    """`numbers` is a prompt in tokens, for models whose tokenizer is not here. `stream` gets text as it comes."""
    job, weights, words, job_directory = _model(question, needs_text=numbers is None)
    given = [numbers] if numbers is not None else [words.encode(prompt) for prompt in prompts if words]
    _check(question, job, given)

    def said(ids: list[int]) -> str:
        return words.decode(ids) if words else " ".join(map(str, ids))

    spoken = [said(ids) for ids in given]
    end = _ends(job_directory) or ({words.end} if words else set())
    if job.layout.world == 1:
        from fivefold.generate.choose import Chooser
        from fivefold.generate.rank import alone

        generator = alone(job, weights, max(map(len, given)) + question.count)
        found = []
        for prompt, ids in zip(spoken, given, strict=True):
            stream(prompt if words else f"{prompt} ")
            answer: list[int] = []
            shown = ""
            for token in generator.speak(ids, question.count, Chooser(question.sampling), end):
                answer.append(token)
                text = said(answer)
                if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half a character waits for its other half
                    stream(text[len(shown) :])
                    shown = text
            stream(said(answer)[len(shown) :] + "\n")
            found.append(answer)
    else:
        arguments = (job, str(weights), given, question.count, question.sampling, end)
        found = ranks.run(job.layout.world, "fivefold.generate.rank:speak", *arguments, timeout=question.timeout)[0]
        for prompt, answer in zip(spoken, found, strict=True):
            stream(f"{prompt}{'' if words else ' '}{said(answer)}\n")
    return [Answer(prompt, said(answer), ids, answer) for prompt, ids, answer in zip(spoken, given, found, strict=True)]


def _ends(directory: Path) -> set[int]:
    """The tokens that end an answer, as a Hugging Face configuration has them."""
    for name in ("generation_config.json", "config.json", HF_CONFIG):
        if (directory / name).is_file():
            found = json.loads((directory / name).read_text()).get("eos_token_id")
            if found is not None:
                return set(found) if isinstance(found, list) else {found}
    return set()


def _model(question: Question, needs_text: bool) -> tuple[Job, Path, Text | None, Path]:
    """The job to generate with, its weights, its tokenizer, and the directory of the run or Hugging Face model."""
    layout = Layout.parse(question.layout)
    if strange := sorted(set(layout.given()) - _ALLOWED):
        raise UserError(f"--layout {question.layout}: {', '.join(strange)} does not help to speak; tp and pp do")
    source = question.source
    if (source / "config.json").is_file():
        spec, weights, directory = read_hf_config(source), source, source
        words = text_of(source, None, spec.vocab) if needs_text else None
    else:
        checkpoint = find(source, question.step)
        if damage := checkpoint.damage():
            raise UserError(damage)
        made_by = job_of(checkpoint)
        spec, weights, directory = made_by.model, checkpoint.path, run_of(checkpoint)
        words = text_of_run(checkpoint, made_by) if needs_text else None
    if question.dtype not in ("float32", "bfloat16", "float64"):
        raise UserError(f"--dtype {question.dtype} is none of float32, bfloat16, float64")
    if question.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {question.device} is none of auto, cpu, cuda")
    # Not compiled: every length of text is another shape.
    train = msgspec.convert({"dtype": question.dtype, "device": question.device, "compile": "off"}, TrainConfig)
    job = Job(model=spec, layout=msgspec.structs.replace(layout, microbatches=1), train=train)
    return job, weights, words, directory


def _check(question: Question, job: Job, prompts: list[list[int]]) -> None:
    problems = question.sampling.problems()
    problems += job.layout.problems(job.model, seq=job.data.seq, batch=job.layout.microbatches)
    if question.count < 1:
        problems.append(f"--count {question.count} says nothing; nearest: --count 1")
    vocab, longest = job.model.vocab, max(map(len, prompts), default=0)
    if any(not prompt for prompt in prompts):
        problems.append("an empty prompt has no token to go on from; give at least one")
    if strange := [token for prompt in prompts for token in prompt if not 0 <= token < vocab]:
        problems.append(f"token {strange[0]} is not in the vocabulary of {vocab}: 0 to {vocab - 1}")
    if job.model.positions == "learned" and longest + question.count > job.model.context:
        problems.append(
            f"{longest} tokens and {question.count} more are beyond the {job.model.context} positions of "
            f"{job.model.name}; nearest: --count {max(1, job.model.context - longest)}"
        )
    if problems:
        raise UserError(problems)
