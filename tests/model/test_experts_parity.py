"""Mixtures of experts against Hugging Face's: logits and every gradient, the router's included.

The classes of transformers round to float32 what a router and a norm compute; in a float64 comparison they are made to
compute the same formulas in float64 (`unrounded`).
"""

from typing import Any

import pytest
import torch
import transformers

from fivefold.model.linear_cross_entropy import loss_sum
from tests.model.test_parity import by_our_names, pair, unrounded

SIZES = {"vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 2, "num_attention_heads": 6,
         "max_position_embeddings": 64, "pad_token_id": None}  # fmt: skip
HEADS = SIZES | {"num_key_value_heads": 2, "head_dim": 12}
LATENTS = SIZES | {"num_key_value_heads": 6, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
                   "v_head_dim": 8, "first_k_dense_replace": 1}  # fmt: skip
ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 11, "intermediate_size": 34}
FEW = {"intermediate_size": 11, "num_experts_per_tok": 2}
CASES: dict[str, Any] = {
    "mixtral": transformers.MixtralConfig(**HEADS, **FEW, num_local_experts=5),
    "mixtral, all experts": transformers.MixtralConfig(**HEADS, **FEW, num_local_experts=2),
    "olmoe": transformers.OlmoeConfig(**SIZES, **FEW, num_key_value_heads=3, num_experts=5),
    "olmoe, renormalised": transformers.OlmoeConfig(**SIZES, **FEW, num_experts=5, norm_topk_prob=True),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **HEADS, **FEW, moe_intermediate_size=13, num_experts=7, norm_topk_prob=True, mlp_only_layers=[0]
    ),
    "deepseek-v2": transformers.DeepseekV2Config(
        **LATENTS, **ROUTED, n_shared_experts=1, q_lora_rank=9, routed_scaling_factor=1.7,
        topk_method="group_limited_greedy", n_group=3, topk_group=2,
    ),
    "deepseek-v2-lite": transformers.DeepseekV2Config(**LATENTS, **ROUTED, n_shared_experts=2, q_lora_rank=None),
    "deepseek-v3": transformers.DeepseekV3Config(
        **LATENTS, **ROUTED, n_shared_experts=1, q_lora_rank=9, n_group=3, topk_group=2, num_nextn_predict_layers=0
    ),
    "gpt-oss": transformers.GptOssConfig(**HEADS, **FEW, num_local_experts=5, sliding_window=7),
    "glm4-moe": transformers.Glm4MoeConfig(
        **HEADS, **ROUTED, n_shared_experts=2, first_k_dense_replace=0, norm_topk_prob=False, attention_bias=True,
        num_nextn_predict_layers=0,
    ),
}  # fmt: skip
TOKENS = torch.randint(0, 97, (2, 21), generator=torch.Generator().manual_seed(1))
FP32, FP64 = (torch.float32, 1e-5), (torch.float64, 1e-10)


def compared(theirs: torch.nn.Module, ours: torch.nn.Module, tokens: torch.Tensor, bound: float) -> dict[str, Any]:
    """Our gradients by name, after they and the logits were found equal to theirs."""
    targets, mask = tokens.roll(-1, 1), torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 15:] = False
    mask[0, 0] = True
    logits = ours(tokens)
    loss_sum(logits, targets, mask).backward()
    with unrounded(logits.dtype):
        expected = theirs(tokens).logits
        loss_sum(expected, targets, mask).backward()
    assert (logits - expected).abs().max() <= bound * expected.abs().max()
    wanted = by_our_names(
        ours.spec, {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    )
    found = {name: one.grad for name, one in ours.named_parameters()}
    assert found.keys() == wanted.keys()
    scale = max(one.abs().max() for one in wanted.values())
    for name, gradient in found.items():
        # Where a gradient is zero in theory (queries of one token), that of others is the measure.
        measure = max(wanted[name].abs().max(), 1e-3 * scale)
        assert (gradient - wanted[name]).abs().max() <= bound * measure, name
    return found


@pytest.mark.parametrize(("dtype", "bound"), [FP32, FP64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_equal_transformers(case: str, dtype: torch.dtype, bound: float) -> None:
    theirs, ours = pair(CASES[case], dtype)
    for name, gradient in compared(theirs, ours, TOKENS, bound).items():
        assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("case", ["mixtral", "deepseek-v3"])
def test_one_token(case: str) -> None:
    compared(*pair(CASES[case], torch.float64), TOKENS[:1, :1], 1e-10)


def test_experts_that_get_no_token_have_a_gradient_of_zero() -> None:
    theirs, ours = pair(CASES["deepseek-v3"], torch.float64)
    for name, buffer in (*theirs.named_buffers(), *ours.named_buffers()):
        if name.endswith(("e_score_correction_bias", "router.balance")):
            buffer.copy_(torch.tensor([0.0, 9.0, -9.0, 20.0, 0.0, 0.0]))  # two groups always win, and of them three
    found = compared(theirs, ours, TOKENS, 1e-10)
    gate = found["layers.1.mlp.experts.gate.weight"].unflatten(0, (6, -1))
    assert (gate.abs().amax((1, 2)) > 0).tolist() == [True, True, False, True, False, False]
    assert found["layers.1.mlp.router.weight"][2].abs().max() == 0  # a sigmoid knows no other scores
