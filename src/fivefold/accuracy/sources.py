"""The table of what sources of measured runs do not publish: the software, and its settings.

No entry is about a single row. Every entry gives its reason.
"""

import re

from msgspec import Struct, field
from msgspec.structs import replace

from fivefold.cost.software import PLAIN_EXPERTS, Attention, Overlap, SoftwareProfile
from fivefold.cost.systems import (
    ALEPH,
    DEEPSPEED,
    FOUNDRY,
    INTERNEVO,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_2023,
    MEGATRON_CORE,
    NANOTRON,
    NEMO,
    SYSTEMS,
    TITAN,
    XLA,
    ZERO_2021,
    ZERO_BUBBLE,
    software_of,
)
from fivefold.layout.layout import ContextKind, Recompute
from fivefold.spec.model import Attention as Counting


class Source(Struct, frozen=True, kw_only=True):
    """Assumptions about one source."""

    match: str = ""  # a pattern for the `source` column: the name of a paper or of software, not of a model
    why: str
    stack: SoftwareProfile
    zero: int = 0
    pipelined_zero: int = 3  # at most, with pp: software may keep weights gathered, and reduce gradients once a step
    sp: bool = False  # where tp > 1 and the row does not say
    recompute: Recompute = "none"
    counting: Counting = "full"  # how its TFLOP/s and MFU count attention
    hardware_flops: bool = False  # its TFLOP/s count recomputation
    compiled_if_said: bool = False  # eager, unless a row's notes say "compile"
    kernels: dict[str, Attention] = field(default_factory=dict)  # words in `notes` -> the attention kernel
    dropout: float = 0.0
    chunks: int = 1  # at most, where pp > 1 and the row does not say: as many as divide the layers evenly
    cp_kind: ContextKind = "ring"
    reserved: bool = False  # it publishes what the allocator reserved, not what was allocated
    memory_unit: float = 1e9  # bytes of a published GB
    ports: float = 1.0  # of a node's network, relative to the catalogue's
    vocab: int = 0  # where the row does not say
    divides_experts: bool = False  # tp divides experts, as it does all other weights
    untied: bool = False  # the head of GPT-like models is a table of its own
    balanced_if: str = ""  # a word in `notes` that says that layers are assigned with regard to embedding and head
    assumed: bool = False  # it is a guess, by a word of the row, its year or its accelerator


