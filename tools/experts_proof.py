"""python tools/experts_proof.py cuda|curves: mixtures of experts on ranks that share a GPU; their loss curves on cores.

Prints what each proof and each curve says in the end; exit code 1 if one does not hold. Takes minutes, so `make test`
leaves it out.
"""

import subprocess
import sys

FIVEFOLD = [sys.executable, "-m", "fivefold"]
LAYOUTS = (
    "dp=2,ep=2",
    "tp=2,sp,ep=2",
    "dp=2,ep=2,zero=3",
    "cp=2,ep=2,recompute=selective",
    "dp=2,tp=2,ep=4",
    "dp=2,pp=2,ep=2,schedule=zb-v,microbatches=4",
    "dp=4,ep=2,zero=1,dispatch=allgather",
)
CURVES = (
    "dp=4,ep=4",
    "dp=2,tp=2,sp,ep=2",
    "dp=2,pp=2,ep=2,schedule=zb-v,microbatches=4",
    "dp=2,cp=2,ep=4",
    "dp=4,zero=1,ep=2",
    "dp=4,zero=3,ep=2",
)


def verify(model: str, layout: str, dtype: str) -> list[str]:
    words = f"verify --model {model} --layout {layout} --dtype {dtype} --device cuda --steps 2 train.compile=off"
    return words.split()


def curve(layout: str) -> list[str]:
    return f"verify --curve model=tiny-moe layout={layout} train.steps=100 train.device=cpu".split()


def told(words: list[str]) -> tuple[int, str]:
    """The command, and what it says in the end."""
    done = subprocess.run([*FIVEFOLD, *words], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if words[0] == "verify":
        lines = [line for line in lines if line.startswith(("routing", "passed", "fails"))] or lines[-1:]
    text = "\n".join(f"  {line}" for line in lines or done.stderr.splitlines()[-3:])
    return done.returncode, f"fivefold {' '.join(words)}\n{text}\n"


def main(which: str) -> int:
    commands = [curve(layout) for layout in CURVES]
    if which == "cuda":
        commands = [verify("tiny-moe", layout, dtype) for dtype in ("float64", "bfloat16") for layout in LAYOUTS]
        commands += [verify("tiny-deepseek", "dp=2,tp=2,ep=4", dtype) for dtype in ("float64", "bfloat16")]
    failed = 0
    for words in commands:
        code, text = told(words)
        failed += code != 0
        print(text, flush=True)
    print(f"{len(commands) - failed} of {len(commands)} passed")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] not in (["cuda"], ["curves"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
