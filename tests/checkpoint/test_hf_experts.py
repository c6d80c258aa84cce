"""Mixtures of experts in Hugging Face's files: both ways, in each of their forms, quantised ones too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fivefold.checkpoint import hf, hf_files
from fivefold.checkpoint.find import find, job_of
from fivefold.checkpoint.hf import export_hf, import_hf
from fivefold.checkpoint.hf_files import HuggingFace
from fivefold.checkpoint.store import Store
from fivefold.model.decoder import Decoder
from fivefold.support.errors import UserError
from tests.model.test_experts_parity import CASES

KINDS = ["mixtral", "olmoe", "qwen3-moe", "deepseek-v2", "deepseek-v3", "glm4-moe", "gpt-oss"]
EAGER = {"experts_implementation": "eager"}  # their kernel refuses odd widths
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 97


def quiet(_: int) -> None: ...


def made(case: str, directory: Path) -> transformers.PreTrainedModel:
    """A directory that transformers wrote, and the model in it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CASES[case], dtype=torch.float32, **EAGER)
    with torch.no_grad():
        for name, one in (*model.named_parameters(), *model.named_buffers()):
            if not name.endswith("inv_freq"):
                one.add_(torch.randn_like(one), alpha=0.1)
    model.save_pretrained(directory)
    return model.eval()


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    return out if isinstance(out, Tensor) else out.logits


def ours(directory: Path) -> Tensor:
    reader = HuggingFace(directory)
    model = Decoder(reader.spec)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(reader.read(name, tuple(range(size) for size in tensor.shape)))
    return logits(model.eval())


def stored(directory: Path) -> dict[str, Tensor]:
    return {name: one for file in sorted(directory.glob("*.safetensors")) for name, one in load_file(file).items()}


