"""A mixer of another package is proven, planned, trained and resumed as one of ours."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import fivefold as ff
from fivefold.checkpoint.hf import export_hf
from fivefold.checkpoint.hf_files import HuggingFace
from fivefold.checkpoint.manifest import Checkpoint, Manifest
from fivefold.checkpoint.save import write_alone
from fivefold.checkpoint.shards import Shard
from fivefold.checkpoint.store import Store
from fivefold.checkpoint.tensors import model_key
from fivefold.dry.result import DryRunResult
from fivefold.generation.generator import LaterQueries
from fivefold.generation.request import Request, generate
from fivefold.generation.sampling import Sampling
from fivefold.job.reading import read_job
from fivefold.job.toml_writer import to_toml
from fivefold.model.decoder import Decoder
from fivefold.model.hf_names import unnamed_kinds
from fivefold.model.init import initialise
from fivefold.model.layers import TokenPositions
from fivefold.model.ops import LocalOps
from fivefold.spec.kinds import BlockKind
from fivefold.spec.mixers import GroupedQueryAttention
from fivefold.spec.mlps import MLPS
from fivefold.spec.pattern import Layer
from fivefold.support.errors import Note, UserError
from tests.commands import fivefold
from tests.plugins.conftest import HOMES, is_short_and_without_torch
from tests.verifier.cases import slow

PACKAGE, NAME = "gated_conv", "fivefold_gated_conv:GatedConv"
PATTERN = f"""model.pattern=[{{mixer = "{NAME}", mlp = "dense"}}, {{mixer = "attention", mlp = "dense"}},
{{mixer = {{name = "{NAME}", taps = 4}}}}]""".replace("\n", " ")
CHANGES = [PATTERN, "model.layers=3"]
SMALL = ("data.seq=32", "train.batch=4", "train.dtype=float64", "train.eval_samples=0", "train.device=cpu",
         "model.hidden=32", "model.ffn=48", "run.name=conv", "optimizer.schedule_steps=40")  # fmt: skip


@pytest.fixture
def conv(package: Path) -> Path:
    return package


def test_it_is_a_short_package_of_its_own_that_imports_no_torch(conv: Path) -> None:
    is_short_and_without_torch(conv, "fivefold_gated_conv")
    assert (HOMES / "gated_conv" / "README.md").exists()


@pytest.mark.parametrize("layout", [
    "pp=2,tp=2,schedule=zb-h1,microbatches=4,recompute=selective",
    *slow(["dp=2,tp=2,sp,zero=3", "dp=2,zero=1,pp=2,recompute=full,microbatches=2", "dp=4,zero=2,replicate=1"]),
])  # fmt: skip
def test_a_layout_computes_what_one_process_computes_in_float64(layout: str, conv: Path) -> None:
    """Loss, norm, gradients, parameters; what is sent, and what is held."""
    result = ff.verify(layout, CHANGES, steps=2, seq=16)
    assert result.ok, str(result)


def test_it_is_the_convolution_that_it_says_it_is(conv: Path) -> None:
    """Against the definition, written with a loop; tokens of other documents, and later ones, are not read."""
    spec = ff.preset("tiny", layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, ffn=8, pattern=[_layer(conv, taps=3)])
    model = Decoder(spec).double()
    initialise(model, spec, 0)
    layer = model.layers["0"].conv
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2]])
    x = torch.randn(1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = TokenPositions.of(documents)
    positions = TokenPositions(plain.position_ids, plain.samples, 8, documents)
    [inputs] = model._shared(positions, torch.float64)
    found = layer(x, inputs)
    b, c, values = (x @ getattr(layer, name).weight.T for name in ("b", "c", "x"))
    wanted = torch.zeros_like(x)
    for token in range(8):
        for tap in range(3):
            if token - tap >= 0 and documents[0, token - tap] == documents[0, token]:
                wanted[0, token] += layer.filter.weight[:, tap] * (b * values)[0, token - tap]
    assert torch.allclose(found, (c * wanted) @ layer.out.weight.T, atol=1e-14)


def test_cp_is_refused_and_never_planned(conv: Path) -> None:
    with pytest.raises(UserError, match="reads whole ones; nearest: cp=1") as refused:
        ff.verify("cp=2", CHANGES)
    assert refused.value.codes == ["layout.cp.kind"]
    with pytest.raises(UserError, match="taps=65 must lie in 1 to 64; nearest: 64"):
        ff.verify("dp=2", [f'model.pattern=[{{mixer = {{name = "{NAME}", taps = 65}}, mlp = "dense"}}]'])
    with pytest.raises(UserError, match=f"does not divide the width 64 in {NAME} of tiny"):
        ff.verify("tp=3", [f'model.pattern=[{{mixer = "{NAME}"}}]'])
    plan = ff.plan(_job(conv), "8xH100", batch=16, seq=256)
    assert {option.layout.cp for option in plan.options} == {1}


def test_the_dry_run_finds_what_the_planner_says(conv: Path) -> None:
    dry = ff.dryrun(_job(conv), "dp=2,tp=2,sp", batch=4, seq=64)
    assert isinstance(dry, DryRunResult)
    figures = {figure.name: figure for figure in dry.ranks[0].figures}
    for name in ("parameters", "gradients", "optimizer"):
        assert figures[name].dry == figures[name].plan > 0
    peak = figures["peak"]
    assert peak.dry == pytest.approx(peak.plan, rel=0.1)


def test_token_by_token_it_computes_what_it_computes_of_the_whole(conv: Path) -> None:
    """In float64; what each layer then keeps is what its kind says."""
    spec = ff.preset("tiny", layers=3, hidden=32, ffn=48, pattern=[
        _layer(conv, taps=3), Layer(mixer=GroupedQueryAttention(window=5)), _layer(conv, taps=1)])  # fmt: skip
    whole, piecewise = Decoder(spec).double(), Decoder(spec, ops=LocalOps(attention=LaterQueries())).double()
    initialise(whole, spec, 0)
    piecewise.load_state_dict(whole.state_dict())
    tokens = torch.randint(0, spec.vocab, (1, 12), generator=torch.Generator().manual_seed(0))
    piecewise.begin_text(12)
    found = []
    with torch.no_grad():
        for piece in (range(7), *(range(at, at + 1) for at in range(7, 12))):
            ids = torch.tensor([[*piece]])
            positions = TokenPositions(ids, torch.zeros(1, dtype=torch.int64), 12)
            found.append(piecewise(tokens[:, piece.start : piece.stop], positions))
        assert (torch.cat(found, dim=1) - whole(tokens)).abs().max() < 1e-12
    kept = [sum(tensor.numel() for tensor in cache.tensors) for cache in piecewise.caches]
    windowed = spec.kinds(1).mixer.cache(spec, 1)
    assert kept == [2 * 32, windowed.numbers(4), 0]  # of a window's keys the next token sees all but the first
    for layer in (0, 2):
        assert spec.kinds(layer).mixer.cache(spec, 1).numbers(12) == kept[layer]
        assert spec.kinds(layer).mixer.cache(spec, 2).numbers(12) == kept[layer] / 2


def test_it_generates_the_same_text_in_every_layout(conv: Path, tmp_path: Path) -> None:
    """That of the whole sequence computed again for each token."""
    job = read_job(None, [*CHANGES, *SMALL, f"run.dir={tmp_path}"])
    model = Decoder(job.model).double()
    initialise(model, job.model, 0)
    shards = {model_key(name): Shard.whole(tensor.detach()) for name, tensor in model.named_parameters()}
    manifest = Manifest(step=0, samples=0, updates=0, optimizer=False, data="", job=msgspec.to_builtins(job))
    write_alone(Store(tmp_path / "checkpoints"), [shards], manifest, lambda _: None)
    wanted = [5, 6, 7, 8]
    with torch.no_grad():
        for _ in range(8):
            wanted.append(int(model(torch.tensor([wanted]))[0, -1].argmax()))

    def generated(layout: str) -> list[int]:
        request = Request(tmp_path, None, layout, "float64", "cpu", 8, Sampling(temperature=0.0), 60.0)
        return generate(request, [], wanted[:4], lambda _: None)[0].tokens

    assert generated("dp=1") == generated("tp=2") == wanted[4:]


@pytest.mark.slow  # test_lion.py and test_mixture.py have the like
def test_a_run_goes_on_in_another_layout_with_the_same_curve(
    conv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = ff.train(None, [*CHANGES, *SMALL, "train.steps=4", "run.name=whole"]).losses
    ff.train(None, [*CHANGES, *SMALL, "train.steps=2", "layout=dp=2,zero=1"])
    resumed = ff.train("runs/conv", ["train.steps=4", "layout=tp=2"])
    assert resumed.losses == pytest.approx(whole, abs=1e-10)
    assert resumed.losses[0] - resumed.losses[-1] > 0.01  # it learns

    # To another process the name is one of a file, and its user has to say that it may be imported.
    done = fivefold("train", "runs/conv", "train.steps=8", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"If you trust it: --plugin {NAME}" in done.stderr


def test_its_weights_lie_in_files_of_hugging_face_where_it_says(
    conv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No class of transformers has such layers, so no config.json is written, and an import is told the model."""
    monkeypatch.chdir(tmp_path)
    job = read_job(None, [*CHANGES, *SMALL])
    (tmp_path / "conv.toml").write_text(to_toml(job))
    model = Decoder(job.model)
    initialise(model, job.model, 0)
    shards = {model_key(name): Shard.whole(tensor.detach()) for name, tensor in model.named_parameters()}
    manifest = Manifest(step=0, samples=0, updates=0, optimizer=False, data="", job=msgspec.to_builtins(job))
    (tmp_path / "run").mkdir()
    checkpoint = Checkpoint(write_alone(Store(tmp_path / "run" / "checkpoints"), [shards], manifest, lambda _: None))
    with pytest.warns(Note, match="no model of transformers has the layers of tiny's pattern: .* and no config.json"):
        export_hf(checkpoint, job.model, tmp_path / "hf", "float32", 1 << 30, None, None, lambda _: None)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    layer = model.layers["0"].conv
    joined = torch.cat([layer.b.weight, layer.c.weight, layer.x.weight])
    assert torch.equal(stored["model.layers.0.conv.in_proj.weight"], joined)
    assert torch.equal(stored["model.layers.2.conv.conv.weight"], model.layers["2"].conv.filter.weight)
    assert torch.equal(stored["model.layers.1.self_attn.q_proj.weight"], model.layers["1"].attention.q.weight)

    found = HuggingFace(tmp_path / "hf", job.model)
    for name, tensor in model.named_parameters():
        assert torch.equal(found.read(name, tuple(map(range, tensor.shape))), tensor), name
    done = fivefold("hf", "import", "hf", "-o", "runs/again", cwd=tmp_path, env={"PYTHONPATH": str(conv)})
    assert (done.returncode, "config.json" in done.stderr) == (2, True)
    words = ("hf", "import", "hf", "-o", "runs/again", "--model", "conv.toml")
    done = fivefold(*words, cwd=tmp_path, env={"PYTHONPATH": str(conv)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"fivefold train runs/again/job.toml data.path=TOKENS --plugin {NAME}\n")


def test_a_kind_without_names_has_no_place_in_files(conv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = _layer(conv)
    monkeypatch.setattr(type(kind.mixer), "hf_names", BlockKind.hf_names)
    [problem] = unnamed_kinds(_job(conv))
    assert problem.startswith(f"{NAME} does not say where files of Hugging Face have conv.b, conv.c, conv.filter, ")
    assert unnamed_kinds(ff.preset("tiny-deepseek")) == unnamed_kinds(ff.preset("tiny-oss")) == []


def _layer(conv: Path, **settings: int) -> Layer:
    from fivefold_gated_conv import GatedConv  # type: ignore[import-not-found,unused-ignore]

    return Layer(mixer=GatedConv(**settings), mlp=MLPS["dense"]())


def _job(conv: Path) -> ff.ModelSpec:
    return ff.preset("tiny", layers=3, pattern=[_layer(conv)] * 3)
