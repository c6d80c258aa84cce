"""What holds across devices; skipped where there is no GPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.checkpoint.shards import shards_to_write
from fivefold.checkpoint.staging import Staging
from fivefold.data.corpus import stdlib_corpus
from fivefold.job.config import TrainConfig
from fivefold.job.preflight import preflight
from fivefold.job.reading import read_job
from fivefold.launch.device import make_repeatable
from fivefold.model import philox
from fivefold.model.compiler import compilation, compile_function
from fivefold.model.decoder import Decoder, Dropout
from fivefold.model.dispatch import Permute, Unpermute, inverse
from fivefold.model.fp8 import Fp8GroupedLinear, fp8_linear
from fivefold.model.grouped import GroupedLinear, Groups
from fivefold.model.init import init_param, initialise
from fivefold.model.kernels import Tiles
from fivefold.model.layers import TokenPositions, accum_dtype
from fivefold.model.linear_cross_entropy import add_product, log_sum_exp_of
from fivefold.model.masks import causal_spans
from fivefold.model.ops import LocalOps
from fivefold.model.router import sort_by_expert
from fivefold.optim.adamw import AdamW
from fivefold.parallel.mesh import Mesh
from fivefold.spec.presets import preset
from fivefold.trainer.engine import Engine
from fivefold.trainer.loop import Trainer
from fivefold.verifier.cases import make_batch, plain_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3", "tiny-gpt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_initial_weights_are_the_same_bits_on_cpu_and_cuda(name: str, dtype: torch.dtype) -> None:
    spec = preset(name)
    here, there = Decoder(spec).to(dtype), Decoder(spec).to("cuda", dtype)
    initialise(here, spec, seed=0)
    initialise(there, spec, seed=0)
    for (key, a), b in zip(here.named_parameters(), there.parameters(), strict=True):
        assert torch.equal(a, b.cpu()), key


def test_a_hundred_million_normals_are_the_same_bits_on_cpu_and_cuda() -> None:
    key = philox.random_key(0, "w")
    for row in range(0, 6400, 64):
        rows, columns = range(row, row + 64), range(16_384)
        on_gpu = philox.random_normal(key, rows, columns, "cuda")
        assert torch.equal(philox.random_normal(key, rows, columns), on_gpu.cpu())


def test_dropout_masks_are_the_same_bits_on_cpu_and_cuda() -> None:
    dropout = Dropout(0.1, seed=0, name="layers.0.mlp")
    tokens = torch.zeros(8, 128)
    place = replace(TokenPositions.of(tokens), samples=torch.arange(8) + 2**33)
    there = TokenPositions(place.position_ids.cuda(), place.samples.cuda(), place.length)
    x = torch.ones(8, 128, 512)
    assert torch.equal(dropout(x, place), dropout(x.cuda(), there).cpu())


def test_a_shard_of_a_large_matrix_is_drawn_alone() -> None:
    spec = preset("llama3-8b")
    parameter = next(p for p in spec.parameters() if p.name == "layers.31.mlp.down.weight")
    here, there = torch.empty(64, 100), torch.empty(64, 100, device="cuda")
    init_param(spec, parameter, here, 0, (range(4000, 4064), range(14_001, 14_101)))
    init_param(spec, parameter, there, 0, (range(4000, 4064), range(14_001, 14_101)))
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["tiny", "tiny-qwen3", "tiny-gpt"])
def test_the_same_run_twice_gives_the_same_bits_on_cuda(tmp_path: Path, model: str, dtype: str) -> None:
    changes = [f"model={model}", f"data.path={stdlib_corpus(tmp_path)}", f"train.dtype={dtype}", "train.steps=5"]
    job = read_job(None, [*changes, "layout.recompute=selective"])
    make_repeatable(job.train)
    try:
        weights = []
        for _ in range(2):
            trainer = Trainer(job, preflight(job, 1), Mesh.of(job.layout, torch.device("cuda")))
            trainer.run([])
            weights.append([p.detach().clone() for p in trainer.engine.model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def repeatable() -> Iterator[None]:
    make_repeatable(TrainConfig())
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("length", [128, 640])
@pytest.mark.parametrize("width", [64, 128])
def test_repeatable_attention_computes_attention(kv_heads: int, length: int, width: int) -> None:
    """Against float64; no further from it than PyTorch's own kernels are, and a little."""
    noise = torch.Generator("cuda").manual_seed(5)
    shapes = [(2, heads, length, width) for heads in (4, kv_heads, kv_heads, 4)]
    *qkv, grad = (torch.randn(shape, generator=noise, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    place = TokenPositions.of(torch.zeros(2, length, dtype=torch.int64, device="cuda"))
    sight = LocalOps().attention_mask(place)
    assert isinstance(sight, Tiles)
    found = []
    for dtype, attend in (
        (torch.float64, LocalOps().attend),
        (torch.bfloat16, LocalOps().attend),  # eager: what scaled_dot_product_attention takes
        (torch.bfloat16, compile_function(LocalOps().attend)),
    ):
        inputs = [x.to(dtype).requires_grad_() for x in qkv]
        out = attend(*inputs, sight)
        found.append([out, *torch.autograd.grad(out, inputs, grad.to(dtype))])
    true, usual, ours = ([x.double() for x in some] for some in found)
    for want, plain, got in zip(true, usual, ours, strict=True):
        assert (got - want).norm() <= 1.5 * (plain - want).norm()
    assert compilation()[1] == {}


@pytest.mark.usefixtures("repeatable")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_runs_with_tiles_give_the_same_bits_and_what_flash_attention_gives(
    tmp_path: Path, recompute: str
) -> None:
    changes = ["model=tiny", "model.hidden=256", "model.head_dim=64", "train.dtype=bfloat16", "data.seq=256"]
    losses = []
    for compile in ("on", "on", "off"):
        more = [f"data.path={stdlib_corpus(tmp_path)}", f"layout.recompute={recompute}", f"train.compile={compile}"]
        job = read_job(None, [*changes, *more, "train.steps=8"])
        trainer = Trainer(job, preflight(job, 1), Mesh.of(job.layout, torch.device("cuda")))
        losses.append([trainer.step(step, read()).loss for step, read in enumerate(trainer.reads(), start=1)])
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2], rel=2e-3)  # bf16 rounds at other places


