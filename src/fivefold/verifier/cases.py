"""The cases that `verify --all` proves: every legal layout of a world, models that are known to break layouts, and
samples of both in which every pair of settings occurs.

Without a pipeline "every" is: all products dp x cp x tp, all kinds of cp where cp > 1, sp on and off where tp > 1, ZeRO
0 to 3 where dp x cp > 1, with every hybrid (replicate) at 3, every recompute, and one and two microbatches. The other
settings of a layout do not change what is computed.

With one, the product would be ten times as long and prove little more: a schedule does not know what its stages
compute. So "every" is all products dp x cp x tp x pp with every schedule (but naive, which is gpipe in another order)
and every ZeRO and hybrid; each of those once, with the rest (kinds of cp, sp, recompute; 1, p and 2p microbatches;
layers that are balanced over the stages or piled up on the last) chosen such that every pair of settings occurs, and
more layouts where that takes more. Layouts with more microbatches than the batch has are left out.

Of a mixture of experts "every" is all products dp x cp x tp with every ep, ZeRO, hybrid, sp and kind of cp, and all
dp x cp x tp x pp with every schedule; each of those once, with the rest (dispatch, recompute, microbatches; with a
pipeline also ep, ZeRO, sp and kinds of cp) chosen such that every pair occurs.

The requested model runs on all of them; `deepen` gives it more layers where it has too few for the stages. Its
`variants`, each a known way to go wrong, run on a small sample of layouts in which every pair of settings occurs; kinds
of attention and unlike layers share one such sample, as do the variants of a mixture, in which the variant is a
setting. A dense model is also proven with experts (`mixture`). A pattern that was written down is kept in all variants:
who writes one wants its blocks proven. Variants that none of them would notice are left out.
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
from fivefold.data.source_check import check
from fivefold.data.tokenizer import ByteTokenizer, Encoded
from fivefold.job.config import Job
from fivefold.layout.axes import AXES
from fivefold.layout.layout import ContextKind, Dispatch, Layout, Recompute
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.blocks import Experts, LatentSpec
from fivefold.spec.mixers import GroupedQueryAttention
from fivefold.spec.mlps import Dense, MixtureOfExperts
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block
from fivefold.spec.pattern import Layer
from fivefold.support.text import divisors

_GPT = {"norm": "layernorm", "activation": "gelu", "positions": "learned", "bias": True, "tied": True, "dropout": 0.1}
_LATENTS = LatentSpec(q_rank=12, kv_rank=10, nope_dim=6, rope_dim=4, v_dim=8)
_MLA: dict[str, object] = {"mla": _LATENTS, "kv_heads": 0, "head_dim": 0, "rope_interleaved": True}
_SINKS: dict[str, object] = {"sinks": True, "window": 5, "window_period": 2}
# Layers without an MLP and without a mixer, with a window and without, with experts and without.
_SLIDES = GroupedQueryAttention(window=5)
_UNLIKE: dict[str, object] = {"pattern": (Layer(mixer=_SLIDES), Layer(mlp=Dense()))}
_UNLIKE_EXPERTS: dict[str, object] = {"pattern": (Layer(mixer=_SLIDES, mlp=Dense()), Layer(mlp=MixtureOfExperts()))}
_ATTENTIONS = ("q/k norm over all heads", "sinks and windows", "latent attention", "unlike layers")
_DEGREE_AXES = [axis for axis in AXES if axis in Layout().degrees]
_VARIED_SETTINGS = ("schedule", "cp_kind", "sp", "zero", "replicate", "recompute", "microbatches", "ep", "dispatch")
_ALL_SETTINGS = (*_DEGREE_AXES, *_VARIED_SETTINGS)
_AXIS_OF_SETTING = {"schedule": "pp", "dispatch": "ep"}  # settings that mean nothing without their axis

# Larger than in training, so that a mistake changes the result visibly, and the choice of experts too.
BALANCE_LOSSES = {"balance_loss": 0.1, "router_z_loss": 0.01}
BALANCE_RATE = 0.05
LOSSES_OFF = "no balance losses"  # the name of a variant


@dataclass(frozen=True)
class LayoutCase:
    """One layout of one model."""

    job: Job
    variant: str  # how the model differs from the one asked for; empty: it is that one


def legal_layouts(spec: ModelSpec, world: int, seq: int, batch: int, *, deepen: bool = False) -> Iterator[Layout]:
    """A layout of each group (`_group_key`), and as many others as it takes for every pair of settings to occur."""
    pair_counts = Counter[object](), Counter[object]()  # of layouts without pp, where schedules mean nothing; with pp
    rest: list[Layout] = []
    groups: dict[object, list[Layout]] = {}
    for base in _bases(spec, world):
        deep = deep_enough(spec, base) if deepen else spec  # the number of stages follows from `base`
        for layout in _vary_settings(base, deep):
            if not layout.problems(deep, world=world, seq=seq, batch=batch):
                groups.setdefault(_group_key(layout, spec), []).append(layout)
    for legal in groups.values():
        counts = pair_counts[legal[0].pp > 1]
        best = max(legal, key=partial(_new_pairs, counts=counts)) if len(legal) > 1 else legal[0]
        counts.update(_pairs(best))
        rest += [layout for layout in legal if layout is not best]
        yield best
    for layout in rest:
        counts = pair_counts[layout.pp > 1]
        if not _pairs(layout) <= counts.keys():
            counts.update(_pairs(layout))
            yield layout


def _group_key(layout: Layout, spec: ModelSpec) -> object:
    """The settings that a layout shares with its group; proving one layout of a group is enough."""
    degrees, schedule, sharded = tuple(layout.degrees.values()), layout.schedule, (layout.zero, layout.replicate)
    if spec.experts is None:
        return layout if layout.pp == 1 else (degrees, schedule, sharded)
    return (degrees, layout.ep, sharded, layout.sp, layout.cp_kind) if layout.pp == 1 else (degrees, schedule)


def _bases(spec: ModelSpec, world: int) -> Iterator[Layout]:
    """All layouts that differ in degrees, schedule or ZeRO; their other settings are defaults."""
    for sizes in product(divisors(world), repeat=len(_DEGREE_AXES)):
        degrees: dict[str, Any] = dict(zip(_DEGREE_AXES, sizes, strict=True))
        axes = Layout(**degrees)
        if axes.world != world:
            continue
        schedules = [name for name in CATALOGUE if name != "naive"] if axes.pp > 1 else ["1f1b"]
        for ep in divisors(axes.size("stage")) if spec.experts is not None else [1]:
            sharded = [(zero, 1) for zero in range(4)] + [(3, copies) for copies in divisors(axes.dp) if copies > 1]
            if not Layout(**degrees, ep=ep).has_copies(spec):
                sharded = [(0, 1)]
            for schedule, (zero, replicate) in product(schedules, sharded):
                yield msgspec.structs.replace(
                    Layout(**degrees, schedule=schedule), ep=ep, zero=zero, replicate=replicate
                )


def _new_pairs(layout: Layout, counts: Counter[object]) -> tuple[int, int]:
    """A sort key: how many pairs of settings the layout would add to `counts`, and how rare its other pairs are."""
    occurrences = [counts[pair] for pair in _pairs(layout)]
    return occurrences.count(0), -sum(occurrences)


def _vary_settings(base: Layout, spec: ModelSpec) -> Iterator[Layout]:
    """Layouts with the degrees, schedule and ZeRO of `base`, and all values of the other settings."""
    choices = {
        "cp_kind": get_args(ContextKind) if base.cp > 1 else ("ring",),
        "sp": (False, True) if base.tp > 1 else (False,),
        "recompute": get_args(Recompute),
        "microbatches": (1, base.pp, 2 * base.pp) if base.pp > 1 else (1, 2),
        "dispatch": get_args(Dispatch) if base.ep > 1 else ("alltoall",),
        "split": [(), _uneven_split(spec.layers, base.stages)] if base.pp > 1 else [()],
    }
    for values in product(*choices.values()):
        yield msgspec.structs.replace(base, **dict(zip(choices, values, strict=True)))


def _uneven_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers by stage: one for each of the last stages, none for the first, and the remainder on the last."""
    split = [int(stages - stage <= layers) for stage in range(stages)]
    split[-1] += layers - sum(split)
    return tuple(split)


