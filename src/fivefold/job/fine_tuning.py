"""A job that trains given weights further: a published recipe of full fine-tuning.

    fine_tuning_job(spec, Choice("bfloat16", "as the weights"))[0].optimizer.lr     # 5e-6 for a model of 8B parameters

The recipe is Tulu 3's supervised fine-tuning (arXiv 2411.15124), as its commands have it:
https://github.com/allenai/open-instruct/blob/main/docs/tulu3.md. Rates of pretraining are some hundred times as high,
and would undo what the weights know.
"""

import math
from typing import Any

from fivefold.data.packing import PackedDocuments
from fivefold.data.shards import TokenShards
from fivefold.data.tokens import TokenStore
from fivefold.job.config import Job, RunConfig, TrainConfig
from fivefold.job.recipes import Choice
from fivefold.layout.layout import Layout
from fivefold.optim.adamw import AdamW
from fivefold.spec.model import ModelSpec
from fivefold.support.text import si

TULU_SOURCE = "https://github.com/allenai/open-instruct/blob/main/docs/tulu3.md"
TULU_RATES = {"8B": (8.03e9, 5e-6), "70B": (70.6e9, 2e-6)}  # parameters and rate
BATCH, SEQ, EPOCHS = 128, 4096, 2
WARMUP_SHARE = 0.03  # of the steps


def fine_tuning_job(spec: ModelSpec, dtype: Choice, data: TokenStore | None = None) -> tuple[Job, dict[str, Choice]]:
    """The job, and where its settings come from."""
    size = min(TULU_RATES, key=lambda size: abs(math.log(TULU_RATES[size][0] / spec.parameter_count)))
    seq = min(spec.context, SEQ)
    steps = TrainConfig().steps
    length = "of the data's size nothing is known yet"
    # By a table of positions a conversation would read otherwise in the middle of a window than alone.
    packed = data is not None and data.index.chats and spec.positions != "learned"
    if data is not None:
        row = PackedDocuments(path=str(data.path), seq=seq).open().train if packed else data.split("train")
        samples = (row.tokens - 1) // seq  # the last one's last target is one token more
        steps = max(1, -(-EPOCHS * samples // BATCH))
        length = f"{EPOCHS} epochs, as Tulu 3, of {si(row.tokens)} tokens"
    choices = {
        "optimizer.lr": Choice(TULU_RATES[size][1], f"Tulu 3 {size}, supervised fine-tuning"),
        "optimizer.betas": Choice((0.9, 0.999), "PyTorch's, as Tulu 3"),
        "optimizer.weight_decay": Choice(0.0, "Tulu 3"),
        "optimizer.schedule": Choice("wsd", "with decay = 1, a line down from the warm-up on: Tulu 3"),
        "optimizer.decay": Choice(1.0, ""),
        "optimizer.final": Choice(0.0, "Tulu 3"),
        "optimizer.warmup": Choice(
            max(1, round(WARMUP_SHARE * steps)), f"steps: {WARMUP_SHARE:.0%} of them, as Tulu 3"
        ),
        "data.seq": Choice(seq, "tokens: Tulu 3" if seq == SEQ else f"tokens: the context of {spec.name}"),
        "train.batch": Choice(BATCH, "sequences: Tulu 3"),
        "train.steps": Choice(steps, length),
        "train.dtype": dtype,
        "layout.microbatches": Choice(BATCH, "a sequence at a time; fivefold plan chooses a layout for a cluster"),
    }
    own: dict[str, dict[str, Any]] = {"optimizer": {}, "data": {}, "train": {}, "layout": {}}
    for name, choice in choices.items():
        section, _, setting = name.partition(".")
        own[section][setting] = choice.value
    path = str(data.path.absolute()) if data is not None else ""
    job = Job(
        model=spec,
        layout=Layout(**own["layout"]),
        data=(PackedDocuments if packed else TokenShards)(path=path, **own["data"]),
        optimizer=AdamW(**own["optimizer"]),
        train=TrainConfig(**own["train"]),
        run=RunConfig(),
    )
    return job, choices
