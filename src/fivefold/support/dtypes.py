"""A precision has two names, the makers' (bf16) and PyTorch's (bfloat16). Every input takes either of them.

dtype_of("bf16") == "bfloat16"; precision_of("torch.bfloat16") == "bf16"; other words stay as they are
"""

SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_LONG = {short: long for long, short in SHORT.items()} | {"double": "float64", "float": "float32", "half": "float16"}
_LONG |= {"f64": "float64", "f32": "float32", "f16": "float16"}


def dtype_of(word: str) -> str:
    """The name in PyTorch, job files and `--dtype`."""
    plain = word.strip().lower().removeprefix("torch.")
    dtype = _LONG.get(plain, plain)
    return dtype if dtype in SHORT else word


def precision_of(word: str) -> str:
    """The name in data sheets and `--precision`."""
    return SHORT.get(dtype_of(word), word.strip().lower())
