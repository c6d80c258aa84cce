"""What a run reports: one record per step, one per look at the held-out data. They are the lines of metrics.jsonl."""

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    step: int  # counted from 1
    loss: float  # mean over the step's target tokens, nats
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # input tokens of the step, over all ranks
    loss_tokens: int  # target tokens that carried loss
    seconds: float
    tokens_per_second: float
    mfu: float | None  # model FLOPs utilisation, attention counted full; None where the peak is not known
    memory: int  # bytes, peak so far: the GPU allocator's, or the process's resident size


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation", tag_field="kind"):
    step: int
    held_out_loss: float
    samples: int
    loss_tokens: int
