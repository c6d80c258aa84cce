"""torchtitan 0.2's Llama 3 and Qwen3 with its own compile, loss, clipping and optimizer, as `bench train` times it.

Everything that computes is torchtitan's; batches and weights are ours, so that first losses agree. Its data loaders are
not used, and packages that only they need may be missing. 0.3 wants a newer torch than some machines have, and another
construction; 0.2 imports with torch 2.11.
"""

import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fivefold.bench.baselines import LR, RankBatch
from fivefold.bench.comparison import TORCHTITAN_FAMILIES
from fivefold.job.config import Job
from fivefold.launch.device import TORCH_DTYPES, compiles
from fivefold.model.hf_names import sources
from fivefold.model.init import init_param
from fivefold.spec.blocks import RopeScaling
from fivefold.spec.hf import to_hf_config
from fivefold.spec.model import ModelSpec
from fivefold.support.errors import UserError

_DATA_PACKAGES = ("datasets", "datasets.distributed", "torchdata", "torchdata.stateful_dataloader")


class TorchtitanSystem:
    """Its training step on one device: float32 parameters under autocast, its default, or all in the compute dtype."""

    def __init__(self, job: Job, device: torch.device, *, masters: bool, lr: float = LR):
        titan = _imported()
        from torchtitan.config import JobConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed import utils as dist_utils
        from torchtitan.protocols.train_spec import get_train_spec

        self.job, self.device, self.part = job, device, RankBatch([], 0)
        config, family = JobConfig(), TORCHTITAN_FAMILIES[to_hf_config(job.model, job.train.dtype)["model_type"]]
        config.training.seq_len, config.training.local_batch_size = job.data.seq, job.train.batch
        config.training.dtype = "float32" if masters else job.train.dtype
        config.training.mixed_precision_param = job.train.dtype
        config.training.max_norm = job.optimizer.clip
        config.activation_checkpoint.mode = "none"  # as ours: the activations fit
        config.compile.enable = compiles(job.train, device)
        config.optimizer.lr = lr
        dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
        spec, arguments = get_train_spec(family), _arguments(job.model, family)
        arguments.update_from_config(config)
        with torch.device(device), titan.tools.utils.set_default_dtype(getattr(torch, config.training.dtype)):
            model = spec.model_cls(arguments)
            model = spec.parallelize_fn(model, dims, config)
            with torch.no_grad():
                model.init_weights(buffer_device=device)
        self.model = model.train()
        _load(self.model, job, spec.state_dict_adapter(arguments, None), device)
        self.loss = spec.build_loss_fn(config, parallel_dims=dims)
        self.optimizers = spec.build_optimizers_fn([self.model], config.optimizer, dims)
        self.autocast = dist_utils.maybe_enable_amp(dims, config.training.mixed_precision_param, device.type)
        self.clip = dist_utils.clip_grad_norm_

    def step(self) -> float:
        """As in its train_step."""
        self.optimizers.zero_grad()
        total = torch.zeros((), device=self.device)
        for tokens, targets in self.part.samples:
            with self.autocast:
                loss = self.loss(self.model(tokens), targets) / self.part.count
            loss.backward()
            total += loss.detach()
        self.clip(list(self.model.parameters()), self.job.optimizer.clip, foreach=True)
        self.optimizers.step()
        return total.item()


def _imported() -> ModuleType:
    """torchtitan, with empty packages where those of its data loaders are missing."""
    missing = {name for name in _DATA_PACKAGES if "." not in name and find_spec(name) is None}
    for name in _DATA_PACKAGES:
        if name.partition(".")[0] in missing:
            empty = sys.modules[name] = _Empty(name)
            empty.__spec__, empty.__path__ = ModuleSpec(name, None), []
    try:
        import torchtitan.tools.utils
    except ImportError as error:
        raise UserError(
            f"--against torchtitan: {error}; nearest: pip install torchtitan==0.2.2", "bench.against"
        ) from None
    return torchtitan


class _Empty(ModuleType):
    """Has a new class for every name that is asked of it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _arguments(model: ModelSpec, family: str) -> Any:
    same = {
        "dim": model.hidden, "n_layers": model.layers, "n_heads": model.heads, "n_kv_heads": model.kv_heads,
        "vocab_size": model.vocab, "norm_eps": model.norm_eps, "rope_theta": model.rope_theta,
    }  # fmt: skip
    if family == "llama3":
        from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

        scaling = RoPEScalingArgs(scaling_factor=1.0)
        if isinstance(own := model.rope_scaling, RopeScaling):
            scaling = RoPEScalingArgs(own.factor, own.low_freq_factor, own.high_freq_factor, own.original_context)
        # The width of its MLP is 8/3 of the hidden one, times a factor, rounded up to a multiple.
        width = {"multiple_of": model.ffn, "ffn_dim_multiplier": model.ffn / (8 * model.hidden / 3)}
        return TransformerModelArgs(**same, **width, rope_scaling_args=scaling)
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

    experts: dict[str, Any] = {}
    if routed := model.experts:
        moe = MoEArgs(
            num_experts=routed.count, num_shared_experts=0, top_k=routed.top_k, score_func="softmax",
            route_norm=routed.renormalise, score_before_experts=False, load_balance_coeff=None,
        )  # fmt: skip
        experts = {"moe_enabled": True, "moe_inter_dim": routed.ffn, "moe_args": moe}
    own_dims = {"head_dim": model.head_dim, "hidden_dim": model.ffn, "qk_norm": model.qk_norm}
    return Qwen3ModelArgs(**same, **own_dims, enable_weight_tying=model.tied, **experts)


def _load(model: torch.nn.Module, job: Job, adapter: Any, device: torch.device) -> None:
    """Our initial weights, by the names that Hugging Face and torchtitan's adapter have for them."""
    files: dict[str, Tensor] = {}
    for parameter in job.model.parameters():
        full = torch.empty(parameter.shape, dtype=TORCH_DTYPES[job.train.dtype], device=device)
        init_param(job.model, parameter, full, job.train.seed)
        for source in sources(job.model, parameter):
            files[source.name] = full[source.rows.start : source.rows.stop]
    # Compiled modules have a prefix in the names of their parameters.
    own = {re.sub(r"_orig_mod\.", "", name): value for name, value in model.named_parameters()}
    given = {name: value for name, value in adapter.from_hf(files).items() if name in own}
    if missing := own.keys() - given.keys():
        raise RuntimeError(f"torchtitan's model has parameters that ours has not: {', '.join(sorted(missing))}")
    with torch.no_grad():
        for name, value in given.items():
            own[name].copy_(value)
