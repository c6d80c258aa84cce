"""The systems behind published runs, as stacks: which kernels they have and what they overlap, as far as they say."""

from fivefold.cost.software import FIVEFOLD, MEGATRON_EXPERTS, ON_CPUS, Overlap, SoftwareProfile
from fivefold.hardware.accelerators import Accelerator
from fivefold.support.errors import UserError
from fivefold.support.text import did_you_mean

# Bytes that Megatron's vocabulary-parallel cross-entropy moves per logit: written in bf16, cast to float32, and then
# maximum, difference, exponential, sum and quotient each by themselves; the gradient scaled and cast back.
EAGER_LOGITS = 52.0
TORCH_LOGITS = 30.0  # F.cross_entropy in float32: cast, log-softmax, and back
FUSED_LOGITS = 8.0  # one kernel each way over bf16 logits: written, read; read, and the gradient written
MEGATRON_ORDER = ("tp", "cp", "dp", "pp")  # parallel_state's default: pipeline stages are furthest apart


MEGATRON_2021 = SoftwareProfile(
    name="Megatron-LM 2021",
    attention="fused",
    order=MEGATRON_ORDER,
    host=0.5,
    accumulate_bytes=10,
    logit_bytes=EAGER_LOGITS,
    scattered_sends=True,
    even=True,
)
MEGATRON_2022 = MEGATRON_2021.but(
    name="Megatron-LM 2022", overlap=Overlap(tp_backward=1), selective="attention", accumulate_bytes=0
)
DEEPSPEED = MEGATRON_2021.but(
    name="Megatron-DeepSpeed", host=1.0, gradient_bytes=2, accumulate_bytes=6, scattered_sends=False
)
# As of 2023: FlashAttention 2 and fused kernels; what is not overlapped by default is not.
MEGATRON_2023 = MEGATRON_2022.but(name="Megatron-LM 2023", attention="flash2", selective="pointwise")
# ZeRO 3 of early 2021: the twelve parameters of a GPT's block travel one by one, when they are needed, into lists of
# which every part is copied out; a recomputed block's weights are dropped after its forward; gradients are reduced to
# every rank.
ZERO_2021 = MEGATRON_2021.but(
    name="DeepSpeed ZeRO 3, 2021",
    host=1.0,
    gradient_bytes=2,
    unit_parts=12,
    copies_parts=True,
    gathers_again=True,
    reduces_whole=True,
)
NEMO = SoftwareProfile(
    name="NeMo, Transformer Engine",
    attention="flash3",
    overlap=Overlap(tp=1, cp=1, dp=1, pp=1, zero=1),
    order=MEGATRON_ORDER,
    host=0.3,
    host_step=0.02,  # timers, logging, and a gradient norm that the host waits for
    gradient_bytes=2,  # its recipes for speed set grad_reduce_in_fp32=False
    logit_bytes=EAGER_LOGITS,
    experts=MEGATRON_EXPERTS,
    remakes_heads=True,  # its recipes' mla_up_proj
)
# Megatron-Core with Transformer Engine and none of the flags for overlap.
MEGATRON_CORE = NEMO.but(
    name="Megatron-Core, without overlap",
    overlap=Overlap(tp_backward=1, cp=1),
    host=0.5,
    even=True,
    gradient_bytes=4,  # bf16 runs add up in float32 unless told otherwise
)
# sail-sg's forks of Megatron-LM, 2023 and 2024: no distributed optimizer, weight gradients apart; fp16 runs add them
# up in fp16, as Megatron does unless told otherwise.
ZERO_BUBBLE = MEGATRON_2022.but(name="zero-bubble Megatron", overlap=Overlap(), gradient_bytes=2)
# InternLM's system of 2023 (its install page: flash-attention 1.0.5, fused norms and cross-entropy): autograd adds up
# bf16 gradients, and a step ends with each rank's broadcast of its part of the new weights.
INTERNEVO = MEGATRON_2023.but(
    name="InternEvo",
    attention="flash1",
    pointwise="eager",
    norm="fused",
    overlap=Overlap(dp=1, exposes_weights=True),
    broadcasts=True,
    gradient_bytes=2,
    accumulate_bytes=6,
    logit_bytes=20,
    columns_apart=True,
)
ALEPH = SoftwareProfile(
    name="Aleph Alpha",
    order=MEGATRON_ORDER,
    host=0.5,
    pointwise="eager",
    norm="eager",
    gradient_bytes=2,
    accumulate_bytes=6,
    logit_bytes=EAGER_LOGITS,
    peak_logit_bytes=16,
    columns_apart=True,
    gathers_logits=True,  # found from which of its runs do not fit: with tp the memory of the loss does not shrink
    even=True,
)
FOUNDRY = SoftwareProfile(
    name="llm-foundry, FSDP",
    attention="flash1",
    pointwise="eager",
    norm="eager",
    overlap=Overlap(zero=1),
    host=0.5,
    gradient_bytes=2,
    logit_bytes=FUSED_LOGITS,  # its loss_fn is "fused_crossentropy", FlashAttention's, unless set
    peak_logit_bytes=4,  # bf16 logits and their gradient
)
TITAN = SoftwareProfile(
    name="torchtitan, FSDP2",
    pointwise="compiled",
    norm="compiled",
    selective="half",
    overlap=Overlap(zero=1),
    host=0.5,
    logit_bytes=TORCH_LOGITS,
    peak_logit_bytes=14,  # bf16, float32, log-probabilities, gradient
    keeps_ends=True,  # FSDP2's root does not reshard after forward
)
# Hugging Face's nanotron (its llama.py, parallel/ and optim/): eager but for FlashAttention 2 and a Triton norm; bf16
# gradients are added to float32 ones by a kernel of their own and reduced behind the last backward; ZeRO 1 gathers the
# new weights before the next step; tp's collectives run behind the weights' gradients.
NANOTRON = SoftwareProfile(
    name="nanotron",
    attention="flash2",
    pointwise="eager",
    overlap=Overlap(tp_backward=1, dp=1, exposes_weights=True),
    order=MEGATRON_ORDER,
    host=0.5,
    host_step=0.02,
    accumulate_bytes=10,
    logit_bytes=EAGER_LOGITS,
)
XLA = SoftwareProfile(
    name="Pathways, XLA",
    attention="fused",
    pointwise="compiled",
    norm="compiled",
    overlap=Overlap(tp=1, zero=1),
    gradient_bytes=2,
)


