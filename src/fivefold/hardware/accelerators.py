"""The catalogue: what each accelerator can do at best, and the links of the node it usually sits in.

Every number is a ceiling taken from the maker's papers; how much of it a kernel or a collective reaches is the
planner's business. Each line says where its figure comes from. Assumptions are called assumptions.
"""

import re
from typing import TypeVar

from msgspec import Struct

from fivefold.hardware.efficiency import Achieved
from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean

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
        """One core, which is its own host; in the catalogue, or measured."""
        return self.name == "CPU"

    def rate(self, precision: str) -> float:
        """Peak FLOP/s in a precision; a sentence where the device has none."""
        if precision not in PRECISIONS:
            raise UserError(f"unknown precision {precision!r}; {did_you_mean(precision, PRECISIONS)}")
        rate: float | None = getattr(self.peak, precision)
        if rate is None:
            has = [name for name in PRECISIONS if getattr(self.peak, name) is not None]
            raise UserError(f"{self.name} has no {precision} rate; it has {', '.join(has) or 'none'}")
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
        Link(450 * GB, _NVLINK, "NVLink4"),  # H100 and H200 datasheets: 900 GB/s both ways
        Link(900 * GB, _NVLINK, "NVLink5"),  # Blackwell datasheet: 1.8 TB/s both ways
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

# A100 datasheet (SXM): printed dense beside sparse; fp64 is the tensor-core line. The two sizes differ in memory only.
_A100 = Rates(fp64=19.5 * T, fp32=19.5 * T, tf32=156 * T, bf16=312 * T, fp16=312 * T)
# H100 whitepaper, SXM5 column, "without sparsity" (the datasheet prints the sparse 989, 1979 and 3958); fp64 is the
# tensor-core line. The H200 datasheet prints the same compute. The PCIe and NVL boards are slower: not these entries.
_HOPPER = Rates(fp64=66.9 * T, fp32=66.9 * T, tf32=494.7 * T, bf16=989.4 * T, fp16=989.4 * T, fp8=1978.9 * T)
# Blackwell datasheet, HGX B200 column, per GPU: sparse 2.2, 4.5 and 9 PFLOPS halved; the rest as printed.
_B200 = Rates(fp64=37 * T, fp32=75 * T, tf32=1100 * T, bf16=2250 * T, fp16=2250 * T, fp8=4500 * T)
# Blackwell datasheet, GB200 NVL72 column, per GPU: sparse 2.5, 5 and 10 PFLOPS halved; the rest as printed.
_GB200 = Rates(fp64=40 * T, fp32=80 * T, tf32=1250 * T, bf16=2500 * T, fp16=2500 * T, fp8=5000 * T)
# Blackwell Ultra datasheet, HGX B300 column, per GPU: dense bf16 and fp8 as the B200's, more memory.
_B300 = Rates(fp64=1.3 * T, fp32=77 * T, tf32=1100 * T, bf16=2250 * T, fp16=2250 * T, fp8=4500 * T)
# GB300 NVL72 datasheet, per GPU: 360 PFLOPS sparse bf16 and 720 fp8 in a rack of 72, halved.
_GB300 = Rates(fp64=1.4 * T, fp32=80 * T, tf32=1250 * T, bf16=2500 * T, fp16=2500 * T, fp8=5000 * T)
# L40S datasheet: tf32 183, bf16 and fp16 362.05, fp8 733 dense; fp64 is 1/64 of fp32 as in all of Ada.
_L40S = Rates(fp64=1.43 * T, fp32=91.6 * T, tf32=183 * T, bf16=362.05 * T, fp16=362.05 * T, fp8=733 * T)
# Ada whitepaper: fp16 with fp32 accumulation, half of the 330 that fp16 accumulation would give; fp64 1/64.
_RTX4090 = Rates(fp64=1.29 * T, fp32=82.6 * T, tf32=82.6 * T, bf16=165.2 * T, fp16=165.2 * T, fp8=330.3 * T)
# V100 datasheet, SXM2: 125 tensor TFLOPS in fp16 (bf16 came with the A100), 32 GB at 900 GB/s, 300 GB/s both ways.
_V100, _NVLINK2 = Rates(fp64=7.8 * T, fp32=15.7 * T, fp16=125 * T), Link(150 * GB, _NVLINK, "NVLink2")
# arXiv 2304.01433, table 4: 275 TFLOP/s bf16, 32 GiB at 1.2 TB/s, six links of 50 GB/s in a 3D torus. Racks are joined
# optically at the same rate: both links are the torus.
_TPU_V4, _TORUS = Rates(bf16=275 * T, fp16=275 * T, fp32=69 * T), Link(150 * GB, 2 * us, "ICI")
# One rank of gloo on a laptop, taken as 4 cores, 16 GiB and two channels of DDR4-3200 (25.6 GB/s each) shared by 4
# ranks. One core x 3 GHz x 2 AVX2 FMA units x 8 lanes x 2 FLOP; fp64 has 4 lanes, bf16 and fp16 compute as fp32.
# Nominal, so that planning works anywhere; measure and override before believing a time.
_CPU = Rates(fp64=0.048 * T, fp32=0.096 * T, bf16=0.096 * T, fp16=0.096 * T)


