"""One step of the real trainer on fake ranks and tensors: memory, FLOPs and traffic before a GPU is rented.

Needs PyTorch, but no GPU: pip install "fivefold[train]".
"""

import fivefold as ff

# The first rank of 8 H100s that train Llama 3.2 1B. print() shows what `fivefold dryrun` does.
result = ff.dryrun("llama3.2-1b", "dp=8,zero=1,microbatches=2,recompute=selective", batch=32, seq=2048)
print(result)
print("8 GPUs of 80 GB:", "it fits" if result.ok else result.advice)

# Memory through the step, as a picture. A notebook shows it by itself.
with open("memory.svg", "w") as file:
    file.write(result.svg() or "")
