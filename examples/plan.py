"""Which layout, how fast, how much memory: the planner from Python. No torch, no GPU."""

import fivefold as ff

# Every layout of 64 H100s for Llama 3 70B. print() shows what `fivefold plan` does; a notebook shows a picture, too.
result = ff.plan("llama3-70b", "8x8xH100")
print(result)

# The same figures as objects.
best = result.chosen
print(f"8x8xH100: {best.layout} takes {best.seconds:.1f} s a step")

# How the choice changes with the cluster. Choices that are not free go into `fix`.
for cluster in ("4x8xH100", "8x8xH200"):
    chosen = ff.plan("llama3-70b", cluster, fix="tp=8", top=1).chosen
    print(f"{cluster}: {chosen.layout} takes {chosen.seconds:.1f} s a step")
