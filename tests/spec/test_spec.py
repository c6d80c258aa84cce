"""Models as numbers: exact counts, FLOPs by their convention, Hugging Face configurations."""

import json
import warnings

import msgspec
import pytest
import transformers

from fivefold.spec.blocks import RopeScaling
from fivefold.spec.hf import read_hf_config, spec_from_hf
from fivefold.spec.model import ModelSpec
from fivefold.spec.presets import PRESETS, preset
from fivefold.support.errors import Note, UserError
from tests.refusals import refusal

PUBLISHED = {  # from the releases' own weights
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
    "mistral-7b-v0.3": 7_248_023_552,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gpt2-124m": 124_439_808,
    # counted by transformers' own classes, which have no weights to download
    "mixtral-8x7b": 46_702_792_704,
    "olmoe-1b-7b": 6_919_161_856,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
    "glm-4.5-air": 106_852_245_504,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert preset(name).parameter_count == PUBLISHED[name]


def test_active_parameters_are_those_of_the_model_cards() -> None:
    """In billions: Mixtral 12.9, OLMoE 1.3, Qwen3 3.3 and 22; of a dense model all are."""
    for name, billions in (("mixtral-8x7b", 12.88), ("olmoe-1b-7b", 1.28), ("qwen3-30b-a3b", 3.35)):
        assert round(preset(name).active_parameters / 1e9, 2) == billions
    assert preset("llama3-8b").active_parameters == preset("llama3-8b").parameter_count


def test_qwen_counts_without_embeddings_are_those_of_the_model_cards() -> None:
    """In billions, as the cards of Qwen2.5 print them."""
    for name, billions in (("qwen2.5-0.5b", 0.36), ("qwen2.5-1.5b", 1.31), ("qwen2.5-3b", 2.77), ("qwen2.5-7b", 6.53)):
        kept = [p for p in preset(name).parameters() if p.kind != "embedding" and p.name != "head.weight"]
        assert round(sum(p.size for p in kept) / 1e9, 2) == billions


def test_qwen2_has_biases_on_q_k_and_v_alone() -> None:
    biased = {p.name: (p.shape, p.tp) for p in preset("qwen2.5-7b").block_parameters(0) if p.kind == "bias"}
    assert biased == {
        "layers.0.attention.q.bias": ((3584,), "colwise"),
        "layers.0.attention.k.bias": ((512,), "colwise_kv"),
        "layers.0.attention.v.bias": ((512,), "colwise_kv"),
    }


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("megatron")])
def test_megatron_counts_follow_the_papers_formula(name: str) -> None:
    """P = 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)), to which the final norm adds 2h."""
    spec = preset(name)
    lhs = 12 * spec.layers * spec.hidden**2 + 13 * spec.layers * spec.hidden + (51_200 + 2048) * spec.hidden
    assert spec.parameter_count == lhs + 2 * spec.hidden
    published = name.removeprefix("megatron-").removesuffix("b")
    billions = 1008.0 if published == "1t" else float(published)
    assert spec.parameter_count / 1e9 == pytest.approx(billions, abs=0.06)


