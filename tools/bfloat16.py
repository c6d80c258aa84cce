"""How far bfloat16 is from float32 with the same weights, by what is rounded. Curves of two trainings do not tell: they
part by themselves, whatever moved them first.

    .venv/bin/python tools/bfloat16.py [steps] [batches]

A Llama and a gpt-oss of 4 layers are trained in float32 on the source of Python's library. Then held-out batches are
computed anew, each way in turn: the loss's mean difference with its standard error, the root of its mean square, and
the relative error of the whole gradient, of an eighth of the batches. Of experts also: how many tokens go to others,
and the gradient's error where all go where float32 sends them.
"""

import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from fivefold.model.decoder import Decoder
from fivefold.model.hf_names import expert_format_in, sources
from fivefold.model.init import initialise
from fivefold.model.linear_cross_entropy import Targets
from fivefold.model.ops import LocalOps
from fivefold.model.router import Router
from fivefold.spec.hf import spec_from_hf

ROWS, SEQ, LR, NARROW = 8, 64, 3e-3, torch.bfloat16
_SIZES: dict[str, Any] = {"vocab_size": 257, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
                          "num_key_value_heads": 2, "max_position_embeddings": 4096}  # fmt: skip
CONFIGS = {
    "Llama": transformers.LlamaConfig(**_SIZES, intermediate_size=384),
    "gpt-oss": transformers.GptOssConfig(
        **_SIZES, head_dim=32, intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, sliding_window=10,
        pad_token_id=None,
    ),
}  # fmt: skip
Batch = tuple[Tensor, Tensor]
Loss = Callable[[Batch], Tensor]


class FastProducts(TorchDispatchMode):
    """Products of bfloat16 as float32's, rounded at the end: what the units for them compute, on CPUs without them."""

    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    known = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm, attention, back)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        narrow = any(isinstance(one, Tensor) and one.dtype == NARROW for one in args)
        if op.overloadpacket not in self.known or not narrow:
            return op(*args, **(kwargs or {}))

        def cast(to: torch.dtype, dtype: torch.dtype) -> Callable[[Any], Any]:
            return lambda one: one.to(to) if isinstance(one, Tensor) and one.dtype == dtype else one

        found = op(*tree_map(cast(torch.float32, NARROW), args), **(kwargs or {}))
        if op.overloadpacket is self.attention:
            return found[0].to(NARROW), found[1]  # the log-sum-exp is wide
        return tree_map(cast(NARROW, torch.float32), found)


class WideStream(LocalOps):
    """The residual stream in float32, as under autocast; what blocks make of it is not."""

    def embed(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        return super().embed(table, tokens).float()

    def norm(self, module: nn.Module, x: Tensor) -> Tensor:
        return super().norm(module, x).to(NARROW)


def batch(number: int) -> Batch:
    at = np.random.default_rng(number).integers(0, len(TEXT) - SEQ - 1, ROWS)
    rows = torch.from_numpy(np.stack([TEXT[start : start + SEQ + 1] for start in at]))
    return rows[:, :-1], rows[:, 1:]


TEXT = np.frombuffer(
    b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]), np.uint8
).astype(np.int64)


def loss_of(model: nn.Module) -> Loss:
    def loss(of: Batch) -> Tensor:
        tokens, targets = of
        return model(tokens, targets=Targets(targets, torch.ones_like(targets, dtype=torch.bool))) / targets.numel()

    return loss