ANY = Source(why="a source without an entry: plain Megatron-Core", stack=MEGATRON_CORE, zero=1, sp=True)
NVIDIA = replace(
    ANY,
    match=r"NeMo|DGXC|Megatron-Bridge",
    why="NeMo's recipes: tp and dp overlapped, sp with tp, distributed optimizer, cuDNN attention",
    counting="causal",
    stack=NEMO,
)
EARLY = replace(ANY, stack=DEEPSPEED, zero=0, sp=False, recompute="full", dropout=0.1)  # Megatron, up to 2022
TORCHTITAN = Source(
    match=r"torchtitan",
    why="its benchmarks: FSDP2, selective recompute of every other matmul; compiled where the notes say so",
    stack=TITAN,
    zero=3,
    pipelined_zero=1,  # FSDP2 as it calls it: no resharding between microbatches, and one reduction
    sp=True,
    recompute="selective",
    reserved=True,
    compiled_if_said=True,
)
SOURCES = (
    Source(
        match=r"Hagemann 2023",
        why="arXiv 2311.05610: AA-Scaling, ZeRO-1, 1F1B; the row's notes name the attention kernel",
        stack=ALEPH,
        zero=1,
        kernels={
            "flash_attention2 + RMS": "flash2",
            "flash_attention2": "flash2",
            "flash_attentionv1": "flash1",
            "kernel=fused": "fused",
            "kernel=torch": "torch",
        },
    ),
    replace(
        EARLY,
        match=r"vTrain",
        why="its validation config: Megatron-DeepSpeed, full recompute, 4 network ports of 200 Gb/s a node",
        ports=0.5,
    ),
    replace(
        EARLY,
        match=r"Korthikanti",
        why="arXiv 2205.05198: no flash attention, gradients reduced after backward, dropout as GPT-3",
        stack=MEGATRON_2022,
        recompute="none",
        memory_unit=2**30,
    ),
    replace(
        EARLY,
        match=r"Megatron-LM 2021 Table 2",
        why="arXiv 2104.04473, section 5.2: ZeRO 3 by DeepSpeed, without tensor or pipeline parallelism",
        stack=ZERO_2021,
        zero=3,
        hardware_flops=True,
    ),
    replace(
        EARLY,
        match=r"Megatron-LM (README )?2021",
        why="arXiv 2104.04473: fused softmax, full recompute, scatter/gather sends, nothing overlapped",
        stack=MEGATRON_2021,
        hardware_flops=True,
    ),
    replace(
        EARLY,
        match=r"MT-NLG 530B 2022|2201\.11990",
        why="arXiv 2201.11990: DeepSpeed's pipeline and Megatron's tensor parallelism, as of 2021",
        hardware_flops=True,
    ),
    Source(
        match=r"PaLM 2022|2204\.02311",
        why="arXiv 2204.02311, section 4: XLA fuses and overlaps what the compiler finds; no pipeline",
        stack=XLA,
        zero=3,
        sp=True,
    ),
    replace(
        ANY,
        match=r"Megatron-Core README",
        why="README: gradient and weight collectives and tp overlapped, distributed optimizer. "
        "Interleaving is not said, and with 23 and 7 layers a rank, both primes, it can only be by single layers. "
        "Mid-2024: FlashAttention 2",
        stack=NEMO.but(name="Megatron-Core 0.8", attention="flash2", gradient_bytes=4),
        chunks=64,
    ),
    replace(
        NVIDIA,
        match=r"DGXC",
        why=f"{NVIDIA.why}; Grok-1 on 512 GPUs without pp fits only where tp divides its experts, too",
        divides_experts=True,
    ),
    NVIDIA,
    replace(
        EARLY,
        match=r"Zero-Bubble",
        why="arXiv 2401.10241: a fork of Megatron-LM of 2023, fp16, no recompute, no flash attention by its memory; "
        "the ends have a layer fewer, and a tied vocabulary of 32,000, by their parameters",
        stack=ZERO_BUBBLE,
        recompute="none",
        vocab=32_000,
    ),
    replace(
        EARLY,
        match=r"Vocabulary Parallelism",
        why="arXiv 2411.05288: the same fork of 2024 with flash attention; notes say where layers are redistributed",
        stack=ZERO_BUBBLE.but(name="zero-bubble Megatron 2024", attention="flash2"),
        recompute="none",
        balanced_if="redistributed",
        untied=True,
        dropout=0.0,
    ),
    replace(
        ANY,
        match=r"SimuMax",
        why="its real runs: Megatron-LM with Transformer Engine, fused cross-entropy, no flag for overlap",
        stack=MEGATRON_CORE,
    ),
    replace(
        ANY,
        match=r"LAER-MoE",
        why="its artifact: Megatron with distributed optimizer and overlap, on A100s with FlashAttention 2",
        stack=NEMO.but(name="Megatron-Core on A100", attention="flash2", gradient_bytes=4, experts=PLAIN_EXPERTS),
    ),
    Source(
        match=r"InternEvo",
        why="its performance page: flash attention, ZeRO-1 groups, 4 ports of 100 Gb/s a node",
        stack=INTERNEVO,
        zero=1,
        ports=0.25,
    ),
    replace(
        ANY,
        match=r"Llama 3 Table|2407\.21783",
        why="arXiv 2407.21783, section 3.3: gradients and optimizer sharded, sp with tp, RoCE of 400 Gb/s",
        stack=NEMO.but(
            name="Llama 3",
            gradient_bytes=4,  # added up and reduced in float32, as its section 3.3.2 says
            attention="flash2",
            pointwise="eager",
            accumulate_bytes=10,
            overlap=Overlap(dp=1, pp=1),
            order=("tp", "cp", "pp", "dp"),
        ),
        chunks=8,
        cp_kind="allgather",
    ),
    Source(
        match=r"llm-foundry",
        why="its benchmarking README: FSDP FULL_SHARD, Triton flash attention, eager",
        stack=FOUNDRY,
        zero=3,
    ),
    replace(
        TORCHTITAN,
        match=r"torchtitan H200",
        why="a later torchtitan (2025): as below, and the loss is compiled, so that no float32 logits are stored",
        stack=TITAN.but(name="torchtitan 2025, FSDP2", logit_bytes=8, peak_logit_bytes=4),
    ),
    TORCHTITAN,
)


