"""Every legal layout of a world, the models that make them stumble, and samples that still meet every pair.

Without a pipeline "every" is: all products dp x cp x tp, all kinds of cp where cp > 1, sp on and off where tp > 1, ZeRO
0 to 3 where dp x cp > 1, with every hybrid (replicate) at 3, every recompute, and one and two microbatches. The world's
other settings do not change what is computed.

With one, the product would be ten times as long, most of it the same thing again: a schedule does not know what its
stages compute. So "every" is all products dp x cp x tp x pp with every schedule (but naive, which is gpipe in another
order) and every ZeRO and hybrid; each of those once, with the rest (kinds of cp, sp, recompute; 1, p and 2p
microbatches; layers that are balanced over the stages or pile up on the last) chosen such that every pair of settings
is met, and more layouts where that takes more. What the batch has no microbatches for is left out.

Of a mixture of experts "every" is all products dp x cp x tp with every ep, ZeRO, hybrid, sp and kind of cp, and all
dp x cp x tp x pp with every schedule; each of those once, with the rest (dispatch, recompute, microbatches; with a
pipeline also ep, ZeRO, sp and kinds of cp) chosen to meet every pair.

The model asked for runs on all of them; if it has too few layers for all the stages, and may be changed (`deepen`), on
as many more as it takes. `variants` of it, each a known way to go wrong, run on the least sample of layouts that meets
every pair of settings; kinds of attention, and the variants of a mixture, together on such a sample, in which the
variant is a setting. A model without experts is also given some (`mixture`), and proven with those.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from fivefold.data.batch import Batch, DpShare, read_share
from fivefold.data.prepare import SHARD_TOKENS, Sink
from fivefold.data.rows import check
from fivefold.data.tokenizer import ByteTokenizer, Encoded
from fivefold.job.config import Job
from fivefold.layout.axes import AXES
from fivefold.layout.layout import ContextKind, Dispatch, Layout, Recompute
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.blocks import Experts, LatentSpec
from fivefold.spec.model import ModelSpec
from fivefold.support.text import divisors

_GPT = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "tied": True, "dropout": 0.1}
_LATENTS = LatentSpec(q_rank=12, kv_rank=10, nope_dim=6, rope_dim=4, v_dim=8)
_MLA: dict[str, object] = {"mla": _LATENTS, "kv_heads": 0, "head_dim": 0, "rope_interleaved": True}
_SINKS: dict[str, object] = {"sinks": True, "window": 5, "window_period": 2}
_ATTENTIONS = ("q/k norm over all heads", "sinks and windows", "latent attention")
_DEGREES = [axis for axis in AXES if axis in Layout().degrees]
_SETTINGS = ("schedule", "cp_kind", "sp", "zero", "replicate", "recompute", "microbatches", "ep", "dispatch")
_FACTORS = (*_DEGREES, *_SETTINGS)
_OF_AXIS = {"schedule": "pp", "dispatch": "ep"}  # settings that mean nothing without their axis

# So large that a mistake shows, in choices too.
BALANCE = {"balance_loss": 0.1, "router_z_loss": 0.01}
BALANCE_RATE = 0.05
LOSSES_OFF = "no balance losses"  # a variant


@dataclass(frozen=True)
class LayoutCase:
    """One layout of one model."""

    job: Job
    variant: str  # how the model differs from the one asked for; empty: it is that one


def legal_layouts(spec: ModelSpec, world: int, seq: int, batch: int, deepen: bool = False) -> Iterator[Layout]:
    """Those that each stand for a group, and as many others as it takes to meet every pair of settings."""
    met = Counter[object](), Counter[object]()  # without pp, where a schedule means nothing, and with it
    left: list[Layout] = []
    groups: dict[object, list[Layout]] = {}
    for base in _bases(spec, world):
        deep = deep_enough(spec, base) if deepen else spec  # the number of stages follows from `base`
        for layout in _rest(base, deep):
            if not layout.problems(deep, world=world, seq=seq, batch=batch):
                groups.setdefault(_group(layout, spec), []).append(layout)
    for legal in groups.values():
        pairs = met[legal[0].pp > 1]
        best = max(legal, key=partial(_worth, met=pairs)) if len(legal) > 1 else legal[0]
        pairs.update(_pairs(best))
        left += [layout for layout in legal if layout is not best]
        yield best
    for layout in left:
        pairs = met[layout.pp > 1]
        if not _pairs(layout) <= pairs.keys():
            pairs.update(_pairs(layout))
            yield layout


def _group(layout: Layout, spec: ModelSpec) -> object:
    """Layouts of which one is enough, but for pairs that it has not."""
    degrees, schedule, sharded = tuple(layout.degrees.values()), layout.schedule, (layout.zero, layout.replicate)
    if spec.experts is None:
        return layout if layout.pp == 1 else (degrees, schedule, sharded)
    return (degrees, layout.ep, sharded, layout.sp, layout.cp_kind) if layout.pp == 1 else (degrees, schedule)


def _bases(spec: ModelSpec, world: int) -> Iterator[Layout]:
    """Degrees, a schedule and ZeRO."""
    for sizes in product(divisors(world), repeat=len(_DEGREES)):
        degrees: dict[str, Any] = dict(zip(_DEGREES, sizes, strict=True))
        axes = Layout(**degrees)
        if axes.world != world:
            continue
        schedules = [name for name in CATALOGUE if name != "naive"] if axes.pp > 1 else ["1f1b"]
        for ep in divisors(axes.size("stage")) if spec.experts is not None else [1]:
            shares = Layout(**degrees, ep=ep).has_copies(spec)
            sharded = [(zero, 1) for zero in range(4)] + [(3, copies) for copies in divisors(axes.dp) if copies > 1]
            for schedule, (zero, replicate) in product(schedules, sharded if shares else [(0, 1)]):
                yield msgspec.structs.replace(
                    Layout(**degrees, schedule=schedule), ep=ep, zero=zero, replicate=replicate
                )


def _worth(layout: Layout, met: Counter[object]) -> tuple[int, int]:
    """How many pairs of settings it would add, and how rare its others are."""
    times_met = [met[pair] for pair in _pairs(layout)]
    return times_met.count(0), -sum(times_met)


def _rest(base: Layout, spec: ModelSpec) -> Iterator[Layout]:
    """What is left to choose when the degrees, the schedule and ZeRO are given."""
    choices = {
        "cp_kind": get_args(ContextKind) if base.cp > 1 else ("ring",),
        "sp": (False, True) if base.tp > 1 else (False,),
        "recompute": get_args(Recompute),
        "microbatches": (1, base.pp, 2 * base.pp) if base.pp > 1 else (1, 2),
        "dispatch": get_args(Dispatch) if base.ep > 1 else ("alltoall",),
        "split": [(), _piled(spec.layers, base.stages)] if base.pp > 1 else [()],
    }
    for chosen in product(*choices.values()):
        yield msgspec.structs.replace(base, **dict(zip(choices, chosen, strict=True)))


def _piled(layers: int, stages: int) -> tuple[int, ...]:
    """A layer each for the last stages, none for the first, and all that are too many on the last."""
    each = [int(stages - stage <= layers) for stage in range(stages)]
    each[-1] += layers - sum(each)
    return tuple(each)


def deep_enough(spec: ModelSpec, layout: Layout) -> ModelSpec:
    """The model with as many layers as fill the stages; the ends may have none but embedding and head."""
    return msgspec.structs.replace(spec, layers=max(spec.layers, layout.stages - 2))


def variants(spec: ModelSpec) -> dict[str, ModelSpec]:
    """Models that differ from `spec` in one way that layouts have to get right."""
    changes: dict[str, dict[str, object]] = {
        "one kv head": {"kv_heads": 1},  # fewer than tp: shared by ranks, whose gradients add up
        "two kv heads": {"kv_heads": 2},
        "vocab 257": {"vocab": 257},  # a prime: no tp divides it
        "GPT block with dropout": {**_GPT, "kv_heads": spec.heads},
        "q/k norm": {"qk_norm": True},  # one scale for heads on different ranks
        "q/k norm over all heads": {"qk_norm": True, "qk_norm_over": "all"},  # their squares add up over ranks
        "tied embeddings": {"tied": True},
        "sinks and windows": _SINKS,
        "latent attention": _MLA,
    }
    if (experts := spec.experts) is not None:  # what a dense model shows is not shown again
        changed = partial(msgspec.structs.replace, experts)
        changes = {
            "DeepSeek": {**_MLA, "experts": _deepseek(experts)},
            "every expert": {"experts": changed(top_k=experts.count, groups=1, top_groups=1)},
            "more experts than tokens": {"experts": changed(count=_MANY, ffn=8)},  # so that some get none
            "gpt-oss": {**_SINKS, "bias": True, "activation": "swiglu_clamped"},
            "GPT block with experts": {**_GPT, "kv_heads": spec.heads},  # biases; the embedding is tied
        }
    specs = {name: msgspec.structs.replace(spec, **change) for name, change in changes.items()}
    return {name: variant for name, variant in specs.items() if variant != spec and not variant.problems()}


_MANY = 128  # a microbatch of a rank has 32 tokens or a few more; each expert costs a layer three products a pass


def _deepseek(experts: Experts) -> Experts:
    """Scores of their own for each expert, groups, a shared expert, a first layer without, a bias by the load."""
    router = {"scores": "sigmoid", "scale": 2.5, "groups": 4, "top_groups": 2, "balance_bias": True}
    return msgspec.structs.replace(experts, **router, shared=1, dense_layers=1)


def mixture(spec: ModelSpec) -> ModelSpec:
    """A dense model with experts in place of its feed-forward networks."""
    return msgspec.structs.replace(spec, experts=Experts(count=8, top_k=2, ffn=max(1, spec.ffn // 4)))


def all_cases(job: Job, world: int, deepen: bool = False, given: Collection[str] = ()) -> list[LayoutCase]:
    """The job's model on every layout, and its variants on a pairwise cover of those that are legal for them; if it
    has no experts, the same with experts. Settings that are `given` stay."""
    cases = cases_of(job, world, deepen, given=given)
    if job.model.experts is None:
        cases += cases_of(msgspec.structs.replace(job, model=mixture(job.model)), world, deepen, "experts", given)
    return cases


def with_balance(job: Job, given: Collection[str] = (), *, losses: bool = True) -> Job:
    """The job, with all that keeps the load of experts even if it has any, or without the losses of it; settings that
    are `given` stay."""
    if (experts := job.model.experts) is None:
        return job
    factors = BALANCE if losses else dict.fromkeys(BALANCE, 0.0)
    settings = factors | ({"balance_rate": BALANCE_RATE} if experts.balance_bias else {})
    changed = {name: value for name, value in settings.items() if f"train.{name}" not in given}
    return msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, **changed))


def cases_of(
    job: Job, world: int, deepen: bool = False, name: str = "", given: Collection[str] = ()
) -> list[LayoutCase]:
    """The job's model, which goes by `name`, and its variants."""
    seq, batch = job.data.seq, job.train.batch
    layouts = list(legal_layouts(job.model, world, seq, batch, deepen))

    def case_of(spec: ModelSpec, layout: Layout, variant: str) -> LayoutCase:
        spec = deep_enough(spec, layout) if deepen else spec
        changed = msgspec.structs.replace(job, model=spec, layout=layout)
        return LayoutCase(with_balance(changed, given, losses=variant != LOSSES_OFF) if variant else changed, variant)

    problems = partial(Layout.problems, world=world, seq=seq, batch=batch)
    cases = [case_of(job.model, layout, name) for layout in layouts]
    together: list[LayoutCase] = []
    off = {LOSSES_OFF: job.model} if job.model.experts is not None else {}
    for variant, spec in (variants(job.model) | off).items():
        chosen = [case_of(spec, layout, variant) for layout in layouts]
        if variant in ("one kv head", "two kv heads", "vocab 257"):  # these matter to tp alone
            chosen = [case for case in chosen if case.job.layout.tp > 1]
        chosen = [case for case in chosen if not problems(case.job.layout, case.job.model)]
        if job.model.experts is not None or variant in _ATTENTIONS:  # the variant is one setting among the others
            together += chosen
        else:
            cases += pairwise(chosen)
    return cases + pairwise(together)


