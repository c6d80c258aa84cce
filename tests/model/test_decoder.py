"""The model's own claims: names, initial weights, dropout, documents, recompute."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.model.decoder import Decoder, Dropout
from fivefold.model.init import init_param, initialise
from fivefold.model.layers import TokenPositions
from fivefold.model.linear_cross_entropy import loss_sum
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import Parameter
from fivefold.spec.presets import preset

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 61, "context": 64}
SPECS = {
    "llama": preset("tiny", **SMALL, kv_heads=2),
    "llama-tied": preset("tiny", **SMALL, kv_heads=2, tied=True),
    "qwen3": preset("tiny-qwen3", **SMALL, kv_heads=2, head_dim=16),
    "gpt": preset("tiny-gpt", **SMALL),
}
TOKENS = torch.randint(0, 61, (3, 24), generator=torch.Generator().manual_seed(0))


def build(spec: ModelSpec, recompute: str = "none", dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(spec, recompute, seed=3).to(dtype)  # type: ignore[arg-type]
    initialise(model, spec, seed=3)
    return model


def gradients(model: Decoder, place: TokenPositions | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_sum(model(TOKENS, place), TOKENS.roll(-1, 1), torch.ones_like(TOKENS, dtype=torch.bool))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", SPECS)
def test_the_model_has_the_parameters_that_its_spec_lists(name: str) -> None:
    spec = SPECS[name]
    built = {name: tuple(p.shape) for name, p in Decoder(spec).named_parameters()}
    assert built == {p.name: p.shape for p in spec.parameters()}
    assert sum(p.numel() for p in Decoder(spec).parameters()) == spec.parameter_count


@pytest.mark.parametrize("name", SPECS)
def test_a_shard_draws_the_weights_that_the_whole_has(name: str) -> None:
    spec = SPECS[name]
    whole = dict(build(spec, dtype=torch.float32).named_parameters())
    for parameter in spec.parameters():
        if parameter.kind in ("norm", "bias"):
            continue
        rows, columns = range(3, parameter.shape[0] - 2), range(5, parameter.shape[1] - 1)
        out = torch.empty(len(rows), len(columns))
        init_param(spec, parameter, out, seed=3, box=(rows, columns))
        assert torch.equal(out, whole[parameter.name][rows.start : rows.stop, columns.start : columns.stop])


def test_matrices_that_write_into_the_residual_stream_start_smaller() -> None:
    spec = preset("tiny")
    model = Decoder(spec)
    initialise(model, spec, seed=0)
    std = {name: p.std().item() for name, p in model.named_parameters() if p.ndim == 2}
    assert std["layers.0.mlp.up.weight"] == pytest.approx(0.02, rel=0.02)
    assert std["layers.0.mlp.down.weight"] == pytest.approx(0.02 / (2 * 4) ** 0.5, rel=0.01)
    assert std["layers.3.attention.o.weight"] == pytest.approx(0.02 / (2 * 4) ** 0.5, rel=0.015)


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("name", SPECS)
def test_recompute_changes_no_bit_of_loss_or_gradients(name: str, how: str) -> None:
    plain_loss, plain = gradients(build(SPECS[name], "none"))
    loss, recomputed = gradients(build(SPECS[name], how))
    assert torch.equal(loss, plain_loss)
    assert recomputed.keys() == plain.keys()
    assert all(torch.equal(recomputed[name], plain[name]) for name in plain)


class Runs(TorchDispatchMode):
    """Counts the operators that run; what a checkpoint answers from its memory does not reach this far."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def matmuls(self) -> int:
        return self.counts["mm"] + self.counts["addmm"]  # addmm: with a bias

    @property
    def attentions(self) -> int:
        return self.counts["_scaled_dot_product_flash_attention_for_cpu"]


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_recompute_runs_what_it_says(name: str, how: str) -> None:
    """Forward and backward of a linear are three matmuls; full recompute adds the forward one again, selective none.

    Nothing needs the output of a block's last matmul again, and the recomputation stops before it: 6 of Llama's 7.
    """
    spec = SPECS[name]
    with Runs() as runs:
        gradients(build(spec, how))
    per_block = 7 if spec.activation == "swiglu" else 6
    again = per_block - (0 if spec.dropout else 1)  # dropout needs it: its mask multiplies the last output
    assert runs.matmuls == 3 * (2 * per_block + 1) + (2 * again if how == "full" else 0)
    assert runs.attentions == 2 * (2 if how == "full" else 1)


