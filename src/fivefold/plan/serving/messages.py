"""Links under the protocol of small messages, which is what a decode step sends."""

from dataclasses import replace

from msgspec import structs

from fivefold.hardware.accelerators import LINKS, Link
from fivefold.plan.cost.kernels import Device
from fivefold.plan.cost.links import Wires

# NCCL's LL protocol has these latencies a hop where Simple, which the catalogue has for training, has
# the ones on the left (src/graph/tuning.cc, `hwLat`); it sends a flag with every word, hence half the bandwidth. Within
# a node servers have kernels of their own that cost about a launch beside the hops (vLLM's and SGLang's one-shot and
# two-shot all-reduces: 4-10 us for KBs, 20-45 us for 2 MB, on 2-8 H100s); between nodes NCCL adds its base latency.
FAST = {LINKS["NVLink4"].latency: 0.6e-6, LINKS["PCIe5"].latency: 1.0e-6, LINKS["InfiniBand-NDR"].latency: 2.7e-6}
FLAGGED = 0.5
NCCL_BASE = 6.8e-6


def flagged(wires: Wires) -> Wires:
    own = wires.device.accelerator
    links = structs.replace(own, inside=_flagged(own.inside), across=_flagged(own.across))
    return replace(wires, device=Device(links, wires.device.reached))


def _flagged(link: Link) -> Link:
    """A link of the catalogue for small messages; measured latencies are what they are."""
    if link.latency not in FAST:
        return link
    return structs.replace(link, latency=FAST[link.latency], bandwidth=FLAGGED * link.bandwidth)
