"""What to correct, from all that was found: sentences, the most urgent first."""

from collections.abc import Iterator

from fivefold.checkup.calibration import notable, sentence_of
from fivefold.checkup.layouts import BEST, errors_of
from fivefold.checkup.report import CheckupReport

_WRONG = 0.15  # relative: a prediction that is farther off is named
_TIE = 0.03  # relative: a layout that is so little faster is no rival


def corrections(report: CheckupReport, cluster_file: str) -> list[str]:
    """What a person should do before the first real run."""
    return [*_of_parts(report), *_of_planner(report, cluster_file)]


def _of_parts(report: CheckupReport) -> Iterator[str]:
    advice = {
        "machines": "take these out of the job, or repair them, before anything else",
        "proofs": "do not train with these layouts; send this report with the version of torch and NCCL",
        "lost-rank": "see that a launcher starts the ranks again, and that all nodes share run.dir",
    }
    for part in report.parts:
        if part.findings and part.name in advice:
            yield f"{part.title.lower()}: {advice[part.name]} ({len(part.findings)} found)"
        if part.status == "out of time":
            minutes = 2 * report.minutes
            yield f"{part.title.lower()}: give it more time, --minutes {minutes:g}"
        if part.status == "failed":
            why = part.says[-1] if part.says else "run the command of this part by itself"
            yield f"{part.title.lower()}: it failed; {why}"


def _of_planner(report: CheckupReport, cluster_file: str) -> Iterator[str]:
    calibration = report.part("calibration")
    if calibration and "calibrated" in report.clusters:
        far = notable(calibration.data.get("figures", []))
        why = "; ".join(sentence_of(figure) for figure in far)
        yield f"plan with the measured figures: fivefold plan MODEL --cluster {cluster_file}" + (
            f" ({why})" if far else ""
        )
    runs = [run for run in report.runs if run.measured]
    before, after = (errors_of(runs, which) for which in ("catalogue", "calibrated"))
    for run in runs:
        error = run.error("calibrated")
        if error is not None and abs(error) > _WRONG:
            word = "longer" if error < 0 else "shorter"
            apart = abs(1 / (1 + error) - 1)
            yield f"{run.layout}: a step takes {apart:.0%} {word} than predicted; trace it with fivefold trace"
    if before and after and _mean(after) > _mean(before):
        yield (
            f"the measured figures predict worse ({_mean(after):.1%} off) than the catalogue's ({_mean(before):.1%}): "
            "calibrate again without --quick, on machines that do nothing else"
        )
    best = next((run for run in runs if run.role == BEST), None)
    for run in runs:
        if best and best.measured and run.measured and run.measured.seconds < (1 - _TIE) * best.measured.seconds:
            gain = 1 - run.measured.seconds / best.measured.seconds
            yield f"take {run.layout}: its step is {gain:.0%} shorter than that of the planner's best, {best.layout}"


def _mean(errors: list[float]) -> float:
    return sum(map(abs, errors)) / len(errors)
