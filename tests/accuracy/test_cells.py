"""Cells that cannot be read, and layouts that cannot be: each row is refused with the reason, and never misread."""

from pathlib import Path

import pytest

from fivefold.accuracy.cases import MeasuredRun, PublishedRow, measured, read_rows
from fivefold.accuracy.result import _fittable_runs, planner_accuracy
from fivefold.accuracy.score import evaluate
from fivefold.render.blocks import Text
from fivefold.support.errors import UserError

RUN = {
    "source": "ours", "model": "llama3-8b", "seq_len": "8192", "gpu": "H100", "gpus": "8", "dp": "2", "tp": "4",
    "micro_batch": "1", "global_batch": "128", "step_time_s": "12.1", "status": "ok", "system": "megatron-core",
}  # fmt: skip

SHAPE = {"layers": "2", "hidden": "64", "heads": "4", "vocab": "1000"}


def run(**cells: str) -> MeasuredRun:
    return measured(PublishedRow("mine", 2, RUN | cells))


PIPELINE = {"gpus": "64", "dp": "1", "tp": "1", "pp": "64"}
MIXTURE = {"model": "my-moe 4x1b", **SHAPE}


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"tp": "two"}, "tp is 'two'; it must be a whole number"),
        ({"dp": "2.5"}, "dp is 2.5; it must be a whole number; nearest: 2 or 3"),
        ({"ep": "-1"}, "ep is -1; it must be above zero"),
        ({"step_time_s": "12,1"}, "step_time_s is '12,1'; it must be a number"),
        ({"peak_mem_gb": "lots", "mfu": "nan"}, "mfu is 'nan'; .*; peak_mem_gb is 'lots'; it must be a number"),
        ({"gpus": "64"}, "dp=2 x tp=4 x pp=1 x cp=1 makes 8 GPUs, but gpus is 64"),
        ({"dp": "", "tp": "3"}, "tp=3 x pp=1 x cp=1 = 3 does not divide gpus=8"),
        ({"global_batch": "129"}, "global_batch=129 does not divide over dp=2 x micro_batch=1; nearest: 128 or 130"),
        ({"global_batch": "1"}, "global_batch=1 does not divide over dp=2 x micro_batch=1; nearest: 2$"),
        ({"zero_stage": "7"}, "zero_stage is '7'; it must be 0, 1, 2 or 3"),
        ({"recompute": "fulll"}, "unknown recompute 'fulll'; did you mean 'full'"),
        ({"recompute": "yes"}, "unknown recompute 'yes'; known: none, selective"),
        ({"sequence_parallel": "maybe"}, "sequence_parallel is 'maybe'; it must be yes or no"),
        ({"precision": "int3"}, "unknown precision 'int3'"),
        # a layout that the model cannot have
        (PIPELINE, "makes 64 stages, and llama3-8b has 32 layers"),
        ({**PIPELINE, "schedule": "zb-v"}, "makes 128 stages"),
        ({"gpus": "24", "dp": "8", "tp": "3"}, "tp=3 does not divide the 32 attention heads"),
        ({"gpus": "14", "tp": "1", "cp": "7", "seq_len": "8191"}, "a sequence of 8191 tokens does not divide"),
        # a model that cannot be, before it is computed
        ({"layers": "1e9"}, "model.layers=1000000000 is more than 10000"),
        ({"heads": "1e300"}, "model.heads=.* is more than 100000"),
        ({**MIXTURE, "notes": "experts=4 top-k=8 expert_ffn=64"}, "top_k=8"),
        ({**MIXTURE, "notes": "experts=0 top-k=1 expert_ffn=64"}, "count=0"),
    ],
)
def test_a_cell_that_cannot_be_is_named(cells: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(**cells)


@pytest.mark.parametrize("column", ["source", "model", "notes", "gpu", "status", "tp"])
def test_a_cell_without_end_is_refused_by_its_line(tmp_path: Path, column: str) -> None:
    path = tmp_path / "march.csv"
    for long in (5_000, 200_000):  # the second is beyond what the reader of CSV takes
        rows = [RUN | {"notes": ""}, RUN | {"notes": "", column: "(" * long}]
        path.write_text("\n".join(",".join(one) for one in ([*rows[0]], *(row.values() for row in rows))))
        with pytest.raises(UserError, match=r"march.csv line [23] cannot be read: "):
            read_rows(tmp_path)
    path.write_text("(" * 200_000)
    with pytest.raises(UserError, match=r"march.csv line [01] cannot be read: "):
        read_rows(tmp_path)


def test_numbers_of_thousands_of_digits_are_no_release(tmp_path: Path) -> None:
    digits = "9" * 4_400
    (one,) = evaluate(
        [PublishedRow("mine", 2, RUN | {"model": "mixtral-8x7b", "source": f"Megatron-Bridge 1.{digits}"})]
    )
    assert one.refused or one.seconds
    (one,) = evaluate(
        [PublishedRow("mine", 2, RUN | {"model": "my-moe", "notes": f"experts={digits} top-k=1 expert_ffn=64"})]
    )
    assert "neither a preset of its name nor its notes say how many" in one.refused


def test_a_row_that_makes_no_sense_is_left_out_of_what_is_fitted() -> None:
    nonsense = PublishedRow("mine", 2, RUN | {"zero_stage": "3", "notes": "shard group: 0 ranks"})
    assert "contradict each other" in evaluate([nonsense])[0].refused
    assert [one.row.line for one in _fittable_runs([nonsense, PublishedRow("mine", 3, RUN)])] == [3]


def test_the_lines_of_refused_rows_are_told(tmp_path: Path) -> None:
    mixture = RUN | {"model": "my-moe", "notes": "experts=4 top-k=2 expert_ffn=64", "layers": "2", "hidden": "64"}
    rows = [mixture, RUN | dict.fromkeys(("notes", "layers", "hidden"), ""), mixture]
    (tmp_path / "march.csv").write_text("\n".join(",".join(one) for one in ([*mixture], *(r.values() for r in rows))))
    said = [block.text for block in planner_accuracy(tmp_path).blocks() if isinstance(block, Text)]
    told = "refused: 2 of march (line 2, 4): the notes of 'my-moe' give its experts, so no preset gives its sizes"
    assert f"{told}; not published: heads, vocab" in said


def test_a_refused_row_is_listed_and_the_next_is_predicted() -> None:
    bad, good = evaluate(
        [PublishedRow("mine", 2, RUN | {"step_time_s": "12 s"}), PublishedRow("mine", 3, RUN)], exact=False
    )
    assert bad.refused.startswith("step_time_s is '12 s'")
    assert good.error is not None


def test_words_are_read_as_people_write_them() -> None:
    for stage in range(4):
        for words in ("{}", "zero{}", "ZeRO-{}", "stage {}", "ZeRO stage {}", "{} (FSDP2)", "{}.0"):
            assert run(zero_stage=words.format(stage)).workload.layout.zero == stage
    for word, sp in (("yes", True), ("true", True), ("1", True), ("no", False), ("False", False), ("0", False)):
        assert run(sequence_parallel=word).workload.layout.sp is sp
    words = {"none (baseline)": "none", "Selective op": "selective", "full": "full", "partial": "full"}
    assert {word: run(recompute=word).workload.layout.recompute for word in words} == words


def test_layers_that_do_not_divide_are_dealt_out_whatever_stands_at_the_ends() -> None:
    layout = run(gpus="32", dp="4", tp="1", pp="8", vp="3", schedule="interleaved").workload.layout
    assert layout.split == (2,) * 8 + (1,) * 16


def test_a_file_in_place_of_its_directory_is_told(tmp_path: Path) -> None:
    path = tmp_path / "march.csv"
    path.write_text(",".join(RUN) + "\n" + ",".join(RUN.values()) + "\n")
    with pytest.raises(UserError, match=f"march.csv is a file, .*; nearest: {tmp_path}$"):
        read_rows(path)
    with pytest.raises(UserError, match=r"no second source or accelerator \(sources: march\)"):
        planner_accuracy(tmp_path, leave_out=True)
