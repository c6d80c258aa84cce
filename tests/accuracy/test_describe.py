"""How a run says its software, its schedule, its model and its precision; and what the page about it shows."""

import re
from pathlib import Path

import pytest

from fivefold.accuracy.cases import MeasuredRun, device_of, measured, read_rows
from fivefold.accuracy.result import planner_accuracy
from fivefold.accuracy.sources import SYSTEM_DEFAULTS
from fivefold.accuracy.spelling import UnpredictableRow, precision_named, preset_named, schedule_named
from fivefold.cost.systems import SYSTEMS
from fivefold.hardware.accelerators import find_accelerator
from fivefold.schedules.registry import CATALOGUE
from fivefold.support.errors import UserError

HEAD = "source,model,layers,seq_len,gpu,gpus,dp,tp,pp,micro_batch,global_batch,precision,schedule,step_time_s,status"


def one(directory: Path, row: str, toml: str = "") -> MeasuredRun:
    (directory / "mine.csv").write_text(HEAD + ",system\n" + row + "\n")
    (directory / "mine.toml").write_text(toml) if toml else None
    return measured(read_rows(directory)[0])


def test_the_page_s_example_runs_and_prints_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs/planner.md").read_text()
    page = text[text.index("## Judge it by your own runs") :]
    for kind in ("csv", "toml"):
        found = re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)
        assert found is not None
        (tmp_path / f"march.{kind}").write_text(found.group(1))
    result = planner_accuracy(tmp_path)
    assert [(row.refused, row.fits) for row in result.results] == [("", True)] * 2
    assert all(abs(row.error or 1.0) < 0.25 for row in result.results)
    shown = re.search(r"\$ fivefold accuracy --data my-runs/\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    assert [" ".join(map(str, row)) for row in result.software] == [
        "march Megatron-Core, without overlap False march.toml, from 'megatron-core'"
    ]
    assert "march   Megatron-Core, without overlap  described  march.toml, from 'megatron-core'" in shown.group(1)


ROW = "ours,llama3-8b,,8192,H100,8,8,1,1,1,16,bf16,,1,ok,"


def test_a_column_names_the_system_and_a_guess_is_called_one(tmp_path: Path) -> None:
    assert set(SYSTEM_DEFAULTS) == set(SYSTEMS)
    said, guessed = one(tmp_path, ROW + "torchtitan").source, one(tmp_path, ROW).source
    assert (said.software, said.assumed) == (SYSTEMS["torchtitan"], False)
    assert (guessed.software, guessed.assumed) == (SYSTEMS["megatron-core"], True)
    assert one(tmp_path, ROW.replace("H100", "V100")).source.software == SYSTEMS["megatron-2021"]
    assert one(tmp_path, ROW.replace("ours", "MLPerf v5")).source.software == SYSTEMS["nemo"]
    with pytest.raises(UserError, match="unknown software 'nemmo'; did you mean 'nemo'"):
        one(tmp_path, ROW + "nemmo")


@pytest.mark.parametrize("source", ["PaLM-like model at ACME", "Llama 3 8B on our cluster", "acme"])
def test_a_model_s_name_says_nothing_of_the_software(tmp_path: Path, source: str) -> None:
    found = one(tmp_path, ROW.replace("ours", source)).source
    assert (found.software, found.why) == (SYSTEMS["megatron-core"], "'megatron-core', by its H100")


def test_a_paper_s_or_a_software_s_name_is_a_guess_outside_of_the_package(tmp_path: Path) -> None:
    for source, software in (("torchtitan, ours", SYSTEMS["torchtitan"]), ("as arXiv 2204.02311", SYSTEMS["xla"])):
        found = one(tmp_path, ROW.replace("ours", f'"{source}"')).source
        assert (found.software, found.assumed) == (software, True)
        assert found.why.startswith("its source's name: ")