# System -> the settings with which it usually runs, for rows that name their system.
USUAL: dict[str, Source] = {
    "fivefold": Source(why="this code", stack=SYSTEMS["fivefold"], zero=1, sp=True),
    "nemo": NVIDIA,
    "torchtitan": TORCHTITAN,
    "megatron": replace(EARLY, stack=MEGATRON_2022),
    "megatron-2021": replace(EARLY, stack=MEGATRON_2021),
    "megatron-2023": replace(EARLY, stack=MEGATRON_2023, recompute="none", dropout=0.0, zero=1, sp=True),
    "megatron-core": replace(ANY, stack=MEGATRON_CORE),
    "megatron-deepspeed": EARLY,
    "deepspeed-zero3-2021": replace(EARLY, stack=ZERO_2021, zero=3),
    "zero-bubble": replace(EARLY, stack=ZERO_BUBBLE, recompute="none"),
    "internevo": Source(why="", stack=INTERNEVO, zero=1),
    "aleph-alpha": Source(why="", stack=ALEPH, zero=1),
    "llm-foundry": Source(why="", stack=FOUNDRY, zero=3),
    "nanotron": Source(why="", stack=NANOTRON, zero=1, sp=True),
    "xla": Source(why="", stack=XLA, zero=3, sp=True),
}

# Pattern in a row's words -> system, for a source without an entry; the first match counts.
WORDS = (
    (r"mlperf|mlcommons|nemo|megatron-?bridge|dgxc|github\S*[ /]nvidia|docs\.nvidia", "nemo"),
    (r"torchtitan|fsdp2", "torchtitan"),
    (r"internevo|internlm", "internevo"),
    (r"zero.?bubble|sail-sg", "zero-bubble"),
    (r"nanotron|ultra-?scale", "nanotron"),
    (r"megatron-?deepspeed|deepspeed|gpt-?neox", "megatron-deepspeed"),
    (r"llm-foundry|mosaic|fsdp|accelerate|huggingface", "llm-foundry"),
    (r"megatron-?core|mcore|transformer engine", "megatron-core"),
)
# Accelerator and format -> system. They tell the year: FlashAttention came between V100 and H100, bf16 with the A100.
YEARS = (
    (r"V100", "megatron-2021"),
    (r"A100.* fp16", "megatron"),
    (r"A100|A800", "megatron-2023"),
    (r"TPU", "xla"),
    (r"", "megatron-core"),
)


def usual(system: str) -> Source:
    """The settings with which a system of that name usually runs."""
    name = system.strip().lower()
    software_of(name)  # raises with the names that there are
    return replace(USUAL[name], why=f"system {name!r}", match="", assumed=False)


def known(text: str) -> Source | None:
    """The entry of a source, by its name; None if it has none."""
    return next((source for source in SOURCES if re.search(source.match, text, re.IGNORECASE)), None)


def guessed(text: str, gpu: str, precision: str = "") -> Source:
    """A guess for a source without an entry: by its words, the year of its paper, or its accelerator and format."""
    system, why = _by_words(text) or _by_year(text) or _by_device(gpu, precision)
    source = replace(usual(system), assumed=True, why=f"{system!r}, by {why}")
    flash = re.search(r"flash.?att", text, re.IGNORECASE) and source.stack.attention in ("fused", "torch")
    return replace(source, stack=source.stack.but(attention="flash2")) if flash else source


def _by_words(text: str) -> tuple[str, str] | None:
    for word, system in WORDS:
        if match := re.search(word, text, re.IGNORECASE):
            return system, f"the word {match.group()!r}"
    return None


def _by_year(text: str) -> tuple[str, str] | None:
    """The system for a paper or a release from before FlashAttention was common, and why; None for later ones."""
    if match := re.search(r"arXiv.?(19|2[0-2])\d\d\.\d{4,5}|\b20(19|2[0-2])\b", text):
        return ("megatron" if "22" in match.groups() else "megatron-2021"), f"the year of {match.group()!r}"
    return None


def _by_device(gpu: str, precision: str) -> tuple[str, str]:
    system = next(system for pattern, system in YEARS if re.search(pattern, f"{gpu} {precision}", re.IGNORECASE))
    return system, f"its {gpu or 'GPU'}"
