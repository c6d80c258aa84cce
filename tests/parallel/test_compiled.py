"""Compiled blocks under tensor parallelism: the numbers of eager ones, and one graph however many layers there are."""

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch import Tensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.launch import processes
from fivefold.layout.layout import Layout
from fivefold.model import compiler, kernels
from fivefold.model.decoder import Decoder
from fivefold.model.linear_cross_entropy import Targets
from fivefold.model.masks import PackedSpans, causal_spans
from fivefold.model.ops import LocalAttention
from fivefold.parallel.collectives import full_tensor
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.pipeline import Channels, Message
from fivefold.parallel.tensor import ops_of
from fivefold.schedules.actions import Action
from fivefold.spec.presets import preset
from fivefold.trainer.engine import Engine
from fivefold.verifier.cases import make_batch, plain_batch
from tests.ranks import run_ranks

SLOW = pytest.mark.slow


def graphs(rank: int, world: int, layers: int) -> tuple[int, dict[str, int], float, float]:
    """Graphs and breaks of a compiled decoder, and its loss beside that of an eager one with the same weights."""
    compiler.COMPILER_BACKEND = "aot_eager"
    spec, layout = preset("tiny", layers=layers), Layout(tp=world, sp=True)
    mesh = Mesh.of(layout, torch.device("cpu"))
    tokens = torch.arange(64).reshape(2, 32) % spec.vocab
    aim = Targets(tokens.roll(-1, 1), torch.ones_like(tokens, dtype=torch.bool))
    losses = []
    for quick in (False, True):
        ops = ops_of(spec, mesh)
        ops.compiled = quick
        with torch.device("meta"):
            model = Decoder(spec, ops=ops, compile=quick)
        ops.shard_parameters(model)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter.to_local(), std=0.02)  # type: ignore[operator]
        loss = model(tokens, targets=aim)
        loss.backward()
        losses.append(loss.item())
    return (*compiler.compilation(), *losses)


@pytest.mark.parametrize(("layout", "recompute", "blocks"), [
    ("pp=2,schedule=zb-h1", "none", True),
    ("pp=2,schedule=zb-h1", "full", True),
    ("pp=2,schedule=zb-h1", "selective", False),
    ("cp=2", "full", True),
    ("cp=2", "selective", False),
    ("cp=2,cp_kind=ulysses", "selective", True),
    ("pp=2", "selective", True),
])  # fmt: skip
def test_selective_recompute_is_compiled_where_a_block_is_one_graph(layout: str, recompute: str, blocks: bool) -> None:
    assert Layout.parse(f"{layout},microbatches=2,recompute={recompute}").compiles_blocks == blocks


@pytest.mark.parametrize("layout", [
    pytest.param("pp=2,microbatches=2,schedule=zb-h1,recompute=full", marks=SLOW),
    pytest.param("cp=2,recompute=full", marks=SLOW),
])  # fmt: skip
def test_recomputed_blocks_with_breaks_are_compiled(layout: str) -> None:
    """Without care PyTorch drops the graphs of a block that breaks inside of a checkpoint, and says nothing."""
    job = read_job(None, [f"layout={layout}", "model.layers=2", "data.seq=32", "train.batch=2", "train.compile=on"])
    [(made, _)] = processes.run(1, f"{__name__}:{graphs_of_a_step.__name__}", job, timeout=120)
    assert made > 2  # more than the loss has


def graphs_of_a_step(rank: processes.Rank, job: Job) -> tuple[int, dict[str, int]]:
    """On the last of two ranks. The other is PyTorch's pretence: what is sent does not decide what is compiled."""
    compiler.COMPILER_BACKEND = "aot_eager"
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    Engine(job, Mesh.of(job.layout, torch.device("cpu"))).forward_backward(plain_batch(job.model.vocab, 2, 32))
    return compiler.compilation()


