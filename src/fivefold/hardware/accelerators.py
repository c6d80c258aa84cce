"""The catalogue: what each accelerator can do at best, and the links of the node it usually sits in.

Every number is a ceiling taken from the maker's papers; how much of it a kernel or a collective reaches is the
planner's business. Each line says where its figure comes from. Assumptions are called assumptions.
"""

import re

from msgspec import Struct

from fivefold.hardware.efficiency import Achieved
from fivefold.support.errors import UserError
from fivefold.support.formatting import did_you_mean

GB, T, MiB, us = 1e9, 1e12, 1 << 20, 1e-6


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


def _gbit(rate: float) -> float:
    return rate * 1e9 / 8


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
        Link(_gbit(200), _RDMA, "InfiniBand-HDR"),  # ConnectX-6: 200 Gb/s a port
        Link(_gbit(400), _RDMA, "InfiniBand-NDR"),  # ConnectX-7: 400 Gb/s a port
        Link(_gbit(800), _RDMA, "InfiniBand-XDR"),  # ConnectX-8: 800 Gb/s a port
        Link(_gbit(100), _RDMA, "RoCE-100G"),
        Link(_gbit(200), _RDMA, "RoCE-200G"),
        Link(_gbit(400), _RDMA, "RoCE-400G"),
        Link(_gbit(1), _TCP, "Ethernet-1G"),
        Link(_gbit(10), _TCP, "Ethernet-10G"),
        Link(_gbit(25), _TCP, "Ethernet-25G"),
        Link(_gbit(100), _TCP, "Ethernet-100G"),
        # gloo between two processes of one machine: 3.1 GB/s and 97 us measured one way, on a 2-core virtual machine.
        Link(3 * GB, 100 * us, "Gloo-local"),
    )
}

# A100 datasheet (SXM): printed dense beside sparse; fp64 is the tensor-core line. The two sizes differ in memory only.
_A100 = Rates(fp64=19.5 * T, fp32=19.5 * T, tf32=156 * T, bf16=312 * T, fp16=312 * T)
# H100 whitepaper, SXM5 column, "without sparsity" (the datasheet prints the sparse 989, 1979 and 3958); fp64 is the
# tensor-core line. The H200 datasheet prints the same compute. The PCIe and NVL boards are slower: not these entries.
_HOPPER = Rates(fp64=66.9 * T, fp32=66.9 * T, tf32=494.7 * T, bf16=989.4 * T, fp16=989.4 * T, fp8=1978.9 * T)