def _device(name: str, peak: Rates, memory: int, bandwidth: float, *links: Link | str) -> Accelerator:
    """Memory in MiB, its bandwidth in GB/s, the links inside and across nodes.

    Memory is what the driver reports as total (nvidia-smi), because that is what a plan must fit into: the box says
    "80 GB" where the driver says 81559 MiB. The context and NCCL take their part of it later.
    """
    inside, across = (LINKS[link] if isinstance(link, str) else link for link in links)
    size, rate = memory * MiB, bandwidth * GB
    return Accelerator(name=name, peak=peak, memory=size, memory_bandwidth=rate, inside=inside, across=across)


ACCELERATORS = {
    device.name: device
    for device in (
        # A100 datasheet, 40GB and 80GB SXM: bandwidth. DGX A100 datasheet: 8 compute ports for 8 GPUs.
        _device("A100-40", _A100, 40960, 1555, "NVLink3", "InfiniBand-HDR"),
        _device("A100-80", _A100, 81920, 2039, "NVLink3", "InfiniBand-HDR"),
        # H100 datasheet: 3.35 TB/s. DGX H100 user guide: one ConnectX-7 port beside each GPU.
        _device("H100", _HOPPER, 81559, 3350, "NVLink4", "InfiniBand-NDR"),
        # The board of torchtitan's benchmarks (its README): 96 GB of HBM2e at 2.4 TB/s, limited to 500 W of 700.
        _device("H100-96", _HOPPER, 97871, 2400, "NVLink4", "InfiniBand-NDR"),
        # H200 datasheet: 4.8 TB/s. DGX H200 is DGX H100 with other GPUs.
        _device("H200", _HOPPER, 143771, 4800, "NVLink4", "InfiniBand-NDR"),
        # Blackwell datasheet: 7.7 TB/s (first papers said 8). DGX B200 user guide: 8 single-port ConnectX-7.
        _device("B200", _B200, 183359, 7700, "NVLink5", "InfiniBand-NDR"),
        # A node of a cluster here is an NVLink domain, not a motherboard: a GB200 NVL72 rack is one node of 72 GPUs,
        # and two racks are written "2x72xGB200" although the operating system counts 36 trays of 4 GPUs.
        # Blackwell datasheet: 8 TB/s. DGX GB200 datasheet: 72 ConnectX-7 ports of 400 Gb/s.
        _device("GB200", _GB200, 189471, 8000, "NVLink5", "InfiniBand-NDR"),
        _device("TPU-v4", _TPU_V4, 32768, 1200, _TORUS, _TORUS),
        # HGX B300: 8 ConnectX-8 of 800 Gb/s. GB300 NVL72: 72 of them.
        _device("B300", _B300, 275040, 8000, "NVLink5", "InfiniBand-XDR"),
        _device("GB300", _GB300, 284208, 8000, "NVLink5", "InfiniBand-XDR"),
        # DGX-1: 4 adapters of 100 Gb/s for 8 GPUs, each pair's own.
        _device("V100", _V100, 32768, 900, _NVLINK2, "RoCE-100G"),
        # L40S datasheet: 864 GB/s; memory with ECC on, as it comes; no NVLink. Assumption: a 400 Gb/s adapter for four.
        _device("L40S", _L40S, 46068, 864, "PCIe4", "RoCE-100G"),
        # Ada whitepaper: 384 bits x 21 Gb/s. The driver offers no peer access: traffic goes through host memory, so
        # PCIe is a ceiling. Assumption: a server of eight cards behind one 100 Gb/s port.
        _device("RTX4090", _RTX4090, 24564, 1008, "PCIe4", "Ethernet-10G"),
        # Assumption: the port that a laptop has.
        _device("CPU", _CPU, 4096, 12.8, "Gloo-local", "Ethernet-1G"),
    )
}

# Other spellings, without case, spaces, dashes and makers; among them what torch.cuda.get_device_name() says.
_SPELLINGS = {
    "A100-40": "a10040gb a100sxm440gb a10040gbsxm",
    "A100-80": "a100 a10080gb a100sxm a100sxm4 a100sxm480gb a10080gbsxm",
    "H100": "h10080 h10080gb h10080gbsxm h10080gbsxm700w h10080gbhbm3 h100sxm h100sxm5",
    "H100-96": "h10096gbhbm2e500w",
    "H200": "h200sxm h200141gb h200141gbsxm",
    "B200": "b200sxm",
    "GB200": "gb200nvl72",
}


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())


def find_accelerator(name: str) -> Accelerator:
    """The catalogue's entry under any of its spellings."""
    spelled = {spelling: ACCELERATORS[known] for known, all_ in _SPELLINGS.items() for spelling in all_.split()}
    return _find("accelerator", name, ACCELERATORS, spelled)


def find_link(name: str) -> Link:
    return _find("link", name, LINKS, {})


def _find(what: str, name: str, known: dict[str, D], spelled: dict[str, D]) -> D:
    found = spelled | {_plain(one): entry for one, entry in known.items()}
    if _plain(name) not in found:
        raise UserError(f"unknown {what} {name!r}; {did_you_mean(name, list(known))}")
    return found[_plain(name)]