@pytest.mark.parametrize("layers", [9, pytest.param(2, marks=SLOW)])
def test_layers_share_a_graph(layers: int) -> None:
    for made, breaks, eager, quick in run_ranks(2, graphs, layers):
        assert (made, breaks) == (4, {})
        assert abs(eager - quick) < 1e-4 * eager


@pytest.mark.parametrize("recompute", ["selective", *(pytest.param(how, marks=SLOW) for how in ("none", "full"))])
def test_a_mixture_is_in_its_block_s_graph(recompute: str) -> None:
    """No break, whatever is kept; and the numbers of eager blocks, what they counted included."""
    words = ["model=tiny-moe", "model.layers=2", "data.seq=32", "train.batch=2", "train.dtype=bfloat16",
             "train.balance_loss=0.01"]  # fmt: skip
    job = read_job(None, [*words, f"layout=recompute={recompute}"])
    [(made, breaks, apart)] = processes.run(1, f"{__name__}:{mixture_twice.__name__}", job, timeout=240)
    assert breaks == {}
    assert 0 < made <= 4
    assert apart == 0.0


def mixture_twice(rank: processes.Rank, job: Job) -> tuple[int, dict[str, int], float]:
    """Graphs and breaks of a compiled step, and how far its loss, gradients and counts are from an eager one's."""
    compiler.COMPILER_BACKEND = "aot_eager"
    found = []
    for how in ("off", "on"):
        its = structs.replace(job, train=structs.replace(job.train, compile=how))
        engine = Engine(its, Mesh.of(its.layout, torch.device("cpu"), spec=its.model))
        loss = engine.forward_backward(plain_batch(its.model.vocab, 2, 32))
        assert engine.expert_loads is not None
        found.append([loss, engine.expert_loads.collect(), *engine.gradients().values()])
    apart = max((one - other).abs().max().item() for one, other in zip(*found, strict=True))
    return (*compiler.compilation(), apart)


def graphs_at_the_first_receive(rank: int, world: int, layout: str) -> tuple[list[int], int, float, float]:
    """Graphs when each receive is posted, and after two steps; and the second loss, compiled and eager."""
    compiler.COMPILER_BACKEND = "aot_eager"
    eager = loss_of_two_steps(layout, "off")
    posted, receive = [], Channels.receive

    def noted(self: Channels, action: Action, shape: tuple[int, ...]) -> Message:
        posted.append(compiler.compilation()[0])
        return receive(self, action, shape)

    Channels.receive = noted  # type: ignore[method-assign]
    quick = loss_of_two_steps(layout, "on")
    return posted, compiler.compilation()[0], quick, eager


@pytest.mark.parametrize(
    "layout", [pytest.param("pp=2,microbatches=2", marks=SLOW), "pp=2,microbatches=4,schedule=zb-v"]
)
def test_stages_are_compiled_before_the_first_message_and_once(layout: str) -> None:
    """So ranks compile at the same time, with no receive on their device; and what they made up leaves no trace."""
    for posted, end, quick, eager in run_ranks(2, graphs_at_the_first_receive, layout):
        assert posted
        assert set(posted) == {end}
        assert end > 0
        assert quick == pytest.approx(eager, rel=1e-12)


def loss_of_two_steps(layout: str, compiled: str) -> float:
    settings = ["model.layers=4", "data.seq=32", "train.batch=4", f"train.compile={compiled}", "train.dtype=float64"]
    job = read_job(None, [f"layout={layout}", *settings])
    engine = Engine(job, Mesh.of(job.layout, torch.device("cpu"), spec=job.model))
    batch = plain_batch(job.model.vocab, 4, 32)
    for _ in range(2):
        loss = engine.forward_backward(batch)
        engine.step(1e-3, engine.gradient_norm())
    return loss.item()


