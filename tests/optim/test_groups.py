"""Groups of parameters: by the optimizer, by a job's patterns; each with its own decay, rate and states."""

import msgspec
import pytest
import torch

import fivefold as ff
from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.job.resume_rules import MEANT, changes
from fivefold.model.decoder import Decoder
from fivefold.model.init import initialise
from fivefold.optim.adamw import AdamW
from fivefold.optim.base import group_of
from fivefold.optim.groups import GroupSettings, ParamGroup
from fivefold.optim.muon import Muon
from fivefold.spec.operations import Parameter
from tests.optim.test_optimizer import SPEC, backward, made

GROUPS = (
    GroupSettings(match="embedding.*", lr_factor=3.0, weight_decay=0.5),
    GroupSettings(match="layers.?.mlp.*", weight_decay=0.0),
    GroupSettings(match="*norm.weight", lr_factor=0.0),
)


def test_float32_with_groups_is_stock_adamw_with_the_same_groups_to_the_bit() -> None:
    config = AdamW(clip=0.0, weight_decay=0.2, groups=GROUPS)
    model, weights, optimizer = made(config, torch.float32)
    plain = Decoder(SPEC)
    initialise(plain, SPEC, seed=3)
    kinds = {p.name: p.kind for p in SPEC.parameters()}
    groups = []
    for name, p in plain.named_parameters():
        decay = 0.5 if name.startswith("embedding") else 0.2 if kinds[name] == "linear" and ".mlp." not in name else 0.0
        factor = 3.0 if name.startswith("embedding") else 0.0 if name.endswith("norm.weight") else 1.0
        groups.append({"params": [p], "weight_decay": decay, "lr": 0.01 * factor})
    adam = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, fused=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step in range(2):
        backward(plain, step)
        with weights.microbatch(last=True):
            backward(model, step)
        weights.finish_grad_sync()
        optimizer.step(0.01, optimizer.gradient_norm())
        adam.step()
        adam.zero_grad()
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, before[name]) == name.endswith("norm.weight"), name


class Counting(AdamW, frozen=True, kw_only=True, tag="counting:Counting"):
    """A rule that adds one to each of its states, whose names say which parameters have them."""

    states = ("of_embedding", "of_norm", "of_all")
    fuses = False

    def states_of(self, parameter: Parameter) -> tuple[str, ...]:
        own = {"embedding": ("of_embedding",), "norm": ("of_norm",)}.get(parameter.kind, ())
        return (*own, "of_all")

    def update(self, masters, grads, states, rate, decay, step) -> None:  # type: ignore[no-untyped-def]
        assert {len(tensors) for tensors in states.values()} == {len(masters)}
        for tensors in states.values():
            for master, tensor in zip(masters, tensors, strict=True):
                assert master.shape == tensor.shape
                tensor.add_(1)


def test_parameters_that_keep_other_states_are_updated_apart() -> None:
    model, weights, optimizer = made(Counting(), torch.float32)
    with weights.microbatch(last=True):
        backward(model, 0)
    weights.finish_grad_sync()
    optimizer.step(0.01, optimizer.gradient_norm())
    for parameter in SPEC.parameters():
        kept = optimizer.states[parameter.name]
        assert tuple(kept) == Counting().states_of(parameter)
        assert all((state == 1).all() for state in kept.values())


@pytest.mark.parametrize("optimizer", [AdamW(), Muon()])
def test_without_groups_linears_decay_and_nothing_else_does(optimizer: AdamW) -> None:
    for parameter in SPEC.parameters():
        group = group_of(optimizer, parameter)
        assert group.weight_decay == (0.1 if parameter.kind == "linear" else 0.0)
        assert group.lr_factor == 1.0
        assert (group.rule == "matrix") == (optimizer.unit == "matrix" and parameter.name.startswith("layers.")
                                            and parameter.kind == "linear")  # fmt: skip


def test_the_first_group_that_matches_wins_and_what_it_leaves_out_stays() -> None:
    config = AdamW(groups=(GroupSettings(match="head.*", lr_factor=0.5), GroupSettings(match="*", weight_decay=0.3)))
    groups = {parameter.name: group_of(config, parameter) for parameter in SPEC.parameters()}
    assert groups.pop("head.weight") == ParamGroup("element", 0.1, 0.5)
    assert {*groups.values()} == {ParamGroup("element", 0.3, 1.0)}


def job(groups: str, *more: str) -> Job:
    return read_job(None, [f"optimizer.groups=[{groups}]", *more])


@pytest.mark.parametrize(
    ("groups", "codes", "words"),
    [
        ('{match="embeding.*", lr_factor=2}', ["optimizer.groups.match"], "did you mean 'embedding.weight'?"),
        ('{match="q.weight", lr_factor=2}', ["optimizer.groups.match"], "nearest: match='layers.*.attention.q.weight'"),
        ('{match="*", lr_factor=2}, {match="head.*", lr_factor=1}', ["optimizer.groups.order"], "stands behind '*'"),
        ('{match="head.*"}', ["optimizer.groups.empty"], "write lr_factor=... or weight_decay=..."),
        ('{match="head.*", lr_factor=-1}', ["optimizer.groups.lr_factor.range"], "[0].lr_factor=-1.0 must be"),
        ('{match="head.*", weight_decay=inf}', ["optimizer.groups.weight_decay.range"], "weight_decay=inf must be"),
    ],
)
def test_a_group_that_means_nothing_is_refused(groups: str, codes: list[str], words: str) -> None:
    problems = ff.UserError(job(groups).problems())
    assert problems.codes == codes
    assert words in problems.problems[0]


def test_all_that_is_wrong_with_the_form_of_groups_is_told_at_once() -> None:
    with pytest.raises(ff.UserError) as refused:
        job('{lr_factor=3}, 3, {match="*", wd=0.1}')
    assert refused.value.codes == ["optimizer.groups.match.missing", "optimizer.groups.type", "setting.unknown"]


def test_a_job_file_has_them_back_and_a_run_that_goes_on_has_to_mean_others() -> None:
    one, other = job('{match="embedding.*", lr_factor=0.1}'), job("")
    assert msgspec.convert(msgspec.to_builtins(one.optimizer), AdamW) == one.optimizer
    [change] = changes(other, one)
    assert (change.rule, str(change)) == (MEANT, 'optimizer.groups: none -> [{match = "embedding.*", lr_factor = 0.1}]')
