"""Words of measured runs in ours: schedules, precisions and models as papers and logs spell them."""

import re

from fivefold.hardware.accelerators import Accelerator
from fivefold.layout.layout import Recompute
from fivefold.schedule.catalogue import CATALOGUE
from fivefold.spec.presets import PRESETS
from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean


class Refused(UserError):
    """Why a row cannot be predicted."""


# Without case, dashes and blanks. ZB-1p and ZB-2p of arXiv 2401.10241 are found by search within zb-h1's and zb-h2's
# memory.
_SCHEDULES = {
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
_NARROW_OR_WIDE = ("fp4", "fp8", "tf32", "fp32")
_NONE = {"", "none", "no", "na", "nopipeline", "-"}


def plain(text: str) -> str:
    return re.sub(r"[^a-z0-9+.]", "", text.lower())


def schedule_named(text: str) -> str:
    """The catalogue's name of a schedule; empty where a row does not say."""
    word = plain(re.sub(r"\(.*?\)", "", text))
    if word in _NONE:
        return ""
    spelled = {other: name for name, others in _SCHEDULES.items() for other in others.split()}
    found = (spelled | {plain(name): name for name in CATALOGUE}).get(word)
    if found is None:
        raise Refused(f"schedule {text!r} is none of ours; {did_you_mean(text.lower(), list(CATALOGUE))}")
    return found


def precision_named(text: str, device: Accelerator) -> str:
    """Of matmuls: fp8 for any recipe in 8 bits, fp4 in 4; what is wider and not said is the device's 16-bit format."""
    word = text.lower()
    if word and not re.search(r"(fp|float)(4|8|16|32)|bf16|tf32|^(amp|mixed|half|16)\b", word):
        raise Refused(f"precision {text!r} is none of ours; {did_you_mean(word, ['bf16', 'fp16', *_NARROW_OR_WIDE])}")
    for precision in _NARROW_OR_WIDE:
        pattern = f"{precision}|{precision.replace('fp', 'float')}"
        if re.search(pattern, word) and not re.search("bf16|fp16", word):
            device.rate(precision)  # raises with what it has
            return precision
    return "bf16" if device.peak.bf16 else "fp16"


def zero_named(text: str) -> int | None:
    """3 of '3', 'zero3', 'ZeRO-3', 'stage 3' or '3 (FSDP2)'; None where a row does not say."""
    word = plain(re.sub(r"\(.*?\)", "", text))
    if found := re.fullmatch(r"(?:zero)?(?:stage)?([0-3])(?:\.0)?", word):
        return int(found.group(1))
    # Weights that are gathered once a step: optimizer and gradients are sharded, and the software says how.
    if not word or "not resharded" in text:
        return None
    raise Refused(f"zero_stage is {text!r}, and must be 0, 1, 2 or 3, or empty where it is not known")


def recompute_named(text: str, usual: Recompute) -> Recompute:
    """By its first word: 'full', 'selective op', 'none (baseline)'; some of the layers count as all."""
    kinds: dict[str, Recompute] = {"none": "none", "selective": "selective", "full": "full", "partial": "full"}
    first = re.match(r"\w*", text.lower())
    word = first.group() if first else ""
    if text and word not in kinds:
        raise Refused(f"recompute {text!r} is none of ours; {did_you_mean(word, list(kinds))}")
    return kinds[word] if text else usual


def yes_or_no(column: str, text: str, usual: bool) -> bool:
    words = {"": usual, "yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if text.lower() not in words:
        raise Refused(f"{column} is {text!r}, and must be yes or no, or empty where it is not known")
    return words[text.lower()]


def preset_named(text: str) -> str | None:
    """The preset that a model's name means, whatever it says beside of precision and makers."""
    word = re.sub(r"(?i)\b(nv|mx)?(bf16|fp16|fp8|fp4)\b|meta|pre-?train(ing)?|[-_ ]cs\b", "", text.replace("_", " "))
    word = plain(word)
    known = {plain(name): name for name in PRESETS}
    # Megatron's names of GPT-3, and shapes that two releases share.
    same = {"llama3.1405b": "llama3-405b", "gpt3175b": "gpt3-175b", "llama27b": "llama2-7b", "grok1314b": "grok-1"}
    return known.get(word) or same.get(word)