def pairwise(cases: Sequence[LayoutCase], most: int | None = None) -> list[LayoutCase]:
    """Few cases in which every pair of settings that occurs in any of them occurs together, or the best `most` of them.

    Greedy: always the case with the most pairs that are still to be met. What is asked for beyond a cover starts a
    second one among the rest.
    """
    left = {number: _pairs(case.job.layout, case.variant) for number, case in enumerate(cases)}
    unmet: set[object] = set()
    chosen: list[int] = []
    while left and (most is None or len(chosen) < most):
        if not unmet:
            if most is None and chosen:
                break
            unmet = set().union(*left.values())
        best = max(left, key=lambda number: (len(left[number] & unmet), -number))
        unmet -= left.pop(best)
        chosen.append(best)
        if most is not None and not any(pairs & unmet for pairs in left.values()):
            unmet = set()
    return [cases[number] for number in sorted(chosen)]


def covered(sample: Sequence[LayoutCase], cases: Sequence[LayoutCase]) -> float:
    """The share of the pairs of settings that a sample meets."""
    met, all_pairs = (
        set().union(*(_pairs(case.job.layout, case.variant) for case in chosen)) for chosen in (sample, cases)
    )
    return len(met) / len(all_pairs) if all_pairs else 1.0


def _pairs(layout: Layout, variant: str = "") -> set[object]:
    settings = [("model", variant), ("piled", bool(layout.split))]
    meant = [name for name in _FACTORS if getattr(layout, _OF_AXIS.get(name, ""), 2) > 1]
    return set(combinations([*settings, *((name, getattr(layout, name)) for name in meant)], 2))


