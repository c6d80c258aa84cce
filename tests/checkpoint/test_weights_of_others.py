"""Imported weights: a job that fine-tunes them, tokens that are their own, and all that lay beside them given back."""

import json
import os
import shutil
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from typer.testing import CliRunner

from fivefold.checkpoint import hf_extras
from fivefold.checkpoint.find import find, stored_job
from fivefold.checkpoint.hf import import_hf
from fivefold.checkpoint.hf_extras import CARRIED_FILES
from fivefold.cli import app
from fivefold.data.prepare import prepare
from fivefold.job.fine_tuning import TULU_SOURCE, fine_tuning_job
from fivefold.job.reading import read_job
from fivefold.job.recipes import Choice
from fivefold.spec.presets import preset
from fivefold.support.errors import Note, UserError
from tests.commands import fivefold

TEXT = "The cat sat on the mat, and the hat was on the cat. " * 60
SMALL = ["train.device=cpu", "train.batch=4", "layout.microbatches=1", "train.steps=1", "optimizer.warmup=0"]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "vocab_size": 320,
    "initializer_range": 0.2,
}  # fmt: skip


def quiet(_: int) -> None: ...


def here(*words: object) -> str:
    """What a command prints that starts no ranks."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refusal(*words: object) -> str:
    with pytest.raises(UserError) as error:
        here(*words)
    return "\n".join(error.value.problems)


def first_loss(run: Path) -> float:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"]


def tokenizer(directory: Path, text: str) -> transformers.PreTrainedTokenizerFast:
    """One with a chat template, and an end of a turn that is not its end of a text."""
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = tokenizers.decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_end|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bare.train_from_iterator([text], trainer)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token="<s>", eos_token="<|im_end|>", pad_token="</s>", model_max_length=64
    )
    made.chat_template = "{% for one in messages %}{{ bos_token + one['content'] + eos_token }}{% endfor %}"
    made.save_pretrained(directory)
    return made


def made(directory: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
    """A directory of a chat model, as transformers writes it, with what older releases wrote beside it."""
    torch.manual_seed(0)
    words = tokenizer(directory, TEXT)
    own = {"bos_token_id": words.bos_token_id, "eos_token_id": [words.eos_token_id, 1], "pad_token_id": 1}
    experts = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.07, "output_router_logits": True}
    config = {
        "llama": lambda: transformers.LlamaConfig(**SIZES, **own),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, **own),
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, n_inner=128, vocab_size=320, n_positions=64, **own
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **SIZES, **own, **experts, num_experts=4, moe_intermediate_size=16
        ),
    }[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, bos_token_id=0, eos_token_id=[words.eos_token_id, 1]
    )
    model.save_pretrained(directory)
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<|im_end|>"}))
    return directory


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, tokens of its tokenizer and tokens of another one."""
    folder = tmp_path_factory.mktemp("others")
    made(folder / "hf")
    tokenizer(folder / "stranger", "def main(): return [None for word in words]\n" * 50)
    (folder / "text.txt").write_text(TEXT)
    prepare([folder / "text.txt"], folder / "tokens", tokenizer=folder / "hf")
    prepare([folder / "text.txt"], folder / "strange", tokenizer=folder / "stranger")
    prepare([folder / "text.txt"], folder / "bytes")
    return folder


def test_the_job_of_an_import_fine_tunes_by_a_recipe_that_it_names(own: Path, tmp_path: Path) -> None:
    said = here("hf", "import", own / "hf", "-o", tmp_path / "run")
    assert f"fivefold train {tmp_path / 'run'}/job.toml data.path=TOKENS" in said
    assert f"fivefold data prepare TEXT -o TOKENS --tokenizer {tmp_path / 'run'}" in said
    assert TULU_SOURCE in (tmp_path / "run" / "job.toml").read_text()
    job = read_job(tmp_path / "run" / "job.toml")
    assert job == stored_job(find(tmp_path / "run"))
    assert (job.optimizer.lr, job.optimizer.weight_decay, job.optimizer.warmup) == (5e-6, 0.0, 9)
    assert (job.optimizer.schedule, job.optimizer.decay, job.optimizer.final) == ("wsd", 1.0, 0.0)
    assert (job.train.dtype, job.data.seq, job.train.batch) == ("bfloat16", 64, 128)
    assert job.layout.microbatches == 128
    assert not job.problems(world=1)


@pytest.mark.parametrize(
    ("name", "lr", "seq"),
    [("llama3.2-1b", 5e-6, 4096), ("llama3-8b", 5e-6, 4096), ("llama3-70b", 2e-6, 4096), ("gpt2-124m", 5e-6, 1024)],
)
def test_a_larger_model_takes_a_lower_rate_and_no_sequence_is_longer_than_the_context(
    name: str, lr: float, seq: int
) -> None:
    job, choices = fine_tuning_job(preset(name), Choice("bfloat16", ""))
    assert (job.optimizer.lr, job.data.seq) == (lr, seq)
    assert not job.problems(world=1)
    assert "Tulu 3" in choices["optimizer.lr"].why