def graphs_of_documents(rank: int, world: int, layout: str, settings: list[str]) -> tuple[list[int], float]:
    """Graphs after each of three steps whose documents differ, and how far their gradients are from eager ones."""
    compiler.COMPILER_BACKEND = "aot_eager"
    words = [f"layout={layout}", "model.layers=2", "data.seq=32", "data.document_mask=true", "train.batch=4", *settings]
    made, apart = [], 0.0
    jobs = [read_job(None, [*words, f"train.compile={how}", "train.dtype=float64"]) for how in ("off", "on")]
    engines = [Engine(job, Mesh.of(job.layout, torch.device("cpu"), spec=job.model)) for job in jobs]
    for step in range(3):
        found = []
        for engine, job in zip(engines, jobs, strict=True):
            engine.forward_backward(make_batch(job, step))
            found.append([full_tensor(one) for one in engine.gradients().values()])
            engine.step(1e-3, engine.gradient_norm())
        apart = max(apart, *((one - other).abs().max().item() for one, other in zip(*found, strict=True)))
        made.append(compiler.compilation()[0])
    return made, apart


@pytest.mark.parametrize(("layout", "settings"), [
    pytest.param("cp=2,cp_kind=allgather,microbatches=2,recompute=full", [], marks=SLOW),
    ("cp=2,cp_kind=allgather,recompute=selective", ["model.sinks=true", "model.window=8"]),
    pytest.param("dp=2,recompute=full", ["model.sinks=true", "model.window=8"], marks=SLOW),
    pytest.param("cp=2,microbatches=2", [], marks=SLOW),
])  # fmt: skip
def test_documents_make_no_graphs_of_their_own(layout: str, settings: list[str]) -> None:
    """Else every microbatch would be compiled anew, until PyTorch's limit ends the run."""
    for made, apart in run_ranks(2, graphs_of_documents, layout, settings):
        assert made[0] == made[-1]
        assert apart < 1e-12  # of gradients of about 1: sums in other orders


def within_documents(q: Tensor, k: Tensor, v: Tensor, at: PackedSpans) -> Tensor:
    """What flash attention computes of packed documents, for a CPU."""
    rows = torch.arange(q.shape[0] * q.shape[2]).view(q.shape[0], -1)
    document = torch.searchsorted(at.cu_seqlens_q, rows, right=True)
    seen = document[:, None, :, None] == document[:, None, None, :]
    nearby = rows[:, None, :, None] - rows[:, None, None, :] < at.max_seqlen_q
    return F.scaled_dot_product_attention(q, k, v, (seen & nearby).tril(), enable_gqa=True)


def graphs_of_packed(rank: processes.Rank, job: Job) -> tuple[int, int, int]:
    """Graphs of a step, of four, and the shapes of packed documents in them, as they are on a GPU."""
    compiler.COMPILER_BACKEND = "aot_eager"
    kernels.packed_attention = within_documents
    LocalAttention.attention_mask = lambda _, positions, *__, **___: kernels.document_spans(positions).packed  # type: ignore[method-assign,assignment]
    engine, made, shapes = Engine(job, Mesh.of(job.layout, torch.device("cpu"))), [], set[tuple[int, int]]()
    for step in range(4):  # of three shapes
        batch = make_batch(job, step)
        at = causal_spans(batch.documents, torch.device("cpu")).packed
        shapes.add((len(at.cu_seqlens_q), at.max_seqlen_q))
        assert engine.forward_backward(batch).isfinite()
        engine.step(1e-3, engine.gradient_norm())
        made.append(compiler.compilation()[0])
    return made[0], made[-1], len(shapes)


@pytest.mark.slow
def test_packed_documents_have_a_few_graphs_and_not_one_for_each_batch() -> None:
    job = read_job(
        None,
        ["model.layers=2", "data.seq=64", "data.document_mask=true", "train.batch=4", "train.compile=on"],
    )
    [(first, all_of_them, shapes)] = processes.run(1, f"{__name__}:{graphs_of_packed.__name__}", job, timeout=120)
    assert 1 < shapes < 5
    assert all_of_them - first == shapes - 1
