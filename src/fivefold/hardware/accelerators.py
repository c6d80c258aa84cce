"""The catalogue of accelerators: peak figures, and the links of the node that each usually is in.

Every number is a ceiling from the maker's documents; `Achieved` has the shares of it that kernels and collectives
reach. Every entry says where its figures come from (`fivefold list accelerators` prints it); an assumption is called
one.
"""

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, convert

from fivefold.support.errors import UserError
from fivefold.support.text import did_you_mean, either

# ---- efficiency -----------------------------------------------------------------------------------------------------
# The shares of its ceilings that a device reaches.
#
#     achieved("H100").gemm      # share of the peak rate in a large bf16 GEMM
#
# The shares are in `efficiency.toml` next to this file: fitted to published runs by `fivefold accuracy --fit`, or
# measured on a device by `fivefold calibrate`; each table says which.


FILE = Path(__file__).with_name("efficiency.toml")


class Achieved(Struct, frozen=True, kw_only=True):
    """Shares of the accelerator's own ceilings, unless a unit is given."""

    gemm: float = 0.75  # of the peak rate: large GEMMs in bf16 or fp16, sustained
    fp8: float = 0.60  # of the fp8 peak: likewise, without the casts around them
    fp4: float = 0.45  # of the fp4 peak: likewise
    ramp: float = 200.0  # filling and draining a tile, in steps of its inner loop
    units: int = 108  # multiprocessors: the tiles of a GEMM run in waves of so many
    flash1: float = 0.35  # of the peak rate: attention kernels forward, over the scores that a causal mask leaves
    flash2: float = 0.60
    flash3: float = 0.60
    stream: float = 0.80  # of the memory bandwidth: kernels that read, do little and write
    inside: float = 0.75  # of a link's bandwidth: large collectives within a node
    across: float = 0.80  # and between nodes
    launch: float = 4e-6  # seconds from the end of one kernel to the start of the next
    # For CPUs, if they were measured (else 0): seconds of Python and dispatch for a pass through a block; and seconds
    # per parameter of the gradient norm, clipping and AdamW, which on a CPU arithmetic bounds, not memory.
    host: float = 0.0
    update: float = 0.0
    source: str = "assumed"


class Software(Struct, frozen=True, kw_only=True):
    """For software that overlaps, the share of a collective's time that compute hides; and the speed of a host."""

    tp: float = 0.80  # all of tensor parallelism's collectives, in pieces behind their GEMMs
    tp_backward: float = 0.80  # input gradients behind the weights'
    cp: float = 0.80  # the ring behind attention
    zero: float = 0.80  # ZeRO 3's gathers and scatters behind the neighbouring blocks
    dp: float = 0.90  # gradients behind backward, weights behind forward
    pp: float = 0.80  # sends behind the next microbatch
    norm: float = 1.5  # times the bytes of an eager norm: kernels that reduce reach less of the bandwidth
    host: float = 1.1e-3  # seconds in which Python launches the forward pass of one eager block


# A device that nobody has measured reaches what the nearest of its kind does.
LIKE = dict.fromkeys(("A100-40", "A100-PCIE-40", "A100-PCIE-80", "A800"), "A100-80")
LIKE |= dict.fromkeys(("TPU-v4", "L40S", "A10G", "RTX4090", "RTX5090"), "A100-80")
LIKE |= dict.fromkeys(("H100-96", "H200", "H800", "MI300X", "MI325X"), "H100")
LIKE |= dict.fromkeys(("GB200", "B300", "GB300", "MI350X", "MI355X"), "B200")
LIKE["V100-16"] = "V100"


@cache
def known() -> dict[str, dict[str, Any]]:
    """The tables of efficiency.toml: one per accelerator, and one for software."""
    return tomllib.loads(FILE.read_text()) if FILE.exists() else {}


