"""Results of commands that run, made of small data: no rank is started, and torch is not imported."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from fivefold.checkpoint.inspect import CheckpointCheck, CheckpointContents, CheckpointList
from fivefold.checkpoint.manifest import Manifest
from fivefold.checkup.report import CheckupReport, LayoutRun, LayoutStep, PartReport
from fivefold.clusters.launch_files import LaunchResult, check_deployment, next_commands
from fivefold.cost.collective_time import Traffic
from fivefold.dry.result import DryRunResult, vs_plan
from fivefold.foreign.certificate import Certificate, LayoutProof
from fivefold.foreign.compare import Deviation
from fivefold.foreign.evidence import Cause
from fivefold.foreign.repeated import RepeatedCertificate
from fivefold.hardware.accelerators import ACCELERATORS
from fivefold.hardware.cluster import Cluster
from fivefold.job.reading import read_job
from fivefold.labs.catalogue import LABS
from fivefold.labs.checking import LabCheck, Outcome
from fivefold.labs.messages import LabMessage
from fivefold.labs.scaling import LabBench, Span, TimedSteps
from fivefold.machines.doctor import DoctorResult
from fivefold.machines.judge import Examination
from fivefold.machines.result import CalibrationResult, MeasuredRow, RankSpeed, RanksResult
from fivefold.spec.presets import preset
from fivefold.support.files import File
from fivefold.tracing.result import TraceResult
from fivefold.tracing.summary import TraceSummary
from fivefold.trainer.compare_runs import RunsResult
from fivefold.trainer.parting import ComparedFigures
from fivefold.trainer.records import Digest, Digests, Evaluation, Load, Step
from fivefold.trainer.result import ExpertsResult, TrainResult
from fivefold.trainer.run_settings import Setting
from fivefold.verifier.cases import LayoutCase
from fivefold.verifier.compare import ValueComparison
from fivefold.verifier.result import VerifyResult
from fivefold.verifier.verdict import MemoryCheck, TrafficCheck, Verdict
from fivefold.verifier.verify import CurveResult
from tests.machines.made import examined_job, reports
from tests.tracing.test_summary import by_hand

LONG = "dp=2,tp=2,pp=2,cp=2,zero=1,sp,schedule=zb-v,microbatches=8,recompute=selective"
JOB = read_job(None, ["model=tiny-qwen3", f"layout={LONG}", "train.batch=32", "data.seq=64"])


def _verdict(holds: bool = True, noisy: bool = False) -> Verdict:
    value, name = 1e-16 if holds else 0.5, "layers.10.attention.k_norm.weight"
    sent = Traffic("dp", "reduce-scatter", 6, 1 << 30, Fraction(1 << 29))
    other = sent if holds else Traffic("dp", "reduce-scatter", 9, 1 << 31, Fraction(1 << 29))
    return Verdict(
        JOB,
        1.5,
        losses=[(5.543610057, 5.543610057)],
        norms=[(1.323600561, 1.323600561)],
        comparisons=[
            ValueComparison("loss", "", 1, value, 1e-10),
            ValueComparison("norm", "", 1, value, 1e-10),
            ValueComparison("gradient", name, 1, value, 0.2 if noisy else 1e-10),
            ValueComparison("parameter", name, 1, value, 1e-10),
        ],
        traffic=[TrafficCheck(0, other, sent)],
        memory=[
            MemoryCheck(0, "microbatches in flight", 4, 4 if holds else 5),
            MemoryCheck(0, "optimizer", 1 << 30, 1 << 30),
        ],
        graphs=(3, {"a reason": 2}),
    )


def verified(holds: bool = True, noisy: bool = False) -> VerifyResult:
    return VerifyResult([(LayoutCase(JOB, ""), _verdict(holds, noisy))])


def broken() -> VerifyResult:
    verdict = Verdict(JOB, 1.0, broken="rank 1 died by SIGKILL", details="Traceback\n  a line of it")
    return VerifyResult([(LayoutCase(JOB, ""), verdict)])


def swept() -> VerifyResult:
    judged = [(LayoutCase(JOB, "GPT block with dropout"), _verdict(number % 2 == 0)) for number in range(24)]
    return VerifyResult(judged, 831, 0.9)


def followed() -> CurveResult:
    losses = [5.0 - step / 100 for step in range(30)]
    return CurveResult(JOB.layout, losses, losses, [x + 1e-7 for x in losses], same_start=True, rounding=2.0**-23)


def traced(ranks: int = 2) -> TraceResult:
    trace = by_hand()
    many = tuple(
        replace(trace.ranks[at % 2], rank=at, pipeline=at // 2, name=f"dp{at // 2} pp{at % 2}", clock_error=1e-5)
        for at in range(ranks)
    )
    return TraceResult(TraceSummary(replace(trace, ranks=many, layout=LONG)), Path("trace.json"))


def dried(ranks: int = 2) -> DryRunResult:
    cluster = Cluster.parse("2x8xH100")

    def run(rank: int) -> Any:
        moments = tuple(
            SimpleNamespace(name=f"F0.{at}", peak=10**10 + at, _asdict=dict, activations=at) for at in range(20)
        )
        return SimpleNamespace(
            rank=rank, place=JOB.layout.coordinates(rank), layers=(1, 1), parameters=10**9, gradients=10**9,
            optimizer=4 * 10**9, peak=123 * 10**9, peak_moment="the sum of gradients", moments=moments, live=4,
            allowed=5, flops=1e15, traffic=(Traffic("dp", "all-reduce", 3, 1 << 30, Fraction(1 << 30)),), seconds=1.2,
            activations=10**10,
        )  # fmt: skip

    found = [vs_plan(JOB, run(rank), cluster) for rank in range(ranks)]
    return DryRunResult(JOB, cluster, found, "it does not fit: rank 0 (pipeline rank 0) needs more than a device has")


def listed() -> CheckpointList:
    sound = {"name": "step-00000008", "step": 8, "complete": True, "problems": [], "layout": LONG, "files": 16,
             "bytes": 10**10}  # fmt: skip
    damaged = {"name": "step-00000006", "step": 6, "complete": False, "problems": ["rank-1.tensors is missing"]}
    kept = {"name": "step-00000010.1767225600000", "step": 10, "layout": LONG, "files": 16, "bytes": 10**10}
    halves, aside, home = ["step-00000009.incomplete"], ["step-1.damaged-2"], f"/dev/shm/fivefold-0/{'4f1d' * 8}"
    return CheckpointList(Path("runs/demo"), [damaged, sound], halves, aside, [kept], home)


def held() -> CheckpointContents:
    files = [File(name=f"rank-{rank}.tensors", bytes=10**9, sha256="0123456789abcdef" * 4) for rank in range(3)]
    manifest = Manifest(
        torch="2.13", step=8, samples=32, updates=8, optimizer=True, data="", job=msgspec.to_builtins(JOB), files=files
    )
    checkpoint = SimpleNamespace(path=Path("runs/demo/checkpoints/step-00000008"), manifest=manifest)
    tensors = [{"name": "norm.weight", "shape": [64], "dtype": "float32", "pieces": 2}]
    return CheckpointContents(cast(Any, checkpoint), tensors)


def checked() -> CheckpointCheck:
    return CheckpointCheck({"step-00000006": ["rank-1.tensors is missing"], "step-00000008": []})


def trained() -> TrainResult:
    steps = [
        Step(
            step=at,
            loss=5.0 / at,
            grad_norm=1.5,
            lr=1e-3,
            tokens=1 << 20,
            loss_tokens=1 << 20,
            seconds=1.0,
            tokens_per_second=1048576.0,
            mfu=None,
            memory=1 << 30,
        )
        for at in range(1, 40)
    ]  # fmt: skip
    return TrainResult(Path("runs/demo"), steps, Evaluation(step=39, held_out_loss=2.5, samples=8, loss_tokens=512))


def compared_runs(same: bool = False) -> RunsResult:
    first, figures = trained().steps, ComparedFigures("float32", bits=False)
    second = [msgspec.structs.replace(one, loss=one.loss and one.loss * (1 if same else 1.01)) for one in first[:30]]
    name, step = "layers.117.mlp.experts.gate_and_up.weight as the model has it", 12
    for a, b in zip(first, second, strict=False):
        figures.see_step(a, b)
    if not same:
        figures.see_digests(
            Digests(step=step, parameters={name: Digest("0" * 16, 2.0, (1.0, 2.0))}),
            Digests(step=step, parameters={name: Digest("1" * 16, 2.0, (1.1, 2.0))}, unequal=[name]),
        )
    settings = [Setting("model.experts.top_groups", (list(range(40)), None), "the model"),
                Setting("checkpoint.every", (1, 2), "nothing")]  # fmt: skip
    where = Path("runs/a-long-name-of-a-run"), Path("runs/b")
    return RunsResult(where, (first, second), figures, [] if same else settings, same, ["a note"])


def loaded() -> ExpertsResult:
    model = preset("tiny-deepseek")
    tokens = [[10 + layer * expert % 7 for expert in range(8)] for layer in range(1, 4)]
    steps = [msgspec.structs.replace(one, load=Load.of(tokens, expected=0)) for one in trained().steps]
    return ExpertsResult(Path("runs/a-long-name-of-a-run"), model, steps, 0, steps[0])


def calibrated() -> CalibrationResult:
    rows = [
        MeasuredRow("gemm, sustained", "712.3 TFLOP/s", 0.72, note="nothing but large products, for seconds"),
        MeasuredRow(
            "attention, flash2, forward and backward", "512.0 TFLOP/s", 0.5, 0.02, 0.11, "over 12 shapes of training"
        ),
        MeasuredRow("launch", "2.12 us", note="from one tiny kernel to the next"),
    ]
    return CalibrationResult("NVIDIA H200", ACCELERATORS["H200"], rows, 1e-3, {"units": 132})


def deployed() -> LaunchResult:
    made = check_deployment(None, [f"layout={LONG}", "train.batch=32", "data.seq=64"], nodes=2).deployment
    blank, note = "FILL_IN_ACCOUNT in job.sbatch, or give --account", "tp=8 does not divide the 4 ranks of a node"
    start = ["sbatch job.sbatch"]
    commands = next_commands("123", made)
    return LaunchResult("slurm", made.title, 2, 8, "job.sbatch", "", start, [blank], [note], "123", commands)


def shown() -> LaunchResult:
    text = "torchrun \\\n  --nnodes=2"
    return replace(deployed(), kind="torchrun", output_name="", file_text=text, job_id="", next_commands=())


def examined(nodes: int = 3) -> DoctorResult:
    return DoctorResult(Examination(examined_job(nodes), reports(nodes, slow=1)), 12.0)


def speeds() -> RanksResult:
    """Two of four ranks take twice as long."""
    paces = [[0.1, 0.11], [0.1, 0.1], [0.2, 0.21], [0.2, 0.2]]
    return RanksResult([RankSpeed(n, "node-1", "a CPU", one, ACCELERATORS["CPU"]) for n, one in enumerate(paces)])


def certificate() -> Certificate:
    """One layout passes, one differs, one could not run."""
    name = "model.layers.11.self_attention.linear_qkv.layer_norm_weight"
    good = [Deviation(what, name, 2, 3, 3.4e-15, 1e-10) for what in ("loss", "gradient", "norm", "parameter")]
    cause = Cause(
        f"26 of 51 gradients ({name} and 25 more): exactly x 0.5 = 1/dp on every rank",
        "the mean is taken twice: by DDP, and by the loss", "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    )  # fmt: skip
    layout = {"dp": 2, "tp": 2, "sp": 1, "pp": 2, "vpp": 2, "schedule": "InterleavedZeroBubble", "microbatches": 8}
    proofs = [
        LayoutProof({"dp": 2}, 2, 1.5, good),
        LayoutProof(layout, 8, 2.5, [Deviation("gradient", name, 1, 5, 0.5, 1e-10)], [cause]),
        LayoutProof({"pp": 3}, 3, 0.5, [], broken="rank 1 of 3 raised ValueError", details="one line\nand another"),
    ]
    versions = {"fivefold": "1", "torch": "2.13.0+cpu", "transformers": "5.23.0"}
    return Certificate(
        adapter="my_adapter.py", adapter_digest="0" * 64, dtype="float64", device="cpu", steps=2, seed=1234, random="",
        parameters=1_234_567, versions=versions, proofs=proofs,
    )  # fmt: skip


def repeated_certificate() -> RepeatedCertificate:
    now = certificate()
    body = now.to_dict()
    rows = [row | {"passed": True} for row in body["layouts"]]
    stated = {"layouts": rows, "created": "2026-01-02T03:04:05Z", "versions": {"torch": "2.12.0"}, "steps": 1}
    return RepeatedCertificate(body | stated, now)


def lab_check() -> LabCheck:
    """A layout that passes, one whose output is wrong, and one that hangs."""
    case, ranks = LABS[1].cases[0], tuple(range(4))
    good = LayoutProof({"tp": 2}, 2, 1.5, [Deviation("loss", "", 1, 0, 3.4e-15, 1e-10)])
    wrong = "the output of the layer is 4 x = tp x what it should be: it is reduced twice"
    hangs = "rank 0 waits in an all-reduce of 1,536 bytes, its collective number 2; rank 1 is through after 1"
    sent = [LabMessage("all-reduce", 123_456, ranks)] * 2 + [LabMessage("reduce-scatter", 1_234_567, ranks)] * 12
    outcomes = [
        Outcome(case, good, (), sent),
        Outcome(case, replace(good, layout={"tp": 4}), (wrong,), sent),
        Outcome(case, replace(good, layout={"tp": 4}, broken="rank 0 gave no answer within 30 s"), (hangs,), []),
    ]
    return LabCheck(LABS[1], tuple(outcomes))


def lab_bench() -> LabBench:
    waits = [Span(0.01, 0.02), Span(0.04, 0.05)]
    return LabBench(LABS[1], {n: [TimedSteps([0.11 / n, 0.1 / n], waits)] * n for n in (1, 2, 4)})


def checked_up() -> CheckupReport:
    """A checkup of sixteen ranks, one of which is slow, with a layout that ran out of memory."""
    long = "dp=2,tp=4,pp=2,zero=1,sp,schedule=interleaved,chunks=2,microbatches=8,recompute=selective"
    step = LayoutStep(seconds=0.8123, exposed=0.0512, bubble=0.0333, memory=61e9)
    planned = LayoutStep(seconds=0.7544, exposed=0.0433, bubble=0.0301, memory=58.2e9)
    runs = [
        LayoutRun(layout=long, role="the planner's best", measured=step, catalogue=planned, calibrated=planned),
        LayoutRun(layout="dp=16,zero=3", role="rival", catalogue=planned, calibrated=planned, failed="out of memory"),
    ]
    says = ["16 ranks on 2 nodes: NVIDIA H200; matmuls reach 412 TFLOP/s to 688 TFLOP/s in bf16"]
    slow = "rank 3 on node 1: matmuls reach 412 TFLOP/s, and 688 TFLOP/s in the median of the others"
    parts = [
        PartReport(
            name="machines", title="Machines", status="found", limit=300, seconds=41, says=says, findings=[slow]
        ),
        PartReport(name="proofs", title="Proofs", status="out of time", limit=300, seconds=300, says=says),
        PartReport(name="lost-rank", title="A lost rank", status="passed", limit=300, seconds=55, says=says * 2),
        PartReport(name="calibration", title="Calibration", status="left out"),
        PartReport(name="layouts", title="Layouts", status="found", limit=300, seconds=280, findings=["out of memory"]),
    ]
    setup = {"ranks": 16, "nodes": 2, "device": "NVIDIA H200", "backend": "NCCL", "versions": {"torch": "2.11.0"}}
    return CheckupReport(
        fivefold="0.1.0", day="2026-11-19", command="fivefold checkup", minutes=10, seconds=590, setup=setup,
        parts=parts, runs=runs, corrections=[f"take {long}: its step is 7% shorter than that of the planner's best"],
    )  # fmt: skip
