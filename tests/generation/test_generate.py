"""What a model generates: token for token that of `transformers`, on one process and on many."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from fivefold.generation.generator import LaterQueries
from fivefold.generation.request import Request, generate
from fivefold.generation.sampling import Sampler, Sampling
from fivefold.job.reading import read_job
from fivefold.model.layers import TokenPositions
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Microbatch
from fivefold.planner.serve_cost import whole_cache
from fivefold.support.errors import UserError
from fivefold.trainer.engine import RankModel
from tests.checkpoint.runs import Run
from tests.checkpoint.test_hf import made

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def request(source: Path, layout: str = "dp=1", count: int = 20, dtype: str = "float32", **how: float) -> Request:
    sampling = Sampling(**({"temperature": 0.0} | how))  # type: ignore[arg-type]
    return Request(source, None, layout, dtype, "cpu", count, sampling, 60.0)


def generated(*arguments, **settings) -> list[int]:
    return generate(request(*arguments, **settings), [], PROMPT, lambda _: None)[0].tokens


@pytest.mark.parametrize(
    ("kind", "tied"),
    [("llama", False), ("gpt2", True), *(pytest.param(n, True, marks=pytest.mark.slow) for n in ("qwen2", "qwen3"))],
)
def test_greedy_is_that_of_transformers_in_every_layout(tmp_path: Path, kind: str, tied: bool) -> None:
    directory = made(kind, tied, tmp_path / "in")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    end = model.generation_config.eos_token_id
    with torch.no_grad():
        found = model.generate(torch.tensor([PROMPT]), max_new_tokens=10, do_sample=False, eos_token_id=None)
    want = found[0, len(PROMPT) :].tolist()
    assert end is None or end not in want
    assert len(set(want)) > 1, "a model that repeats one token would prove little"
    for layout in ("dp=1", "tp=2,pp=2", *(("pp=2,split=1,2",) if kind == "llama" else ())):
        assert generated(directory, layout, count=10) == want, layout


def test_the_same_seed_draws_the_same_in_every_layout(tmp_path: Path) -> None:
    directory = made("llama", False, tmp_path / "in")
    one = generated(directory, dtype="float64", temperature=1.0, seed=1)
    assert one == generated(directory, "tp=2,pp=2", dtype="float64", temperature=1.0, seed=1)
    assert one != generated(directory, dtype="float64", temperature=1.0, seed=2)


def test_temperature_top_k_and_top_p_draw_as_they_say() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))

    def drawn(**how: float) -> list[float]:
        choose = Sampler(Sampling(**how))  # type: ignore[arg-type]
        count = [0] * 4
        for _ in range(2000):
            count[choose(logits)] += 1
        return [one / 2000 for one in count]

    assert drawn(temperature=0.0) == [1.0, 0.0, 0.0, 0.0]
    assert drawn(temperature=1.0) == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.05)
    assert drawn(temperature=1.0, top_k=2) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.05)
    assert drawn(temperature=1.0, top_p=0.7) == pytest.approx([2 / 3, 1 / 3, 0, 0], abs=0.05)
    assert drawn(temperature=0.5)[0] > 0.7


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    directory = made("gpt2", True, tmp_path / "in")
    with pytest.raises(UserError, match="dp, zero does not help to generate; tp and pp do, and ep"):
        generate(request(directory, "dp=2,zero=1"), [], PROMPT, lambda _: None)
    with pytest.raises(UserError) as error:
        generate(request(directory, "tp=3", count=80, temperature=-1.0), [], [999], lambda _: None)
    assert len(error.value.problems) == 5  # temperature, heads and kv heads, token, positions
    with pytest.raises(UserError, match=r"--share-gpu nccl lets ranks .* the CPU; nearest: --share-gpu gloo"):
        generate(replace(request(directory, "tp=2"), share_gpu="nccl"), [], PROMPT, lambda _: None)
    with pytest.raises(UserError, match="--share-gpu mpi is neither gloo nor nccl"):
        generate(replace(request(directory), share_gpu="mpi"), [], PROMPT, lambda _: None)
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        generate(request(directory), ["hello"], None, lambda _: None)
    with pytest.raises(UserError, match="is not a directory"):
        generate(request(tmp_path / "nowhere"), [], PROMPT, lambda _: None)


def test_experts_generate_alike_in_every_layout_and_without_a_cache(tokens: Path, tmp_path: Path) -> None:
    """With biases that choose other experts than their scores alone; one token at a time, most ranks route none."""
    words = ["model.layers=3", "model.hidden=32", "model.experts.ffn=16", "data.seq=16", "train.batch=4"]
    job = read_job(None, ["model=tiny-deepseek", *words, "train.steps=1", f"data.path={tokens}", "train.device=cpu"])
    run = Run(job, 1, tmp_path / "checkpoints")
    for number, bias in enumerate(run.trainer.engine.buffers.values()):
        bias += 0.1 * torch.arange(8).roll(3 * number)
    run.keeper.save(0)
    run.keeper.ensure()
    want = generated(tmp_path, count=6, dtype="float64")
    for layout in ("tp=2,ep=2", "pp=2"):
        assert generated(tmp_path, layout, count=6, dtype="float64") == want, layout

    model = run.trainer.engine.model.eval().double()

    @torch.no_grad()
    def logits(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids]))[0, -1]

    for number in range(len(want)):
        assert int(logits([*PROMPT, *want[:number]]).argmax()) == want[number]
    before = logits(PROMPT)
    for bias in model.buffers():
        bias.zero_()
    assert not torch.equal(logits(PROMPT), before)


@pytest.mark.parametrize("model", ["tiny", "tiny-moe", "tiny-deepseek", "tiny-mla"])
def test_a_cache_has_the_bytes_that_the_plan_of_serving_says(model: str) -> None:
    """Keys and values, or the latents alone."""
    job = read_job(None, [f"model={model}", "model.layers=2", "train.device=cpu"])
    network = RankModel(job, Mesh(job.layout, torch.device("cpu")), attention=LaterQueries())
    network.model.begin_text(24)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        network.pipeline.forward_only(Microbatch(ids, TokenPositions.of(ids)))
    held = sum(tensor.nbytes for cache in network.model.caches for tensor in cache.tensors)
    assert held == whole_cache(job.model, cache_bytes=4, tokens=24)