def write(tables: dict[str, dict[str, Any]], path: Path = FILE) -> None:
    """Write efficiency.toml with these tables; its other tables stay."""
    lines = ["# Made by `fivefold accuracy --fit` and `fivefold calibrate`; each table says by which."]
    for name, table in sorted((known() | tables).items()):
        key = f'"{name}"' if re.search(r"[^\w-]", name) else name
        lines += ["", f"[{key}]"]
        lines += [
            f"{field} = {f'{value:.4g}' if isinstance(value, float) else json.dumps(value, ensure_ascii=False)}"
            for field, value in table.items()
        ]
    path.write_text("\n".join(lines) + "\n")
    known.cache_clear()


@cache
def achieved(accelerator: str) -> Achieved:
    """The shares of an accelerator, or of the nearest one that was measured (`LIKE`)."""
    tables = known()
    name = accelerator if accelerator in tables else LIKE.get(accelerator, "")
    return convert(tables.get(name, {}), Achieved)


def source_of(accelerator: str) -> str:
    """Where an accelerator's shares come from; for one that was not measured, whose shares it has."""
    guessed = accelerator not in known() and accelerator in LIKE
    return f"a guess, as {LIKE[accelerator]}'s" if guessed else achieved(accelerator).source


@cache
def software() -> Software:
    return convert(known().get("software", {}), Software)


# ---- accelerators ---------------------------------------------------------------------------------------------------


D = TypeVar("D")
GB, Gb, T, MiB, us = 1e9, 1e9 / 8, 1e12, 1 << 20, 1e-6


class Link(Struct, frozen=True):
    """A way out of one GPU."""

    bandwidth: float  # bytes/s in one direction, each GPU's own share (makers print both directions added)
    latency: float  # seconds per hop
    name: str = "custom"