def test_a_description_without_its_runs_is_told_from_other_files(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('name = "mine"\n')
    one(tmp_path, ROW)
    (tmp_path / "march.toml").write_text('system = "nemo"\n')
    with pytest.raises(UserError, match=r"march\.toml describes the runs of march\.csv, which does not exist"):
        one(tmp_path, ROW)


def test_a_file_beside_the_rows_changes_any_switch(tmp_path: Path) -> None:
    toml = 'system = "nemo"\nzero = 3\n[software]\nattention = "flash2"\n[software.overlap]\ntp = 0\n'
    run = one(tmp_path, ROW, toml)
    assert (run.workload.layout.zero, run.workload.software.attention) == (3, "flash2")
    assert (run.workload.software.overlap.tp, run.workload.software.overlap.dp) == (0, 1)
    assert not run.source.assumed
    own = one(tmp_path, ROW + "torchtitan", toml)  # a row knows better, and says so
    assert own.workload.software.name == SYSTEMS["torchtitan"].name
    assert own.source.why == "system 'torchtitan' of the row, not mine.toml, from 'nemo'"


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("zro = 3", "zro is not a setting; did you mean 'zero'"),
        ("[software]\nattntion = 1", "software.attntion is not a setting; did you mean 'attention'"),
        ('[software]\nattention = "flash9"', "software.attention='flash9' is not a choice"),
        ("[software.overlap]\ndpp = 1", "software.overlap.dpp is not a setting"),
        ('[software]\norder = ["tp", "tq"]', "is not an order of"),
        ("system = 3", "system=3 is not text"),
        ('system = "titan"', "did you mean 'torchtitan'"),
        ("assumed = true", "assumed is not a setting"),
        ("zero = 9", "zero=9 is more than 3"),
        ("network_scale = -1.0", "network_scale=-1 must be at least 0.001"),
        ("max_chunks = -3\nmemory_unit = 0.0", "max_chunks=-3 must be at least 1; memory_unit=0 must be at least 1"),
        ("[software]\nweight_bytes = -2", "software.weight_bytes=-2 must be at least 1"),
        ("[software]\nhost = nan", "software.host=nan"),
        ("[software.experts]\nrearranged = [4.0, -4.0]", "software.experts.rearranged=-4 must be at least 0"),
        ("[software.overlap]\ndp = 7", "software.overlap.dp=7 is more than 1"),
        ("[stack]\nhost = 1", "stack is now software"),
        ("zero = ", "cannot be read as TOML"),
    ],
)
def test_a_file_with_a_mistake_says_which(tmp_path: Path, toml: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        one(tmp_path, ROW, toml)


def test_schedules_go_by_many_names() -> None:
    assert all(schedule_named(name) == name for name in CATALOGUE)
    words = {
        "ZB-1p": "zb-h1", "ZB-2p": "zb-h2", "ZB-V": "zb-v", "V-Half": "v-half", "1F1B-I": "interleaved",
        "GPipe": "gpipe", "interleaved-1F1B (flexible)": "interleaved", "1F1B": "1f1b", "none": "", "": "",
        "DualPipeV": "dualpipe-v",
    }  # fmt: skip
    assert {word: schedule_named(word) for word in words} == words
    with pytest.raises(UserError, match="unknown schedule 'interlaced'; did you mean 'interleaved'"):
        schedule_named("interlaced")


@pytest.mark.parametrize("name", ["zb-h1", "ZB-2p", "zb-v", "v-min", "gpipe", "interleaved"])
def test_a_schedule_that_is_said_is_the_one_that_is_timed(tmp_path: Path, name: str) -> None:
    layout = one(tmp_path, f"ours,llama3-8b,,8192,H100,8,1,1,8,1,32,bf16,{name},1,ok,nemo").workload.layout
    assert layout.schedule == schedule_named(name)


def test_a_known_model_needs_no_shape_and_keeps_what_is_said_of_it(tmp_path: Path) -> None:
    whole, cut = one(tmp_path, ROW).workload.spec, one(tmp_path, ROW.replace("8b,,", "8b,12,")).workload.spec
    assert (whole.layers, whole.hidden, whole.kv_heads, cut.layers, cut.hidden) == (32, 4096, 8, 12, 4096)
    known = {"LLAMA3_70B": "llama3-70b", "Llama 3.1 405b FP8": "llama3-405b", "Qwen2.5-7B": "qwen2.5-7b",
             "GPT3-175B": "gpt3-175b"}  # fmt: skip
    assert {name: preset_named(name) for name in known} == known
    assert preset_named("our own") is None


def test_precisions_go_down_to_four_bits() -> None:
    h100, gb200, v100 = map(find_accelerator, ("H100", "GB200", "V100"))
    words = {"NVFP4": "fp4", "MXFP4": "fp4", "MXFP8": "fp8", "FP8-CS": "fp8", "amp_bf16": "bf16", "": "bf16",
             "tf32": "tf32"}  # fmt: skip
    assert {word: precision_named(word, gb200) for word in words} == words
    assert precision_named("bf16", v100) == "fp16"
    with pytest.raises(UserError, match="unknown precision 'bf17'; did you mean 'bf16'"):
        precision_named("bf17", h100)
    with pytest.raises(UserError, match="H100 has no fp4 rate"):
        precision_named("NVFP4", h100)


def test_a_board_is_not_taken_for_another_of_its_chip(tmp_path: Path) -> None:
    """Less of its name would be an A100 with NVLink and 80 GB."""
    assert one(tmp_path, ROW.replace("H100", "A100-PCIE-40GB")).workload.first_device.accelerator.name == "A100-PCIE-40"
    with pytest.raises(
        UnpredictableRow, match="unknown accelerator 'V100-PCIE-16GB'; did you mean 'V100' or 'V100-16'"
    ):
        device_of("V100-PCIE-16GB")