def test_recompute_keeps_less_the_more_it_computes_again() -> None:
    live = {how: live_bytes_after_forward(how) for how in ("none", "selective", "full")}
    assert live["full"] < 0.4 * live["none"]
    assert live["full"] < live["selective"] < 0.75 * live["none"]


def live_bytes_after_forward(how: str) -> int:
    """What the allocator gave out and has not got back between forward and backward, the logits aside."""
    model = build(preset("tiny", layers=4), how, torch.float32)
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    with torch.profiler.profile(profile_memory=True) as profile:
        logits = model(tokens)
    events = profile.events()
    assert events is not None
    kept = sum(event.self_device_memory_usage + event.self_cpu_memory_usage for event in events)
    return kept - logits.nbytes


def test_dropout_is_a_function_of_sample_and_position_not_of_the_batch() -> None:
    dropout = Dropout(0.25, seed=1, name="layers.0.mlp")
    x = torch.ones(4, 16, 30, dtype=torch.float64)
    place = replace(TokenPositions.of(torch.zeros(4, 16)), samples=torch.tensor([5, 6, 7, 2**40]))
    whole = dropout(x, place)
    kept = whole != 0
    assert set(whole[kept].unique().tolist()) == {1 / 0.75}
    assert abs(kept.double().mean().item() - 0.75) < 5 * (0.75 * 0.25 / kept.numel()) ** 0.5

    part = TokenPositions(place.position_ids[1:3, 4:9], place.samples[1:3], length=16)
    assert torch.equal(dropout(x[1:3, 4:9], part), whole[1:3, 4:9])
    assert not torch.equal(Dropout(0.25, seed=2, name="layers.0.mlp")(x, place), whole)
    assert not torch.equal(Dropout(0.25, seed=1, name="layers.1.mlp")(x, place), whole)
    assert not torch.equal(whole[0], whole[1])


def test_dropout_is_off_in_eval_mode() -> None:
    model = build(SPECS["gpt"])
    assert not torch.equal(model(TOKENS), model.eval()(TOKENS))
    assert torch.equal(model(TOKENS), model(TOKENS))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    """With rotary positions, which are relative, a packed document computes what it would alone."""
    model = build(SPECS[name])
    documents = torch.tensor([[0] * 10 + [1] * 14]).expand(3, -1)
    packed = model(TOKENS, replace(TokenPositions.of(TOKENS), documents=documents))
    assert torch.allclose(packed[:, :10], model(TOKENS[:, :10]), rtol=1e-12, atol=1e-12)
    assert torch.allclose(packed[:, 10:], model(TOKENS[:, 10:]), rtol=1e-12, atol=1e-12)


def test_the_loss_counts_only_what_the_mask_keeps() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    targets = torch.randint(0, 7, (2, 5))
    mask = torch.tensor([[True, False, True, True, False], [False] * 5])
    by_hand = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert torch.allclose(loss_sum(logits, targets, mask), by_hand[mask].sum())
    assert loss_sum(logits, targets, torch.zeros_like(mask)).item() == 0.0


def test_a_box_of_a_stack_of_matrices_draws_what_the_whole_stack_has() -> None:
    spec = preset("tiny")
    experts = Parameter("layers.0.mlp.experts.weight", (3, 5, 7), "linear", 0, "colwise")
    whole = torch.empty(3, 5, 7)
    init_param(spec, experts, whole, seed=3)
    assert len(set(whole.flatten().tolist())) == 3 * 5 * 7
    part = torch.empty(2, 3, 4)
    init_param(spec, experts, part, seed=3, box=(range(1, 3), range(1, 4), range(2, 6)))
    assert torch.equal(part, whole[1:3, 1:4, 2:6])
    flat = torch.empty(15, 7)
    init_param(spec, experts._replace(shape=(15, 7)), flat, seed=3)
    assert torch.equal(flat, whole.flatten(0, 1))