# ---- batches --------------------------------------------------------------------------------------------------------
# A job's own data where it names any, and otherwise random data from a seed. Random batches of proofs are as awkward as
# real data can be; those of benchmarks are plain.
#
# Tokens are uniform, so that every row of the vocabulary occurs. Loss masks are unequal: samples keep between a tenth
# and all of their targets, one keeps none, and in every second step one data-parallel rank has no target at all, a
# different one each time. So a mean of means is detected. Documents have random lengths, so that they begin and end
# inside the shares of context parallel ranks and reach across them.


_DOCUMENTS = 5  # per sequence, at most


def reader(job: Job, parts: int = 1, number: int = 0) -> Callable[[int], Batch | DpShare]:
    """What reads the global batch of a step, from 0: of the job's own data, share `number` of `parts`, as a run does.
    What others have is of no use to it, but for their masks."""
    if job.data.usual:
        return partial(make_batch, job)
    row, data, size = check(job.data).train, job.data, job.train.batch

    def read(step: int) -> DpShare:
        samples = range(step * size, (step + 1) * size)
        return read_share(row, data.seq, data.seed, samples, job.model.vocab, parts, number)

    return read


def make_batch(job: Job, step: int) -> Batch:
    """The global batch of `step`, from 0. The only part of the layout that matters is dp, which the mask depends on."""
    size, seq = job.train.batch, job.data.seq
    rng = np.random.default_rng([job.data.seed, step])
    tokens = rng.integers(0, job.model.vocab, (size, seq + 1))
    return Batch(
        samples=np.arange(step * size, (step + 1) * size),
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_mask=_mask(rng, size, seq, job.layout.size("batch"), step),
        documents=np.stack([_documents(rng, seq) for _ in range(size)]),
    )