def test_a_float64_run_on_cuda_is_the_run_on_the_cpu(tmp_path: Path) -> None:
    """The same weights, data and dropout: what differs is the order of additions."""
    changes = ["model=tiny-gpt", f"data.path={stdlib_corpus(tmp_path)}", "train.dtype=float64", "train.steps=5"]
    job = read_job(None, [*changes, "train.batch=4"])
    losses = []
    for device in ("cpu", "cuda"):
        trainer = Trainer(job, preflight(job, 1), Mesh.of(job.layout, torch.device(device)))
        steps: list[float] = []
        for step, read in enumerate(trainer.reads(), start=1):
            steps.append(trainer.step(step, read()).loss)
        losses.append(steps)
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


@pytest.mark.parametrize("model", ["tiny", "tiny-qwen3", "tiny-gpt"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_compute_what_eager_ones_do(tmp_path: Path, model: str, recompute: str) -> None:
    changes = [f"model={model}", f"data.path={stdlib_corpus(tmp_path)}", "train.dtype=float64", "train.batch=4"]
    losses = []
    for compile in ("off", "on"):
        job = read_job(None, [*changes, f"layout.recompute={recompute}", f"train.compile={compile}", "train.steps=5"])
        trainer = Trainer(job, preflight(job, 1), Mesh.of(job.layout, torch.device("cuda")))
        losses.append([trainer.step(step, read()).loss for step, read in enumerate(trainer.reads(), start=1)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


@pytest.mark.parametrize("size", [7, 1000, 4096 * 33])
def test_the_kernel_of_adamw_is_torchs_adamw(size: int) -> None:
    """Clipping by a half, five steps; and the rounded copy is the master's."""
    from fivefold.optim.kernels import adamw

    random = torch.Generator("cuda").manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(size, device="cuda", generator=random))
    theirs = torch.nn.Parameter(ours.detach().clone())
    rounded = torch.empty(size, device="cuda", dtype=torch.bfloat16)
    config = AdamW(betas=(0.9, 0.95), eps=1e-8)
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    moments = torch.zeros_like(ours.detach()), torch.zeros_like(ours.detach())
    half = torch.tensor(0.5, device="cuda")
    for step in range(1, 6):
        ours.grad = torch.randn(size, device="cuda", generator=random)
        theirs.grad = ours.grad * 0.5
        with torch.no_grad():
            adamw(ours, moments, half, rounded, config.betas, config.eps, 1e-2, 0.1, step)
        reference.step()
    # Both round each of a handful of operations: an update of 1e-2 has some units in the last place of 1.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5 * 4 * torch.finfo(torch.float32).eps * 8)
    torch.testing.assert_close(moments[0], reference.state[theirs]["exp_avg"], rtol=0, atol=1e-6)
    torch.testing.assert_close(moments[1], reference.state[theirs]["exp_avg_sq"], rtol=1e-6, atol=1e-9)
    assert torch.equal(rounded, ours.bfloat16())


def test_8_bit_products_on_the_gpu_are_those_of_their_definition() -> None:
    """The roundings are the same; what differs is the order of sums, and that they are kept in fewer bits."""
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 64, 256, generator=random), torch.randn(128, 256, generator=random)
    slope = torch.randn(4, 64, 128, generator=random)
    results = []
    for device in ("cpu", "cuda"):
        given = [one.to(device, torch.bfloat16).requires_grad_() for one in (x, weight)]
        y = fp8_linear(given[0], given[1], None)
        y.backward(slope.to(device, torch.bfloat16))
        results.append([one.float().cpu() for one in (y, *(one.grad for one in given if one.grad is not None))])
    for found, wanted in zip(results[1], results[0], strict=True):
        assert (found - wanted).norm() / wanted.norm() < 2**-8  # the results themselves are rounded to bfloat16


@pytest.mark.parametrize("sizes", [(100, 0, 3, 921), (0, 0, 0, 1024), (64,) * 16])
@pytest.mark.parametrize("product", [GroupedLinear, Fp8GroupedLinear])
def test_products_of_experts_in_a_graph_are_those_of_a_loop(product: Any, sizes: tuple[int, ...]) -> None:
    """Groups of any size, also none; what nobody has written is not read."""
    random, kind = torch.Generator().manual_seed(0), torch.bfloat16
    x, weight = torch.randn(1024, 256, generator=random), torch.randn(len(sizes) * 128, 256, generator=random)
    results = []
    for device in ("cpu", "cuda"):
        ends = Groups.of(sizes, torch.device(device)).ends
        given = [one.to(device, kind).requires_grad_() for one in (x, weight)]

        def steps(x: Tensor, weight: Tensor, ends: Tensor = ends) -> Tensor:
            return torch.nn.functional.silu(product.apply(2 * x, weight, ends, None, None))

        y = (compile_function(steps) if device == "cuda" else steps)(*given)
        y.float().square().sum().backward()
        results.append([one.float().cpu() for one in (y, *(one.grad for one in given if one.grad is not None))])
    for found, wanted in zip(results[1], results[0], strict=True):
        assert (found - wanted).norm() / wanted.norm() < 2**-6  # three roundings to bfloat16, and fast sums
    none = torch.tensor([not size for size in sizes])
    assert not results[1][2].unflatten(0, (len(sizes), -1))[none].any()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "width", "top_k"), [(1, 40, 1), (77, 200, 3), (300, 2048, 8), (0, 64, 2)])