def deep_enough(spec: ModelSpec, layout: Layout) -> ModelSpec:
    """The model with enough layers to fill the stages; the first may have the embedding alone, the last the head."""
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
        "unlike layers": _UNLIKE,
    }
    if (experts := spec.experts) is not None:  # only variants that a dense model does not have
        changed = partial(msgspec.structs.replace, experts)
        changes = {
            "DeepSeek": {**_MLA, "experts": _deepseek(experts)},
            "every expert": {"experts": changed(top_k=experts.count, groups=1, top_groups=1)},
            "more experts than tokens": {"experts": changed(count=_MANY_EXPERTS, ffn=8)},  # so that some get none
            "unlike layers with experts": {**_UNLIKE_EXPERTS, "experts": changed(dense_layers=0)},
            "gpt-oss": {**_SINKS, "bias": True, "activation": "swiglu_clamped"},
            "GPT block with experts": {**_GPT, "kv_heads": spec.heads},  # biases; the embedding is tied
        }
    if spec.pattern:
        changes = {name: change for name, change in changes.items() if "pattern" not in change}
    specs = {name: msgspec.structs.replace(spec, **change) for name, change in changes.items()}
    return {name: one for name, one in specs.items() if one != spec and not one.problems() and _differs(one, spec)}


def _differs(variant: ModelSpec, spec: ModelSpec) -> bool:
    """Whether anything computes otherwise: kinds of a user's own need not read what a variant changes."""
    if not spec.pattern or variant.parameters() != spec.parameters() or variant.experts != spec.experts:
        return True
    return any(block(variant, layer=kinds) != block(spec, layer=kinds) for kinds in spec.counted())