def plain_batch(vocab: int, size: int, seq: int, seed: int = 0) -> Batch:
    """For timings: every target counts, every sequence is one document.

    Tokens come from the whole vocabulary: the gradient of an embedding is slower if few rows get all of it.
    """
    tokens, shape = np.random.default_rng(seed).integers(0, vocab, (size, seq + 1)), (size, seq)
    return Batch(np.arange(size), tokens[:, :-1], tokens[:, 1:], np.ones(shape, bool), np.zeros(shape, np.int32))


def write_tokens(directory: Path, vocab: int, count: int) -> None:
    """Prepare a directory, as if from text, with one document of `count` tokens from the whole vocabulary."""
    tokens = np.random.default_rng(0).integers(0, vocab, count)
    true = np.ones(1, bool)
    sink = Sink(directory, _MadeUp(vocab), SHARD_TOKENS, seed=0, valid=0.0)
    sink.write(Encoded(tokens, np.array([count]), true, true, read=0))
    sink.finish()


class _MadeUp(ByteTokenizer):
    """A tokenizer whose tokens stand for no text."""

    name = "made up"

    def __init__(self, vocab: int):
        self.vocab, self.end = vocab, vocab - 1


def _mask(rng: np.random.Generator, size: int, seq: int, dp: int, step: int) -> NDArray[np.bool_]:
    shares = rng.permutation(np.linspace(0.1, 1.0, size))
    mask = rng.random((size, seq)) < shares[:, None]
    if size > 1:
        mask[rng.integers(size)] = False
    share, empty = size // dp, step // 2 % dp
    if dp > 1 and step % 2:  # in the other steps every rank has targets
        mask[empty * share : (empty + 1) * share] = False
    if not mask.any():  # one or two samples: at least one target must count
        mask[empty * share - 1] = True
    return mask


def _documents(rng: np.random.Generator, seq: int) -> NDArray[np.int32]:
    """Document numbers of one sequence, from 0."""
    starts = np.zeros(seq, np.int32)
    cuts = rng.choice(seq, min(seq, int(rng.integers(1, _DOCUMENTS + 1))), replace=False)
    starts[cuts[cuts > 0]] = 1
    return starts.cumsum(dtype=np.int32)
