"""Dtypes: their names, their bytes, and which of them a job computes in. No torch: `launch/device.py` has torch's own.

dtype_of("bf16") == "bfloat16"; precision_of("torch.bfloat16") == "bf16"; other words stay as they are

A dtype has two names, PyTorch's (bfloat16) and the makers' (bf16), its precision. Every input takes either of them.
"""

from typing import Literal, get_args

Dtype = Literal["float32", "bfloat16", "float64"]  # that a job computes in
DTYPES = get_args(Dtype)
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}  # of an element
PRECISIONS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LONG_NAMES = {short: long for long, short in PRECISIONS.items()} | {
    "double": "float64",
    "float": "float32",
    "half": "float16",
}
_LONG_NAMES |= {"f64": "float64", "f32": "float32", "f16": "float16"}


def dtype_of(word: str) -> str:
    """The name in PyTorch, job files and `--dtype`."""
    plain = word.strip().lower().removeprefix("torch.")
    dtype = _LONG_NAMES.get(plain, plain)
    return dtype if dtype in PRECISIONS else word


def precision_of(word: str) -> str:
    """The name in data sheets and `--precision`."""
    return PRECISIONS.get(dtype_of(word), word.strip().lower())


def wide_bytes(dtype: str) -> int:
    """Bytes of an element of masters and sums: float32, or float64 in float64 runs."""
    return max(DTYPE_BYTES["float32"], DTYPE_BYTES[dtype])


def accum_bytes(compute_bytes: int) -> int:
    """The same for a computation in elements of so many bytes."""
    return max(DTYPE_BYTES["float32"], compute_bytes)


def dtype_of_bytes(wide: int) -> Dtype:
    """The dtype of jobs whose elements have so many bytes."""
    return next(dtype for dtype in DTYPES if DTYPE_BYTES[dtype] == wide)
