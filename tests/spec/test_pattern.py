"""Which mixer and MLP each layer has: derived from a model's numbers, or written down.

spec = preset("tiny", pattern=[Layer(mixer="attention"), Layer(mlp="dense")])
spec.kinds(1).branches
"""

import msgspec
import pytest

from fivefold.job.reading import job_from, read_job
from fivefold.job.toml_writer import to_toml
from fivefold.layout.layout import Layout
from fivefold.layout.stages import stages_of
from fivefold.spec.blocks import Experts
from fivefold.spec.hf import to_hf_config
from fivefold.spec.mixers import GroupedQueryAttention, MultiHeadLatentAttention
from fivefold.spec.mlps import Dense, MixtureOfExperts
from fivefold.spec.model import ModelSpec
from fivefold.spec.operations import block
from fivefold.spec.pattern import Layer
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.errors import UserError
from fivefold.support.parsing import parse_toml, toml_value

FEW = Experts(count=4, top_k=2, ffn=32)
MIXED = [{"mixer": {"name": "attention", "window": 8}, "mlp": "dense"}, {"mlp": "moe"}, {"mixer": "attention"}]


def test_the_numbers_of_published_models_say_their_patterns() -> None:
    names = {
        "llama3-8b": {(GroupedQueryAttention, Dense): 32},
        "mixtral-8x7b": {(GroupedQueryAttention, MixtureOfExperts): 32},
    }
    names |= {
        "deepseek-v2-lite": {(MultiHeadLatentAttention, Dense): 1, (MultiHeadLatentAttention, MixtureOfExperts): 26}
    }
    for name, wanted in names.items():
        counted = preset(name).counted()
        assert {(type(kinds.mixer), type(kinds.mlp)): count for kinds, count in counted.items()} == wanted
    oss = preset("gpt-oss-20b")
    windows = [block(oss, layer=oss.kinds(layer)).attention.window for layer in range(24)]
    assert windows == [128, 0] * 12


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.startswith("megatron")])
def test_a_pattern_that_is_written_down_is_the_same_model(name: str) -> None:
    spec = preset(name)
    experts = msgspec.structs.replace(spec.experts, dense_layers=0) if spec.experts else None
    written = tuple(spec.kinds(layer) for layer in range(spec.layers))
    same = msgspec.structs.replace(spec, pattern=written, window=0, window_period=1, experts=experts)
    assert same.problems() == []
    assert same.parameters() == spec.parameters()
    assert same.flops_per_token(4096) == spec.flops_per_token(4096)
    assert same.active_parameters == spec.active_parameters
    assert stages_of(same, Layout(pp=2), 4096) == stages_of(spec, Layout(pp=2), 4096)


def test_a_pattern_is_repeated_and_what_is_missing_has_no_parameters() -> None:
    spec = preset("tiny", layers=7, pattern=MIXED, experts=FEW)
    assert spec.problems() == []
    assert spec.kinds(6) == spec.kinds(0) == Layer(mixer=GroupedQueryAttention(window=8), mlp=Dense())
    assert spec.routed_layers == (1, 4)
    parts = {name.split(".")[2] for name in (parameter.name for parameter in spec.parameters()) if "layers.1." in name}
    assert parts == {"mlp_norm", "mlp"}
    parts = {name.split(".")[2] for name in (parameter.name for parameter in spec.parameters()) if "layers.2." in name}
    assert parts == {"attention_norm", "attention"}
    assert spec.parameter_count == sum(parameter.size for parameter in spec.parameters())
    assert spec.residual_writers == 3 * 2 + 2 * 1 + 2 * 1


def test_a_job_keeps_its_pattern() -> None:
    changes = [f"model.pattern={toml_value(MIXED)}", *(f"model.experts.{key}={n}" for key, n in _numbers().items())]
    job = read_job(None, changes)
    assert job.problems() == []
    assert job_from(msgspec.to_builtins(job)) == job
    assert msgspec.convert(parse_toml(to_toml(job))["model"], ModelSpec) == job.model


def test_jobs_of_before_there_were_patterns_are_read() -> None:
    table = msgspec.to_builtins(read_job(None, []))
    del table["model"]["pattern"]
    assert job_from(table).model == preset("tiny")


