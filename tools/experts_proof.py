"""python tools/experts_proof.py: mixtures of experts on ranks that share a GPU, and their loss curves on its cores.

Prints one line for each proof and the end of each curve; exit code 1 if one does not hold. Takes minutes on 16 cores
and one GPU, and needs both, so `make test` leaves it out.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

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
    return f"curve model=tiny-moe layout={layout} train.steps=100 train.device=cpu".split()


def told(words: list[str]) -> tuple[int, str]:
    """The command, and what it says in the end."""
    done = subprocess.run([*FIVEFOLD, *words], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if words[0] == "verify":
        lines = [line for line in lines if line.startswith(("routing", "holds", "fails"))] or lines[-1:]
    text = "\n".join(f"  {line}" for line in lines or done.stderr.splitlines()[-3:])
    return done.returncode, f"fivefold {' '.join(words)}\n{text}\n"


def main() -> int:
    proofs = [verify("tiny-moe", layout, dtype) for dtype in ("float64", "bfloat16") for layout in LAYOUTS]
    proofs += [verify("tiny-deepseek", "dp=2,tp=2,ep=4", dtype) for dtype in ("float64", "bfloat16")]
    failed = 0
    # Two proofs at a time share the GPU, while two curves have the cores.
    with ThreadPoolExecutor(2) as on_gpu, ThreadPoolExecutor(2) as on_cores:
        waiting = [*(on_gpu.submit(told, words) for words in proofs)]
        waiting += [on_cores.submit(told, curve(layout)) for layout in CURVES]
        for one in waiting:
            code, text = one.result()
            failed += code != 0
            print(text, flush=True)
    print(f"{len(waiting) - failed} of {len(waiting)} hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