_MANY_EXPERTS = (
    128  # a microbatch of a rank has 32 tokens or a few more; each expert costs a layer three products a pass
)


def _deepseek(experts: Experts) -> Experts:
    """Experts as in DeepSeek-V3: sigmoid scores, groups, a shared expert, a dense first layer, a bias that balances."""
    router = {"scores": "sigmoid", "scale": 2.5, "groups": 4, "top_groups": 2, "balance_bias": True}
    return msgspec.structs.replace(experts, **router, shared=1, dense_layers=1)


def mixture(spec: ModelSpec) -> ModelSpec:
    """A dense model with experts in place of its feed-forward networks; a pattern without such has none to replace."""
    experts = Experts(count=8, top_k=2, ffn=max(1, spec.ffn // 4))
    pattern = tuple(
        msgspec.structs.replace(layer, mlp=MixtureOfExperts()) if type(layer.mlp) is Dense else layer
        for layer in spec.pattern
    )
    return msgspec.structs.replace(spec, experts=experts, pattern=pattern)


def all_cases(job: Job, world: int, *, deepen: bool = False, fixed_keys: Collection[str] = ()) -> list[LayoutCase]:
    """The job's model on every layout, and its variants on a pairwise cover of those that are legal for them; if it
    has no experts, the same with experts. Settings of the job named in `fixed_keys` stay as they are."""
    cases = cases_of(job, world, deepen, fixed_keys=fixed_keys)
    if job.model.experts is None and not (mixed := mixture(job.model)).problems():
        with_experts = msgspec.structs.replace(job, model=mixed)
        cases += cases_of(with_experts, world, deepen, "experts", fixed_keys)
    return cases


def with_balance(job: Job, fixed_keys: Collection[str] = (), *, losses: bool = True) -> Job:
    """The job with the load balancing of experts turned on, if it has any; `losses` False turns its losses off.

    Settings named in `fixed_keys` stay as they are.
    """
    if (experts := job.model.experts) is None:
        return job
    factors = BALANCE_LOSSES if losses else dict.fromkeys(BALANCE_LOSSES, 0.0)
    settings = factors | ({"balance_rate": BALANCE_RATE} if experts.balance_bias else {})
    changed = {name: value for name, value in settings.items() if f"train.{name}" not in fixed_keys}
    return msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, **changed))


def cases_of(
    job: Job, world: int, deepen: bool = False, name: str = "", fixed_keys: Collection[str] = ()
) -> list[LayoutCase]:
    """The cases of the job's model, whose variant is called `name`, and of its variants."""
    seq, batch = job.data.seq, job.train.batch
    layouts = list(legal_layouts(job.model, world, seq, batch, deepen=deepen))

    def case_of(spec: ModelSpec, layout: Layout, variant: str) -> LayoutCase:
        spec = deep_enough(spec, layout) if deepen else spec
        changed = msgspec.structs.replace(job, model=spec, layout=layout)
        if variant:
            changed = with_balance(changed, fixed_keys, losses=variant != LOSSES_OFF)
        return LayoutCase(changed, variant)

    problems = partial(Layout.problems, world=world, seq=seq, batch=batch)
    cases = [case_of(job.model, layout, name) for layout in layouts]
    sampled_together: list[LayoutCase] = []
    losses_off = {LOSSES_OFF: job.model} if job.model.experts is not None else {}
    for variant, spec in (variants(job.model) | losses_off).items():
        candidates = [case_of(spec, layout, variant) for layout in layouts]
        if variant in ("one kv head", "two kv heads", "vocab 257"):  # these matter to tp alone
            candidates = [case for case in candidates if case.job.layout.tp > 1]
        candidates = [case for case in candidates if not problems(case.job.layout, case.job.model)]
        if job.model.experts is not None or variant in _ATTENTIONS:  # the variant is one setting among the others
            sampled_together += candidates
        else:
            cases += pairwise(candidates)
    return cases + pairwise(sampled_together)


