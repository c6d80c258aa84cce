"""How sentences about serving say numbers, and what a step may be bound by."""

BOUNDS = {
    "weights": "reading weights",
    "cache": "reading the KV cache",
    "compute": "tensor cores",
    "pointwise": "norms, activation functions and logits",
    "launch": "kernel launches",
    "tp": "all-reduces",
    "ep": "tokens to experts and back",
    "pp": "pipeline sends and waits",
    "host": "host",
}


def gigabytes(count: float) -> str:
    return f"{count / 1e9:,.{0 if count >= 1e11 else 1 if count >= 1e10 else 2}f} GB"


def milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.1f}"


def sequences(count: int) -> str:
    return f"{count:,} sequence{'s' * (count != 1)}"