@pytest.mark.parametrize(
    ("dtype", "computed"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "bfloat16")]
)
def test_compute_and_exports_have_the_dtype_of_the_weights(tmp_path: Path, dtype: torch.dtype, computed: str) -> None:
    made(tmp_path / "hf", dtype=dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", Note)
        import_hf(tmp_path / "hf", tmp_path / "run", quiet)
    notes = [str(one.message) for one in caught if issubclass(one.category, Note)]
    assert [("float16" in one) for one in notes] == ([True] if dtype == torch.float16 else [])
    assert read_job(tmp_path / "run" / "job.toml").train.dtype == computed
    assert ("loss scale" in (tmp_path / "run" / "job.toml").read_text()) == (dtype == torch.float16)
    here("hf", "export", tmp_path / "run", "-o", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "out"))
    assert {one.dtype for one in after.values()} == {dtype}
    assert all(torch.equal(before[name], after[name]) for name in before)
    here("hf", "export", tmp_path / "run", "-o", tmp_path / "wide", "--dtype", "float32")
    assert load_file(tmp_path / "wide" / "model.safetensors")["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "qwen3_moe"])
def test_what_lay_beside_the_weights_comes_out_again_though_the_source_is_gone(tmp_path: Path, kind: str) -> None:
    directory = made(tmp_path / "in", kind)
    kept = tmp_path / "kept"
    shutil.copytree(directory, kept)
    import_hf(directory, tmp_path / "first", quiet)
    shutil.rmtree(directory)
    here("checkpoint", "reshard", tmp_path / "first", "--layout", "dp=2,zero=1", "-o", tmp_path / "run")
    here("hf", "export", tmp_path / "run", "-o", tmp_path / "out")
    names = [name for name in CARRIED_FILES if (kept / name).exists()]
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
            "special_tokens_map.json"} <= {*names}  # fmt: skip
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (kept / name).read_bytes(), name
    words = [transformers.AutoTokenizer.from_pretrained(one) for one in (kept, tmp_path / "out")]
    chat = [{"role": "user", "content": "The cat"}]
    for got in ("bos_token_id", "eos_token_id", "pad_token_id", "chat_template", "special_tokens_map"):
        assert getattr(words[0], got) == getattr(words[1], got), got
    assert words[0].eos_token == "<|im_end|>"
    assert words[0].apply_chat_template(chat, tokenize=False) == words[1].apply_chat_template(chat, tokenize=False)
    assert words[0](TEXT).input_ids == words[1](TEXT).input_ids
    ends = [transformers.GenerationConfig.from_pretrained(one).to_dict() for one in (kept, tmp_path / "out")]
    assert ends[0] == ends[1]
    configs = [transformers.AutoConfig.from_pretrained(one).to_dict() for one in (kept, tmp_path / "out")]
    assert {**configs[0], "_name_or_path": ""} == {**configs[1], "_name_or_path": ""}
    assert configs[1]["eos_token_id"] == [2, 1]
    if kind == "qwen3_moe":
        assert configs[1]["router_aux_loss_coef"] == 0.07


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_only_files_of_the_directory_that_are_not_too_large_are_taken(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = made(tmp_path / "in")
    content = (directory / name).read_bytes()
    (tmp_path / "away").write_bytes(content)
    for bad in (lambda place: place.symlink_to(tmp_path / "away"), os.mkfifo, Path.mkdir):
        (directory / name).unlink()
        bad(directory / name)
        with pytest.raises(UserError, match=r"leads out of|not a regular file"):
            import_hf(directory, tmp_path / "run", quiet)
        assert not (tmp_path / "run").exists()
        (directory / name).rmdir() if (directory / name).is_dir() else (directory / name).unlink()
        (directory / name).write_bytes(content)
    monkeypatch.setattr(hf_extras, "_MAX_BYTES", len(content) - 1)
    with pytest.raises(UserError, match="are read"):
        import_hf(directory, tmp_path / "run", quiet)
    assert not (tmp_path / "run").exists()


def test_tokens_of_another_tokenizer_are_refused(own: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    import_hf(own / "hf", run, quiet)
    way = f"fivefold data prepare TEXT -o TOKENS --tokenizer {run}"
    for words in (["train", run / "job.toml"], ["train", run], ["train", run / "job.toml", "--fresh"],
                  ["train", run / "job.toml", "run.name=new"]):  # fmt: skip
        said = refusal(*words, "--check", f"data.path={own / 'strange'}", *SMALL)
        assert f"{own / 'strange' / 'tokenizer.json'} (sha256 " in said
        assert f"the model's tokenizer is {run / 'tokenizer.json'} (sha256 " in said
        assert way in said
        for data in (f"data.path={own / 'bytes'}", "data.path="):  # the second: the standard library
            said = refusal(*words, "--check", data, *SMALL)
            assert "made by the tokenizer bytes" in said
            assert way in said
        here(*words, "--check", f"data.path={own / 'tokens'}", *SMALL)


def test_an_import_says_at_once_that_data_is_not_its_own(own: Path, tmp_path: Path) -> None:
    said = refusal("hf", "import", own / "hf", "-o", tmp_path / "run", "--data", own / "strange")
    assert f"--tokenizer {own / 'hf'}" in said
    assert not (tmp_path / "run").exists()
    said = here("hf", "import", own / "hf", "-o", tmp_path / "run", "--data", own / "tokens")
    assert "data.path=TOKENS" not in said
    job = read_job(tmp_path / "run" / "job.toml")
    assert job.data.path == str(own / "tokens")
    assert job.train.steps == 1  # two epochs of it are less than a step
    here("train", tmp_path / "run" / "job.toml", "--check")


def test_a_model_whose_tokenizer_is_not_read_here_is_not_trained_on_bytes(own: Path, tmp_path: Path) -> None:
    shutil.copytree(own / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").rename(tmp_path / "hf" / "tokenizer.model")
    with pytest.warns(Note, match=r"has no tokenizer\.json"):
        import_hf(tmp_path / "hf", tmp_path / "run", quiet)
    said = refusal("train", tmp_path / "run" / "job.toml", "--check", *SMALL)
    assert f"the model's tokenizer is {tmp_path / 'run' / 'tokenizer.model'}" in said
    assert "save_pretrained" in said


@pytest.mark.parametrize("eos", [99_999, [2, -1], "2", True])
def test_an_import_names_special_tokens_that_are_none(own: Path, tmp_path: Path, eos: object) -> None:
    shutil.copytree(own / "hf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
    with pytest.warns(Note, match=r"eos_token_id=.* of config\.json is not one of the \d+"):
        import_hf(tmp_path / "hf", tmp_path / "run", quiet)


def test_every_new_run_of_the_job_starts_from_the_imported_weights(own: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "m"
    import_hf(own / "hf", run, quiet)
    words = ["train", str(run / "job.toml"), f"data.path={own / 'tokens'}", *SMALL]
    first = fivefold(*words, "train.steps=4", "checkpoint.every=1", "checkpoint.keep=1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == ["step-00000000", "step-00000004"]
    fresh = fivefold(*words, "--fresh", cwd=tmp_path)
    assert fresh.returncode == 0, fresh.stderr
    assert f"starts with the weights of {run / 'checkpoints' / 'step-00000000'}" in fresh.stdout
    two = fivefold(*words, "run.name=two", "layout=dp=2,zero=1", "--nproc", "2", cwd=tmp_path)
    assert two.returncode == 0, two.stderr
    random = fivefold(*words, "run.name=random", "run.weights=", cwd=tmp_path)
    assert random.returncode == 0, random.stderr
    losses = {name: first_loss(tmp_path / "runs" / name) for name in ("m", "m-2", "two", "random")}
    assert losses["m-2"] == losses["m"]
    assert losses["two"] == pytest.approx(losses["m"], abs=1e-3)
    assert abs(losses["random"] - losses["m"]) > 1e-2
    here("hf", "export", tmp_path / "runs" / "m-2", "-o", tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|im_end|>"


def test_a_job_of_the_same_name_that_pretrains_does_not_touch_imported_weights(own: Path, tmp_path: Path) -> None:
    import_hf(own / "hf", tmp_path / "hf", quiet)
    words = [f"model.config={own / 'hf'}", "run.name=hf", f"run.dir={tmp_path}", f"data.path={own / 'tokens'}"]
    said = refusal("train", *words, "--check", *SMALL)
    assert "has imported weights" in said
    assert "optimizer.lr=0.003" in said
    meant = f"run.weights={tmp_path / 'hf' / 'checkpoints' / 'step-00000000'}"
    assert meant in said
    here("train", *words, meant, "--check", *SMALL)
    here("train", *words, "--fresh", "--check", *SMALL)


def test_weights_that_are_gone_or_of_another_model_are_sentences_and_a_moved_run_has_its_own(
    own: Path, tmp_path: Path
) -> None:
    run = tmp_path / "m"
    import_hf(own / "hf", run, quiet)
    given = ["--check", f"data.path={own / 'tokens'}", *SMALL]
    said = refusal("train", run / "job.toml", "--fresh", "model.layers=1", *given)
    assert "belong to another model: model.layers: 2 -> 1" in said
    run.rename(tmp_path / "moved")
    moved = here("train", tmp_path / "moved", "--fresh", *given)
    assert tomllib.loads(moved)["run"]["weights"] == str(tmp_path / "moved" / "checkpoints" / "step-00000000")
    by_file = here("train", tmp_path / "moved" / "job.toml", "--fresh", *given)
    assert tomllib.loads(by_file)["run"]["weights"] == tomllib.loads(moved)["run"]["weights"]
    shutil.rmtree(tmp_path / "moved" / "checkpoints")
    said = refusal("train", tmp_path / "moved" / "job.toml", "--fresh", *given)
    assert f"run.weights={run / 'checkpoints' / 'step-00000000'}: " in said
    assert "run.weights=RUN" in said