# Memory is what the driver reports as total (nvidia-smi), because that is what a plan must fit into: the box says
# "80 GB" where the driver says 81559 MiB. The context and NCCL take their part of it later.
ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator(
            name="A100-40",
            peak=_A100,
            memory=40960 * MiB,
            memory_bandwidth=1555 * GB,  # A100 datasheet, 40GB SXM
            inside=LINKS["NVLink3"],
            across=LINKS["InfiniBand-HDR"],  # DGX A100 datasheet: 8 compute ports for 8 GPUs
        ),
        Accelerator(
            name="A100-80",
            peak=_A100,
            memory=81920 * MiB,
            memory_bandwidth=2039 * GB,  # A100 datasheet, 80GB SXM
            inside=LINKS["NVLink3"],
            across=LINKS["InfiniBand-HDR"],  # as above
        ),
        Accelerator(
            name="H100",
            peak=_HOPPER,
            memory=81559 * MiB,
            memory_bandwidth=3350 * GB,  # H100 datasheet: 3.35 TB/s
            inside=LINKS["NVLink4"],
            across=LINKS["InfiniBand-NDR"],  # DGX H100 user guide: one ConnectX-7 port beside each GPU
        ),
        Accelerator(
            # The board of torchtitan's benchmarks (its README): 96 GB of HBM2e at 2.4 TB/s, limited to 500 W of 700.
            name="H100-96",
            peak=_HOPPER,
            memory=97871 * MiB,
            memory_bandwidth=2400 * GB,
            inside=LINKS["NVLink4"],
            across=LINKS["InfiniBand-NDR"],
        ),
        Accelerator(
            name="H200",
            peak=_HOPPER,
            memory=143771 * MiB,
            memory_bandwidth=4800 * GB,  # H200 datasheet: 4.8 TB/s
            inside=LINKS["NVLink4"],
            across=LINKS["InfiniBand-NDR"],  # DGX H200 is DGX H100 with other GPUs
        ),
        Accelerator(
            name="B200",
            # Blackwell datasheet, HGX B200 column, per GPU: sparse 2.2, 4.5 and 9 PFLOPS halved; the rest as printed
            peak=Rates(fp64=37 * T, fp32=75 * T, tf32=1100 * T, bf16=2250 * T, fp16=2250 * T, fp8=4500 * T),
            memory=183359 * MiB,
            memory_bandwidth=7700 * GB,  # same: 7.7 TB/s (first papers said 8)
            inside=LINKS["NVLink5"],
            across=LINKS["InfiniBand-NDR"],  # DGX B200 user guide: 8 single-port ConnectX-7
        ),
        # A node of a cluster here is an NVLink domain, not a motherboard: a GB200 NVL72 rack is one node of 72 GPUs,
        # and two racks are written "2x72xGB200" although the operating system counts 36 trays of 4 GPUs.
        Accelerator(
            name="GB200",
            # Blackwell datasheet, GB200 NVL72 column, per GPU: sparse 2.5, 5 and 10 PFLOPS halved; the rest as printed
            peak=Rates(fp64=40 * T, fp32=80 * T, tf32=1250 * T, bf16=2500 * T, fp16=2500 * T, fp8=5000 * T),
            memory=189471 * MiB,
            memory_bandwidth=8000 * GB,  # same: 8 TB/s
            inside=LINKS["NVLink5"],
            across=LINKS["InfiniBand-NDR"],  # DGX GB200 datasheet: 72 ConnectX-7 ports of 400 Gb/s
        ),
        Accelerator(
            name="TPU-v4",
            # arXiv 2304.01433, table 4: 275 TFLOP/s bf16, 32 GiB at 1.2 TB/s, six links of 50 GB/s in a 3D torus. Racks
            # are joined optically at the same rate: both links are the torus.
            peak=Rates(bf16=275 * T, fp16=275 * T, fp32=69 * T),
            memory=32768 * MiB,
            memory_bandwidth=1200 * GB,
            inside=Link(150 * GB, 2 * us, "ICI"),
            across=Link(150 * GB, 2 * us, "ICI"),
        ),
        Accelerator(
            name="B300",
            # Blackwell Ultra datasheet, HGX B300 column, per GPU: dense bf16 and fp8 as the B200's, more memory
            peak=Rates(fp64=1.3 * T, fp32=77 * T, tf32=1100 * T, bf16=2250 * T, fp16=2250 * T, fp8=4500 * T),
            memory=275040 * MiB,
            memory_bandwidth=8000 * GB,
            inside=LINKS["NVLink5"],
            across=LINKS["InfiniBand-XDR"],  # HGX B300: 8 ConnectX-8 of 800 Gb/s
        ),
        Accelerator(
            name="GB300",
            # GB300 NVL72 datasheet, per GPU: 360 PFLOPS sparse bf16 and 720 fp8 in a rack of 72, halved
            peak=Rates(fp64=1.4 * T, fp32=80 * T, tf32=1250 * T, bf16=2500 * T, fp16=2500 * T, fp8=5000 * T),
            memory=284208 * MiB,
            memory_bandwidth=8000 * GB,
            inside=LINKS["NVLink5"],
            across=LINKS["InfiniBand-XDR"],  # GB300 NVL72: 72 ConnectX-8
        ),
        Accelerator(
            name="V100",
            # V100 datasheet, SXM2: 125 tensor TFLOPS in fp16 (bf16 came with the A100), 32 GB at 900 GB/s
            peak=Rates(fp64=7.8 * T, fp32=15.7 * T, fp16=125 * T),
            memory=32768 * MiB,
            memory_bandwidth=900 * GB,
            inside=Link(150 * GB, _NVLINK, "NVLink2"),  # same: 300 GB/s both ways
            across=LINKS["RoCE-100G"],  # DGX-1: 4 adapters of 100 Gb/s for 8 GPUs, each pair's own
        ),
        Accelerator(
            name="L40S",
            # L40S datasheet: tf32 183, bf16 and fp16 362.05, fp8 733 dense; fp64 is 1/64 of fp32 as in all of Ada
            peak=Rates(fp64=1.43 * T, fp32=91.6 * T, tf32=183 * T, bf16=362.05 * T, fp16=362.05 * T, fp8=733 * T),
            memory=46068 * MiB,  # with ECC on, as it comes
            memory_bandwidth=864 * GB,  # L40S datasheet
            inside=LINKS["PCIe4"],  # no NVLink
            across=LINKS["RoCE-100G"],  # assumption: one 400 Gb/s adapter for four cards
        ),
        Accelerator(
            name="RTX4090",
            # Ada whitepaper: fp16 with fp32 accumulation, half of the 330 that fp16 accumulation would give; fp64 1/64
            peak=Rates(fp64=1.29 * T, fp32=82.6 * T, tf32=82.6 * T, bf16=165.2 * T, fp16=165.2 * T, fp8=330.3 * T),
            memory=24564 * MiB,
            memory_bandwidth=1008 * GB,  # Ada whitepaper: 384 bits x 21 Gb/s
            inside=LINKS["PCIe4"],  # the driver offers no peer access: traffic goes through host memory, so a ceiling
            across=LINKS["Ethernet-10G"],  # assumption: a server of eight cards behind one 100 Gb/s port
        ),
        Accelerator(
            # One rank of gloo on a laptop, taken as 4 cores, 16 GiB and two channels of DDR4-3200 shared by 4 ranks.
            # Nominal, so that planning works anywhere; measure and override before believing a time.
            name="CPU",
            # one core x 3 GHz x 2 AVX2 FMA units x 8 lanes x 2 FLOP; fp64 has 4 lanes, bf16 and fp16 compute as fp32
            peak=Rates(fp64=0.048 * T, fp32=0.096 * T, bf16=0.096 * T, fp16=0.096 * T),
            memory=4096 * MiB,
            memory_bandwidth=12.8 * GB,  # 2 x 25.6 GB/s over 4 ranks
            inside=LINKS["Gloo-local"],
            across=LINKS["Ethernet-1G"],  # assumption: the port that a laptop has
        ),
    )
}