class Rates(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Peak FLOP/s by precision: dense (no 2:4 sparsity), fp32 accumulation; None where the hardware has none."""

    fp64: float | None = None
    fp32: float | None = None
    tf32: float | None = None
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    fp4: float | None = None


PRECISIONS = Rates.__struct_fields__


class Accelerator(Struct, frozen=True, kw_only=True):
    """One device, with the link inside its usual node and the link to the other nodes."""

    name: str
    peak: Rates
    memory: int  # bytes
    memory_bandwidth: float  # bytes/s
    inside: Link
    across: Link
    achieved: Achieved | None = None  # measured on this very device; None: as `efficiency.toml` says

    @property
    def is_cpu(self) -> bool:
        """Whether it is a core of a CPU, from the catalogue or measured."""
        return self.name == "CPU"

    def rate(self, precision: str) -> float:
        """Peak FLOP/s in a precision; a UserError if the device has none."""
        if precision not in PRECISIONS:
            hint = did_you_mean(precision, PRECISIONS)
            raise UserError(f"unknown precision {precision!r}; {hint}", "precision.unknown")
        rate: float | None = getattr(self.peak, precision)
        if rate is None:
            has = [name for name in PRECISIONS if getattr(self.peak, name) is not None]
            near = "; nearest: --precision fp16" if precision == "bf16" and self.peak.fp16 else ""
            none = f"{self.name} has no {precision} rate; it has {', '.join(has) or 'none'}{near}"
            raise UserError(none, "precision.accelerator")
        return rate


# Latency per hop: the ring/Simple entries of `hwLat` in NCCL's own tuning model (src/graph/tuning.cc, 2.2x: NVLink 3.4,
# PCIe 5.7, network 14.0 us). Simple is the protocol of messages of megabytes, which training sends; small messages
# (LL) see 0.6, 1.0 and 2.7 us. NCCL makes no difference between InfiniBand and RoCE, so neither do we.
_NVLINK, _PCIE, _RDMA = 3.4 * us, 5.7 * us, 14.0 * us
_TCP = 50 * us  # assumption: a kernel TCP round trip through one switch is 50-100 us, and gloo/NCCL sockets add a copy

LINKS = {
    link.name: link
    for link in (
        Link(300 * GB, _NVLINK, "NVLink3"),  # A100 datasheet: 600 GB/s both ways
        Link(200 * GB, _NVLINK, "NVLink-400"),  # A800 and H800: 400 GB/s both ways (arXiv 2505.09343, section 4.1)
        Link(450 * GB, _NVLINK, "NVLink4"),  # H100 and H200 datasheets: 900 GB/s both ways
        Link(900 * GB, _NVLINK, "NVLink5"),  # Blackwell datasheet: 1.8 TB/s both ways
        # MI300X and MI355X datasheets: to each of seven others 128 and 153.6 GB/s both ways. Latency: assumed NVLink's.
        Link(448 * GB, _NVLINK, "InfinityFabric3"),
        Link(537.6 * GB, _NVLINK, "InfinityFabric4"),
        Link(31.5 * GB, _PCIE, "PCIe4"),  # 16 lanes x 16 GT/s x 128/130 coding; datasheets round to 64 GB/s both ways
        Link(63.0 * GB, _PCIE, "PCIe5"),  # 16 lanes x 32 GT/s x 128/130
        Link(200 * Gb, _RDMA, "InfiniBand-HDR"),  # ConnectX-6: 200 Gb/s a port
        Link(400 * Gb, _RDMA, "InfiniBand-NDR"),  # ConnectX-7: 400 Gb/s a port
        Link(800 * Gb, _RDMA, "InfiniBand-XDR"),  # ConnectX-8: 800 Gb/s a port
        Link(100 * Gb, _RDMA, "RoCE-100G"),
        Link(200 * Gb, _RDMA, "RoCE-200G"),
        Link(400 * Gb, _RDMA, "RoCE-400G"),
        Link(1 * Gb, _TCP, "Ethernet-1G"),
        Link(10 * Gb, _TCP, "Ethernet-10G"),
        Link(25 * Gb, _TCP, "Ethernet-25G"),
        Link(100 * Gb, _TCP, "Ethernet-100G"),
        # gloo between two processes of one machine: 3.1 GB/s and 97 us measured one way, on a 2-core virtual machine.
        Link(3 * GB, 100 * us, "Gloo-local"),
    )
}

# What a Hopper, or another chip, computes at best, and the paper that says so.
Rated = tuple[Rates, str]
_A100: Rated = (
    Rates(fp64=19.5 * T, fp32=19.5 * T, tf32=156 * T, bf16=312 * T, fp16=312 * T),
    "A100 datasheet (SXM): dense, beside sparse; fp64 is the tensor-core line",
)
_HOPPER: Rated = (  # the NVL board is slower, too, and has no entry
    Rates(fp64=66.9 * T, fp32=66.9 * T, tf32=494.7 * T, bf16=989.4 * T, fp16=989.4 * T, fp8=1978.9 * T),
    "H100 whitepaper, SXM5 column, without sparsity (datasheets print it with); fp64 is the tensor-core line",
)
_H100_PCIE: Rated = (
    Rates(fp64=51.2 * T, fp32=51.2 * T, tf32=378 * T, bf16=756 * T, fp16=756 * T, fp8=1513 * T),
    "H100 whitepaper, PCIe column, without sparsity; fp64 is the tensor-core line",
)
_H800: Rated = (
    Rates(fp64=1 * T, fp32=66.9 * T, tf32=494.7 * T, bf16=989.4 * T, fp16=989.4 * T, fp8=1978.9 * T),
    "H800 datasheet, SXM5: as the H100's, but 1 TFLOPS in fp64",
)
_B200: Rated = (
    Rates(fp64=37 * T, fp32=75 * T, tf32=1100 * T, bf16=2250 * T, fp16=2250 * T, fp8=4500 * T, fp4=9000 * T),
    "Blackwell datasheet, HGX B200 column, per GPU: sparse 2.2, 4.5, 9 and 18 PFLOPS halved",
)
_GB200: Rated = (
    Rates(fp64=40 * T, fp32=80 * T, tf32=1250 * T, bf16=2500 * T, fp16=2500 * T, fp8=5000 * T, fp4=10000 * T),
    "Blackwell datasheet, GB200 NVL72 column, per GPU: sparse 2.5, 5, 10 and 20 PFLOPS halved",
)
_B300: Rated = (
    Rates(fp64=1.3 * T, fp32=77 * T, tf32=1100 * T, bf16=2250 * T, fp16=2250 * T, fp8=4500 * T, fp4=13500 * T),
    "Blackwell Ultra datasheet, HGX B300 column, per GPU: dense bf16 and fp8 as the B200's; fp4 108 dense of eight",
)
_GB300: Rated = (
    Rates(fp64=1.4 * T, fp32=80 * T, tf32=1250 * T, bf16=2500 * T, fp16=2500 * T, fp8=5000 * T, fp4=15000 * T),
    "GB300 NVL72 datasheet, per GPU: 360 PFLOPS sparse bf16 and 720 fp8 in a rack of 72, halved; 1,080 dense fp4",
)
_L40S: Rated = (
    Rates(fp64=1.43 * T, fp32=91.6 * T, tf32=183 * T, bf16=362.05 * T, fp16=362.05 * T, fp8=733 * T),
    "L40S datasheet: dense, beside sparse; fp64 is 1/64 of fp32 as in all of Ada",
)
_A10G: Rated = (
    Rates(fp64=0.55 * T, fp32=35 * T, tf32=35 * T, bf16=70 * T, fp16=70 * T),
    "A10G datasheet (AWS, G5 instances): dense, beside sparse; fp64 is 1/64 of fp32",
)
_RTX4090: Rated = (
    Rates(fp64=1.29 * T, fp32=82.6 * T, tf32=82.6 * T, bf16=165.2 * T, fp16=165.2 * T, fp8=330.3 * T),
    "Ada whitepaper, appendix A: fp32 accumulation, half of what fp16 accumulation gives; fp64 is 1/64 of fp32",
)
_RTX5090: Rated = (
    Rates(fp64=1.64 * T, fp32=104.8 * T, tf32=104.8 * T, bf16=209.5 * T, fp16=209.5 * T, fp8=419 * T),
    "RTX Blackwell whitepaper, appendix A: fp32 accumulation, dense; fp64 is 1/64 of fp32",
)
_CDNA3: Rated = (
    Rates(fp64=163.4 * T, fp32=163.4 * T, tf32=653.7 * T, bf16=1307.4 * T, fp16=1307.4 * T, fp8=2614.9 * T),
    "Instinct MI300X and MI325X datasheets: matrix cores, without sparsity",
)
_CDNA4: Rated = (
    Rates(fp64=78.6 * T, fp32=157.3 * T, bf16=2516.6 * T, fp16=2516.6 * T, fp8=5033.2 * T),
    "Instinct MI355X datasheet: matrix cores, without sparsity; no tf32",
)
_MI350X: Rated = (
    Rates(fp64=72.1 * T, fp32=144.2 * T, bf16=2306.9 * T, fp16=2306.9 * T, fp8=4613.7 * T),
    "Instinct MI350X datasheet: matrix cores, without sparsity, at 2.2 GHz of the MI355X's 2.4; no tf32",
)
_V100: Rated = (
    Rates(fp64=7.8 * T, fp32=15.7 * T, fp16=125 * T),
    "V100 datasheet, SXM2: 125 tensor TFLOPS in fp16; bf16 came with the A100",
)
_TPU_V4: Rated = (Rates(bf16=275 * T, fp16=275 * T, fp32=69 * T), "arXiv 2304.01433, table 4")
_CPU: Rated = (
    Rates(fp64=0.048 * T, fp32=0.096 * T, bf16=0.096 * T, fp16=0.096 * T),
    "nominal: one core x 3 GHz x 2 AVX2 FMA units x 8 lanes x 2 FLOP, bf16 and fp16 as fp32; measure before "
    "believing a time",
)
_NVLINK2 = Link(150 * GB, _NVLINK, "NVLink2")
_TORUS = Link(150 * GB, 2 * us, "ICI")

SOURCES: dict[str, tuple[str, str]] = {}  # by accelerator: of its rates; of its memory and links
# Where such a paper is. These were read in what others quote of them, as PyTorch does of the MI300X's in
# torch/_inductor/analysis/device_info.py.
PAGES = {
    "MI300X": "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
    "MI325X": "https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html",
    "MI350X": "https://www.amd.com/en/products/accelerators/instinct/mi350/mi350x.html",
    "MI355X": "https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html",
    "A10G": "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
    "RTX5090": "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
}


def _device(name: str, rated: Rated, memory: int, bandwidth: float, *links: Link | str, source: str) -> Accelerator:
    """Memory in MiB, its bandwidth in GB/s, the links inside and across nodes.

    Memory is what the driver reports as total (nvidia-smi, rocm-smi), because that is what a plan must fit into: the
    box says "80 GB" where the driver says 81559 MiB. The context and NCCL take their part of it later.
    """
    inside, across = (LINKS[link] if isinstance(link, str) else link for link in links)
    size, rate = memory * MiB, bandwidth * GB
    SOURCES[name] = rated[1], source
    return Accelerator(name=name, peak=rated[0], memory=size, memory_bandwidth=rate, inside=inside, across=across)


_A100_NODE = "A100 datasheet (SXM): bandwidth. DGX A100 datasheet: 8 compute ports for 8 GPUs"
_A100_PCIE = (
    "A100 datasheet (PCIe): bandwidth; a bridge of NVLink joins two boards at most, so PCIe is taken. Assumption: "
    "ports as DGX A100's"
)
# A node of a cluster here is an NVLink domain, not a motherboard: a GB200 NVL72 rack is one node of 72 GPUs, and two
# racks are written "2x72xGB200" although the operating system counts 36 trays of 4 GPUs.
_SEVEN = "seven links to the other seven GPUs; 16 MiB of the memory are the driver's. Assumption: a 400 Gb/s port each"
ACCELERATORS = {
    device.name: device
    for device in (
        _device("A100-40", _A100, 40960, 1555, "NVLink3", "InfiniBand-HDR", source=_A100_NODE),
        _device("A100-80", _A100, 81920, 2039, "NVLink3", "InfiniBand-HDR", source=_A100_NODE),
        _device("A100-PCIE-40", _A100, 40960, 1555, "PCIe4", "InfiniBand-HDR", source=_A100_PCIE),
        _device("A100-PCIE-80", _A100, 81920, 1935, "PCIe4", "InfiniBand-HDR", source=_A100_PCIE),
        _device("A800", _A100, 81920, 2039, "NVLink-400", "InfiniBand-HDR",
                source="A800 datasheet (SXM): an A100-80 with NVLink of 400 GB/s. Assumption: ports as DGX A100's"),
        _device("H100", _HOPPER, 81559, 3350, "NVLink4", "InfiniBand-NDR",
                source="H100 datasheet: 3.35 TB/s. DGX H100 user guide: one ConnectX-7 port beside each GPU"),
        _device("H100-96", _HOPPER, 97871, 2400, "NVLink4", "InfiniBand-NDR",
                source="README of torchtitan's benchmarks: 96 GB of HBM2e at 2.4 TB/s, limited to 500 W of 700"),
        _device("H100-PCIE", _H100_PCIE, 81559, 2039, "PCIe5", "InfiniBand-NDR",
                source="H100 whitepaper (PCIe): bandwidth; a bridge of NVLink joins two boards at most, so PCIe is "
                "taken. Assumption: ports as DGX H100's"),
        _device("H200", _HOPPER, 143771, 4800, "NVLink4", "InfiniBand-NDR",
                source="H200 datasheet: 4.8 TB/s. DGX H200 is DGX H100 with other GPUs"),
        _device("H800", _H800, 81559, 3350, "NVLink-400", "InfiniBand-NDR",
                source="H800 datasheet: 3.35 TB/s. arXiv 2505.09343, section 4: NVLink 400 GB/s, 8 ports of 400 Gb/s"),
        _device("B200", _B200, 183359, 7700, "NVLink5", "InfiniBand-NDR",
                source="Blackwell datasheet: 7.7 TB/s (first papers said 8). DGX B200 user guide: 8 ConnectX-7"),
        _device("GB200", _GB200, 189471, 8000, "NVLink5", "InfiniBand-NDR",
                source="Blackwell datasheet: 8 TB/s. DGX GB200 datasheet: 72 ConnectX-7 ports of 400 Gb/s"),
        _device("B300", _B300, 275040, 8000, "NVLink5", "InfiniBand-XDR",
                source="Blackwell Ultra datasheet: 8 TB/s. HGX B300: 8 ConnectX-8 of 800 Gb/s"),
        _device("GB300", _GB300, 284208, 8000, "NVLink5", "InfiniBand-XDR",
                source="GB300 NVL72 datasheet: 8 TB/s, 72 ConnectX-8 of 800 Gb/s"),
        _device("MI300X", _CDNA3, 196592, 5300, "InfinityFabric3", "RoCE-400G",
                source=f"Instinct MI300X datasheet: 192 GB, 5.3 TB/s, {_SEVEN}"),
        _device("MI325X", _CDNA3, 262128, 6000, "InfinityFabric3", "RoCE-400G",
                source=f"Instinct MI325X datasheet: 256 GB, 6 TB/s, {_SEVEN}"),
        _device("MI350X", _MI350X, 294896, 8000, "InfinityFabric4", "RoCE-400G",
                source=f"Instinct MI350X datasheet: 288 GB, 8 TB/s, {_SEVEN}"),
        _device("MI355X", _CDNA4, 294896, 8000, "InfinityFabric4", "RoCE-400G",
                source=f"Instinct MI355X datasheet: 288 GB, 8 TB/s, {_SEVEN}"),
        _device("V100", _V100, 32768, 900, _NVLINK2, "RoCE-100G",
                source="V100 datasheet: 900 GB/s, NVLink 300 GB/s both ways. DGX-1: 4 adapters of 100 Gb/s for 8 GPUs"),
        _device("V100-16", _V100, 16384, 900, _NVLINK2, "RoCE-100G",
                source="V100 datasheet: 16 GB, else as the 32 GB one. DGX-1: 4 adapters of 100 Gb/s for 8 GPUs"),
        _device("L40S", _L40S, 46068, 864, "PCIe4", "RoCE-100G",
                source="L40S datasheet: 864 GB/s; memory with ECC on; no NVLink. Assumption: 400 Gb/s for four"),
        _device("A10G", _A10G, 23028, 600, "PCIe4", "Ethernet-10G",
                source="A10G datasheet: 600 GB/s; memory with ECC on. AWS: 100 Gb/s for the eight of a g5.48xlarge"),
        # No peer access between GeForces: traffic goes through host memory, so PCIe is a ceiling.
        _device("RTX4090", _RTX4090, 24564, 1008, "PCIe4", "Ethernet-10G",
                source="Ada whitepaper: 384 bits x 21 Gb/s. Assumption: a server of eight behind one 100 Gb/s port"),
        _device("RTX5090", _RTX5090, 32607, 1792, "PCIe5", "Ethernet-10G",
                source="RTX Blackwell whitepaper: 512 bits x 28 Gb/s. Assumption: as the RTX4090's server"),
        _device("TPU-v4", _TPU_V4, 32768, 1200, _TORUS, _TORUS,
                source="arXiv 2304.01433, table 4: six links of 50 GB/s in a 3D torus, which also joins the racks"),
        _device("CPU", _CPU, 4096, 12.8, "Gloo-local", "Ethernet-1G",
                source="assumption: a laptop of 4 cores, 16 GiB and two channels of DDR4-3200, shared by 4 ranks"),
    )
}  # fmt: skip

# Other spellings, without case, spaces, dashes and makers; among them what torch.cuda.get_device_name() says.
_SPELLINGS = {
    "A100-40": "a10040gb a100sxm40 a100sxm40gb a100sxm440gb a10040gbsxm a10040gbsxm4",
    "A100-80": "a100 a10080gb a100sxm a100sxm4 a100sxm80 a100sxm80gb a100sxm480gb a10080gbsxm a10080gbsxm4",
    "A100-PCIE-40": "a100pcie40gb a10040gbpcie a10040pcie",
    "A100-PCIE-80": "a100pcie80gb a10080gbpcie a10080pcie",
    "A800": "a80080 a80080gb a800sxm a800sxm4 a800sxm80gb a800sxm480gb a80080gbsxm",
    "H100": "h10080 h10080gb h10080gbsxm h10080gbsxm700w h10080gbhbm3 h100sxm h100sxm5",
    "H100-PCIE": "h100pcie80gb h10080gbpcie",
    "H100-96": "h10096gbhbm2e500w",
    "H800": "h80080 h80080gb h800sxm h800sxm5 h800sxm80gb h80080gbsxm",
    "H200": "h200sxm h200141gb h200141gbsxm",
    "B200": "b200sxm b200192gb b200180gb",
    "GB200": "gb200nvl72",
    "B300": "b300sxm b300288gb",
    "GB300": "gb300nvl72",
    "MI300X": "mi300x192gb mi300xoam",
    "MI325X": "mi325x256gb mi325xoam",
    "MI350X": "mi350x288gb mi350xoam",
    "MI355X": "mi355x288gb mi355xoam",
    "L40S": "l40s48gb",
    "A10G": "a10g24gb",
    "RTX4090": "4090 rtx409024gb",
    "RTX5090": "5090 rtx509032gb",
    "V100": "v100sxm v100sxm2 v100sxm32gb v100sxm232gb v10032gb v10032 v10032gbsxm2",
    "V100-16": "v10016gb v100sxm16gb v100sxm216gb v10016gbsxm2",
    "TPU-v4": "tpuv4",
}


# Devices that the catalogue does not have, and whose names are near to some that it has.
_NOT_HERE = (
    "a2 a10 a16 a30 a40 a4000 a5000 a6000 rtxa4000 rtxa5000 rtxa6000 rtx6000 b100 gb10 gh200 h20 l4 l20 l40 p100 t4 "
    "mi100 mi210 mi250 mi250x mi300a rtx2080 rtx3080 rtx3090 3090 rtx4080 4080 rtx5080 5080 tpuv5e tpuv5p tpuv6e"
)


# GPUs of the node an accelerator usually sits in, where not 8; None: any number of them is one.
_NODES = {"GB200": 72, "GB300": 72, "TPU-v4": None, "CPU": None}


def usual_node(accelerator: str) -> int | None:
    """How many of them a node usually has at most; None if there is no usual number."""
    return _NODES.get(accelerator, 8) if accelerator in ACCELERATORS else None


def _plain(name: str) -> str:
    """A name in lower case, without maker's names and separators."""
    return re.sub(r"nvidia|geforce|tesla|amd|instinct|[\s_-]", "", name.lower())


def find_accelerator(name: str) -> Accelerator:
    """The catalogue's entry under any of its spellings."""
    spelled = {spelling: ACCELERATORS[known] for known, all_ in _SPELLINGS.items() for spelling in all_.split()}
    return _find("accelerator", name, ACCELERATORS, spelled)


def find_link(name: str) -> Link:
    return _find("link", name, LINKS, {})


def _find(what: str, name: str, known: dict[str, D], spelled: dict[str, D]) -> D:
    entries = spelled | {_plain(key): entry for key, entry in known.items()}
    if _plain(name) not in entries:
        hint = _suggestion(name) if what == "accelerator" else did_you_mean(name, list(known))
        unknown = f"unknown {what} {name!r}; {hint}"
        raise UserError(unknown, "cluster.accelerator" if what == "accelerator" else "cluster.link")
    return entries[_plain(name)]


def _suggestion(name: str) -> str:
    """The hint for an unknown name: boards of the same chip, the nearest spelling, or, if it is the name of a device
    that the catalogue does not have, how to measure it."""
    if same := _boards(_plain(name)):
        return f"did you mean {either(same)}?"
    if (device := _plain(re.sub(r"(?i)[\s-]\d+ ?gb.*", "", name))) in _NOT_HERE.split():
        measured = f"`fivefold calibrate -o {device}.toml` on one measures it for the planner"
        return f"the catalogue has {', '.join(ACCELERATORS)}; {measured}"
    return did_you_mean(name, list(ACCELERATORS))


def _boards(name: str) -> list[str]:
    """The boards of the chip that a name begins with, for 'H100-PCIe' those of the H100: those that the name is the
    beginning of, or else all."""
    same = [board for board in ACCELERATORS if name.startswith(_plain(board.partition("-")[0]))]
    return [repr(board) for board in same if _plain(board).startswith(name)] or [repr(board) for board in same]