def test_flops_per_token_name_their_convention() -> None:
    """6 per matmul weight and 12 l h s, as PaLM counts; half of the latter under a causal mask."""
    spec = preset("llama3-8b")
    weights = spec.parameter_count - 128_256 * 4096 - (2 * 32 + 1) * 4096  # no look-up table, no norms
    assert spec.matmul_parameters == weights
    assert spec.flops_per_token(8192, "full") == 6 * weights + 12 * 32 * 4096 * 8192
    assert spec.flops_per_token(8192, "causal") == 6 * weights + 6 * 32 * 4096 * 8192
    tied = preset("llama3.2-1b")
    assert tied.matmul_parameters == sum(p.size for p in tied.parameters() if p.kind != "norm")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "llama3.2-1b",
            {"rope_scaling": RopeScaling(factor=32.0), "rope_theta": 5e5, "norm_eps": 1e-5, "head_dim": 64},
        ),
        ("llama3-405b", {"rope_scaling": RopeScaling(factor=8.0), "kv_heads": 8, "context": 131_072}),
        ("llama2-70b", {"rope_theta": 1e4, "rope_scaling": None, "kv_heads": 8, "context": 4096}),
        ("qwen3-8b", {"rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True, "head_dim": 128, "context": 40_960}),
        ("qwen2.5-7b", {"rope_theta": 1e6, "norm_eps": 1e-6, "vocab": 152_064, "context": 131_072, "tied": False}),
        ("qwen2.5-32b", {"norm_eps": 1e-5, "qkv_bias": True, "bias": False, "head_dim": 128}),
        ("mistral-7b-v0.3", {"rope_theta": 1e6, "vocab": 32_768, "context": 32_768, "norm_eps": 1e-5, "kv_heads": 8}),
        ("smollm2-1.7b", {"rope_theta": 1.3e5, "tied": True, "kv_heads": 32, "context": 8192}),
        ("megatron-1t", {"heads": 160, "layers": 128, "context": 2048, "norm": "layernorm", "activation": "gelu"}),
        ("megatron-529.6b", {"heads": 128, "layers": 105}),
        ("gpt3-175b", {"heads": 96, "head_dim": 128, "bias": True, "tied": True}),
    ],
)
def test_presets_have_the_published_settings(name: str, fields: dict[str, object]) -> None:
    spec = preset(name)
    assert {field: getattr(spec, field) for field in fields} == fields


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound(name: str) -> None:
    assert preset(name).problems() == []


def test_derived_fields_follow_a_changed_one() -> None:
    assert preset("tiny", hidden=256).head_dim == 64
    assert preset("qwen3-0.6b", hidden=512).head_dim == 128  # given, not derived
    assert ModelSpec(layers=1, hidden=8, heads=2, vocab=3).ffn == 32


def test_unknown_models_are_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown model 'lama3-8b'; did you mean 'llama3-8b'"):
        preset("lama3-8b")


def test_heads_that_do_not_divide_the_hidden_width_are_not_rounded() -> None:
    [problem] = preset("tiny", heads=3, kv_heads=1).problems()
    assert "does not divide into model.heads=3 equal heads; nearest: heads=2 or heads=4" in problem
    assert preset("tiny", heads=3, kv_heads=1, head_dim=32).problems() == []


def test_changes_of_a_preset_have_names_types_and_ranges() -> None:
    assert refusal(lambda: preset("tiny", layrs=3)).codes == ["setting.unknown"]
    assert "did you mean 'layers'" in str(refusal(lambda: preset("tiny", layrs=3)))
    assert refusal(lambda: preset("tiny", layers="x", rope_theta="y")).codes == [
        "model.layers.type",
        "model.rope_theta.type",
    ]
    assert refusal(lambda: preset("tiny", layers=-1, kv_heads=-2)).codes == [
        "model.layers.range",
        "model.kv_heads.range",
    ]


def test_every_problem_of_a_model_is_reported() -> None:
    odd = preset("tiny", heads=6, kv_heads=4, dropout=2, norm_eps=float("nan"))
    assert len(msgspec.structs.replace(odd, layers=0).problems()) == 5
    problems = preset("tiny", heads=6, kv_heads=4, head_dim=15, dropout=1.5).problems()
    assert len(problems) == 3
    assert "kv_heads=4 does not divide model.heads=6" in problems[0]
    assert "nearest: kv_heads=3" in problems[0]


LLAMA31 = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip


def test_released_configs_are_their_presets(tmp_path) -> None:
    folder = tmp_path / "llama3.1-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA31))
    assert read_hf_config(folder) == read_hf_config(folder / "config.json") == preset("llama3.1-8b")
    assert spec_from_hf(QWEN25, "qwen2.5-7b") == preset("qwen2.5-7b")
    assert spec_from_hf(MISTRAL, "mistral-7b-v0.3") == preset("mistral-7b-v0.3")


