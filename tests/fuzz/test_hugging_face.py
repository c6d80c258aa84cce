"""Hugging Face directories: opened, or refused in sentences, whichever of their files is damaged."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.checkpoint.hf_files import HuggingFace
from fivefold.data.tokenizer import end_tokens
from fivefold.generation.request import text_of
from fivefold.model.hf_names import sources
from fivefold.spec.hf import END_NAMED_IN, spec_from_hf, to_hf_config
from fivefold.spec.presets import preset
from tests.fuzz.cases import changed, damaged, documents, fuzz, survives

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 257,
    "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "eos_token_id": 256, "hidden_act": "silu", "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 257, "n_positions": 64, "n_inner": None,
    "attn_pdrop": 0.0, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "activation_function": "gelu_new",
}  # fmt: skip
QUANTISED = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MIXTURES = [
    to_hf_config(preset(name, layers=4), "float32") | {"quantization_config": QUANTISED, "num_nextn_predict_layers": 1}
    for name in ("qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b")
]


def ends(folder: Path) -> set[int]:
    return end_tokens(folder, END_NAMED_IN)


def header() -> dict[str, Any]:
    """Of a safetensors file with every weight of the Llama, all of them zero."""
    spec, end, found = spec_from_hf(LLAMA), 0, {}
    for parameter in spec.parameters():
        start, end = end, end + 4 * parameter.size
        name = next(sources(spec, parameter)).name
        found[name] = {"dtype": "F32", "shape": list(parameter.shape), "data_offsets": [start, end]}
    return found


def weights(head: bytes, size: int) -> bytes:
    return struct.pack("<Q", len(head)) + head + bytes(size)


HEADER = header()
SIZE = max(one["data_offsets"][1] for one in HEADER.values())
WEIGHTS = weights(json.dumps(HEADER).encode(), SIZE)
INDEX = {"metadata": {}, "weight_map": dict.fromkeys(HEADER, "model.safetensors")}
TOKENIZER = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1},
                                                            "unk_token": "a"}}  # fmt: skip
WHOLE: dict[str, bytes] = {
    "config.json": json.dumps(LLAMA).encode(),
    "model.safetensors": WEIGHTS,
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "generation_config.json": b'{"eos_token_id": [256, 1]}',
    "tokenizer.json": json.dumps(TOKENIZER).encode(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    for name, content in WHOLE.items():
        (path / name).write_bytes(content)
    return path


def judge(folder: Path, changes: dict[str, bytes], *questions: Callable[[Path], object]) -> None:
    """Some files changed, and put back."""
    for name, content in changes.items():
        (folder / name).write_bytes(content)
    for ask in questions:
        survives(lambda ask=ask: ask(folder))
    for name in changes:
        (folder / name).write_bytes(WHOLE[name])


def test_the_undamaged_one_is_read(folder: Path) -> None:
    assert HuggingFace(folder).spec.layers == 1
    assert ends(folder) == {256, 1}
    assert text_of(folder, None, 257).encode("a") == [1]


@fuzz
@given(st.one_of(*map(documents, (LLAMA, GPT2, *MIXTURES))))
def test_configs(folder: Path, content: bytes) -> None:
    judge(folder, {"config.json": content}, HuggingFace, ends)


@fuzz
@given(documents(INDEX))
def test_indices_of_tensors(folder: Path, content: bytes) -> None:
    judge(folder, {"model.safetensors.index.json": content}, HuggingFace)


@fuzz
@given(st.one_of(damaged(WEIGHTS), changed(HEADER).map(lambda it: weights(json.dumps(it).encode(), SIZE)), st.binary()))
def test_weights(folder: Path, content: bytes) -> None:
    judge(folder, {"model.safetensors": content}, HuggingFace)


@fuzz
@given(documents({"eos_token_id": [256, 1], "bos_token_id": 0}), documents(TOKENIZER))
def test_other_files(folder: Path, generation: bytes, tokenizer: bytes) -> None:
    files = {"generation_config.json": generation, "tokenizer.json": tokenizer}
    judge(folder, files, ends, lambda path: text_of(path, None, 257))
