"""Whatever a member of a plugin does, its user reads one sentence: the plugin, the member, what came, and where."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fivefold as ff
from fivefold.job.config import Job
from fivefold.job.reading import read_job
from fivefold.layout.layout import Layout
from fivefold.model.decoder import Decoder
from fivefold.model.hf_names import sources, unnamed_kinds
from fivefold.model.layers import TokenPositions
from fivefold.model.linear_cross_entropy import Targets, Vocabulary, linear_cross_entropy, loss_sum
from fivefold.optim.base import check_update, matrix_flops, matrix_memory, reading, reads_whole, states_of
from fivefold.support import plugins
from fivefold.support.errors import UserError
from tests.refusals import refusal
from tests.verifier.cases import slow

Made = Callable[..., Job]

KIND = """
from fivefold.spec.kinds import MLP, Mixer
from fivefold.spec.operations import Elementwise, Matmul

class Mine(MLP, frozen=True, kw_only=True, tag="mine:Mine"):
    place = "mine"
    module = "mine:Layer"
    MEMBERS

    def operations(self, spec, tp):
        yield Matmul("mine", "up", "mine_norm", spec.hidden, spec.hidden // tp, "colwise")
        yield Matmul("mine", "down", "up", spec.hidden // tp, spec.hidden, "rowwise")

def __getattr__(name):
    if name != "Layer":
        raise AttributeError(name)
    from torch import nn
    from fivefold.model.layers import Linear

    class Layer(nn.Module):
        def __init__(self, kind, spec, ops):
            super().__init__()
            self.ops = ops
            self.up, self.down = (Linear(spec.hidden, spec.hidden, bias=False) for _ in range(2))

        def forward(self, x):
            (y,) = self.ops.column_parallel(x, self.up)
            return self.ops.row_parallel(y.relu(), self.down)
    return Layer
"""
OPTIMIZER = """
from fivefold.optim.base import OptimizerConfig

class Mine(OptimizerConfig, frozen=True, kw_only=True, tag="mine:Mine"):
    states = ("momentum",)
    unit = "matrix"
    MEMBERS

    def update(self, masters, grads, states, rate, decay, step):
        pass

    def matrix_update(self, matrices):
        return matrices

    def stock(self, groups, **options):
        import torch
        return torch.optim.SGD(groups, lr=self.lr)
"""
SOURCE = """
from fivefold.data.base import DataSource

class Mine(DataSource, frozen=True, kw_only=True, tag="mine:Mine"):
    MEMBERS

    def open(self):
        raise OSError("no disk")
"""
LOSS = """
from fivefold.losses.base import Loss

class Mine(Loss, frozen=True, kw_only=True, tag="mine:Mine"):
    MEMBERS

    def sums(self, logits, words):
        return (words.pick(logits),)

    def value(self, lse, sums, size):
        return lse - sums[0]

    def slope(self, logits, lse, sums, words):
        return (logits - lse[:, None]).exp()

    def plain(self, logits, targets):
        return -logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
"""
LISTENER = """
from fivefold.job.listeners import RunListener

class Mine(RunListener):
    MEMBERS

    def step(self, record):
        pass
"""
TEXTS = {"kind": KIND, "optimizer": OPTIMIZER, "source": SOURCE, "loss": LOSS, "listener": LISTENER}
NAMED = {
    "kind": 'model.pattern=[{mixer="attention", mlp="mine:Mine"}]',
    "optimizer": "optimizer.name=mine:Mine",
    "source": "data.source=mine:Mine",
    "loss": "loss.name=mine:Mine",
    "listener": "run.listeners=mine:Mine",
}


@pytest.fixture
def made(tmp_path: Path, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Made:
    """The job that names a plugin of a sort, whose class has these lines in addition to what it needs; a member that
    they have is left out of the rest."""
    monkeypatch.chdir(tmp_path)

    def job(sort: str, members: str = "", *changes: str, replaced: tuple[str, str] = ("", "")) -> Job:
        own = [line.split("def ")[1].split("(")[0] for line in members.splitlines() if line.strip().startswith("def ")]
        text = TEXTS[sort].replace(*replaced)
        for name in own:
            text = text.replace(f"    def {name}(", f"    def _unused_{name}(")
        text = text.replace("    MEMBERS\n", "\n".join(f"    {line}" for line in members.splitlines()) + "\n")
        (tmp_path / "mine.py").write_text(text)
        return read_job(None, [NAMED[sort], "model.hidden=32", "model.layers=1", *changes])

    return job


def said(error: UserError, code: str) -> str:
    """The one sentence of an error."""
    assert error.codes == [code], error.coded
    [sentence] = error.problems
    assert "mine:Mine" in sentence
    return sentence


# ---- before a process starts ----------------------------------------------------------------------------------------

ARITIES = [
    ("kind", "def operations(self, spec): pass", "operations(self, spec), and not operations(self, spec, tp)"),
    ("kind", "def parameters(self, spec): pass", "parameters(self, spec), and not parameters(self, spec, layer)"),
    ("kind", "def problems(self): pass", "problems(self), and not problems(self, spec)"),
    ("kind", "def cache(self, spec): pass", "cache(self, spec), and not cache(self, spec, tp)"),
    ("kind", "def divided(self): pass", "divided(self), and not divided(self, spec)"),
    ("kind", "def hf_names(self, a, b): pass", "hf_names(self, a, b), and not hf_names(self, spec)"),
    ("kind", "cp = 1", "has cp=1, and not True or False"),
    ("kind", "divided: int = 3", "has a setting divided, which is a method of MLP"),
    ("kind", "taps: list[int] = []", "has taps: list, which can be changed; write a tuple"),
    ("kind", "async def divided(self, spec): pass", "has an async divided, which nobody awaits"),
    ("optimizer", "def matrix_update(self): pass", "matrix_update(self), and not matrix_update(self, matrices)"),
    ("optimizer", "def stock(self, groups): pass", "stock(self, groups), and not stock(self, groups, **options)"),
    ("optimizer", "def states_of(self): pass", "states_of(self), and not states_of(self, parameter)"),
    ("optimizer", "def accumulate(self, grads): pass", "accumulate(self, grads), and not accumulate(self, grads, st"),
    ("optimizer", "def own_rules(self, spec): pass", "own_rules(self, spec), and not own_rules(self)"),
    ("source", "def problems(self, spec): pass", "problems(self, spec), and not problems(self)"),
    ("source", "def open(self, path): pass", "open(self, path), and not open(self)"),
    ("source", "def vocab(self, path): pass", "vocab(self, path), and not vocab(self)"),
    ("loss", "def sums(self, logits): pass", "sums(self, logits), and not sums(self, logits, words)"),
    ("loss", "def value(self, lse): pass", "value(self, lse), and not value(self, lse, sums, size)"),
    ("loss", "def slope(self, logits, lse, sums): pass", "slope(self, logits, lse, sums), and not slope(self, logits"),
    ("loss", "def plain(self, logits): pass", "plain(self, logits), and not plain(self, logits, targets)"),
    ("loss", "def reduced(self): return 1", "has a method reduced, which is a property of Loss; write @property"),
    ("listener", "def step(self): pass", "step(self), and not step(self, record)"),
    ("listener", "async def end(self, step): pass", "has an async end, which nobody awaits"),
]


@pytest.mark.parametrize(("sort", "member", "sentence"), ARITIES)
def test_a_member_that_cannot_be_called_is_refused_with_the_class(
    made: Made, sort: str, member: str, sentence: str
) -> None:
    assert sentence in said(refusal(lambda: made(sort, member)), "plugin.protocol")


def test_members_that_take_more_than_they_need_are_taken(made: Made) -> None:
    assert not made("kind", "@staticmethod\ndef divided(*given, extra=0, **more): return []").problems()


def test_all_shortcomings_of_all_listeners_are_told_at_once(made: Made, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("class Other: pass")
    wrong = "def step(self): pass\ndef end(self): pass\ndef __init__(self, url): pass"
    error = refusal(lambda: made("listener", wrong, "run.listeners=mine:Mine,other:Other,none:None"))
    assert error.codes == ["plugin.protocol"] * 3 + ["plugin.kind", "plugin.module"]


RAISES = "raise KeyError('lost')"
ODD = [  # what a member gives, and what is said of it
    ("kind", "def problems(self, spec): return 'text'", "problems gave 'text', and not sentences"),
    ("kind", "def problems(self, spec): return [3]", "problems gave 3, and not sentences"),
    ("kind", "def problems(self, spec): pass", "problems gave None, and not sentences"),
    ("kind", "def operations(self, spec, tp): pass", "operations gave None, and not fivefold.spec.operations (Matmul"),
    ("kind", "def operations(self, spec, tp): return [object()]", "operations gave a object, and not fivefold.spec"),
    ("kind",
     "def operations(self, spec, tp): yield Matmul('mine', 'up', 'x', spec.hidden, spec.hidden / tp, 'colwise')",
     "operations gave Matmul('up') with outputs=32.0 (Expected `int`, got `float`), and not"),
    ("kind", "def operations(self, spec, tp): yield Matmul('mine', 'up', 'x', spec.hidden, spec.hidden, 'columns')",
     "operations gave Matmul('up') with tp='columns' (known: colwise, colwise_kv, "),
    ("kind", "def parameters(self, spec, layer): return [1]",
     "parameters gave 1, and not fivefold.spec.operations:Par"),
    ("kind", "def divided(self, spec): return 32", "divided gave 32, and not a list of whole numbers"),
    ("kind", "def divided(self, spec): return [32.0]", "divided gave 32.0, and not a list of whole numbers"),
    ("kind", "def cache(self, spec, tp): return 32", "cache gave 32, and not a fivefold.spec.operations:Cache or None"),
    ("kind", "def hf_names(self, spec): return {'mine.up': 'up'}", "hf_names gave 'mine.up': 'up', and not a dict of"),
    ("kind", "def hf_names(self, spec): return None", "hf_names gave None, and not a dict of names and"),
    ("kind", "def operations(self, spec, tp): return [Elementwise('other', 64, flops=float('inf'))]",
     "operations gave Elementwise('') with flops=inf (a number, finite and not negative), and not"),
    ("kind", "def operations(self, spec, tp): return [Elementwise('other', 64, moved=(float('nan'), 1.0))]",
     "operations gave Elementwise('') with moved=(nan, 1.0) (a number, finite"),
    ("kind", "def cache(self, spec, tp):\n    from fivefold.spec.operations import Cache\n    return Cache(token=-1)",
     "cache gave Cache('') with token=-1 (a number, finite"),
    ("kind", "def parameters(self, spec, layer):\n    from fivefold.spec.operations import Parameter\n"
     "    return [Parameter('a', (2,), 'weird', layer)]", "parameters gave Parameter('a') with kind='weird' (known: "),
    ("optimizer", "def matrix_flops(self, rows, columns): return float('nan')", "matrix_flops gave nan, and not a"),
    ("optimizer", "def matrix_memory(self, rows, columns): return -5", "matrix_memory gave -5, and not a number"),
    ("optimizer", "def states_of(self, parameter): return 2 * self.states", "states_of gave ('momentum', 'momentum')"),
    ("optimizer", "def own_rules(self): return None", "own_rules gave None, and not pairs of a truth and a sentence"),
    ("optimizer", "def own_rules(self): return [False]", "own_rules gave False, and not pairs of a truth and"),
    ("optimizer", "def problems(self): return 3", "problems gave 3, and not sentences"),
    ("source", "def problems(self): return None", "problems gave None, and not sentences"),
    ("source", "def problems(self): yield 3", "problems gave 3, and not sentences"),
    ("loss", "def problems(self): return None", "problems gave None, and not sentences"),
    ("loss", "reduced = '2'", "reduced gave '2', and not a whole number of sums, 0 or more"),
    ("loss", "reduced = True", "reduced gave True, and not a whole number of sums"),
    ("loss", "@property\ndef reduced(self): return -1", "reduced gave -1, and not a whole number of sums"),
]  # fmt: skip


@pytest.mark.parametrize(("sort", "member", "sentence"), ODD)
def test_a_result_of_another_type_is_said_before_a_process_starts(
    made: Made, sort: str, member: str, sentence: str
) -> None:
    assert sentence in said(UserError(made(sort, member).problems()), "plugin.result")


@pytest.mark.parametrize(("sort", "member", "line"), [
    ("kind", "problems(self, spec)", 8),
    ("kind", "operations(self, spec, tp)", 8),
    ("kind", "parameters(self, spec, layer)", 8),
    ("kind", "divided(self, spec)", 8),
    ("kind", "cache(self, spec, tp)", 8),
    ("kind", "hf_names(self, spec)", 8),
    ("optimizer", "own_rules(self)", 7),
    ("optimizer", "problems(self)", 7),
    ("source", "problems(self)", 5),
    ("loss", "problems(self)", 5),
])  # fmt: skip
@pytest.mark.parametrize("raises", [RAISES, "yield 1 / 0", "import sys; sys.exit(3)"])
def test_a_member_that_raises_is_said_with_its_line(
    made: Made, tmp_path: Path, sort: str, member: str, line: int, raises: str
) -> None:
    """Also one that does so only while what it gives is read."""
    sentence = said(UserError(made(sort, f"def {member}: {raises}").problems()), "plugin.raised")
    name = member.partition("(")[0]
    error = {RAISES: "KeyError: 'lost'", "yield 1 / 0": "ZeroDivisionError: division by zero"}.get(raises, "SystemExit")
    assert f"mine:Mine: {name} raised {error}" in sentence
    assert sentence.endswith(f"({tmp_path / 'mine.py'}, line {line})")


def test_a_number_of_sums_that_raises_is_said_with_its_line(made: Made, tmp_path: Path) -> None:
    sentence = said(UserError(made("loss", "@property\ndef reduced(self): return {}['x']").problems()), "plugin.raised")
    assert sentence == f"mine:Mine: reduced raised KeyError: 'x' ({tmp_path / 'mine.py'}, line 6)"


def test_a_parameter_alone_may_have_a_place_of_its_own_in_files_of_hugging_face(made: Made) -> None:
    """By its whole name, which is then the whole name there, too; what is missing is told with what was given."""
    two = (
        "def parameters(self, spec, layer):\n    from fivefold.spec.operations import Parameter\n"
        "    return [Parameter(f'layers.{layer}.mine.{name}', (3,), 'bias', layer) for name in ('a', 'b')]\n"
        "def hf_names(self, spec):\n    from fivefold.spec.kinds import HfTensor\n"
        "    return {'mine_norm': HfTensor('n'), "
    )
    model = made("kind", f"{two}'mine.a': HfTensor('x.a'), 'mine.b': HfTensor('y')}}").model
    names = [next(sources(model, parameter)).name for parameter in model.block_parameters(0)]
    assert {"model.layers.0.x.a", "model.layers.0.y"} < {*names}
    assert unnamed_kinds(model) == []
    plugins._imported.clear()
    del sys.modules["mine"]
    [problem] = unnamed_kinds(made("kind", f"{two}'mine.a': HfTensor('x.a')}}").model)
    assert "have mine.b; its method hf_names(self, spec) gives mine_norm, mine.a" in problem


UP = 'spec.hidden, spec.hidden // tp, "colwise"'
MORE = """def parameters(self, spec, layer):
    from fivefold.spec.operations import Parameter
    yield from super(type(self), self).parameters(spec, layer)
    yield Parameter(f"layers.{layer}.mine.z", """


@pytest.mark.parametrize(("replaced", "members", "sentences"), [
    ((UP, "spec.hidden, 64, 'colwise'"), "", ["mine.up has colwise outputs 64 at tp=2, and 64 at tp=1; a rank has 32"]),
    (("", ""), "def operations(self, spec, tp): return [Matmul('mine', 'up', 'mine_norm', spec.hidden, 101 // tp, "
     "'colwise'), Matmul('mine', 'down', 'up', 101 // tp, spec.hidden, 'rowwise')]",
     ["mine.up has colwise outputs 50 at tp=2, and 101 at tp=1; let divided(self, spec) give 101",
      "mine.down has rowwise inputs 50 at tp=2, and 101 at tp=1; let divided(self, spec) give 101"]),
    (("", ""), "def operations(self, spec, tp): return [Elementwise('other', spec.hidden // tp)]",
     ["Elementwise(other) has width 16 at tp=2, and 32 at tp=1; a rank has 32"]),
    (("", ""), "def operations(self, spec, tp): return [Elementwise('other', 32)] * tp", ["with tp=2 they are others"]),
    ((UP, "spec.hidden, 64, 'colwise'"), "def divided(self, spec): return [33]", []),  # no layout has tp=2
    (("", ""), f"{MORE}(3,), 'bias', layer + 1)", ["has layers.0.mine.z with unit=1 in layer 0"]),
    (("", ""), f"{MORE}(0,), 'bias', layer)", ["has layers.0.mine.z of shape [0], which has no numbers"]),
])  # fmt: skip
def test_what_does_not_fit_together_is_said_before_a_process_starts(
    made: Made, replaced: tuple[str, str], members: str, sentences: list[str]
) -> None:
    problems = made("kind", members, replaced=replaced).problems()
    assert len(problems) == len(sentences)
    assert all(map(str.__contains__, problems, sentences)), problems


def test_operations_that_fail_on_some_layouts_are_said_of_these(made: Made) -> None:
    """The planner and the rules ask for them with other tp than the checks of a model do."""
    job = made(
        "kind",
        "def operations(self, spec, tp): return [Matmul('mine', 'up', 'mine_norm', spec.hidden, 1 // (2 - tp), "
        "'colwise'), Matmul('mine', 'down', 'up', 1, spec.hidden, 'rowwise')]",
    )
    assert not job.problems()
    error = refusal(lambda: ff.plan(job, "2xH100", fix="tp=2"))
    assert "operations raised ZeroDivisionError" in said(error, "plugin.raised")


@pytest.mark.parametrize(("member", "sentence"), [
    ("def vocab(self): return 'many'", "vocab gave 'many', and not a number of ids or None"),
    ("def vocab(self): return 1 // 0", "vocab raised ZeroDivisionError"),
    ("def prepared(self): return 'tokens'", "prepared gave 'tokens', and not paths"),
])  # fmt: skip
def test_a_source_whose_vocabulary_cannot_be_told_is_one_sentence(made: Made, member: str, sentence: str) -> None:
    [problem] = refusal(lambda: made("source", member)).problems
    assert f"mine:Mine: {sentence}" in problem


# ---- on a rank ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "sentence"), [
    (("self.down)\n", "self.down)[..., 1:]\n"),
     "forward of mine:Layer gave a Tensor of shape [2, 4, 31] and torch.flo"),
    (("self.down)\n", "self.down).bfloat16()\n"),
     "gave a Tensor of shape [2, 4, 32] and torch.bfloat16, and not a Tensor of shape [2, 4, 32] and torch.float32"),
    (("return self.ops.row", "return 1, self.ops.row"), "forward of mine:Layer gave (1, tensor"),
    (("return self.ops.row_parallel", "self.ops.row_parallel"), "forward of mine:Layer gave None, and not a Tensor"),
])  # fmt: skip
def test_a_module_of_another_output_is_named(made: Made, change: tuple[str, str], sentence: str) -> None:
    job = made("kind", replaced=change)
    assert not job.problems()
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    model = Decoder(job.model)
    assert sentence in said(refusal(lambda: model(tokens, TokenPositions.of(tokens))), "plugin.result")


@pytest.mark.parametrize(("change", "sentence"), [
    (("def forward(self, x)", "def forward(self, x, shared)"), "be called as forward(x): missing a required"),
    (("def forward(self, x)", "def forward(self)"), "cannot be called as forward(x): too many positional"),
])  # fmt: skip
def test_a_module_that_cannot_be_called_is_named_before_the_first_step(
    made: Made, change: tuple[str, str], sentence: str
) -> None:
    job = made("kind", replaced=change)
    assert sentence in said(refusal(lambda: Decoder(job.model)), "plugin.protocol")


@pytest.mark.parametrize("member", ["__init__", "forward"])
def test_a_module_that_leaves_the_program_is_named_and_is_no_success(made: Made, member: str) -> None:
    """A process that ends with SystemExit(0) looks as if it had done its work."""
    calls = {"__init__": "            super().__init__()", "forward": "            (y,) ="}
    replaced = (calls[member], f"            raise SystemExit(0)\n{calls[member]}")
    model, tokens = made("kind", replaced=replaced).model, torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises((UserError, SystemExit)) as error:
        Decoder(model)(tokens, TokenPositions.of(tokens))
    blamed = error.value if isinstance(error.value, UserError) else plugins.plugin_error(error.value)
    assert blamed is not None
    code = {"__init__": "plugin.protocol", "forward": "plugin.raised"}[member]
    assert "SystemExit: 0 (" in said(blamed, code)


def test_a_module_that_cannot_be_made_is_named_with_its_line(made: Made, tmp_path: Path) -> None:
    job = made("kind", replaced=("            self.ops = ops", "            self.ops = ops.nothing"))
    sentence = said(refusal(lambda: Decoder(job.model)), "plugin.protocol")
    assert "could not be made: AttributeError: 'LocalOps' object has no attribute 'nothing'" in sentence
    assert f"({tmp_path / 'mine.py'}, line 23)" in sentence


@pytest.mark.parametrize(("member", "sentence"), [
    ("def sums(self, logits, words): return words.pick(logits)", "sums gave a Tensor of shape [6]"),
    ("def sums(self, logits, words): return ()", "sums gave 0 tensors, and not a tuple of 1, as `reduced` says"),
    ("def sums(self, logits, words): return None", "sums gave None, and not a tuple of 1"),
    ("def sums(self, logits, words): return (logits.sum(),)", "sums gave a Tensor of shape [] and torch.float32, a"),
    ("def value(self, lse, sums, size): return lse.sum()", "value gave a Tensor of shape [] and torch.float32, and"),
    ("def value(self, lse, sums, size): return None", "value gave None, and not a Tensor of shape [6]"),
    ("def slope(self, logits, lse, sums, words): return lse", "slope gave a Tensor of shape [6] and torch.float32"),
    ("def slope(self, logits, lse, sums, words): return logits.double()", "slope gave a Tensor of shape [6, 9] and t"),
    ("def plain(self, logits, targets): return logits", "plain gave a Tensor of shape [6, 9] and torch.float32, and"),
])  # fmt: skip
def test_a_loss_of_another_shape_is_named(made: Made, member: str, sentence: str) -> None:
    loss = made("loss", member).loss
    x, weight = torch.randn(2, 3, 5, requires_grad=True), torch.randn(9, 5)
    targets = Targets(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.bool), loss)

    def computed() -> None:
        linear_cross_entropy(x, weight, targets, Vocabulary(9))
        loss_sum(x @ weight.T, targets.tokens, targets.mask, loss)

    assert sentence in said(refusal(computed), "plugin.result")


@pytest.mark.parametrize(("member", "sentence"), [
    ("def states_of(self, parameter): return ('other',)", "states_of gave ('other',), and not some of its states"),
    ("def states_of(self, parameter): return None", "states_of gave None, and not some of its states"),
    ("def group(self, parameter): return None", "group gave None, and not a fivefold.optim.groups:ParamGroup"),
    ("def matrix_flops(self, rows, columns): return 'few'", "matrix_flops gave 'few', and not a number"),
    ("def matrix_memory(self, rows, columns): return None", "matrix_memory gave None, and not a number"),
])  # fmt: skip
def test_what_an_optimizer_says_of_parameters_is_checked(made: Made, member: str, sentence: str) -> None:
    job = made("optimizer", member)
    parameter = job.model.parameters()[1]

    def asked() -> None:
        states_of(job.optimizer, parameter)
        reads_whole(job.optimizer, parameter)
        matrix_flops(job.optimizer, 2, 3)
        matrix_memory(job.optimizer, 2, 3)

    assert sentence in said(refusal(asked), "plugin.result")


def test_an_update_that_breaks_its_states_is_named(made: Made) -> None:
    """Where it reads one that `states_of` does not keep, and where it leaves one of another shape."""
    config, master = made("optimizer").optimizer, torch.zeros(2, 2)

    def reads(name: str) -> object:
        with reading(config, "update", states := dict[str, list[torch.Tensor]]()):
            return states[name]

    error = refusal(lambda: reads("momentum"))
    assert "reads the state momentum, and states_of keeps none for these" in said(error, "plugin.result")
    with pytest.raises(KeyError):
        reads("other")
    check_update(config, [master], {"momentum": [torch.ones(2, 2)]})
    error = refusal(lambda: check_update(config, [master], {"momentum": [torch.ones(3)]}))
    assert "update has left momentum as a Tensor of shape [3]" in said(error, "plugin.result")


SMALL = ["data.seq=16", "train.batch=4", "train.steps=1", "train.eval_samples=0", "model.ffn=32", "train.device=cpu"]


@pytest.mark.parametrize(
    ("sort", "member", "code", "sentence"),
    [
        ("optimizer", "def matrix_update(self, matrices): return matrices[0]", "plugin.result", "matrix_update gave a"),
        ("optimizer", "def matrix_update(self, matrices): pass", "plugin.result", "matrix_update gave None"),
        ("optimizer", "def matrix_update(self, matrices): return matrices.double()", "plugin.result",
         "] and torch.float64, and not as it was given a Tensor of shape ["),
        ("optimizer", "def accumulate(self, grads, states, step): return grads[1:]", "plugin.result", "accumulate"),
        ("optimizer", "def update(self, masters, grads, states, rate, decay, step): grads.nothing", "plugin.raised",
         "update raised AttributeError: 'list' object has no attribute 'nothing' ("),
        ("optimizer", "def update(self, masters, grads, states, rate, decay, step): exit(0)", "plugin.raised",
         "update raised SystemExit: 0 ("),
        ("loss", "def slope(self, logits, lse, sums, words): return logits @ lse[:3]", "plugin.raised",
         "slope raised RuntimeError: "),
    ],
)  # fmt: skip
def test_what_fails_in_a_step_of_a_run_is_one_sentence(
    made: Made, sort: str, member: str, code: str, sentence: str
) -> None:
    job = made(sort, member, *SMALL)
    error = refusal(lambda: ff.train(job))
    assert sentence in said(error, code)


def test_a_module_that_writes_into_its_input_is_named_where_autograd_finds_it(made: Made) -> None:
    """In the backward pass, where no frame is a plugin's."""
    job = made("kind", replaced=("return self.ops.row_parallel(", "return x.mul_(2) + self.ops.row_parallel("))
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    logits = Decoder(job.model)(tokens, TokenPositions.of(tokens))
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised:
        logits.sum().backward()
    found = plugins.plugin_error(raised.value)
    assert found is not None
    assert "the backward pass of a model of these blocks raised RuntimeError: one of" in said(found, "plugin.raised")
    plugins._imported.clear()
    assert plugins.plugin_error(raised.value) is None
    del sys.modules["mine"]
    made("optimizer")
    assert plugins.plugin_error(raised.value) is None  # which has no blocks


@pytest.mark.parametrize("read", ["y.relu().detach()", *slow(["y.relu()"])])
@pytest.mark.parametrize("layout", ["pp=2", *slow(["tp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"])])
def test_a_weight_that_gets_no_gradient_is_told_after_the_first_step(made: Made, layout: str, read: str) -> None:
    """By rank 0, also of a layer that another rank has; the weight behind the detached tensor learns."""
    pattern = 'model.pattern=[{mixer="attention", mlp="dense"}, {mixer="attention", mlp="mine:Mine"}]'
    changes = [*SMALL, pattern, "model.layers=2", f"layout={layout}"]
    lines: list[str] = []
    ff.train(made("kind", "", *changes, replaced=("y.relu()", read)), progress=lines.append)
    told = [line.split(", so")[0] for line in lines if "gradient came" in line]
    sentence = "note  mine:Mine: no gradient came to layers.1.mine.up.weight in step 1"
    assert told == [sentence] * ("detach" in read)


@pytest.mark.parametrize("layout", ["dp=2", *slow(["dp=1"])])
def test_a_reference_that_is_none_is_one_sentence(made: Made, layout: str) -> None:
    made("optimizer", "def stock(self, groups, **options): return 3")
    error = refusal(lambda: ff.verify(layout, ["optimizer.name=mine:Mine"], steps=1, seq=16))
    assert "stock gave 3, and not a torch.optim.Optimizer" in said(error, "plugin.result")
    assert Layout.parse(layout)


@pytest.mark.parametrize("function", ["plan", "simulate", "dryrun", "verify"])
def test_what_fails_where_no_member_is_asked_is_one_sentence_from_python_too(made: Made, function: str) -> None:
    job = made("kind", "def __hash__(self): raise KeyError('lost')")
    calls: dict[str, Callable[[], object]] = {
        "plan": lambda: ff.plan(job.model, "8xH100", batch=8, seq=64),
        "simulate": lambda: ff.simulate(job.model, "dp=2", "8xH100", batch=8, seq=64),
        "dryrun": lambda: ff.dryrun(job, "dp=2"),
        "verify": lambda: ff.verify("dp=2", [NAMED["kind"], "model.hidden=32", "model.layers=1"]),
    }
    assert "mine:Mine: __hash__ raised KeyError: 'lost'" in said(refusal(calls[function]), "plugin.raised")


@pytest.mark.parametrize(
    ("raises", "blamed"),
    [
        ("raise ValueError('mine')", True),
        ("import torch; torch.zeros(2) @ torch.zeros(3)", True),  # deeper than the plugin's own frame
        ("import torch; raise torch.OutOfMemoryError('full')", False),  # a restart may help, and its exit code says so
        ("raise OSError('disk')", False),
        ("raise MemoryError", False),
    ],
)
def test_a_plugin_is_not_blamed_for_what_a_machine_does(made: Made, tmp_path: Path, raises: str, blamed: bool) -> None:
    optimizer = made("optimizer", f"def accumulate(self, grads, states, step):\n    {raises}").optimizer
    with pytest.raises(Exception) as raised:  # noqa: PT011
        optimizer.accumulate([], [], 1)
    found = plugins.plugin_error(raised.value)
    assert (found is not None) is blamed
    if found is not None:
        assert f"mine:Mine: accumulate raised {type(raised.value).__name__}: {raised.value}" in str(found)
        assert f"({tmp_path / 'mine.py'}, line 8)" in str(found)
    assert plugins.plugin_error(ValueError("no plugin's")) is None


@pytest.mark.parametrize(
    ("sort", "members", "words"),
    [
        ("kind", "x: dict | None = None", "has x: dict, which can be changed; write a tuple"),
        ("optimizer", "x: tuple[tuple[list[int], ...], ...] = ()", "has x: list, which can be changed; write a tuple"),
        ("optimizer", "x: object = None", "has x: object, which can be changed"),
        (
            "kind",
            "from collections.abc import Sequence\nx: Sequence[int] | None = None",
            "has x: Sequence, which can be changed",
        ),
        ("kind", "import msgspec\nx: int = msgspec.field(default_factory=lambda: 1 / 0)", "raises ZeroDivisionError"),
        (
            "optimizer",
            "def __post_init__(self): raise KeyError('lost')",
            "with its defaults it raises KeyError: 'lost' (",
        ),
        ("source", "def __post_init__(self): import sys; sys.exit(3)", "with its defaults it raises SystemExit: 3 ("),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_class(made: Made, sort: str, members: str, words: str) -> None:
    assert words in said(refusal(lambda: made(sort, members)), "plugin.protocol")


@pytest.mark.parametrize(("sort", "setting"), [("optimizer", "optimizer.x=3"), ("source", "data.x=3")])
def test_an_object_that_raises_with_some_settings_is_one_sentence(made: Made, sort: str, setting: str) -> None:
    members = "x: int = 0\ndef __post_init__(self):\n    if self.x == 3: raise KeyError('lost')"
    assert "mine:Mine: __init__ raised KeyError: 'lost' (" in said(refusal(lambda: made(sort, members, setting)),
                                                                   "plugin.raised")  # fmt: skip


@pytest.mark.parametrize("call", ["open(self)", "read(self, start, stop)"])
def test_a_source_that_leaves_the_program_is_one_sentence(made: Made, call: str) -> None:
    from fivefold.data.source_check import check

    row = "from fivefold.data.rows import Splits, TokenRow\n\nclass Row(TokenRow):\n    vocab, tokens = 9, 99\n"
    row += "    def read(self, start, stop): raise SystemExit(3)\n\nclass Mine("
    opens = "def open(self): raise SystemExit(3)" if call.startswith("open") else (
        "def open(self): return Splits(train=Row(), valid=None, fingerprint='x', where='here')"
    )  # fmt: skip
    job = made("source", opens, replaced=("class Mine(", row))
    error = refusal(lambda: check(job.data))
    assert "raised SystemExit: 3" in error.problems[0]