def rewritten(directory: Path, tensors: dict[str, Tensor], **settings: Any) -> None:
    """The directory with other tensors, and other settings in its config.json."""
    save_file({name: one.contiguous() for name, one in tensors.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | settings
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("case", KINDS)
def test_imported_and_exported_again_it_is_transformers_own(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "_MAX_HELD_BYTES", 2500)  # so that experts of one parameter are in several parts
    model = made(case, tmp_path / "in")
    wanted = logits(model)
    assert torch.allclose(ours(tmp_path / "in"), wanted, atol=1e-5)
    import_hf(tmp_path / "in", tmp_path / "run", quiet)
    one = find(tmp_path / "run")
    assert one.damage() == []
    export_hf(one, job_of(one).model, tmp_path / "out", "float32", 20_000, None, None, quiet)
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **EAGER).eval()
    assert torch.equal(logits(back), wanted)


def test_in_bfloat16_the_bias_of_the_choice_stays_whole(tmp_path: Path) -> None:
    made("deepseek-v3", tmp_path / "in")
    import_hf(tmp_path / "in", tmp_path / "run", quiet)
    one = find(tmp_path / "run")
    export_hf(one, job_of(one).model, tmp_path / "out", "bfloat16", 10**9, None, None, quiet)
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(after[name], before[name])
    assert after["model.layers.1.mlp.experts.5.up_proj.weight"].dtype == torch.bfloat16


def test_experts_in_stacks_are_read(tmp_path: Path) -> None:
    model = made("qwen3-moe", tmp_path / "in")
    rewritten(tmp_path / "in", model.state_dict())
    assert torch.allclose(ours(tmp_path / "in"), logits(model), atol=1e-5)


def test_a_rank_reads_its_own_experts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("mixtral", tmp_path / "in")
    reader, read = HuggingFace(tmp_path / "in"), []
    monkeypatch.setattr(reader, "_slice", lambda name, slice=reader._slice: read.append(name) or slice(name))
    found = reader.read("layers.1.mlp.experts.up.weight", (range(11, 33), range(36)))  # 11 rows an expert
    wanted = [f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight" for expert in (1, 2)]
    assert read == wanted
    assert torch.equal(found, torch.cat([stored(tmp_path / "in")[name] for name in wanted]))
    assert reader.read("layers.0.mlp.experts.down.weight", (range(40, 50), range(3, 7))).shape == (10, 4)


def test_layers_that_predict_later_tokens_are_left_alone(tmp_path: Path) -> None:
    model = made("deepseek-v3", tmp_path / "in")
    beside = {name.replace(".1.", ".2."): one for name, one in stored(tmp_path / "in").items() if ".1." in name}
    rewritten(tmp_path / "in", stored(tmp_path / "in") | beside | {"model.layers.2.eh_proj.weight": torch.zeros(3)})
    with pytest.raises(UserError, match=r"tensor model\.layers\.2\..* and \d+ more of .* has no place"):
        HuggingFace(tmp_path / "in")
    rewritten(tmp_path / "in", stored(tmp_path / "in"), num_nextn_predict_layers=1)
    with pytest.warns(match=r"multi-token prediction \(MTP\) layers are left out"):
        assert torch.allclose(ours(tmp_path / "in"), logits(model), atol=1e-5)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    made("olmoe", tmp_path / "in")
    tensors = stored(tmp_path / "in")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.0.mlp.experts.2.down_proj.weight"] = torch.zeros(36, 12)
    rewritten(tmp_path / "in", tensors)
    with pytest.raises(UserError) as error:
        HuggingFace(tmp_path / "in")
    first, second = error.value.problems
    assert first.startswith("tensor model.layers.0.mlp.experts.2.down_proj.weight of model.safetensors has shape")
    assert "has no tensor model.layers.1.mlp.experts.3.up_proj.weight (our layers.1.mlp.experts.up.weight" in second


def fp8(weight: Tensor, tile: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix as DeepSeek releases it, its scales, and what they stand for."""
    numbers, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty([-(-size // each) for size, each in zip(weight.shape, tile, strict=True)])
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            at = (slice(row * tile[0], (row + 1) * tile[0]), slice(column * tile[1], (column + 1) * tile[1]))
            scales[row, column] = weight[at].abs().max() / 448
            numbers[at] = (weight[at] / scales[row, column]).to(torch.float8_e4m3fn)
            meant[at] = numbers[at].float() * scales[row, column]
    return numbers, scales, meant


@pytest.mark.parametrize("tile", [(128, 128), (8, 5)])
def test_fp8_with_a_scale_for_each_tile_is_read_as_what_it_stands_for(tmp_path: Path, tile: tuple[int, int]) -> None:
    model = made("deepseek-v3", tmp_path / "in")
    settings = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [*tile]}
    written, meant = {}, {}
    for name, one in stored(tmp_path / "in").items():
        written[name] = meant[name] = one
        if "_proj" in name:  # as in the release: neither the router, nor norms, nor the tables
            written[name], written[f"{name}_scale_inv"], meant[name] = fp8(one, tile)
    rewritten(tmp_path / "in", meant)
    wanted = ours(tmp_path / "in")
    rewritten(tmp_path / "in", written, quantization_config=settings)
    assert torch.equal(ours(tmp_path / "in"), wanted)
    assert not torch.equal(wanted, logits(model))
    reader, name = HuggingFace(tmp_path / "in"), "layers.1.attention.kv_up.weight"
    part = reader.read(name, (range(9, 40), range(3, 11)))  # not at the borders of tiles
    assert torch.equal(part, meant["model.layers.1.self_attn.kv_b_proj.weight"][9:40, 3:11])
    import_hf(tmp_path / "in", tmp_path / "run", quiet)
    assert len(Store(tmp_path / "run" / "checkpoints").complete()) == 1
    del written["model.layers.1.self_attn.kv_b_proj.weight_scale_inv"]
    rewritten(tmp_path / "in", written)
    with pytest.raises(UserError, match=r"kv_b_proj\.weight of .* is of F8_E4M3 with no scales, but config"):
        HuggingFace(tmp_path / "in")


def test_other_quantisations_are_refused(tmp_path: Path) -> None:
    made("mixtral", tmp_path / "in")
    for settings in ({"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}):
        rewritten(tmp_path / "in", stored(tmp_path / "in"), quantization_config=settings)
        with pytest.raises(UserError, match="is quantised in a way that is not read"):
            HuggingFace(tmp_path / "in")


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 6, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 6, 2), dtype=torch.uint8, generator=generator)
    wanted = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    assert torch.equal(hf_files.dequantise_mxfp4(blocks, scales).transpose(1, 2), wanted)
    one = torch.zeros(1, 16, dtype=torch.uint8)
    one[0, 0] = 0xA1  # 0.5 in the low four bits, -1 in the high
    assert hf_files.dequantise_mxfp4(one, torch.tensor([130], dtype=torch.uint8))[:3].tolist() == [4.0, -8.0, 0.0]


def test_blocks_of_mxfp4_are_read_as_what_they_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = CASES["gpt-oss"].to_dict() | {"hidden_size": 64, "intermediate_size": 32}
    monkeypatch.setitem(CASES, "wide", transformers.GptOssConfig(**sizes))
    model = made("wide", tmp_path / "in")
    generator, written, meant = torch.Generator().manual_seed(3), {}, {}
    for name, one in stored(tmp_path / "in").items():
        written[name] = meant[name] = one
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = one.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
            meant[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
            del written[name]
            written |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    model.load_state_dict(meant)
    rewritten(tmp_path / "in", written, quantization_config={"quant_method": "mxfp4"})
    found = ours(tmp_path / "in")
    assert torch.allclose(found, logits(model), atol=1e-5 * found.abs().max().item())
    import_hf(tmp_path / "in", tmp_path / "run", quiet)
    one = find(tmp_path / "run")
    export_hf(one, job_of(one).model, tmp_path / "out", "bfloat16", 10**9, None, None, quiet)
    for name, tensor in stored(tmp_path / "out").items():
        assert torch.equal(tensor, meant[name].bfloat16()), name  # four bits and a power of two are exact in bfloat16
    written["model.layers.0.mlp.experts.down_proj_scales"] = torch.zeros(5, 64, 2, dtype=torch.uint8)
    rewritten(tmp_path / "in", written)
    with pytest.raises(UserError, match=r"down_proj_blocks of .* is of U8 with scales of shape \[5, 64, 2\]"):
        HuggingFace(tmp_path / "in")
