"""The model against Hugging Face's: logits and every gradient, in fp32 to 1e-5 and in fp64 to 1e-10."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmoe import modeling_olmoe
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from fivefold.model.decoder import Decoder
from fivefold.model.hf_names import BALANCE_BIAS, expert_format_in, sources, stored_parameters
from fivefold.model.linear_cross_entropy import loss_sum
from fivefold.model.rope import rope_frequencies
from fivefold.spec.hf import spec_from_hf
from fivefold.spec.model import ModelSpec

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "original_max_position_embeddings": 16, "rope_theta": 300.0,
}  # fmt: skip
DEEPSEEK = LLAMA | {  # dense MLPs throughout
    "num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8, "v_head_dim": 5, "first_k_dense_replace": 3,
}  # fmt: skip
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CASES: dict[str, Any] = {
    "llama-gqa": transformers.LlamaConfig(**LLAMA),
    "llama-mha": transformers.LlamaConfig(**LLAMA | {"num_key_value_heads": 6}),
    "llama-mqa-tied": transformers.LlamaConfig(**LLAMA | {"num_key_value_heads": 1}, tie_word_embeddings=True),
    "llama-3.1-rope": transformers.LlamaConfig(**LLAMA, rope_parameters=LLAMA31_ROPE),
    "llama-3.3-rope": transformers.LlamaConfig(**LLAMA, head_dim=16, rope_parameters=LLAMA31_ROPE | {"factor": 2.0}),
    "smollm2": transformers.LlamaConfig(
        **LLAMA | {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 64},
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    ),
    "mistral": transformers.MistralConfig(**LLAMA, sliding_window=None, rms_norm_eps=1e-5),
    "qwen2.5": transformers.Qwen2Config(**LLAMA),
    "qwen2.5-tied": transformers.Qwen2Config(**LLAMA | {"num_key_value_heads": 1}, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**LLAMA, head_dim=16),
    "qwen3-tied": transformers.Qwen3Config(**LLAMA, head_dim=16, tie_word_embeddings=True),
    "deepseek-v2": transformers.DeepseekV2Config(**DEEPSEEK),
    "deepseek-v2-lite": transformers.DeepseekV2Config(
        **DEEPSEEK | {"q_lora_rank": None}, rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}
    ),
    "deepseek-v3": transformers.DeepseekV3Config(
        **DEEPSEEK, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, rms_norm_eps=1e-5
    ),
    "glm4-moe": transformers.Glm4MoeConfig(
        **LLAMA, head_dim=12, first_k_dense_replace=3, attention_bias=True, use_qk_norm=True
    ),
    "yarn": transformers.LlamaConfig(**LLAMA, rope_parameters=YARN | {"truncate": False}),
    "gpt2": transformers.GPT2Config(vocab_size=97, n_embd=48, n_layer=3, n_head=6, n_positions=64, **NO_DROPOUT),
    "gpt2-untied": transformers.GPT2Config(
        vocab_size=97, n_embd=48, n_layer=2, n_head=4, n_positions=64, tie_word_embeddings=False,
        activation_function="gelu", **NO_DROPOUT,
    ),
}  # fmt: skip


_MODULES = (
    modeling_llama, modeling_mistral, modeling_qwen2, modeling_qwen3, modeling_deepseek_v2, modeling_deepseek_v3,
    modeling_glm4_moe, modeling_mixtral, modeling_olmoe, modeling_qwen3_moe, modeling_gpt_oss,
)  # fmt: skip


class _InFloat64:
    """torch, but `torch.float32` is float64: what the Hugging Face code rounds to single precision stays double."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def unrounded(dtype: torch.dtype) -> Iterator[None]:
    """Hugging Face norms and rotations compute in float32 whatever the model's dtype; in a float64 comparison, let
    them compute the same formulas in float64, however they spell the rounding."""
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            for module in _MODULES:
                patch.setattr(module, "torch", _InFloat64())
            patch.setattr(Tensor, "float", Tensor.double)
        yield


def pair(config: Any, dtype: torch.dtype) -> tuple[torch.nn.Module, Decoder]:
    torch.manual_seed(0)
    how = {
        "attn_implementation": "eager" if config.model_type == "gpt_oss" else "sdpa",
        "experts_implementation": "eager",
    }
    theirs = transformers.AutoModelForCausalLM.from_config(config, **how).to(dtype)
    with torch.no_grad():  # norms and biases start at 1 and 0, where a mix-up would not show
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
            assert parameter.dtype == dtype, name
    for name, buffer in theirs.named_buffers():
        if name.endswith(BALANCE_BIAS):
            buffer.normal_(std=0.3)
        if name.endswith("inv_freq") and dtype == torch.float64:  # made in float32 by their constructor
            exact = rope_frequencies(spec_from_hf(config.to_dict()))
            assert torch.allclose(buffer.double(), exact, rtol=1e-6)
            buffer.data = exact.to(dtype)
    spec = spec_from_hf(config.to_dict())
    ours = Decoder(spec).to(dtype)
    state, buffers = by_our_names(spec, theirs.state_dict()), dict(ours.named_buffers())
    for name in spec.buffers():
        buffers[name].copy_(state.pop(name))
    ours.load_state_dict(state)
    return theirs, ours


def by_our_names(spec: ModelSpec, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a class of transformers is ours; it holds experts in stacks."""
    found = {}
    for one in stored_parameters(spec):
        found_in = list(sources(spec, one, expert_format_in(spec, theirs)))
        if found_in[0].name in theirs:  # a gradient of a buffer is not
            found[one.name] = torch.cat([source.view_of(theirs[source.name]) for source in found_in])
    return found


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_equal_transformers(case: str, dtype: torch.dtype, bound: float) -> None:
    theirs, ours = pair(CASES[case], dtype)
    tokens = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(1))
    targets, mask = tokens.roll(-1, 1), torch.ones_like(tokens, dtype=torch.bool)
    mask[0, 20:] = False
    with unrounded(dtype):
        expected = theirs(tokens).logits
        loss_sum(expected, targets, mask).backward()
    logits = ours(tokens)
    loss_sum(logits, targets, mask).backward()

    assert logits.dtype == dtype
    assert worst(logits, expected) <= bound
    expected_gradients = by_our_names(ours.spec, {name: p.grad for name, p in theirs.named_parameters()})
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        if name.endswith("attention.k.bias") and ours.spec.positions == "learned":
            # A shift of every key moves each row of scores by a constant, which softmax ignores: the true value is 0.
            assert gradient.abs().max() <= bound * expected_gradients[name.replace(".k.", ".q.")].abs().max()
            continue
        assert gradient.abs().max() > 0, name
        assert worst(gradient, expected_gradients[name]) <= bound, name


def worst(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("case", CASES)
def test_names_go_to_hugging_face_and_back(case: str) -> None:
    theirs, ours = pair(CASES[case], torch.float32)
    state, expected = ours.state_dict(), {name: one.detach() for name, one in theirs.named_parameters()}
    expert_format = expert_format_in(ours.spec, expected)
    back = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    for parameter in ours.spec.parameters():
        for source in sources(ours.spec, parameter, expert_format):
            assert source.shape(parameter) == back[source.name].shape
            source.view_of(back[source.name]).copy_(state[parameter.name][source.rows.start : source.rows.stop])
    for name, tensor in expected.items():
        assert torch.equal(back[name], tensor), name