SYSTEMS: dict[str, SoftwareProfile] = {
    "fivefold": FIVEFOLD,
    "nemo": NEMO,
    "torchtitan": TITAN,
    "megatron": MEGATRON_2022,
    "megatron-2021": MEGATRON_2021,
    "megatron-2023": MEGATRON_2023,
    "megatron-core": MEGATRON_CORE,
    "megatron-deepspeed": DEEPSPEED,
    "deepspeed-zero3-2021": ZERO_2021,
    "zero-bubble": ZERO_BUBBLE,
    "internevo": INTERNEVO,
    "aleph-alpha": ALEPH,
    "llm-foundry": FOUNDRY,
    "nanotron": NANOTRON,
    "xla": XLA,
}


def check_system_name(name: str) -> None:
    """Refuse a name that no system has; upper case and blanks around it do not matter."""
    if name.strip().lower() not in SYSTEMS:
        raise UserError(f"unknown software {name!r}; {did_you_mean(name, list(SYSTEMS))}", "software.unknown")


def software_of(name: str, device: Accelerator | None = None) -> SoftwareProfile:
    """By name, on a device: a CPU runs this code in another way than a GPU."""
    check_system_name(name)
    profile = SYSTEMS[name.strip().lower()]
    return ON_CPUS if profile is FIVEFOLD and device is not None and device.is_cpu else profile
