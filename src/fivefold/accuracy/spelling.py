"""Reads how papers and logs spell schedules, precisions, ZeRO stages, recomputation and models."""

import re

from fivefold.hardware.accelerators import Accelerator
from fivefold.layout.layout import Recompute
from fivefold.schedules.registry import CATALOGUE
from fivefold.spec.presets import PRESETS
from fivefold.support.errors import UserError
from fivefold.support.text import did_you_mean


class UnpredictableRow(UserError):
    """Why a row cannot be predicted."""

    def __init__(self, sentence: str):
        super().__init__(sentence, "accuracy.row")


# Name -> other spellings, as `normalize` leaves them. ZB-1p and ZB-2p of arXiv 2401.10241 are schedules that its
# search finds within the memory of zb-h1 and zb-h2.
_SCHEDULE_SPELLINGS = {
    "1f1b": "1f1b pipedreamflush dapple noninterleaved1f1b",
    "interleaved": "interleaved1f1b 1f1binterleaved 1f1bi interleaved1f1bvp vpp interleavedpipeline",
    "gpipe": "fthenb afab allforwardallbackward",
    "bfs": "breadthfirst interleavedgpipe loopedbfs",
    "zb-h1": "zb1p zbh1 zerobubbleh1 zerobubble1p zerobubble zb",
    "zb-h2": "zb2p zbh2 zerobubbleh2 zerobubble2p",
    "zb-v": "zbv zbvshape zerobubblev",
    "v-half": "vhalf vshapehalf",
    "v-min": "vmin",
    "dualpipe-v": "dualpipev",
}
_NO_SCHEDULE = {"", "none", "no", "na", "nopipeline"}
# Pattern -> precision, empty for the device's 16-bit format; the first match wins.
_PRECISION_PATTERNS = (
    (r"bf16|fp16", ""),
    (r"fp4|float4", "fp4"),
    (r"fp8|float8", "fp8"),
    (r"tf32", "tf32"),
    (r"fp32|float32", "fp32"),
    (r"float16|^(amp|mixed|half|16)\b|^$", ""),
)
# Megatron's names of GPT-3, and shapes that two releases share.
_PRESET_ALIASES = {
    "llama3.1405b": "llama3-405b",
    "gpt3175b": "gpt3-175b",
    "llama27b": "llama2-7b",
    "grok1314b": "grok-1",
}


def normalize(text: str) -> str:
    """The text in lower case, with letters, digits, `+` and `.` only."""
    return re.sub(r"[^a-z0-9+.]", "", text.lower())


def without_parentheses(text: str) -> str:
    """The text without remarks in parentheses: 'interleaved-1F1B (flexible)', '3 (FSDP2)'."""
    return re.sub(r"\(.*?\)", "", text)


def schedule_named(text: str) -> str:
    """The catalogue's name of a schedule; empty if a row names none. Remarks in parentheses are ignored."""
    word = normalize(without_parentheses(text))
    if word in _NO_SCHEDULE:
        return ""
    names = {other: name for name, others in _SCHEDULE_SPELLINGS.items() for other in others.split()}
    schedule = (names | {normalize(name): name for name in CATALOGUE}).get(word)
    if schedule is None:
        hint = did_you_mean(text.lower(), list(CATALOGUE))
        raise UnpredictableRow(f"unknown schedule {text!r}; {hint}")
    return schedule


def precision_named(text: str, device: Accelerator) -> str:
    """The precision of matmuls: fp8 and fp4 for any recipe in 8 or 4 bits, tf32 and fp32 if a row says so; else the
    device's 16-bit format."""
    word = text.lower()
    precision = next((precision for pattern, precision in _PRECISION_PATTERNS if re.search(pattern, word)), None)
    if precision is None:
        hint = did_you_mean(word, ["bf16", "fp16", *(name for _, name in _PRECISION_PATTERNS if name)])
        raise UnpredictableRow(f"unknown precision {text!r}; {hint}")
    if precision:
        device.rate(precision)  # raises an error that says what the device has
        return precision
    return "bf16" if device.peak.bf16 else "fp16"


def zero_named(text: str) -> int | None:
    """The ZeRO stage: 3 for '3', 'zero3', 'ZeRO-3', 'stage 3' or '3 (FSDP2)'; None if a row does not say."""
    word = normalize(without_parentheses(text))
    if match := re.fullmatch(r"(?:zero)?(?:stage)?([0-3])(?:\.0)?", word):
        return int(match.group(1))
    # Where weights are "not resharded", they are gathered once a step, and the stage is the source's.
    if not word or "not resharded" in text:
        return None
    raise UnpredictableRow(f"zero_stage is {text!r}; it must be 0, 1, 2 or 3, or empty if it is not known")


def recompute_named(text: str, *, default: Recompute) -> Recompute:
    """Recompute by the first word: 'full', 'selective op', 'none (baseline)'; 'partial', some layers, counts as all."""
    kinds: dict[str, Recompute] = {"none": "none", "selective": "selective", "full": "full", "partial": "full"}
    first = re.match(r"\w*", text.lower())
    word = first.group() if first else ""
    if text and word not in kinds:
        raise UnpredictableRow(f"unknown recompute {text!r}; {did_you_mean(word, list(kinds))}")
    return kinds[word] if text else default


def yes_or_no(column: str, text: str, *, default: bool) -> bool:
    words = {"": default, "yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if text.lower() not in words:
        raise UnpredictableRow(f"{column} is {text!r}; it must be yes or no, or empty if it is not known")
    return words[text.lower()]


def preset_named(text: str) -> str | None:
    """The preset that a model's name means, whatever it says about precision and makers; None if there is none."""
    word = re.sub(r"(?i)\b(nv|mx)?(bf16|fp16|fp8|fp4)\b|meta|pre-?train(ing)?|[-_ ]cs\b", "", text.replace("_", " "))
    word = normalize(word)
    presets = {normalize(name): name for name in PRESETS}
    return presets.get(word) or _PRESET_ALIASES.get(word)
