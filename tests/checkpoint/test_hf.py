"""Hugging Face's directories, both ways: the same logits as `transformers`, and bad ones named."""

import gc
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fivefold.checkpoint import hf
from fivefold.checkpoint.find import find, job_of
from fivefold.checkpoint.hf import export_hf, import_hf
from fivefold.checkpoint.hf_files import HuggingFace
from fivefold.checkpoint.store import Store
from fivefold.generation.generator import single_process_generator
from fivefold.job.config import Job, TrainConfig
from fivefold.model.decoder import Decoder
from fivefold.spec.hf import read_hf_config, spec_from_hf, to_hf_config
from fivefold.spec.presets import preset
from fivefold.support.errors import UserError
from tests.checkpoint.runs import small_job, train
from tests.ranks import run_ranks

TOKENS = torch.arange(24).reshape(2, 12) * 7 % 250


def quiet(_: int) -> None: ...


def theirs(directory: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def ours(spec, fill) -> torch.Tensor:
    model = Decoder(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
        return model.eval()(TOKENS)


def from_files(directory: Path) -> torch.Tensor:
    reader = HuggingFace(directory)

    def fill(name: str, parameter: torch.Tensor) -> None:
        parameter.copy_(reader.read(name, tuple(range(size) for size in parameter.shape)))

    return ours(reader.spec, fill)


def made(kind: str, tied: bool, directory: Path, shard: str = "5GB") -> Path:
    """A directory that transformers wrote."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 64, "head_dim": 8,
             "initializer_range": 0.2}  # fmt: skip
    ends = {"tie_word_embeddings": tied}
    config = {
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=259, n_positions=64, initializer_range=0.2, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        "qwen2": lambda: transformers.Qwen2Config(**sizes, **ends),
        "mistral": lambda: transformers.MistralConfig(**sizes, sliding_window=None),
        "qwen3": lambda: transformers.Qwen3Config(**sizes, **ends),
        "llama": lambda: transformers.LlamaConfig(**sizes, **ends),
    }[kind]()  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory, max_shard_size=shard)
    return directory


CASES = [("llama", False), ("llama", True), ("mistral", False), ("qwen2", True), ("qwen3", False), ("qwen3", True)]
CASES += [("gpt2", True)]


@pytest.mark.parametrize(("kind", "tied", "shard"), [(*case, "20KB") for case in CASES] + [("llama", False, "5GB")])
def test_imported_and_exported_again_it_has_the_logits_of_transformers(
    tmp_path: Path, kind: str, tied: bool, shard: str
) -> None:
    directory = made(kind, tied, tmp_path / "in", shard)
    assert (len(list(directory.glob("*.safetensors"))) > 1) == (shard == "20KB")
    want = theirs(directory)
    assert torch.allclose(from_files(directory), want, atol=1e-5)
    import_hf(directory, tmp_path / "run", quiet)
    one = find(tmp_path / "run")
    assert one.damage() == []
    assert (one.manifest.step, one.manifest.optimizer) == (0, False)
    export_hf(one, job_of(one).model, tmp_path / "out", "float32", 20_000, None, None, quiet)
    assert torch.equal(theirs(tmp_path / "out"), want)
    assert read_hf_config(tmp_path / "out").tied == tied


def test_what_was_trained_under_tp_and_pp_is_read_by_transformers(tokens: Path, tmp_path: Path) -> None:
    job = small_job(tokens, "model.kv_heads=2", "layout=tp=2,pp=2,microbatches=2", "train.steps=3")
    run_ranks(4, train, job, tmp_path / "checkpoints")
    one = find(tmp_path)
    export_hf(one, job.model, tmp_path / "out", "float32", 10**9, None, None, quiet)
    generator = single_process_generator(Job(model=job.model, train=TrainConfig(device="cpu")), one.path, 16)
    logits = theirs(tmp_path / "out")
    for row, want in zip(TOKENS.tolist(), logits, strict=True):
        generator.network.model.begin_text(16)
        with torch.no_grad():
            found = generator._next_logits(row, 0)
        assert found is not None
        assert torch.allclose(found, want[-1], atol=1e-5)


def test_a_run_goes_on_from_imported_weights(tokens: Path, tmp_path: Path) -> None:
    directory = made("llama", False, tmp_path / "in")
    import_hf(directory, tmp_path / "run", quiet)
    spec = read_hf_config(directory)
    job = small_job(tokens, "train.steps=2", "optimizer.lr=1e-3")
    job = msgspec.structs.replace(job, model=spec)
    losses, _, samples = train(0, 1, job, tmp_path / "run" / "checkpoints")
    assert sorted(losses) == [1, 2]
    assert samples == list(range(16))


@pytest.mark.parametrize(
    "name", ["llama3-8b", "llama3.2-1b", "qwen2.5-7b", "qwen3-8b", "tiny-gpt", "tiny", "smollm2-1.7b"]
)
def test_a_config_that_is_written_reads_back_as_the_same_model(name: str) -> None:
    spec = preset(name)
    assert spec_from_hf(to_hf_config(spec, "bfloat16"), spec.name) == spec


def test_a_model_that_transformers_has_not_is_refused(tokens: Path) -> None:
    job = small_job(tokens, "model.bias=true", "model.norm=layernorm")
    with pytest.raises(UserError) as error:
        to_hf_config(job.model, "float32")
    assert len(error.value.problems) == 2
    assert "llama of transformers has norm='rmsnorm', and tiny has norm='layernorm'" in error.value.problems


def changed(directory: Path, change) -> None:
    file = next(iter(directory.glob("*.safetensors")))
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


def problems(directory: Path) -> list[str]:
    with pytest.raises(UserError) as error:
        HuggingFace(directory)
    return [problem.replace(str(directory), "DIR") for problem in error.value.problems]


def without_norm(state: dict[str, torch.Tensor]) -> None:
    del state["model.norm.weight"]
    state["lm_head.weight"] = state["lm_head.weight"][:-1].clone()


def with_oddities(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
    state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_norm, [
            "DIR has no tensor model.norm.weight (our norm.weight, shape [32])",
            "tensor lm_head.weight of model.safetensors has shape [258, 32] for our head.weight, but config.json "
            "expects [259, 32]",
        ]),
        (with_oddities, [
            "tensor model.layers.1.mlp.up_proj.weight of model.safetensors is of I8, which is not a weight dtype",
            "tensor model.layers.0.self_attn.q_proj.bias of DIR has no place in the model of its config.json",
        ]),
    ],
)  # fmt: skip
def test_bad_tensors_are_named(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], said) -> None:
    directory = made("llama", False, tmp_path / "in")
    changed(directory, change)
    assert problems(directory) == said


def test_bad_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*config.json: No such file"):
        HuggingFace(tmp_path)
    directory = made("llama", False, tmp_path / "in")
    weights, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    config = json.loads((directory / "config.json").read_text())

    def indexed(names: object) -> None:
        index.write_text(json.dumps({"weight_map": names}))

    def configured(**changes: object) -> None:
        (directory / "config.json").write_text(json.dumps(config | changes))

    def other_tensors() -> None:
        save_file({"a": torch.zeros(1)}, weights)
        indexed({"model.embed_tokens.weight": weights.name})

    for harm, said in [
        (lambda: weights.write_bytes(b"nothing"), "is not a safetensors file that can be read"),
        (weights.unlink, r"has no \*\.safetensors"),
        (lambda: indexed({"a": "gone.safetensors"}), rf"lacks 1 file that {index.name} names: gone\.safetensors$"),
        (lambda: indexed(["a"]), "is not an index of tensors"),
        (other_tensors, r"lists tensor model\.embed_tokens\.weight in .*model\.safetensors, which does not have it"),
        (lambda: configured(quantization_config={"quant_method": "fp8"}), "is quantised"),
        (lambda: configured(model_type="mamba"), "model_type 'mamba' is not of the family"),
    ]:
        harm()
        with pytest.raises(UserError, match=said):
            HuggingFace(directory)


def test_weights_that_are_no_numbers_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    directory = made("llama", False, tmp_path / "in")
    changed(directory, lambda state: state["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(UserError, match=r"norm\.weight of .* contains NaN or Inf"):
        import_hf(directory, tmp_path / "run", quiet)
    assert Store(tmp_path / "run" / "checkpoints").complete() == []


def test_neither_way_overwrites_anything(tmp_path: Path) -> None:
    directory = made("llama", False, tmp_path / "in")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        import_hf(directory, tmp_path / "full", quiet)
    import_hf(directory, tmp_path / "run", quiet)
    one = find(tmp_path / "run")
    with pytest.raises(UserError, match="not empty"):
        export_hf(one, job_of(one).model, tmp_path / "full", "float32", 10**9, None, None, quiet)
    assert (tmp_path / "full" / "file").read_text() == "mine"


def test_no_more_than_a_part_is_in_memory(tmp_path: Path) -> None:
    """A model of 120 MB, both ways in parts of 8 MB: the memory of a new process that no file stands behind."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 7, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=300))
    model.save_pretrained(tmp_path / "in", max_shard_size="8MB")
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert whole > 115e6
    ((imported, exported, control),) = run_ranks(1, both_ways, tmp_path, whole)
    assert max(imported, exported) < whole / 3
    assert control > whole / 2, "the measure does not see what it is to see"


def both_ways(rank: int, world: int, folder: Path, whole: int) -> tuple[int, int, int]:
    hf._MAX_HELD_BYTES = 8 << 20
    imported = growth(lambda: import_hf(folder / "in", folder / "run", quiet))
    one = find(folder / "run")
    spec = job_of(one).model
    exported = growth(lambda: export_hf(one, spec, folder / "out", "float32", 8 << 20, None, None, quiet))
    return imported, exported, growth(lambda: torch.ones(whole // 4))


def growth(do: Callable[[], object]) -> int:
    """Bytes by which this process's own memory grew, at its most, while something was done."""
    gc.collect()
    start = most = _anonymous()
    done = threading.Event()

    def look() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, _anonymous())

    thread = threading.Thread(target=look)
    thread.start()
    kept = do()
    time.sleep(0.02)
    done.set()
    thread.join()
    del kept
    return most - start


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
