"""The parts of a proof: its data, its measure of error, its layouts, and what the reference may know."""

import math

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from fivefold.layout.context_split import context_share
from fivefold.optim.lr_schedule import learning_rate
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.pattern import Layer
from fivefold.verifier import compare
from fivefold.verifier.cases import (
    all_cases,
    cases_of,
    deep_enough,
    legal_layouts,
    make_batch,
    mixture,
    pair_coverage,
    pairwise,
    variants,
)
from fivefold.verifier.compare import tolerance_of
from fivefold.verifier.reference import measure_noise, run_reference
from fivefold.verifier.verdict import Verdict
from tests.layers import imports, loaded, modules
from tests.verifier.cases import CANCELLING, job, slow, tiny
from tests.verifier.mixtures import moe

# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_masks_are_unequal_and_another_dp_rank_has_none_in_every_second_step(dp: int) -> None:
    one = job(f"dp={dp}")
    for step in range(4):
        shares = [part.loss_tokens for part in make_batch(one, step).split(dp)]
        assert sum(shares) > 0
        empty = [step // 2 % dp] if dp > 1 and step % 2 else []
        assert [rank for rank, tokens in enumerate(shares) if tokens == 0] == empty
        per_sample = make_batch(one, step).loss_mask.sum(1)
        assert len(set(per_sample.tolist())) > 2
        assert 0 in per_sample


@pytest.mark.parametrize("layout", ["cp=2", "cp=4", "cp=2,cp_kind=ulysses", "cp=4,cp_kind=ulysses"])
def test_documents_reach_across_the_shares_of_cp_ranks_and_end_inside_them(layout: str) -> None:
    one = job(layout)
    documents = make_batch(one, 0).documents
    shares = [np.concatenate([list(piece) for piece in context_share(16, one.layout, r)]) for r in range(one.layout.cp)]
    holders = [{int(d) for d in row[share]} for row in documents for share in shares]
    assert any(len(held) > 1 for held in holders), "no boundary inside a share"
    rows = len(documents)
    across = [holders[i * len(shares)] & holders[i * len(shares) + 1] for i in range(rows)]
    assert any(across), "no document on two ranks"
    assert (np.diff(documents, axis=1) >= 0).all()
    assert (documents[:, 0] == 0).all()


def test_data_is_a_function_of_seed_and_step() -> None:
    first, again, later = make_batch(job("dp=2"), 0), make_batch(job("dp=2,zero=3"), 0), make_batch(job("dp=2"), 1)
    assert (first.tokens == again.tokens).all()
    assert (first.tokens != later.tokens).any()
    assert later.samples.tolist() == list(range(8, 16))
    assert (first.targets[:, :-1] == first.tokens[:, 1:]).all()


# ---- the measure -----------------------------------------------------------------------------------------------------


def of(errors: list[compare.ValueComparison], name: str) -> compare.ValueComparison:
    [error] = [error for error in errors if error.name == name]
    return error


GPT = tiny(norm="layernorm", bias=True, positions="learned", activation="gelu", kv_heads=4)
WANTED = {
    "layers.0.attention.k.bias": torch.full((4,), 1e-18, dtype=torch.float64),  # zero, but for rounding
    "layers.0.attention.q.bias": torch.tensor([1.0, -2.0, 0.0, 0.5], dtype=torch.float64),
    "norm.weight": torch.ones(4, dtype=torch.float64),
}


def compared(**changes: Tensor | None) -> list[compare.ValueComparison]:
    found = {name: changes.get(name.split(".")[-2], tensor) for name, tensor in WANTED.items()}
    zero = compare.zero_gradients(WANTED, GPT)
    assert zero == {"layers.0.attention.k.bias"}
    return compare.compare_gradients({n: t for n, t in found.items() if t is not None}, WANTED, 1, 1e-10, GPT, zero)


def test_the_error_is_relative_to_the_largest_entry() -> None:
    error = of(compared(q=WANTED["layers.0.attention.q.bias"] + 1e-3), "layers.0.attention.q.bias")
    assert error.error == pytest.approx(5e-4)
    assert not error.passed


def test_a_missing_a_zero_and_a_nan_gradient_fail() -> None:
    for gradient in (None, torch.zeros(4), torch.full((4,), math.nan), torch.ones(5)):
        errors = compared(norm=gradient)
        assert not of(errors, "norm.weight").passed
        assert compare.worst_comparison(errors) == of(errors, "norm.weight") or math.isnan(
            of(errors, "norm.weight").error
        )
    assert "norm.weight is zero" in str(of(compared(norm=torch.zeros(4)), "norm.weight"))


def test_a_gradient_that_is_zero_in_theory_is_held_against_its_block() -> None:
    name = "layers.0.attention.k.bias"
    assert of(compared(k=torch.full((4,), -3e-17)), name).passed  # other noise
    assert of(compared(k=torch.zeros(4)), name).passed
    assert not of(compared(k=torch.full((4,), 1e-6)), name).passed  # noise in the reference, and here a gradient


def test_the_k_bias_of_the_gpt_block_is_such_a_gradient() -> None:
    step = run_reference(job("dp=1", GPT), torch.device("cpu")).steps[0]
    assert compare.zero_gradients(step.gradients, GPT) == {f"layers.{layer}.attention.k.bias" for layer in range(2)}


def test_a_small_gradient_is_not_zero_and_must_be_there_in_any_dtype() -> None:
    wanted = {"layers.0.attention.k_norm.weight": torch.full((4,), 1e-6), "layers.0.mlp.up.weight": torch.ones(4)}
    found = wanted | {"layers.0.attention.k_norm.weight": torch.zeros(4)}
    error = of(
        compare.compare_gradients(found, wanted, 1, tolerance_of(job("dp=1", dtype="bfloat16")), tiny(qk_norm=True)),
        "layers.0.attention.k_norm.weight",
    )
    assert not error.passed


def test_rounding_noise_widens_the_bound_of_its_own_gradient_alone() -> None:
    name = "layers.0.attention.q.bias"
    off = dict(WANTED) | {name: WANTED[name] + 1e-3, "norm.weight": WANTED["norm.weight"] + 1e-3}
    errors = compare.compare_gradients(off, WANTED, 1, 1e-6, GPT, noise={name: 4e-4})
    assert of(errors, name).passed  # the noise is 4e-4, and 4 times that is allowed
    assert of(errors, name).tolerance == pytest.approx(4 * 4e-4 / 2)  # relative to the largest entry
    assert not of(errors, "norm.weight").passed
    errors = compare.compare_gradients(off, WANTED, 1, 1e-6, GPT, noise={name: 2e-4})
    assert not of(errors, name).passed
    errors = compare.compare_gradients(WANTED | {name: torch.zeros(4)}, WANTED, 1, 1e-6, GPT, noise={name: 0.4})
    assert "is zero" in str(of(errors, name))  # the gradient is larger than its noise
    errors = compare.compare_gradients(WANTED | {name: torch.zeros(4)}, WANTED, 1, 1e-6, GPT, noise={name: 0.6})
    assert of(errors, name).passed  # nothing is known of a gradient below its noise


@pytest.mark.parametrize("dtype", ["bfloat16", *slow(["float32"])])
def test_the_noise_of_a_gradient_knows_what_cancels_in_it(dtype: str) -> None:
    """Relative to the gradient it is near the dtype's rounding for a plain model, and far above where sums cancel."""
    cpu = torch.device("cpu")
    largest = {}
    for name, (spec, seed) in {"plain": (tiny(), 0), **CANCELLING}.items():
        one = job("dp=1", spec, dtype, seed=seed, steps=3)
        reference, exact = run_reference(one, cpu), run_reference(one, cpu, exact=True)
        measure_noise(reference, exact, reference)
        measure_noise(reference, exact, run_reference(one, cpu, nudge_seed=1))
        zero = compare.zero_gradients(exact.steps[0].gradients, spec)
        shares = [
            noise / min(float(step.gradients[n].abs().max()) for step in exact.steps)
            for n, noise in reference.noise.items()
            if n not in zero
        ]
        largest[name] = max(shares) / tolerance_of(one)
    assert largest["plain"] < 1.0
    assert all(largest[name] > 2 * largest["plain"] for name in CANCELLING)


def test_a_parameter_is_held_against_the_way_that_it_can_have_gone() -> None:
    one = job("dp=1")
    way = sum(learning_rate(one.optimizer, step, 2) for step in range(2))
    wanted = {"norm.weight": torch.full((4,), way / 100, dtype=torch.float64)}
    [error] = compare.compare_parameters({"norm.weight": wanted["norm.weight"] + way * 1e-11}, wanted, one, 1e-10)
    assert error.error == pytest.approx(1e-11)


def test_bounds_follow_the_dtype() -> None:
    wide, narrow, coarse = (tolerance_of(job("dp=1", dtype=dtype)) for dtype in ("float64", "float32", "bfloat16"))
    assert wide == 1e-10
    assert 2**-23 < narrow < 1e-5
    assert 2**-7 < coarse < 0.06
    longer = job("dp=1", tiny(layers=8), dtype="float32")
    assert narrow < tolerance_of(longer) < 2 * narrow  # like the root of the roundings


def test_nothing_compared_is_not_a_pass() -> None:
    assert not Verdict(job("dp=1"), 0.0).passed
    assert Verdict(job("dp=1"), 0.0, broken="rank 1 died").to_dict()["problems"] == ["rank 1 died"]


# ---- layouts ---------------------------------------------------------------------------------------------------------


def test_every_legal_layout_of_four_ranks() -> None:
    every = list(legal_layouts(tiny(), 4, 16, 8))
    layouts = [one for one in every if one.pp == 1]
    assert len(set(every)) == len(every)
    assert len(layouts) == 414
    assert {(one.dp, one.cp, one.tp) for one in layouts} == {
        (4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 2, 2), (1, 1, 4)
    }  # fmt: skip
    text = {str(one) for one in layouts}
    assert text >= {
        "tp=4", "tp=4,sp", "dp=2,tp=2,zero=3,sp", "cp=4", "cp=4,cp_kind=allgather", "cp=4,cp_kind=ulysses", "tp=2,cp=2",
        "dp=2,cp=2,zero=3", "dp=4,zero=3,replicate=2", "dp=4,microbatches=2,recompute=full",
    }  # fmt: skip
    assert all(not one.problems(tiny(), world=4, seq=16, batch=8) for one in every)


def test_pipelines_meet_every_schedule_with_every_zero_on_all_degrees() -> None:
    every = [one for one in legal_layouts(tiny(), 4, 16, 8, deepen=True) if one.pp > 1]
    schedules = CATALOGUE.keys() - {"naive"}
    kinds = {(one.dp, one.cp, one.tp, one.pp, one.zero, one.replicate) for one in every}
    assert {kind[:4] for kind in kinds} == {(2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 1, 1, 4)}
    assert {kind[4:] for kind in kinds if kind[0] == 2} == {(0, 1), (1, 1), (2, 1), (3, 1), (3, 2)}
    for kind in kinds:
        same = [one for one in every if (one.dp, one.cp, one.tp, one.pp, one.zero, one.replicate) == kind]
        assert {one.schedule for one in same} == schedules, kind
    assert {one.cp_kind for one in every} == {"ring", "allgather", "ulysses"}
    assert {(one.pp, one.microbatches) for one in every} == {(2, 1), (2, 2), (2, 4), (4, 1), (4, 4), (4, 8)}
    for schedule in schedules:
        rest = {(bool(one.split), one.recompute) for one in every if one.schedule == schedule}
        assert {split for split, _ in rest} == {True, False}
        assert {recompute for _, recompute in rest} == {"none", "selective", "full"}
    for one in every:
        spec = deep_enough(tiny(), one)
        assert spec.layers == max(2, one.stages - 2)
        assert not one.problems(spec, world=4, seq=16, batch=8)
    assert len(every) < 150


def test_a_tied_embedding_in_two_stages_of_one_rank_is_not_sharded() -> None:
    for zero in (2, 3):
        [problem] = job(f"dp=2,pp=2,zero={zero},schedule=zb-v,microbatches=2", tiny(tied=True)).problems()
        assert problem.endswith("nearest: zero=1, or schedule=zb-h1")
    assert job("dp=2,pp=2,zero=1,schedule=zb-v,microbatches=2", tiny(tied=True)).problems() == []
    assert job("dp=2,pp=2,zero=3,schedule=zb-h1,microbatches=2", tiny(tied=True)).problems() == []
    # tp ranks share experts, so that stage 3 shards there too; without experts it has nobody to share with.
    bent = "tp=2,pp=2,zero=3,schedule=zb-v,microbatches=2"
    [problem] = job(bent, moe(tied=True)).problems()
    assert problem.endswith("nearest: zero=1, or schedule=zb-h1")
    assert job(bent, tiny(tied=True)).problems() == []


def test_variants_are_the_known_ways_to_stumble() -> None:
    found = variants(tiny())
    assert found["one kv head"].kv_heads == 1
    assert found["vocab 257"].vocab == 257
    assert (found["GPT block with dropout"].dropout, found["GPT block with dropout"].bias) == (0.1, True)
    assert found["q/k norm"].qk_norm
    assert found["q/k norm over all heads"].qk_norm_over == "all"
    assert found["tied embeddings"].tied
    assert (found["sinks and windows"].sinks, found["sinks and windows"].window) == (True, 5)
    assert found["latent attention"].mla is not None
    unlike = [[kind.name for kind in found["unlike layers"].kinds(layer).branches] for layer in range(2)]
    assert unlike == [["attention"], ["dense"]]
    unlike = [[kind.name for kind in variants(moe())["unlike layers with experts"].kinds(n).branches] for n in range(2)]
    assert unlike == [["attention", "dense"], ["moe"]]
    assert "two kv heads" not in found  # it is the model itself


def test_a_pattern_that_was_written_down_is_that_of_every_variant() -> None:
    """Also with experts: they take the place of dense networks, and where there are none no case is added."""
    mixer_alone, dense = Layer(mixer="attention"), Layer(mlp="dense")
    written = tiny(pattern=(mixer_alone, dense), layers=2)
    found = variants(written)
    assert {variant.pattern for variant in found.values()} == {written.pattern}
    assert {"one kv head", "vocab 257", "GPT block with dropout"} < found.keys()
    [first, second] = mixture(written).pattern
    assert (first, [kind.name for kind in second.branches]) == (mixer_alone, ["moe"])
    without = tiny(pattern=(mixer_alone,))
    assert [case for case in all_cases(job("dp=1", without), 2) if case.job.model.experts is not None] == []
    assert "one kv head" not in variants(tiny(pattern=(dense,)))  # which has no heads


def test_a_sample_meets_every_pair_of_settings() -> None:
    cases = cases_of(job("dp=1"), 2)
    assert {case.variant for case in cases} == {"", *variants(tiny())}
    sample = pairwise(cases)
    assert pair_coverage(sample, cases) == 1.0
    assert len(sample) < len(cases) / 3
    few = pairwise(cases, 14)
    assert len(set(map(id, few))) == 14
    assert 0.5 < pair_coverage(few, cases) < 1.0
    assert len(pairwise(cases[:40], 10_000)) == 40  # several covers


# ---- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_knows_nothing_of_what_it_judges() -> None:
    known = {
        found.module
        for module in loaded("fivefold.verifier.reference") & modules().keys()
        for found in imports(module)
        if found.loads
    }
    assert "fivefold.model.decoder" in known
    judged = ("fivefold.parallel", "fivefold.trainer.engine", "fivefold.optim.kernels", "torch.distributed.fsdp")
    assert not [name for name in known if name.startswith(judged)]


def test_the_reference_divides_once_by_the_global_count_and_clips() -> None:
    one = job("dp=2")
    reference = run_reference(one, torch.device("cpu"))
    plain = run_reference(
        msgspec.structs.replace(one, layout=job("dp=2,zero=3,microbatches=4").layout), torch.device("cpu")
    )
    assert [step.loss for step in reference.steps] == [step.loss for step in plain.steps]
    norm = math.sqrt(sum(float(g.square().sum()) for g in reference.steps[0].gradients.values()))
    assert reference.steps[0].norm == pytest.approx(norm, rel=1e-12)
    assert norm > one.optimizer.clip  # so that clipping is proven too
    assert set(reference.parameters) == {parameter.name for parameter in one.model.parameters()}
