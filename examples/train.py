"""Train a small Llama on two ranks of this machine, and look at what came out.

Needs PyTorch: pip install "fivefold[train]". The corpus is the Python standard library's own source.
"""

import fivefold as ff

SMALL = ["data.seq=64", "train.steps=10", "train.batch=8", "train.eval_samples=8", "train.device=cpu"]

# The ranks are processes of their own, so this works in a script, in a notebook and under `if __name__ == "__main__"`.
two = ff.train(changes=["layout=tp=2,sp", "run.name=two", *SMALL])
print(two)  # in a notebook: the loss as a picture

# The same model, the same data and the same loss on one process: the layout changes only who computes what.
alone = ff.train(changes=["run.name=one", *SMALL])
apart = max(abs(a - b) for a, b in zip(alone.losses, two.losses, strict=True))
print(f"loss {alone.losses[0]:.2f} -> {alone.losses[-1]:.2f}; the two curves differ by at most {apart:.1e}")
