"""Assumptions about the software behind published measurements, where their rows do not say.

An entry of `SOURCES` is about all rows of a source, never about one, and gives its reason.
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
    check_system_name,
)
from fivefold.layout.layout import ContextKind, Recompute
from fivefold.spec.model import AttentionFlopCounting


class Source(Struct, frozen=True, kw_only=True):
    """Assumptions about one source."""

    match: str = ""  # a pattern for the `source` column: the name of a paper or of software, not of a model
    why: str = ""  # is printed, so that it must be understood alone
    software: SoftwareProfile
    zero: int = 0
    max_zero_with_pp: int = 3  # software may keep weights gathered and reduce gradients once a step
    sp: bool = False  # where tp > 1 and the row does not say
    recompute: Recompute = "none"
    attention_flops: AttentionFlopCounting = "full"  # how its TFLOP/s and MFU count attention
    counts_recompute_flops: bool = False  # in its TFLOP/s
    compiled_only_if_noted: bool = False  # eager, unless a row's notes say "compile"
    kernels: dict[str, Attention] = field(default_factory=dict)  # words in `notes` -> the attention kernel
    dropout: float = 0.0
    max_chunks: int = 1  # where pp > 1 and the row does not say: the most up to this that divide the layers evenly
    cp_kind: ContextKind = "ring"
    publishes_reserved_memory: bool = False  # what the allocator reserved, not what was allocated
    memory_unit: float = 1e9  # bytes of a published GB
    network_scale: float = 1.0  # bandwidth of a node's network, relative to the catalogue's
    vocab: int = 0  # where the row does not say
    tp_shards_experts: bool = False  # as it does all other weights
    untied_head: bool = False  # the head of GPT-like models does not share the embedding's weights
    balanced_layers_keyword: str = ""  # in `notes`: layers are assigned with regard to embedding and head
    assumed: bool = False  # it is a guess, by a word of the row, its year or its accelerator


ANY = Source(why="a source without an entry: plain Megatron-Core", software=MEGATRON_CORE, zero=1, sp=True)
NVIDIA = replace(
    ANY,
    match=r"NeMo|DGXC|Megatron-Bridge",
    why="NeMo's recipes: tp and dp overlapped, sp with tp, distributed optimizer, cuDNN attention",
    attention_flops="causal",
    software=NEMO,
)
EARLY_MEGATRON = Source(
    why="Megatron up to 2022: full recompute, dropout as in GPT-3",
    software=DEEPSPEED,
    recompute="full",
    dropout=0.1,
)
TORCHTITAN = Source(
    match=r"torchtitan",
    why="its benchmarks: FSDP2, selective recompute of every other matmul; compiled where the notes say so",
    software=TITAN,
    zero=3,
    max_zero_with_pp=1,  # FSDP2 as torchtitan configures it: no resharding between microbatches, and one reduction
    sp=True,
    recompute="selective",
    publishes_reserved_memory=True,
    compiled_only_if_noted=True,
)
SOURCES = (
    Source(
        match=r"Hagemann 2023",
        why="arXiv 2311.05610: AA-Scaling, ZeRO-1, 1F1B; the row's notes name the attention kernel",
        software=ALEPH,
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
        EARLY_MEGATRON,
        match=r"vTrain",
        why="its validation config: Megatron-DeepSpeed, full recompute, 4 network ports of 200 Gb/s a node",
        network_scale=0.5,
    ),
    replace(
        EARLY_MEGATRON,
        match=r"Korthikanti",
        why="arXiv 2205.05198: no flash attention, gradients reduced after backward, dropout as in GPT-3",
        software=MEGATRON_2022,
        recompute="none",
        memory_unit=2**30,
    ),
    replace(
        EARLY_MEGATRON,
        match=r"Megatron-LM 2021 Table 2",
        why="arXiv 2104.04473, section 5.2: ZeRO 3 by DeepSpeed, without tensor or pipeline parallelism",
        software=ZERO_2021,
        zero=3,
        counts_recompute_flops=True,
    ),
    replace(
        EARLY_MEGATRON,
        match=r"Megatron-LM (README )?2021",
        why="arXiv 2104.04473: fused softmax, full recompute, scatter/gather sends, nothing overlapped",
        software=MEGATRON_2021,
        counts_recompute_flops=True,
    ),
    replace(
        EARLY_MEGATRON,
        match=r"MT-NLG 530B 2022|2201\.11990",
        why="arXiv 2201.11990: DeepSpeed's pipeline and Megatron's tensor parallelism, as of 2021",
        counts_recompute_flops=True,
    ),
    Source(
        match=r"PaLM 2022|2204\.02311",
        why="arXiv 2204.02311, section 4: XLA fuses and overlaps what the compiler finds; no pipeline",
        software=XLA,
        zero=3,
        sp=True,
    ),
    replace(
        ANY,
        match=r"Megatron-Core README",
        why="README: gradient and weight collectives and tp overlapped, distributed optimizer. "
        "Interleaving is not published; a rank has 23 or 7 layers, both prime, so each chunk can only be one layer. "
        "Mid-2024: FlashAttention 2",
        software=NEMO.but(name="Megatron-Core 0.8", attention="flash2", gradient_bytes=4),
        max_chunks=64,
    ),
    replace(
        NVIDIA,
        match=r"DGXC",
        why=f"{NVIDIA.why}; Grok-1 on 512 GPUs without pp fits only if tp shards its experts",
        tp_shards_experts=True,
    ),
    NVIDIA,
    replace(
        EARLY_MEGATRON,
        match=r"Zero-Bubble",
        why="arXiv 2401.10241: a fork of Megatron-LM of 2023, fp16, no recompute; its published memory implies no "
        "flash attention, its parameter counts imply one layer fewer on the end stages and a tied vocabulary of 32,000",
        software=ZERO_BUBBLE,
        recompute="none",
        vocab=32_000,
    ),
    replace(
        EARLY_MEGATRON,
        match=r"Vocabulary Parallelism",
        why="arXiv 2411.05288: sail-sg's fork of Megatron-LM of 2024, flash attention; notes say where layers are "
        "redistributed",
        software=ZERO_BUBBLE.but(name="zero-bubble Megatron 2024", attention="flash2"),
        recompute="none",
        balanced_layers_keyword="redistributed",
        untied_head=True,
        dropout=0.0,
    ),
    replace(
        ANY,
        match=r"SimuMax",
        why="its real runs: Megatron-LM with Transformer Engine, fused cross-entropy, no overlap flags",
        software=MEGATRON_CORE,
    ),
    replace(
        ANY,
        match=r"LAER-MoE",
        why="its artifact: Megatron with distributed optimizer and overlap, on A100s with FlashAttention 2",
        software=NEMO.but(name="Megatron-Core on A100", attention="flash2", gradient_bytes=4, experts=PLAIN_EXPERTS),
    ),
    Source(
        match=r"InternEvo",
        why="its performance page: flash attention, ZeRO-1 groups, 4 ports of 100 Gb/s a node",
        software=INTERNEVO,
        zero=1,
        network_scale=0.25,
    ),
    replace(
        ANY,
        match=r"Llama 3 Table|2407\.21783",
        why="arXiv 2407.21783, section 3.3: gradients and optimizer sharded, sp with tp, RoCE of 400 Gb/s",
        software=NEMO.but(
            name="Llama 3",
            gradient_bytes=4,  # added up and reduced in float32, as its section 3.3.2 says
            attention="flash2",
            pointwise="eager",
            accumulate_bytes=10,
            overlap=Overlap(dp=1, pp=1),
            order=("tp", "cp", "pp", "dp"),
        ),
        max_chunks=8,
        cp_kind="allgather",
    ),
    Source(
        match=r"llm-foundry",
        why="its benchmarking README: FSDP FULL_SHARD, Triton flash attention, eager",
        software=FOUNDRY,
        zero=3,
    ),
    replace(
        TORCHTITAN,
        match=r"torchtitan H200",
        why="torchtitan of 2025: as in its benchmarks of 2024, but the loss is compiled and stores no float32 logits",
        software=TITAN.but(name="torchtitan 2025, FSDP2", logit_bytes=8, peak_logit_bytes=4),
    ),
    TORCHTITAN,
)


# For rows that name their system.
SYSTEM_DEFAULTS: dict[str, Source] = {
    "fivefold": Source(why="this code", software=SYSTEMS["fivefold"], zero=1, sp=True),
    "nemo": NVIDIA,
    "torchtitan": TORCHTITAN,
    "megatron": replace(EARLY_MEGATRON, software=MEGATRON_2022),
    "megatron-2021": replace(EARLY_MEGATRON, software=MEGATRON_2021),
    "megatron-2023": replace(EARLY_MEGATRON, software=MEGATRON_2023, recompute="none", dropout=0.0, zero=1, sp=True),
    "megatron-core": replace(ANY, software=MEGATRON_CORE),
    "megatron-deepspeed": EARLY_MEGATRON,
    "deepspeed-zero3-2021": replace(EARLY_MEGATRON, software=ZERO_2021, zero=3),
    "zero-bubble": replace(EARLY_MEGATRON, software=ZERO_BUBBLE, recompute="none"),
    "internevo": Source(software=INTERNEVO, zero=1),
    "aleph-alpha": Source(software=ALEPH, zero=1),
    "llm-foundry": Source(software=FOUNDRY, zero=3),
    "nanotron": Source(software=NANOTRON, zero=1, sp=True),
    "xla": Source(software=XLA, zero=3, sp=True),
}

# Pattern in a row's text -> system, for a source without an entry; the first match wins.
SYSTEM_BY_KEYWORD = (
    (r"mlperf|mlcommons|nemo|megatron-?bridge|dgxc|github\S*[ /]nvidia|docs\.nvidia", "nemo"),
    (r"torchtitan|fsdp2", "torchtitan"),
    (r"internevo|internlm", "internevo"),
    (r"zero.?bubble|sail-sg", "zero-bubble"),
    (r"nanotron|ultra-?scale", "nanotron"),
    (r"megatron-?deepspeed|deepspeed|gpt-?neox", "megatron-deepspeed"),
    (r"llm-foundry|mosaic|fsdp|accelerate|huggingface", "llm-foundry"),
    (r"megatron-?core|mcore|transformer engine", "megatron-core"),
)
# Pattern in accelerator and precision, which tell the year, -> system; the first match wins. FlashAttention came
# between V100 and H100, bf16 with the A100.
SYSTEM_BY_ACCELERATOR = (
    (r"V100", "megatron-2021"),
    (r"A100.* fp16", "megatron"),
    (r"A100|A800", "megatron-2023"),
    (r"TPU", "xla"),
    (r"", "megatron-core"),
)


def defaults_of_system(system: str) -> Source:
    """The settings with which a system of that name usually runs."""
    name = system.strip().lower()
    check_system_name(name)
    return replace(SYSTEM_DEFAULTS[name], why=f"system {name!r}", match="", assumed=False)


def entry_for(source: str) -> Source | None:
    """The entry of a source, by its name; None if it has none."""
    return next((entry for entry in SOURCES if re.search(entry.match, source, re.IGNORECASE)), None)


def guess_source(text: str, gpu: str, precision: str = "") -> Source:
    """A guess for a source without an entry: by its words, the year of its paper, or its accelerator and precision."""
    system, why = _by_keyword(text) or _by_year(text) or _by_accelerator(gpu, precision)
    source = replace(defaults_of_system(system), assumed=True, why=f"{system!r}, by {why}")
    uses_flash = re.search(r"flash.?att", text, re.IGNORECASE) is not None
    if uses_flash and source.software.attention in ("fused", "torch"):
        return replace(source, software=source.software.but(attention="flash2"))
    return source


def _by_keyword(text: str) -> tuple[str, str] | None:
    for pattern, system in SYSTEM_BY_KEYWORD:
        if match := re.search(pattern, text, re.IGNORECASE):
            return system, f"the word {match.group()!r}"
    return None


def _by_year(text: str) -> tuple[str, str] | None:
    """The system of a paper or release from before FlashAttention was common, and why; None for later ones."""
    if match := re.search(r"arXiv.?(?P<arxiv>19|2[0-2])\d\d\.\d{4,5}|\b20(?P<year>19|2[0-2])\b", text):
        year = 2000 + int(match["arxiv"] or match["year"])
        return ("megatron" if year == 2022 else "megatron-2021"), f"the year of {match.group()!r}"
    return None


def _by_accelerator(gpu: str, precision: str) -> tuple[str, str]:
    text = f"{gpu} {precision}"
    system = next(system for pattern, system in SYSTEM_BY_ACCELERATOR if re.search(pattern, text, re.IGNORECASE))
    return system, f"its {gpu or 'GPU'}"
