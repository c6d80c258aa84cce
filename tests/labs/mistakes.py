"""Typical mistakes: what is edited in the solution of a lab, and words that have to be said of it."""

# ruff: noqa: E501 - edits stand as the lines that they replace

from typing import NamedTuple


class Mistake(NamedTuple):
    lab: str
    what: str
    edits: tuple[tuple[str, str], ...]
    words: tuple[str, ...]


def rows_of(lab: str, *rows: tuple[str, list[tuple[str, str]], list[str]]) -> list[Mistake]:
    return [Mistake(lab, what, tuple(edits), tuple(words)) for what, edits, words in rows]


_SUM = "        dist.all_reduce(x, group=group)\n        return x"
LINEAR = rows_of(
    "linear",
    ("no sum forward", [("        x = x.clone()\n" + _SUM, "        return x")],
     ["the output of the row-parallel layer is in parts", "all-reduce what each rank's features give"]),
    ("a sum that runs twice", [(_SUM, "        dist.all_reduce(x, group=group)\n" + _SUM)],
     ["is 2 x = tp x what it should be", "reduced twice"]),
    ("a mean", [(_SUM, _SUM + " / dist.get_world_size(group)")], ["is 0.5 x = 1/tp x", "and not the mean"]),
    ("no sum backward", [("        g = g.clone()\n        dist.all_reduce(g, group=ctx.group)\n", "")],
     ["1 of 5 gradients (x)", "a missing SUM", "has to sum them over tp in backward"]),
    ("the sum's backward sums, too", [("    def backward(ctx, g):\n        return g, None",
      "    def backward(ctx, g):\n        g = g.clone()\n        dist.all_reduce(g)\n        return g, None")],
     ["exactly x 2 = tp", "the gradient of a sum is a copy"]),
    ("the bias on every rank", [("linear(x, self.weight), self.group) + self.bias",
                                 "linear(x, self.weight, self.bias), self.group)")],
     ["off by the same row for every token: by a bias", "add it once"]),
    ("rows where columns are due", [("weight.chunk(n, dim=1)[r]", "weight.chunk(n)[r]")], ["forward (linear.py, line"]),
    ("a stride", [("weight.chunk(n)[r]", "weight[r::n]")], ["the right features in another order", "no stride"]),
    ("the first part of the bias everywhere", [("bias.chunk(n)[r]", "bias.chunk(n)[0]")],
     ["the output of the column-parallel layer", "the bias is sharded"]),
    ("a sum that one rank alone calls", [("        dist.all_reduce(g, group=ctx.group)",
                                          "        if not dist.get_rank():\n            dist.all_reduce(g, group=ctx.group)")],
     ["rank 0 waits in an all-reduce", "rank 1 is through after 1"]),
    ("one message too many", [("        return Reduce.apply(", "        dist.all_reduce(x.detach().clone())\n        return Reduce.apply(")],
     ["the numbers are right, but a rank sends 3 all-reduces"]),
)  # fmt: skip
_COPY = "        gradient = gradient.contiguous().clone()\n        dist.all_reduce(gradient, group=ctx.group)\n"
ATTENTION = rows_of(
    "attention",
    ("no sum after o", [("return Sum.apply(F.linear(mixed, self.o), self.group)", "return F.linear(mixed, self.o)")],
     ["the output of the layer is in parts", "are to be summed over tp"]),
    ("the input's gradient stays in parts", [("        x = Copy.apply(x, self.group)\n", "")],
     ["gradients (x)", "a missing SUM", "sum it over tp in backward"]),
    ("a shared kv head's gradient stays in parts",
     [("        if self.sharing is not None:\n            k, v = Copy.apply(k, self.sharing), Copy.apply(v, self.sharing)\n", "")],
     ["a missing SUM", "ranks that share a kv head"]),
    ("the wrong kv head", [("[head // shared - kv[0] for head in own]", "[len(kv) - 1 for head in own]")],
     ["what the heads give", "which kv head each query head uses"]),
    ("no causal mask", [("scores.masked_fill(~seen, float(\"-inf\")).softmax(-1)", "scores.softmax(-1)")],
     ["what the heads give", "look at the mask"]),
    ("no scale", [(" * self.d**-0.5", "")], ["what the heads give", "at the scale"]),
    ("the gradient of a sum is summed", [("    def backward(ctx, gradient):\n        return gradient, None",
      "    def backward(ctx, gradient):\n        gradient = gradient.clone()\n        dist.all_reduce(gradient)\n        return gradient, None")], ["exactly x 2 = tp"]),
    ("o by rows", [("o[:, rows]", "o[rows]")], ["(attention.py, line"]),
)  # fmt: skip
SEQUENCE = rows_of(
    "sequence",
    ("tokens joined in dimension 0", [("return torch.cat(parts, dim=1)", "return torch.cat(parts, dim=0)")],
     ["the gathered tokens has the shape"]),
    ("norms that nobody sums", [("        weight, bias = (Replicated.apply(one, self.group) for one in (self.weight, self.bias))\n",
                                 "        weight, bias = self.weight, self.bias\n")], ["norm.", "a missing SUM"]),
    ("no sum, only this rank's tokens", [("return Scatter.apply(summand, self.group)",
      "return summand.chunk(dist.get_world_size(self.group), dim=1)[dist.get_rank(self.group)]")],
     ["the output of the block", "sum them, and keep this rank's tokens"]),
    ("an all-gather whose backward does not sum", [("        return scattered(gradient, ctx.group), None",
      "        return gradient.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None")],
     ["gradients"]),
    ("a mean of the norm's gradients", [("        dist.all_reduce(gradient, group=ctx.group)\n",
      "        dist.all_reduce(gradient, group=ctx.group)\n        gradient /= dist.get_world_size(ctx.group)\n")],
     ["exactly x 0.5 = 1/tp"]),
)  # fmt: skip
DATA_PARALLEL = rows_of(
    "data_parallel",
    ("a sum", [("            flat /= dist.get_world_size(self.group)\n", "")], ["exactly x 2 = dp", "a mean over ranks is wanted"]),
    ("a mean twice", [("            flat /= dist.get_world_size(self.group)\n",
                       "            flat /= dist.get_world_size(self.group) ** 2\n")], ["exactly x 0.5 = 1/dp", "taken twice"]),
    ("the last bucket stays", [("    def finish(self) -> None:\n        self.send()\n", "    def finish(self) -> None:\n")],
     ["missing MEAN", "send it in finish()"]),
    ("means that are not copied back", [("                parameter.grad.copy_(mean.view_as(parameter))\n", "                pass\n")],
     ["missing MEAN"]),
    ("no broadcast", [("            dist.broadcast(parameter.data, src=0, group=group)\n", "")],
     ["the last layer's bias at the start", "broadcast them"]),
    ("all in finish()", [("        if sum(one.numel() * one.element_size() for one in self.bucket) >= self.bucket_bytes:\n            self.send()\n", "")],
     ["after the whole backward pass"]),
    ("a message for each parameter", [("        if sum(one.numel() * one.element_size() for one in self.bucket) >= self.bucket_bytes:\n            self.send()\n", "        self.send()\n")],
     ["the numbers are right, but a rank sends", "are enough"]),
    ("other buckets on another rank", [("self.bucket_bytes = module, group, bucket_bytes", "self.bucket_bytes = module, group, bucket_bytes * (1 + dist.get_rank())")],
     ["rank"]),
    ("the wrong order in a bucket", [("for parameter, mean in zip(bucket, ", "for parameter, mean in zip(bucket[::-1], ")],
     ["(data_parallel.py, line"]),
)  # fmt: skip
ZERO = rows_of(
    "zero",
    ("a sum", [("    return own[: end - first] / ranks", "    return own[: end - first]")], ["parameters move x 2"]),
    ("the whole state on every rank", [("self.optimizer = torch.optim.SGD([self.shard], lr=lr, momentum=momentum)",
      "self.optimizer = torch.optim.SGD([self.shard], lr=lr, momentum=momentum)\n        self.optimizer.state[parameters[0]] = {'m': flat.clone()}")],
     ["give it the shard alone"]),
    ("a weight that is kept", [("        ctx.save_for_backward(x, shard)\n", "        ctx.save_for_backward(x, shard, gathered(shard, shape.numel(), group))\n"),
      ("        x, shard = ctx.saved_tensors\n        weight = gathered(shard, ctx.shape.numel(), ctx.group).view(ctx.shape)\n",
       "        x, shard, weight = ctx.saved_tensors\n        weight = weight.view(ctx.shape)\n")], ["keeps a whole weight"]),
    ("no update of the others", [("        whole = gathered(self.shard.detach(), self.size, self.group)\n",
      "        whole = torch.cat([one.detach().reshape(-1) for one in self.parameters])\n        first, end = bounds(self.size, dist.get_world_size(self.group), dist.get_rank(self.group))\n        whole[first:end] = self.shard.detach()\n")],
     ["parameter"]),
)  # fmt: skip
PIPELINE = rows_of(
    "pipeline",
    ("losses that are not divided", [("(output / microbatches).backward()", "output.backward()")], ["exactly x 3 = m", "each counts 1/m"]),
    ("divided twice", [("(output / microbatches).backward()", "(output / microbatches**2).backward()")], ["1/m"]),
    ("a send that waits", [("        sent.append((tensor, dist.isend(tensor, peer, group=group)))", "        dist.send(tensor, peer, group=group)")],
     ["both wait in a send to each other"]),
    ("backward of the last microbatch", [("            x, output = held.pop(number)", "            x, output = held.pop(max(held))")], ["pipeline.py"]),
    ("a gradient that is not sent", [("            if rank > 0:\n                send(x.grad, rank - 1)\n", "")], ["waits in a receive"]),
    ("an output without its gradient", [("output.backward(receive(rank + 1))", "receive(rank + 1)\n                output.sum().backward()")], ["gradient"]),
    ("receives from the wrong side", [("receive(rank + 1)", "receive(rank - 1)")], ["rank"]),
    ("all forwards first", [("    for kind, number in actions:", "    for kind, number in sorted(actions, key=lambda action: action[0] == 'B'):")],
     ["the schedule says"]),
    ("one loss for all", [("return [losses[number].detach() for number in sorted(losses)]", "return [losses[0].detach() for number in sorted(losses)]")], ["loss"]),
)  # fmt: skip
RING = rows_of(
    "ring",
    ("no log-sum-exp", [("output = output * (lse - merged).exp().unsqueeze(-1) + (scores - merged.unsqueeze(-1)).exp() @ block[1]",
                         "output = output + scores.softmax(-1) @ block[1]")], ["the output"]),
    ("a block's own softmax", [("(scores - merged.unsqueeze(-1)).exp() @", "(scores - own.unsqueeze(-1)).exp() @")], ["the output differs", "log-sum-exp"]),
    ("no scale", [(" * q.shape[-1] ** -0.5\n    if causal", "\n    if causal")], ["the output differs"]),
    ("one step too few", [("        for step in range(ranks):\n            source = (rank - step) % ranks\n            scores = scores_of(q, block[0], causal, rank", "        for step in range(ranks - 1):\n            source = (rank - step) % ranks\n            scores = scores_of(q, block[0], causal, rank")], ["the output differs"]),
    ("the wrong source", [("            source = (rank - step) % ranks\n            scores = scores_of(q, block[0], causal, rank", "            source = (rank + step) % ranks\n            scores = scores_of(q, block[0], causal, rank")], ["the output"]),
    ("gradients that stay", [("            of_block = pass_on(of_block, ctx.group)\n", "")], ["gradients"]),
    ("a send that waits", [("    sending = dist.isend(tensor.contiguous(), (rank + 1) % ranks, group=group)\n", "    dist.send(tensor.contiguous(), (rank + 1) % ranks, group=group)\n"),
                           ("    sending.wait()\n", "")], ["both wait in a send to each other"]),
    ("no delta", [(" - of_rows) * scale", ") * scale")], ["gradients"]),
    ("exp of scores", [("            own = scores.logsumexp(-1)\n", "            own = scores.exp().sum(-1).log()\n")], ["the output has", "nan or infinite"]),
    ("one step too many", [("            if step < ranks - 1:\n                block = pass_on(block, group)\n", "            block = pass_on(block, group)\n")], ["the numbers are right, but a rank sends"]),
)  # fmt: skip
EXPERTS = rows_of(
    "experts",
    ("results in another order", [("index_add(0, token, back", "index_add(0, token.sort()[0], back")], ["the output"]),
    ("no weights", [("back * weights[order].unsqueeze(-1)", "back")], ["the output differs", "the softmax over the chosen scores"]),
    ("softmax over all", [("        weights = scores.softmax(-1).reshape(-1)", "        weights = (x @ self.router.T).softmax(-1).gather(1, chosen).reshape(-1)")], ["the output differs"]),
    ("weights detached", [("scores.softmax(-1).reshape(-1)", "scores.detach().softmax(-1).reshape(-1)")], ["router", "must not be detached"]),
    ("no backward of the exchange", [("        return found, None, None, None", "        return found * 0, None, None, None")], ["gradients"]),
    ("even splits", [("        sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()", "        sent = received = [len(token) // self.ranks] * self.ranks")], ["experts.py"]),
    ("the first expert alone", [("        for number in range(self.own):", "        for number in range(1):")], ["the output"]),
    ("a stride of experts", [("up.chunk(ranks)[rank]", "up[rank::ranks]")], ["the output"]),
    ("all tokens to all", [("        scores, chosen", "        everywhere = [torch.empty(10, 6, dtype=x.dtype) for _ in range(dist.get_world_size(self.group))]\n        dist.all_gather(everywhere, torch.zeros(10, 6, dtype=x.dtype), group=self.group)\n        scores, chosen")], ["a token is needed on the ranks of its 2 experts alone"]),
    ("gradients reduced again", [("        self.down = nn.Parameter(down.chunk(ranks)[rank].clone())", "        self.down = nn.Parameter(down.chunk(ranks)[rank].clone())\n        self.down.register_hook(lambda gradient: gradient / ranks)")], ["exactly x 0.5", "is whole"]),
)  # fmt: skip
SCHEDULE = rows_of(
    "schedule",
    ("a W that is missing", [(" W0.7\n", "\n")], ["W0.7"]),
    ("an I that is missing", [(" I0.6", "")], ["I0.6"]),
    ("a W before its I", [("I0.0 RECV_G0.1 W0.0", "W0.0 RECV_G0.1 I0.0")], ["0.0"]),
    ("twice", [("W0.1 RECV_G0.2", "W0.1 W0.1 RECV_G0.2")], ["W0.1"]),
    ("a gradient that is not sent", [("I1.0 SEND_G1.0", "I1.0")], ["G"]),
    ("a stage of another rank", [("F0.6 SEND_A0.6 I0.3", "F1.6 SEND_A0.6 I0.3")], ["F1.6"]),
    ("no such action", [("W0.3\n", "X0.3\n")], ["X0.3"]),
    ("fewer microbatches", [("microbatches 8", "microbatches 7")], ["7"]),
    ("more memory than it promises", [("peak 4 4 4 4", "peak 3 4 4 4")], ["3"]),
    ("no buffers", [("buffers 2", "buffers 0")], ["buffers"]),
)  # fmt: skip
_BEST = "dp=128,zero=3,microbatches=2,recompute=full"
DECISION = rows_of(
    "decision",
    ("nothing is sharded", [("zero=3", "zero=0")], ["it does not fit", "nearest: --layout"]),
    ("tensor parallelism over nodes", [(_BEST, "dp=8,tp=16,zero=1,sp,microbatches=8,recompute=full")], ["longer than the planner's best"]),
    ("bits for bytes", [("8.8", "70.4")], ["state_gb is 7.98 x the planner's"]),
    ("no optimizer", [("8.8", "1.1")], ["state_gb is 0.125 x the planner's", "Adam"]),
    ("3 N D", [("1.78e18", "0.89e18")], ["flops_per_step is 0.501 x", "6 for each parameter"]),
    ("of one GPU", [("1.78e18", "1.39e16")], ["flops_per_step is 0.00783 x"]),
    ("at the peak", [("step_seconds = 32", "step_seconds = 14")], ["the MFU you expect"]),
    ("sequences for tokens", [("4194304", "512")], ["tokens_per_step is 0.000122 x"]),
    ("127 GPUs", [("dp=128", "dp=127")], ["does not divide", "there are 128"]),
    ("another name", [("bubble", "buble")], ["bubble is not written yet", "did you mean 'bubble'"]),
    ("no TOML", [("bubble = 0", "bubble: 0")], ["is no TOML"]),
)  # fmt: skip
MISTAKES = [
    *LINEAR, *ATTENTION, *SEQUENCE, *DATA_PARALLEL, *ZERO, *PIPELINE, *SCHEDULE, *RING, *EXPERTS, *DECISION
]  # fmt: skip