# Other spellings, without case, spaces, dashes and makers; among them what torch.cuda.get_device_name() says.
_ALIASES = {
    "a100": "A100-80",
    "a10040gb": "A100-40",
    "a100sxm440gb": "A100-40",
    "a10080gb": "A100-80",
    "a100sxm": "A100-80",
    "a100sxm4": "A100-80",
    "a100sxm480gb": "A100-80",
    "h10080": "H100",
    "h10080gbsxm": "H100",
    "h10080gbsxm700w": "H100",
    "h10096gbhbm2e500w": "H100-96",
    "h200141gbsxm": "H200",
    "a10080gbsxm": "A100-80",
    "a10040gbsxm": "A100-40",
    "h10080gb": "H100",
    "h10080gbhbm3": "H100",
    "h100sxm": "H100",
    "h100sxm5": "H100",
    "h200sxm": "H200",
    "h200141gb": "H200",
    "b200sxm": "B200",
    "gb200nvl72": "GB200",
}


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[\s_-]", "", name.lower())


def find_accelerator(name: str) -> Accelerator:
    """The catalogue's entry under any of its spellings."""
    by_plain = {_plain(known): known for known in ACCELERATORS} | _ALIASES
    if _plain(name) not in by_plain:
        raise UserError(f"unknown accelerator {name!r}; {did_you_mean(name, list(ACCELERATORS))}")
    return ACCELERATORS[by_plain[_plain(name)]]


def find_link(name: str) -> Link:
    """The catalogue's link of that name."""
    by_plain = {_plain(known): link for known, link in LINKS.items()}
    if _plain(name) not in by_plain:
        raise UserError(f"unknown link {name!r}; {did_you_mean(name, list(LINKS))}")
    return by_plain[_plain(name)]