def pairwise(cases: Sequence[LayoutCase], count: int | None = None) -> list[LayoutCase]:
    """A small sample in which every pair of settings of the cases occurs; with `count`, one of that many cases.

    Greedy: always the case that adds the most missing pairs. Where `count` is more than that takes, a second sample
    begins among the remaining cases.
    """
    remaining = {number: _pairs(case.job.layout, case.variant) for number, case in enumerate(cases)}
    missing: set[object] = set()
    chosen: list[int] = []
    while remaining and (count is None or len(chosen) < count):
        if not missing:
            if count is None and chosen:
                break
            missing = set().union(*remaining.values())
        best = max(remaining, key=lambda number: (len(remaining[number] & missing), -number))
        missing -= remaining.pop(best)
        chosen.append(best)
        if count is not None and not any(pairs & missing for pairs in remaining.values()):
            missing = set()
    return [cases[number] for number in sorted(chosen)]


def pair_coverage(sample: Sequence[LayoutCase], cases: Sequence[LayoutCase]) -> float:
    """The share of the cases' pairs of settings that occur in a sample of them."""
    all_pairs, sample_pairs = _union_of_pairs(cases), _union_of_pairs(sample)
    return len(sample_pairs) / len(all_pairs) if all_pairs else 1.0


def _union_of_pairs(cases: Sequence[LayoutCase]) -> set[object]:
    return set().union(*(_pairs(case.job.layout, case.variant) for case in cases))


def _pairs(layout: Layout, variant: str = "") -> set[object]:
    """All pairs of (setting, value) that occur together in a layout of a model."""
    settings = [("model", variant), ("piled", bool(layout.split))]
    names = [name for name in _ALL_SETTINGS if getattr(layout, _AXIS_OF_SETTING.get(name, ""), 2) > 1]
    return set(combinations([*settings, *((name, getattr(layout, name)) for name in names)], 2))


# ---- batches --------------------------------------------------------------------------------------------------------
# A job's own data where it names any, and otherwise random data from a seed. Random batches of proofs are as irregular
# as real data can be; benchmarks use plain data.
#
# Tokens are uniform, so that every row of the vocabulary occurs. Loss masks are unequal: samples keep between a tenth
# and all of their targets, one keeps none, and in every second step one data-parallel rank has no target at all, a
# different one each time. So a mean of means is detected. Documents have random lengths, so that they begin and end
# inside the chunks of context parallel ranks and reach across them.


_MAX_DOCUMENTS = 5  # per sequence


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
        loss_mask=_loss_mask(rng, size, seq, job.layout.size("batch"), step),
        documents=np.stack([_document_numbers(rng, seq) for _ in range(size)]),
    )


def plain_batch(vocab: int, size: int, seq: int, seed: int = 0) -> Batch:
    """A random batch for timings: every target counts, every sequence is one document.

    Tokens come from the whole vocabulary: the gradient of an embedding is slower if few rows get all of it.
    """
    tokens, shape = np.random.default_rng(seed).integers(0, vocab, (size, seq + 1)), (size, seq)
    return Batch(np.arange(size), tokens[:, :-1], tokens[:, 1:], np.ones(shape, bool), np.zeros(shape, np.int32))


def write_tokens(directory: Path, vocab: int, count: int) -> None:
    """Writes a directory of token shards, as if from text, with one document of `count` random tokens."""
    tokens = np.random.default_rng(0).integers(0, vocab, count)
    true = np.ones(1, bool)
    sink = Sink(directory, _RandomTokens(vocab), SHARD_TOKENS, seed=0, valid=0.0)
    sink.write(Encoded(tokens, np.array([count]), true, true, read=0))
    sink.finish()


class _RandomTokens(ByteTokenizer):
    """A stand-in for a tokenizer: the tokens stand for no text."""

    name = "made up"

    def __init__(self, vocab: int):
        self.vocab, self.end = vocab, vocab - 1


def _loss_mask(rng: np.random.Generator, size: int, seq: int, dp: int, step: int) -> NDArray[np.bool_]:
    densities = rng.permutation(np.linspace(0.1, 1.0, size))
    mask = rng.random((size, seq)) < densities[:, None]
    if size > 1:
        mask[rng.integers(size)] = False
    samples_per_rank, empty_rank = size // dp, step // 2 % dp
    start = empty_rank * samples_per_rank
    if dp > 1 and step % 2:  # in the other steps every rank has targets
        mask[start : start + samples_per_rank] = False
    if not mask.any():  # one or two samples: at least one target must count
        mask[start - 1] = True
    return mask


def _document_numbers(rng: np.random.Generator, seq: int) -> NDArray[np.int32]:
    """The number of each token's document, from 0, for one sequence."""
    starts = np.zeros(seq, np.int32)
    cuts = rng.choice(seq, min(seq, int(rng.integers(1, _MAX_DOCUMENTS + 1))), replace=False)
    starts[cuts[cuts > 0]] = 1
    return starts.cumsum(dtype=np.int32)
