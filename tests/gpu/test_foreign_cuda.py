"""Other people's training code on a GPU: the adapters that ship, with ranks that share it over NCCL, in float64."""

import pytest

from fivefold.foreign.verify import verify_adapter
from fivefold.support.errors import UserError
from tests.gpu.nccl import needs_a_gpu

pytestmark = needs_a_gpu
LAYOUTS = {
    "huggingface": ["dp=2", "fsdp=2,accumulate=2", "dp=2,fsdp=2"],
    "pipelining": ["tp=2,sp", "fsdp=2", "pp=2,schedule=1F1B", "pp=2,schedule=ZBVZeroBubble"],
    "torchtitan": ["fsdp=2", "tp=2,sp", "cp=2", "pp=2,schedule=1F1B"],
    "megatron": ["dp=2", "tp=2,sp", "pp=2", "dp=2,zero1,overlap"],
    "megatron:experts": ["dp=2,ep=2", "tp=2,sp"],
}


@pytest.mark.parametrize("adapter", LAYOUTS)
def test_an_adapter_that_ships_is_one_process_on_cuda(adapter: str) -> None:
    try:
        certificate = verify_adapter(adapter, LAYOUTS[adapter], device="cuda", timeout=240)
    except UserError as error:
        missing = error.codes == ["adapter.package"]  # a package, or one that it imports
        if not missing and "raised ImportError: cannot import name" not in str(error):  # from an older PyTorch
            raise
        pytest.skip(str(error))
    print(certificate)
    assert certificate.device == "cuda"
    assert certificate.ok, certificate
    assert certificate.worst < 1e-10
