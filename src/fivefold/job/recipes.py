"""Published recipes of pretraining: learning rate, batch and the rest, by model size and token budget.

    recipe(preset("llama3-70b"), 8192, tokens_of("1.4T"))["optimizer.lr"]
        # Choice(1.5e-4, "Llama 3 70B (arXiv 2407.21783, table 3)")

A model within the sizes of a published table takes the values of the nearest one. A smaller one follows DeepSeek's
power laws, which were fitted to small models. The laws also bound the batch: a short run takes a smaller one.

Qwen publishes rates and batches of its first release only. Qwen2.5 says that it has laws, and not which.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError
from fivefold.support.ranges import misfit, within
from fivefold.support.text import divisors, plural, si

CHINCHILLA = 20  # tokens per parameter: Hoffmann et al., arXiv 2203.15556
MAX_TRAINING_TOKENS = 10**15  # tokens: a hundred times what any model has read
M = 1 << 20  # what papers call 4M tokens is 4 x 2^20: 1,024 sequences of 4,096

# Their titles, in this order: Language Models are Few-Shot Learners; Llama 2: Open Foundation and Fine-Tuned Chat
# Models; The Llama 3 Herd of Models; Qwen Technical Report; DeepSeek LLM: Scaling Open-Source Language Models with
# Longtermism; DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model; DeepSeek-V3 Technical
# Report; Kimi K2: Open Agentic Intelligence; On the SDEs and Scaling Rules for Adaptive Gradient Algorithms.
GPT3 = "arXiv 2005.14165, table 2.1"
LLAMA2 = "arXiv 2307.09288, table 1"
LLAMA3 = "arXiv 2407.21783, table 3"
LLAMA3_405B = "arXiv 2407.21783, section 3.4.1"
QWEN_SOURCE = "arXiv 2309.16609, table 1"
DEEPSEEK_SOURCE = "arXiv 2401.02954, section 3.1"
DEEPSEEK_V2 = "arXiv 2405.04434, appendix B"
DEEPSEEK_V3 = "arXiv 2412.19437, section 4.2"
KIMI_K2 = "arXiv 2507.20534, section 2.5"
SQUARE_ROOT = "arXiv 2205.10287"
RECIPE_SOURCES = (
    "GPT-3: arXiv 2005.14165; Llama 2: arXiv 2307.09288; Llama 3: arXiv 2407.21783; Qwen: arXiv 2309.16609; DeepSeek "
    "LLM: arXiv 2401.02954; DeepSeek-V2: arXiv 2405.04434; DeepSeek-V3: arXiv 2412.19437; "
    "Kimi K2: arXiv 2507.20534"
)


class PublishedRun(NamedTuple):
    """A run that somebody made, and what it says of itself."""

    name: str
    parameters: float
    lr: float
    batch: float | None  # tokens of a step, at its largest
    source: str
    warmup: int = 2000  # steps: Llama 1 and 2, DeepSeek LLM
    final: float = 0.1
    tokens: float | None = None  # of the whole run, where a shorter one of the same model is a question

    def says(self, what: str = "") -> str:
        return f"{self.name}{what} ({self.source})"

    def batch_says(self) -> str:
        batch = self.batch or 0
        return self.says(f": {batch / (1e6 if batch % (M / 2) else M):g}M tokens")

    def distance(self, spec: ModelSpec) -> float:
        """In size; a relative is nearer than a stranger of the same size."""
        family = "".join(self.name.lower().split()[:-1])  # "Llama 3 70B" -> "llama3", of which llama3.1-70b is one
        return abs(math.log(self.parameters / spec.parameter_count)) + 0.2 * (not spec.name.startswith(family))


# With learned positions: GPT-3's table. Its batch grew from 32k tokens while the rate warmed up over 375M tokens; a run
# with one batch throughout warms up as the others do.
GPT_TABLE = tuple(
    PublishedRun(f"GPT-3 {size}", parameters, lr, batch, GPT3)
    for size, parameters, lr, batch in (
        ("Small", 125e6, 6e-4, M / 2),
        ("Medium", 350e6, 3e-4, M / 2),
        ("Large", 760e6, 2.5e-4, M / 2),
        ("XL", 1.3e9, 2e-4, M),
        ("2.7B", 2.7e9, 1.6e-4, M),
        ("6.7B", 6.7e9, 1.2e-4, 2 * M),
        ("13B", 13e9, 1e-4, 2 * M),
        ("175B", 175e9, 0.6e-4, 3.2e6),  # no power of two
    )
)
ROTARY_TABLE = (
    PublishedRun("Llama 2 7B", 6.74e9, 3e-4, 4 * M, LLAMA2),
    PublishedRun("Llama 2 13B", 13.0e9, 3e-4, 4 * M, LLAMA2),
    PublishedRun("Llama 2 34B", 33.7e9, 1.5e-4, 4 * M, LLAMA2),
    PublishedRun("Llama 2 70B", 69.0e9, 1.5e-4, 4 * M, LLAMA2),
    PublishedRun("Qwen 7B", 7.72e9, 3e-4, 4 * M, QWEN_SOURCE),
    PublishedRun("Qwen 14B", 14.2e9, 3e-4, 4 * M, QWEN_SOURCE),
    PublishedRun("Llama 3 8B", 8.03e9, 3e-4, None, LLAMA3),
    PublishedRun("Llama 3 70B", 70.6e9, 1.5e-4, None, LLAMA3),
    # 4M tokens at first, 8M after 252M tokens, 16M after 2.87T; the rate ends at 8e-7.
    PublishedRun("Llama 3 405B", 405.9e9, 8e-5, 16 * M, LLAMA3_405B, warmup=8000, final=0.01),
)
# Of models with experts a run says nothing of another model: these are for the model itself. All rates end at a tenth.
THEIR_OWN = {
    "deepseek-v2-lite": PublishedRun("DeepSeek-V2-Lite", 15.7e9, 4.2e-4, 4608 * 4096, DEEPSEEK_V2, tokens=5.7e12),
    # 3,072 sequences of 4,096 tokens at first, 15,360 after 469B tokens.
    "deepseek-v3": PublishedRun("DeepSeek-V3", 671e9, 2.2e-4, 15360 * 4096, DEEPSEEK_V3, tokens=14.8e12),
    # With Muon, whose updates have the size of AdamW's there.
    "kimi-k2": PublishedRun("Kimi K2", 1.04e12, 2e-4, 67e6, KIMI_K2, warmup=500, tokens=15.5e12),
}
DEFAULT_BATCH_TOKENS = (
    4 * M
)  # tokens of a step, where no table has a model of the size: four million, as in most large runs
MIN_TABLE_RATIO = 0.8  # of the smallest model of a table: a smaller one follows the laws
MAX_TABLE_RATIO = 1.5  # times the largest one: from there on the file says how far the table is
SIZE_TOLERANCE = 0.1  # of its published size: what a count of parameters may leave out
MAX_WARMUP_SHARE = 0.1  # of a run: the longest warmup
AS_NEAR = math.log(1.5) / 2  # 22%: what batches of 2 and 3, 4 and 6 for each rank leave between them


class Choice(NamedTuple):
    """A setting of a job, and where it comes from."""

    value: Any
    why: str


def tokens_of(given: str | float) -> int:
    """A number of tokens as people write it: 1.4T, 300B, 15e12, 2000000."""
    if type(given) is int:
        tokens = given  # Python does not print one of thousands of digits
    else:
        text = str(given).strip().replace("_", "")
        match = re.fullmatch(r"(-?\d{1,30}(?:\.\d{0,30})?(?:[eE]\+?\d{1,2})?) ?([kKmMbBtT]?)", text)
        if not match:
            example = "write 300B, 1.4T or 2e9"
            raise UserError(f"tokens={text[:40]!r} is not a number of tokens; {example}", "tokens.type")
        number, suffix = match.groups()
        tokens = round(float(number) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[suffix.lower()])
    if wrong := misfit("tokens", tokens, within(1, MAX_TRAINING_TOKENS, "write 300B, 1.4T or 2e9")):
        raise UserError(wrong, "tokens.range")
    return tokens


def recipe(spec: ModelSpec, seq: int, tokens: int) -> dict[str, Choice]:
    """Settings of a run of so many tokens; `train.tokens` stands for the tokens of a step."""
    # DeepSeek counts FLOPs without the vocabulary's, and attention in full.
    compute = (spec.flops_per_token(seq) - 6 * spec.vocab * spec.hidden) * tokens
    best_lr, best_batch = 0.3118 * compute**-0.1250, 0.2920 * compute**0.3271
    law = f"for C = {f'{compute:.1e}'.replace('e+', 'e')} FLOPs ({DEEPSEEK_SOURCE})"
    table = GPT_TABLE if spec.positions == "learned" else ROTARY_TABLE
    of_its_own = _own_run(spec)
    if of_its_own is None and spec.parameter_count < MIN_TABLE_RATIO * min(run.parameters for run in table):
        lr = Choice(float(f"{best_lr:.1e}"), f"DeepSeek LLM's law, 0.3118 C^-0.1250, {law}")
        batch = Choice(best_batch, f"DeepSeek LLM's law, 0.2920 C^0.3271 tokens, {law}")
        warmup, final, like = 2000, 0.1, "Llama 2, DeepSeek LLM"
        end = "Llama 2, DeepSeek LLM"
    else:
        own = of_its_own or min(table, key=lambda run: run.distance(spec))
        sized = _run_for_batch(spec)
        times = 1.0 if of_its_own else spec.parameter_count / max(run.parameters for run in table)
        largest = f", the largest published; this model has {times:.1f} times as many parameters" * (
            times > MAX_TABLE_RATIO
        )
        lr = Choice(own.lr, own.says() + largest)
        batch = Choice(sized.batch or best_batch, sized.batch_says())
        if (
            of_its_own and of_its_own.tokens
        ):  # the law's slope, through the run that was made: its constant is of dense models
            share = min(1.0, tokens / of_its_own.tokens) ** 0.3271
            short = f", x {share:.2f} for a shorter run: DeepSeek LLM's law, C^0.3271 ({DEEPSEEK_SOURCE})" * (
                share < 0.99
            )
            batch = Choice(batch.value * share, batch.why + short)
        elif best_batch < batch.value:
            batch = Choice(best_batch, f"a short run: DeepSeek LLM's law, 0.2920 C^0.3271 tokens, {law}")
        warmup, final, like = own.warmup, own.final, own.name if own.warmup != 2000 else "Llama 2, DeepSeek LLM"
        end = own.says() if own.final != 0.1 else "GPT-3, Llama 2, Qwen"
    return {
        "optimizer.lr": lr,
        "optimizer.betas": Choice((0.9, 0.95), "GPT-3, Llama 2, Qwen, DeepSeek LLM"),
        "optimizer.weight_decay": Choice(0.1, "GPT-3, Llama 2 and 3, DeepSeek LLM"),
        "optimizer.clip": Choice(1.0, "GPT-3, Llama 2, DeepSeek LLM"),
        "optimizer.schedule": Choice("cosine", "GPT-3, Llama 2 and 3, Qwen"),
        "optimizer.warmup": Choice(warmup, f"steps: {like}"),
        "optimizer.final": Choice(final, f"of the peak rate: {end}"),
        "train.tokens": batch,
    }


def _own_run(spec: ModelSpec) -> PublishedRun | None:
    """The published run of this very model, if its size still matches its name."""
    run = THEIR_OWN.get(spec.name)
    return run if run and abs(spec.parameter_count / run.parameters - 1) < SIZE_TOLERANCE else None


def _run_for_batch(spec: ModelSpec) -> PublishedRun:
    """The run whose batch a model takes."""
    table = GPT_TABLE if spec.positions == "learned" else ROTARY_TABLE
    return _own_run(spec) or min((run for run in table if run.batch), key=lambda run: run.distance(spec))


def usual_batch(spec: ModelSpec, seq: int, world: int) -> Choice:
    """Sequences of a step, where neither a batch nor the length of a run is given: as many tokens as published runs of
    its size had, in sequences that the ranks can divide."""
    small = spec.parameter_count < MIN_TABLE_RATIO * min(run.parameters for run in ROTARY_TABLE)
    run = None if small and _own_run(spec) is None else _run_for_batch(spec)
    tokens = DEFAULT_BATCH_TOKENS if run is None or run.batch is None else run.batch
    share = tokens / seq / world
    batch = round(share) * world if share >= 1 else usable_batch(tokens, seq, world)
    why = f"as {run.batch_says()}" if run else f"about {DEFAULT_BATCH_TOKENS // M}M, as most large runs have"
    return Choice(batch, f"{si(batch * seq)} tokens a step, {why}; --batch changes it")


def usable_batch(tokens: float, seq: int, world: int) -> int:
    """Sequences of about so many tokens that divide over dp, as large as it can be, and further into microbatches.

    A smaller dp leaves tp, pp and cp a power of two if it can.
    """
    wanted = max(1.0, tokens / seq)
    counts = [count << power for count in (1, 3) for power in range(40)]

    def off(batch: int) -> float:
        return abs(math.log(batch / wanted))

    def others(dp: int) -> int:  # odd factors of what tp, pp and cp must share
        return world // dp // (world // dp & -(world // dp))

    units = sorted(divisors(world), key=lambda dp: (others(dp), -dp))
    batches = [min((dp * count for count in counts), key=off) for dp in units]
    return min(batches, key=lambda batch: max(off(batch), AS_NEAR))


def fit(advised: Mapping[str, Choice], batch: int, seq: int, tokens: int, *, given: bool) -> dict[str, Choice]:
    """The recipe with the batch of a plan; `given`: the user chose it."""
    steps, wanted = -(-tokens // (batch * seq)), advised["train.tokens"]
    if batch * seq > tokens:
        raise UserError(
            f"tokens={si(tokens, 4)} is less than one step: {plural(batch, 'sequence')} of {seq} tokens; nearest: "
            f"tokens={batch * seq}, or {'a smaller batch' if batch > 1 else 'shorter sequences'}",
            "tokens.step",
        )
    choices = {key: choice for key, choice in advised.items() if key != "train.tokens"}
    lr, warmup = choices["optimizer.lr"], choices["optimizer.warmup"]
    share = batch * seq / wanted.value
    if given and share < 1 / 1.5:
        value = float(f"{lr.value * math.sqrt(share):.1e}")
        why = f"{lr.why}, times the root of {share:.2g} for the smaller batch ({SQUARE_ROOT})"
        choices["optimizer.lr"] = Choice(value, why)
    if warmup.value > MAX_WARMUP_SHARE * steps:
        choices["optimizer.warmup"] = Choice(
            max(1, int(float(f"{MAX_WARMUP_SHARE * steps:.1e}"))),
            f"steps: a tenth of a short run, instead of the {warmup.value:,} of large ones",
        )
    size = f"sequences of {seq:,}: {si(batch * seq)} tokens a step"
    choices["train.batch"] = Choice(batch, size if given else f"{size}; {wanted.why}")
    choices["train.steps"] = Choice(steps, f"{si(tokens, 4)} tokens")
    return choices