def test_rows_to_experts_and_back_are_those_of_the_cpu(kind: torch.dtype, tokens: int, width: int, top_k: int) -> None:
    """Each sum has at most top_k or `width` terms in float32, and what is returned is rounded once."""
    random, experts = torch.Generator().manual_seed(0), 12
    chosen = torch.rand(tokens, experts, generator=random).argsort(1)[:, :top_k]
    order, _ = sort_by_expert(chosen, experts)
    x, slope = (torch.randn(tokens, width, generator=random).to(kind) for _ in range(2))
    weights = torch.rand(tokens, top_k, generator=random).to(accum_dtype(kind))
    results = []
    for device in ("cpu", "cuda", "cuda"):
        given = [one.to(device).requires_grad_() for one in (x, weights)]
        at = order.to(device)
        rows = Permute.apply(given[0], at, inverse(at))
        y = Unpermute.apply(rows * 1.5, given[1], at, inverse(at))
        y.backward(slope.to(device))
        results.append([one.cpu() for one in (rows.detach(), y.detach(), *(one.grad for one in given))])
    for found, again, wanted in zip(results[1], results[2], results[0], strict=True):
        assert torch.equal(found, again)
        eps = torch.finfo(found.dtype).eps
        terms = width**0.5 * 10 * torch.finfo(accum_dtype(kind)).eps
        assert ((found - wanted).abs() <= 2 * eps * wanted.abs() + terms).all()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("words", [1, 500, 8192, 20_011])
def test_a_log_sum_exp_takes_one_pass_and_large_numbers(kind: torch.dtype, words: int) -> None:
    random = torch.Generator("cuda").manual_seed(0)
    logits = (20 * torch.randn(9, words, device="cuda", generator=random)).to(kind)
    logits[0] = 60_000
    logits[1] = torch.arange(words, device="cuda")  # the largest comes last
    logits[2, 1:] = -torch.inf
    found = log_sum_exp_of(logits, torch.float32)
    torch.testing.assert_close(found, logits.double().logsumexp(-1).float(), rtol=2e-6, atol=2e-6)
    assert torch.equal(found, log_sum_exp_of(logits, torch.float32))