def trained(model: Decoder, steps: int) -> None:
    initialise(model, model.spec, 0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        loss = loss_of(model)(batch(step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / 20)
        optimizer.step()


def rounded(exact: Decoder, kept: Collection[str], ops: LocalOps | None = None) -> Decoder:
    """A copy that computes in bfloat16, but for the weights that are kept."""
    model = Decoder(exact.spec, ops=ops)
    model.load_state_dict(exact.state_dict())
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in kept else NARROW)
    return model


def theirs(exact: Decoder, config: Any) -> nn.Module:
    """The same weights in the class of transformers."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **how).float()
    state, own = model.state_dict(), exact.state_dict()
    for parameter in exact.spec.parameters():
        for source in sources(exact.spec, parameter, expert_format_in(exact.spec, state)):
            source.view_of(state[source.name]).copy_(own[parameter.name][source.rows.start : source.rows.stop])
    return model


def their_loss(model: nn.Module, autocast: bool) -> Loss:
    def loss(of: Batch) -> Tensor:
        with torch.autocast("cpu", NARROW, enabled=autocast):
            logits = model(of[0]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), of[1].flatten())

    return loss


def gradients(model: nn.Module, loss: Loss, batches: list[Batch]) -> Tensor:
    """[batches, parameters]"""
    found = []
    for one in batches:
        model.zero_grad()
        loss(one).backward()
        found.append(torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None]))
    return torch.stack(found)


@contextmanager
def routing(model: Decoder, replayed: list[Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Where tokens go, router by router; or where they are to go."""
    routers, sent = [one for one in model.modules() if isinstance(one, Router)], list[Tensor]()
    given = iter(replayed or ())
    for router in routers:

        def choose(scores: Tensor, of: Router = router) -> Tensor:
            sent.append(of.top_k(scores) if replayed is None else next(given))
            return sent[-1]

        router.choose = choose
    yield sent
    for router in routers:
        router.choose = None


def of_experts(exact: Decoder, model: Decoder, batches: list[Batch], wanted: Tensor) -> str:
    with routing(exact) as right, torch.no_grad():
        for one in batches:
            loss_of(exact)(one)
    with routing(model) as found, torch.no_grad():
        for one in batches:
            loss_of(model)(one)
    pairs = zip(found, right, strict=True)
    others = torch.cat([(a.sort(1).values != b.sort(1).values).any(1) for a, b in pairs]).double().mean().item()
    with routing(model, right):
        far = ((gradients(model, loss_of(model), batches) - wanted).norm() / wanted.norm()).item()
    return f"{others:>10.2%}{far:>10.2%}"


def compare(name: str, steps: int, count: int) -> None:
    spec = spec_from_hf(CONFIGS[name].to_dict())
    exact = Decoder(spec)
    trained(exact, steps)
    batches = [batch(1_000_000 + number) for number in range(count)]
    few = batches[: max(1, count // 8)]
    kept = {one.name for one in spec.parameters() if one.full_precision}
    routers = {one.name for one in spec.parameters() if one.tp == "replicated_partial"}
    of_theirs = theirs(exact, CONFIGS[name])
    ways: list[tuple[str, nn.Module, Loss]] = [
        (text, model, loss_of(model))
        for text, model in (
            ("all weights rounded", rounded(exact, ())),
            ("norms, sinks not", rounded(exact, kept)),
            *([("nor routers", rounded(exact, kept | routers))] if routers else ()),
            ("nor embedding, stream", rounded(exact, {*kept, "embedding.weight"}, WideStream())),
        )
    ]
    ways.append(("transformers, autocast", of_theirs, their_loss(of_theirs, True)))
    narrow = theirs(exact, CONFIGS[name]).to(NARROW)
    ways.append(("transformers, bfloat16", narrow, their_loss(narrow, False)))

    def losses(loss: Loss) -> Any:
        with torch.no_grad():
            return np.array([loss(one).item() for one in batches])

    base, ours = losses(loss_of(exact)), gradients(exact, loss_of(exact), few)
    of_them = gradients(of_theirs, their_loss(of_theirs, False), few)
    print(f"\n{name}: {steps} steps, loss {base.mean():.3f}, {count} batches")
    more = f"{'strays':>10}{'without':>10}" if routers else ""
    print(f"{'':24}{'mean':>10}{'+-':>9}{'rms':>9}{'gradient':>10}{more}")
    for text, model, loss in ways:
        off = losses(loss) - base
        wanted = of_them if text.startswith("transformers") else ours
        far = ((gradients(model, loss, few) - wanted).norm() / wanted.norm()).item()
        error = off.std(ddof=1) / len(off) ** 0.5
        more = of_experts(exact, model, few, ours) if routers and isinstance(model, Decoder) else ""
        rms = (off**2).mean() ** 0.5
        print(f"{text:24}{off.mean():>+10.1e}{error:>9.1e}{rms:>9.1e}{far:>10.2%}{more}", flush=True)


if __name__ == "__main__":
    asked = [int(word) for word in sys.argv[1:3]]
    with FastProducts():
        for which in CONFIGS:
            compare(which, *(asked + [100, 64][len(asked) :]))
