"""Mixtures of experts in Hugging Face's configurations: read, written, and refused by name."""

import warnings
from typing import Any

import pytest

from fivefold.spec.blocks import Experts
from fivefold.spec.hf import spec_from_hf, to_hf_config
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.errors import Note, UserError

PUBLISHED = [name for name in PRESETS if "experts" in PRESETS[name] and not name.startswith(("tiny", "grok"))]
QWEN = {
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OSS = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}  # fmt: skip
KIMI = {
    "model_type": "kimi_k2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 163840,
}  # fmt: skip


def test_released_configs_are_their_presets() -> None:
    assert spec_from_hf(QWEN, "qwen3-30b-a3b") == preset("qwen3-30b-a3b")
    assert spec_from_hf(KIMI, "kimi-k2") == preset("kimi-k2")
    assert spec_from_hf(OSS, "gpt-oss-20b") == preset("gpt-oss-20b")


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_that_is_written_reads_back_as_the_same_model(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert spec_from_hf(to_hf_config(preset(name), "bfloat16"), name) == preset(name)


@pytest.mark.parametrize("rope_dim", [0, 16])
def test_a_head_is_turned_as_far_as_it_was(rope_dim: int) -> None:
    spec = preset("tiny-deepseek", mla=None, rope_interleaved=False, head_dim=32, rope_dim=rope_dim)
    config = to_hf_config(spec, "bfloat16")
    assert config["model_type"] == "glm4_moe"  # whose class turns a half where the share is left out
    assert spec_from_hf(config, "x").rope_dim == rope_dim
    assert config["rope_parameters"]["partial_rotary_factor"] == (rope_dim or 32) / 32


@pytest.mark.parametrize(
    ("config", "change", "sentence"),
    [
        (QWEN, {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported for qwen3_moe; only"),
        (QWEN, {"mlp_only_layers": [0, 2]}, r"mlp_only_layers=\[0, 2\] is not supported: .* as in \[0, 1\]"),
        (QWEN, {"num_experts": None}, "num_experts is missing"),
        (QWEN, {"num_experts": "many"}, "model.experts.count='many'"),
        (QWEN, {"num_experts_per_tok": 200}, "model.experts.top_k=200 is more than model.experts.count=128"),
        (QWEN, {"model_type": "mixtral", "num_local_experts": 8, "router_jitter_noise": 0.1}, "jitter_noise=0.1"),
        (QWEN, {"model_type": "mixtral", "num_local_experts": 8, "sliding_window": 64}, "sliding_window=64"),
        (QWEN, {"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv=8.0 is not supported for olmoe"),
        (OSS, {"swiglu_limit": 5.0}, "swiglu_limit=5.0 is not supported for gpt_oss"),
        (OSS, {"layer_types": ["full_attention"] * 23 + ["sliding_attention"]}, "layer_types=.* is not supported"),
        (KIMI, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (KIMI, {"topk_method": "greedy"}, "topk_method='greedy' is not supported for kimi_k2"),
        (KIMI, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (KIMI, {"model_type": "deepseek_v2", "scoring_func": "softmax"}, "norm_topk_prob=True .* for deepseek_v2"),
        (KIMI, {"model_type": "deepseek_v2", "scoring_func": None, "norm_topk_prob": False},
         "topk_method='noaux_tc' is not supported for deepseek_v2; greedy and group_limited_greedy are"),
    ],
)  # fmt: skip
def test_what_the_family_has_not_is_refused_by_name(config: dict, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        spec_from_hf(config | change)


def test_layers_that_predict_later_tokens_are_left_out_with_a_word() -> None:
    with pytest.warns(Note, match="num_nextn_predict_layers=1 is read as 0"):
        spec = spec_from_hf(KIMI | {"num_nextn_predict_layers": 1}, "kimi-k2")
    assert spec == preset("kimi-k2")


def test_a_mixture_that_transformers_has_not_is_refused() -> None:
    with pytest.raises(UserError) as error:
        to_hf_config(preset("mixtral-8x7b", experts=Experts(count=8, top_k=2, ffn=64, shared=1, scale=2.0)), "float32")
    assert error.value.problems == [
        "mixtral of transformers has experts.shared=0, and mixtral-8x7b has 1",
        "mixtral of transformers has experts.scale=1.0, and mixtral-8x7b has 2.0",
    ]
    few = Experts(count=8, top_k=2, ffn=64, scores="sigmoid", balance_bias=True)
    with pytest.raises(UserError, match="deepseek_v3 of transformers has at least one shared expert"):
        to_hf_config(preset("kimi-k2", experts=few), "float32")