def test_stages_are_balanced_by_what_each_layer_costs() -> None:
    """A layer without an MLP is a fraction of a whole one."""
    spec = preset("tiny", layers=8, vocab=8, pattern=[*[Layer(mixer="attention", mlp="dense")] * 4,
                                                      *[Layer(mixer="attention")] * 4])  # fmt: skip
    first, second = (stage.layers for stage in stages_of(spec, Layout(pp=2), 64))
    assert len(first) < len(second)


WRONG = {
    "3": ("model.pattern.type", "model.pattern=3 is not a list of tables; write a table with mixer, mlp"),
    "[3]": ("model.pattern.type", r"model.pattern\[0\]=3 is not a table; write a table with mixer, mlp"),
    '[{mlp = "dense"}, "dense"]': ("model.pattern.type", r"model.pattern\[1\]='dense' is not a table; write a table"),
    '[{mixr = "attention"}]': ("setting.unknown", r"model.pattern\[0\].mixr is not a setting; did you mean 'mixer'"),
    '[{mlp = "dense"}, {mixer = 3}]': ("model.pattern.kind", r"^model.pattern\[1\].mixer=3 is neither"),
    '[{mlp = "dense"}, {mixer = "no"}]': ("model.pattern.mixer.choice", r"^model.pattern\[1\].mixer='no' is not a ch"),
    "[{mixer = 3}]": ("model.pattern.kind", 'one; write for example mixer = "attention"'),
    '[{mixer = "attenshun"}]': ("model.pattern.mixer.choice", "did you mean 'attention'"),
    '[{mlp = "attention"}]': ("model.pattern.mlp.choice", "'attention' is not a choice"),
    '[{mixer = {name = "attention", windw = 3}}]': ("setting.unknown", "did you mean 'window'"),
    "[{mixer = {window = 3}}]": ("model.pattern.kind", "neither a name nor a table with one"),
    '[{mixer = "nowhere.at_all:Conv"}]': ("plugin.module", "no module nowhere"),
    '[{mlp = "dense"}, {mixer = "nowhere:A"}, {mixer = "nowhere:A"}]': ("plugin.module", r"^model.pattern\[1\].mixer="),
    '[{mixer = "fivefold.spec.mlps:Dense"}]': ("plugin.kind", "not a subclass of fivefold.spec.kinds:Mixer"),
}


@pytest.mark.parametrize("text", WRONG)
def test_a_pattern_that_cannot_be_is_refused_in_a_sentence(text: str) -> None:
    code, words = WRONG[text]
    with pytest.raises(UserError, match=words) as caught:
        read_job(None, [f"model.pattern={text}"])
    assert caught.value.codes == [code]


def test_all_that_is_wrong_with_a_pattern_is_said_at_once() -> None:
    with pytest.raises(UserError) as caught:
        read_job(None, ['model.pattern=[3, {mlp = {name = "dense", fnn = 4}}, {mlp = 4}]'])
    assert caught.value.codes == ["model.pattern.type", "setting.unknown", "model.pattern.kind"]


def test_what_a_pattern_contradicts_is_named() -> None:
    def problems(**changes: object) -> list[str]:
        return preset("tiny", **changes).problems()

    [empty] = problems(pattern=[Layer()])
    assert "neither a mixer nor an mlp in layer 0" in empty
    [long] = problems(pattern=[Layer(mlp="dense")] * 5)
    assert long.endswith("nearest: layers=5")
    [below] = problems(pattern=[Layer(mlp="dense"), Layer(mixer={"name": "attention", "window": -2})])
    assert below == "model.pattern[1].mixer.window=-2 must be at least 0"
    [window] = problems(pattern=[Layer(mixer="attention")], window=8)
    assert "model.window and model.pattern both say" in window
    [unused] = problems(pattern=[Layer(mlp="dense")], experts=FEW)
    assert 'write mlp = "moe"' in unused
    [numbers] = problems(pattern=[Layer(mlp="moe")])
    assert "model.experts has no numbers" in numbers


def test_hugging_face_has_no_model_of_other_patterns() -> None:
    plain = preset("tiny", pattern=[Layer(mixer="attention", mlp="dense")])
    assert to_hf_config(plain, "float32") == to_hf_config(preset("tiny"), "float32")
    with pytest.raises(UserError, match="no model of transformers has the layers of tiny's pattern"):
        to_hf_config(preset("tiny", pattern=[Layer(mlp="dense")]), "float32")


def _numbers() -> dict[str, int]:
    return {"count": FEW.count, "top_k": FEW.top_k, "ffn": FEW.ffn}