QWEN25 = {
    "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_position_embeddings": 131072, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": False, "use_mrope": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
    "vocab_size": 32768,
}  # fmt: skip


@pytest.mark.parametrize("config", [{**MISTRAL, "sliding_window": 4096}, {**QWEN25, "use_sliding_window": True}])
def test_sliding_windows_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"sliding_window=.* is not supported"):
        spec_from_hf(config)
    silent = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    with pytest.raises(UserError, match="sliding_window=4096"):
        spec_from_hf(silent)


def test_todays_transformers_writes_configs_that_are_read_back(tmp_path) -> None:
    config = transformers.Qwen3Config(hidden_size=64, num_hidden_layers=2, head_dim=24, tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    spec = read_hf_config(tmp_path)
    assert (spec.hidden, spec.head_dim, spec.qk_norm, spec.tied) == (64, 24, True, True)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(
            hidden_size=64, num_hidden_layers=2, head_dim=24, vocab_size=50, tie_word_embeddings=True
        )
    )
    assert spec_from_hf(model.config.to_dict()).parameter_count == model.num_parameters()


def test_old_and_new_spellings_of_rope_agree() -> None:
    new = {k: v for k, v in LLAMA31.items() if not k.startswith("rope")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA31["rope_scaling"]}  # type: ignore[dict-item]
    assert spec_from_hf(new) == spec_from_hf(LLAMA31)
    assert spec_from_hf(new).rope_scaling == RopeScaling(factor=8.0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is not of the family; did you mean 'llama'"),
        ({"attention_bias": True}, "attention_bias=True is not supported for llama"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn' has no factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope scaling 'llama3' has no low_freq_factor"),
        ({"rms_norm_eps": "small"}, "model.norm_eps='small' is not a number"),
        ({"model_type": ["llama"]}, "is not of the family"),
        ({"rope_scaling": "yarn"}, "rope scaling is 'yarn', not a table"),
        ({"hidden_size": True}, "hidden_size is missing or not a whole number"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"model_type": "qwen3"}, "head_dim is missing"),
        ({"num_key_value_heads": 5}, "kv_heads=5 does not divide"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused(change, sentence) -> None:
    with pytest.raises(UserError, match=sentence):
        spec_from_hf(LLAMA31 | change)


def test_gpt2_configs_keep_one_dropout_and_warn_of_the_other() -> None:
    config = transformers.GPT2Config().to_dict()
    with pytest.warns(Note, match="attn_pdrop"):
        spec = spec_from_hf(config)
    with pytest.warns(Note, match="attention_dropout"):
        spec_from_hf(LLAMA31 | {"attention_dropout": 0.5})
    assert spec.dropout == 0.1
    assert spec.parameter_count == PUBLISHED["gpt2-124m"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec_from_hf(config | {"attn_pdrop": 0.0})
    with pytest.raises(UserError, match="activation_function='relu'"):
        spec_from_hf(config | {"activation_function": "relu"})


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_file_is_named(tmp_path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_hf_config(tmp_path)
    with pytest.raises(UserError, match="cannot read"):
        read_hf_config(tmp_path / "none")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 2_000_000}, "model.layers=2000000 is more than 10000"),
        ({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 8, "resid_pdrop": []}, "differ"),
    ],
)
def test_absurd_configs_are_refused_at_once(tmp_path, changes: dict, sentence: str) -> None:
    numbers = dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"), 2)
    config = numbers | {"model_type": "llama", "vocab_size": 9, "max_position_embeddings": 8, "attn_pdrop": 0} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=sentence):
        read_hf_config(tmp_path)


def test_parameters_are_counted_without_listing_every_layer() -> None:
    few, many = preset("llama3-8b"), preset("llama3-8b", layers=10_000)
    assert few.parameter_count == sum(one.size for one in few.parameters())
    assert many.parameter_count - few.parameter_count == 9968 * few.block_parameter_count(few.kinds(0))