def test_a_sum_of_squares_is_the_same_every_time_and_exact() -> None:
    from fivefold.optim.kernels import sum_of_squares

    random = torch.Generator("cuda").manual_seed(0)
    kinds = (torch.bfloat16, torch.float32)
    given = [torch.randn(n, device="cuda", generator=random).to(kind) for n in (5, 4096, 300_001) for kind in kinds]
    found = sum_of_squares(given)
    exact = torch.stack([one.double().square().sum() for one in given]).sum()
    assert found.dtype == torch.float64
    assert abs(found / exact - 1).item() < 1e-6
    assert found.item() == sum_of_squares(given).item()


def test_compiled_mixtures_have_no_breaks_and_narrow_gradients(tmp_path: Path) -> None:
    words = ["model=tiny-moe", f"data.path={stdlib_corpus(tmp_path)}", "train.dtype=bfloat16", "train.batch=4"]
    losses = []
    for compile in ("off", "on"):
        job = read_job(None, [*words, f"train.compile={compile}", "train.steps=3", "train.balance_loss=0.01"])
        trainer = Trainer(job, preflight(job, 1), Mesh.of(job.layout, torch.device("cuda"), spec=job.model))
        losses.append([trainer.step(step, read()).loss for step, read in enumerate(trainer.reads(), start=1)])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert not compilation()[1]


def test_sums_of_bf16_products_are_kept_in_float32() -> None:
    random = torch.Generator("cuda").manual_seed(0)
    slope, x = (torch.randn(512, n, device="cuda", generator=random).bfloat16() for n in (96, 64))
    once = add_product(None, slope, x)
    twice = add_product(once.clone(), slope, x)
    exact = slope.double().T @ x.double()
    assert once.dtype == torch.float32
    assert (once - exact).norm() / exact.norm() < 1e-5
    assert (twice - 2 * exact).norm() / exact.norm() < 2e-5


def test_a_snapshot_is_of_its_step_though_the_device_copies_it_beside_the_next(tmp_path: Path) -> None:
    job = read_job(None, ["model=tiny", f"data.path={stdlib_corpus(tmp_path)}", "train.steps=4", "train.compile=off"])
    trainer = Trainer(job, preflight(job, 1), Mesh.of(job.layout, torch.device("cuda")))
    engine, staging = trainer.engine, Staging(torch.device("cuda"))
    shapes = {parameter.name: parameter.shape for parameter in job.model.parameters()}
    pieces = shards_to_write(engine.weights, shapes, engine.optimizer, engine.buffers)
    staging.prepare(pieces)
    batch = plain_batch(job.model.vocab, job.train.batch, job.data.seq)
    engine.forward_backward(batch)  # the first pass makes kernels, and takes longer than what follows
    engine.step(1e-2, engine.gradient_norm())
    for _ in range(2):
        was = {name: piece.make().clone() for name, piece in pieces.items()}
        assert staging.stream is not None
        with torch.cuda.stream(staging.stream):
            torch.cuda._sleep(4_000_000_000)  # the copies begin two seconds late
        snapshot = staging.take(pieces)
        assert all(piece.make().is_pinned() for piece in snapshot.shards.values())
        engine.snapshot_copied = snapshot.copied
        engine.forward_backward(batch)
        assert snapshot.copied is not None
        assert not snapshot.copied.query()  # steps do not wait for it
        engine.step(1e-2, engine.gradient_norm())
        snapshot.wait()
        kept = {name: piece.make() for name, piece in snapshot.shards.items()}
        assert all(torch.equal(kept[name], was[name].cpu()) for name in was)
        assert not all(torch.equal(piece.make(), was[name]) for name, piece in pieces.items())


def test_packed_documents_have_a_few_graphs_and_not_one_for_each_batch() -> None:
    settings = ["model=tiny", "data.seq=64", "data.document_mask=true", "train.batch=4", "train.dtype=bfloat16"]
    job = read_job(None, [*settings, "train.compile=on", "train.device=cuda"])
    torch._dynamo.reset()  # it remembers which sizes changed in other tests of this process
    engine = Engine(job, Mesh.of(job.layout, torch.device("cuda")))
    made, shapes = [], set[tuple[int, int]]()
    for step in range(8):
        batch = make_batch(job, step)
        at = causal_spans(batch.documents, torch.device("cpu")).packed
        shapes.add((len(at.cu_seqlens_q), at.max_seqlen_q))
        loss = engine.forward_backward(batch)
        assert loss.isfinite()
        engine.step(1e-3, engine.gradient_norm())
        made.append(compilation()[0])
    assert made[-1] - made[0] == len(shapes) - 1
    assert 1 < len(shapes) < 6
