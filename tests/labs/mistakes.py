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
    ("two sums", [("        dist.all_reduce(x, group=group)\n        return x", "        dist.all_reduce(x, group=group)\n        dist.all_reduce(x, group=group)\n        return x")],
     ["the output of the layer is 2 x = tp x", "it is reduced twice"]),
    ("a mean", [("        dist.all_reduce(x, group=group)\n        return x", "        dist.all_reduce(x, group=group)\n        return x / dist.get_world_size(group)")],
     ["the output of the layer is 0.5 x = 1/tp x", "a sum is wanted, and not the mean"]),
    ("a shared kv head's gradient is summed over all ranks", [("Copy.apply(k, self.sharing), Copy.apply(v, self.sharing)", "Copy.apply(k, self.group), Copy.apply(v, self.group)")], ["2 of 5 gradients (attention.k, attention.v)", "sum over these, and not over all ranks"]),
    ("groups that only their ranks make", [("            made = dist.new_group(ranks) if sharing > 1 else None\n            if rank in ranks:\n                self.sharing = made",
      "            if rank in ranks and sharing > 1:\n                self.sharing = dist.new_group(ranks)")], ["is in __init__ (attention.py, line", "`dist.new_group` is called by all ranks"]),
    ("nothing is divided", [("        own = range(rank * heads // tp, (rank + 1) * heads // tp)", "        own = range(heads)")], ["what the heads give is whole on every rank, (2, 6, 16): each is to have its part of dimension -1"]),
    ("weights that are no parameters", [("nn.Parameter(q[rows].clone())", "q[rows].clone()")], ["has no parameter attention.q", "an nn.Parameter called q"]),
)  # fmt: skip
SEQUENCE = rows_of(
    "sequence",
    ("tokens joined in dimension 0", [("return torch.cat(parts, dim=1)", "return torch.cat(parts, dim=0)")],
     ["what is gathered has the shape", "along dimension 1"]),
    ("norms that nobody sums", [("        weight, bias = (Replicated.apply(one, self.group) for one in (self.weight, self.bias))\n",
                                 "        weight, bias = self.weight, self.bias\n")], ["(norm.bias, norm.weight)", "a missing SUM", "sum their gradients over tp"]),
    ("no sum, only this rank's tokens", [("return Scatter.apply(summand, self.group)",
      "return summand.chunk(dist.get_world_size(self.group), dim=1)[dist.get_rank(self.group)]")],
     ["the output of the block", "sum them, and keep this rank's, the r-th of neighbouring ones"]),
    ("an all-gather whose backward does not sum", [("        return scattered(gradient, ctx.group), None",
      "        return gradient.chunk(dist.get_world_size(ctx.group), dim=1)[dist.get_rank(ctx.group)], None")],
     ["3 of 5 gradients (norm.bias, norm.weight, x)", "the backward pass of an all-gather is a reduce-scatter"]),
    ("a mean of the norm's gradients", [("        dist.all_reduce(gradient, group=ctx.group)\n",
      "        dist.all_reduce(gradient, group=ctx.group)\n        gradient /= dist.get_world_size(ctx.group)\n")],
     ["exactly x 0.5 = 1/tp"]),
    ("a mean of the output", [("    dist.reduce_scatter(own, parts, group=group)\n    return own", "    dist.reduce_scatter(own, parts, group=group)\n    return own / dist.get_world_size(group)")], ["the output of the block is 0.5 x = 1/tp x", "a sum is wanted, and not the mean"]),
    ("an all-reduce where its half is enough", [("    own = torch.empty_like(parts[0])\n    dist.reduce_scatter(own, parts, group=group)\n    return own", "    x = x.contiguous().clone()\n    dist.all_reduce(x, group=group)\n    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()")], ["the numbers are right, but a rank sends", "1.46 x the bytes"]),
    ("a norm of all tokens", [("        weight, bias = (Rep", "        x = Gather.apply(x, self.group)\n        weight, bias = (Rep"), ("        return Gather.apply(x, self.group)\n\n    def mlp", "        return x\n\n    def mlp")], ["what the norm gives is whole on every rank"]),
    ("the backward of the scatter keeps this rank's part", [("        return gathered(gradient, ctx.group), None", "        n, r = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)\n        return torch.cat([gradient if one == r else torch.zeros_like(gradient) for one in range(n)], 1), None")], ["all 5 gradients", "that of a reduce-scatter is an all-gather"]),
    ("tokens dealt out one by one", [("for part in x.chunk(dist.get_world_size(group), dim=1)]", "for part in (x[:, one :: dist.get_world_size(group)] for one in range(dist.get_world_size(group)))]")], ["the output of the block differs", "neighbouring ones"]),
    ("nothing is divided", [("up.chunk(tp)[rank]", "up"), ("down.chunk(tp, dim=1)[rank]", "down")], ["the output of the block is 2 x = tp x", "up and down are to be sharded"]),
    ("the norm's gradients summed twice", [("        dist.all_reduce(gradient, group=ctx.group)\n        return", "        dist.all_reduce(gradient, group=ctx.group)\n        dist.all_reduce(gradient, group=ctx.group)\n        return")], ["(norm.bias, norm.weight): exactly x 2 = tp", "summed once more"]),
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
     ["collective number", "on rank 0", "call the same ones in the same order"]),
    ("the wrong order in a bucket", [("for parameter, mean in zip(bucket, ", "for parameter, mean in zip(bucket[::-1], ")],
     ["(data_parallel.py, line", "is invalid for input of size"]),
    ("a call that blocks", [("            work.wait()\n", ""), ("async_op=True", "async_op=False")], ["waits for a bucket while gradients are still to be computed"]),
    ("a wait after each send", [("        self.sent.append((self.bucket, flat, work))", "        work.wait()\n        self.sent.append((self.bucket, flat, work))")], ["waits for a bucket while gradients are still to be computed", "wait in finish()"]),
    ("buckets that are sent before they are full", [(">= self.bucket_bytes", ">= self.bucket_bytes // 8")], ["5 all-reduces with 1,704 bytes where 2 all-reduces with 1,704 bytes are enough"]),
    ("a broadcast of copies", [("            dist.broadcast(parameter.data, src=0, group=group)\n", "            dist.broadcast(parameter.data.clone(), src=0, group=group)\n")], ["the last layer's bias at the start differs on rank 1", "broadcast them"]),
)  # fmt: skip
ZERO = rows_of(
    "zero",
    ("a sum", [("    return own[: end - first] / ranks", "    return own[: end - first]")], ["parameters move x 2", "the gradient of a shard is the mean over ranks"]),
    ("the whole state on every rank", [("self.optimizer = torch.optim.SGD([self.shard], lr=lr, momentum=momentum)",
      "self.optimizer = torch.optim.SGD([self.shard], lr=lr, momentum=momentum)\n        self.optimizer.state[parameters[0]] = {'m': flat.clone()}")],
     ["give it the shard alone"]),
    ("a weight that is kept", [("        ctx.save_for_backward(x, shard)\n", "        ctx.save_for_backward(x, shard, gathered(shard, shape.numel(), group))\n"),
      ("        x, shard = ctx.saved_tensors\n        weight = gathered(shard, ctx.shape.numel(), ctx.group).view(ctx.shape)\n",
       "        x, shard, weight = ctx.saved_tensors\n        weight = weight.view(ctx.shape)\n")], ["keeps a whole weight"]),
    ("no update of the others", [("        whole = gathered(self.shard.detach(), self.size, self.group)\n",
      "        whole = torch.cat([one.detach().reshape(-1) for one in self.parameters])\n        first, end = bounds(self.size, dist.get_world_size(self.group), dist.get_rank(self.group))\n        whole[first:end] = self.shard.detach()\n")],
     ["parameters are not updated", "each rank needs the shards that others updated"]),
    ("a mean twice", [("    return own[: end - first] / ranks", "    return own[: end - first] / ranks**2")], ["parameters move x 0.5", "the gradient of a shard is the mean over ranks"]),
    ("no reduction", [("    dist.reduce_scatter(own, parts, group=group)\n", "    own.copy_(parts[dist.get_rank(group)])\n")], ["by the mean of all ranks' gradients"]),
    ("equal parts where they are unequal", [("    small, more = divmod(size, ranks)\n    first = rank * small + min(rank, more)\n    return first, first + small + (rank < more)", "    most = -(-size // ranks)\n    return rank * most, min(size, (rank + 1) * most)")], ["the shards of the weight are joined in the order of ranks, without what padded them"]),
    ("padding that stays", [("part[: len(range(size)[slice(*bounds(size, ranks, rank))])]", "part")], ["forward (zero.py, line", "is invalid for input of size 46"]),
    ("shards in another order", [("for rank, part in enumerate(parts)])", "for rank, part in reversed([*enumerate(parts)])])")], ["joined in the order of ranks"]),
    ("no momentum from step to step", [("        self.optimizer.step()\n", "        self.optimizer.step()\n        self.optimizer.state.clear()\n")], ["the first step is right in all, and the next is not", "or the optimizer's state"]),
    ("an all-reduce where its half is enough", [("    own = torch.empty_like(parts[0])\n    dist.reduce_scatter(own, parts, group=group)\n", "    flat = flat.clone()\n    dist.all_reduce(flat, group=group)\n    own = torch.tensor_split(flat, ranks)[dist.get_rank(group)]\n")], ["1.5 x the bytes of"]),
    ("a gradient that adds up over steps", [("        self.shard.grad = mean_of_shard(", "        self.shard.grad = (0 if self.shard.grad is None else self.shard.grad) + mean_of_shard(")], ["the first step is right in all, and the next is not", "gradients that are not cleared"]),
    ("nothing is divided", [("        shard = torch.tensor_split(weight.reshape(-1), dist.get_world_size(group))[dist.get_rank(group)]\n        self.weight = nn.Parameter(shard.clone())", "        self.weight = nn.Parameter(weight.clone())\n        self.weight.register_hook(lambda g: (g := g.clone(), dist.all_reduce(g), g / dist.get_world_size())[2])"), ("Gathered.apply(x, self.weight, self.shape, self.group)", "F.linear(x, self.weight)")], ["keeps a whole weight from forward to backward: free it, and gather it again"]),
)  # fmt: skip
PIPELINE = rows_of(
    "pipeline",
    ("losses that are not divided", [("(output / microbatches).backward()", "output.backward()")], ["exactly x 3 = m", "each counts 1/m"]),
    ("divided twice", [("(output / microbatches).backward()", "(output / microbatches**2).backward()")], ["exactly x 0.33333333 = 1/m", "divided twice by their number"]),
    ("a send that waits", [("        sent.append((tensor, dist.isend(tensor, peer, group=group)))", "        dist.send(tensor, peer, group=group)")],
     ["both wait in a send to each other"]),
    ("backward of the last microbatch", [("            x, output = held.pop(number)", "            x, output = held.pop(max(held))")], ["keep outputs by number"]),
    ("a gradient that is not sent", [("            if rank > 0:\n                send(x.grad, rank - 1)\n", "")], ["waits in a receive"]),
    ("an output without its gradient", [("output.backward(receive(rank + 1))", "receive(rank + 1)\n                output.sum().backward()")], ["begins with the gradient that was received for it"]),
    ("receives from the wrong side", [("receive(rank + 1)", "receive(rank - 1)")], ["rank 0 waits in a receive", "from rank -1, and there are ranks 0 to 1"]),
    ("all forwards first", [("    for kind, number in actions:", "    for kind, number in sorted(actions, key=lambda action: action[0] == 'B'):")],
     ["the schedule says"]),
    ("one loss for all", [("return [losses[number].detach() for number in sorted(losses)]", "return [losses[0].detach() for number in sorted(losses)]")], ["the loss is", "returns the loss of every microbatch"]),
    ("an input without a gradient", [(".requires_grad_()", "")], ["send (pipeline.py, line", "has a gradient only after requires_grad_()"]),
    ("a microbatch that is not sent backward", [("            x, output = held.pop(number)", "            x, output = held.pop(number)\n            output = output * 0 if number == 0 else output")], ["the samples of the batch enter x [0 x20, 1 x40]"]),
)  # fmt: skip
RING = rows_of(
    "ring",
    ("no log-sum-exp", [("output = output * (lse - merged).exp().unsqueeze(-1) + (scores - merged.unsqueeze(-1)).exp() @ block[1]",
                         "output = output + scores.softmax(-1) @ block[1]")], ["the output differs", "merge blocks by log-sum-exp"]),
    ("a block's own softmax", [("(scores - merged.unsqueeze(-1)).exp() @", "(scores - own.unsqueeze(-1)).exp() @")], ["the output differs", "log-sum-exp"]),
    ("no scale", [(" * q.shape[-1] ** -0.5\n    if causal", "\n    if causal")], ["the output differs", "look at the scale"]),
    ("one step too few", [("        for step in range(ranks):\n            source = (rank - step) % ranks\n            scores = scores_of(q, block[0], causal, rank", "        for step in range(ranks - 1):\n            source = (rank - step) % ranks\n            scores = scores_of(q, block[0], causal, rank")], ["the output differs", "whether all blocks are merged"]),
    ("the wrong source", [("            source = (rank - step) % ranks\n            scores = scores_of(q, block[0], causal, rank", "            source = (rank + step) % ranks\n            scores = scores_of(q, block[0], causal, rank")], ["the output differs", "whose tokens a block has"]),
    ("gradients that stay", [("            of_block = pass_on(of_block, ctx.group)\n", "")], ["2 of 3 gradients (k, v)", "it travels with the block"]),
    ("a send that waits", [("    sending = dist.isend(tensor.contiguous(), (rank + 1) % ranks, group=group)\n", "    dist.send(tensor.contiguous(), (rank + 1) % ranks, group=group)\n"),
                           ("    sending.wait()\n", "")], ["both wait in a send to each other"]),
    ("no delta", [(" - of_rows) * scale", ") * scale")], ["2 of 3 gradients (k, q)", "weights * (gradient v^T - delta)"]),
    ("exp of scores", [("            own = scores.logsumexp(-1)\n", "            own = scores.exp().sum(-1).log()\n")], ["the output has", "nan or infinite"]),
    ("one step too many", [("            if step < ranks - 1:\n                block = pass_on(block, group)\n", "            block = pass_on(block, group)\n")], ["the numbers are right, but a rank sends"]),
    ("all keys gathered", [("        block = torch.stack([k, v])\n        for step", "        block = torch.stack([k, v])\n        every = [torch.empty_like(block) for _ in range(ranks)]\n        dist.all_gather(every, block, group=group)\n        for step"),
      ("                block = pass_on(block, group)", "                block = every[(rank - step - 1) % ranks]")], ["calls 1 all-gather with 3,072 bytes", "more than two blocks of keys"]),
    ("the other way round", [("(rank + 1) % ranks, group=group)", "(rank - 1) % ranks, group=group)"), ("dist.recv(received, (rank - 1)", "dist.recv(received, (rank + 1)"), ("source = (rank - step)", "source = (rank + step)"), ("source = (rank - step)", "source = (rank + step)")], ["rank 0 sends to rank 2, and next in the ring is rank 1"]),
    ("k and v on their own", [("                block = pass_on(block, group)", "                block = torch.stack([pass_on(side, group) for side in block])")], ["5 sends with 6,144 bytes where 4 sends with 6,144 bytes are enough"]),
)  # fmt: skip
EXPERTS = rows_of(
    "experts",
    ("results in another order", [("index_add(0, token, back", "index_add(0, token.sort()[0], back")], ["the output differs", "undo the sort"]),
    ("no weights", [("back * weights[order].unsqueeze(-1)", "back")], ["the output differs", "the softmax over the chosen scores"]),
    ("softmax over all", [("        weights = scores.softmax(-1).reshape(-1)", "        weights = (x @ self.router.T).softmax(-1).gather(1, chosen).reshape(-1)")], ["the output differs", "the softmax over the chosen scores"]),
    ("weights detached", [("scores.softmax(-1).reshape(-1)", "scores.detach().softmax(-1).reshape(-1)")], ["(moe.router", "must not be detached"]),
    ("no backward of the exchange", [("        return found, None, None, None", "        return found * 0, None, None, None")], ["(moe.down, moe.up): zero or missing", "backward of an exchange is the one back"]),
    ("even splits", [("        sent, received = counts.sum(1).tolist(), theirs.sum(1).tolist()", "        sent = received = [len(token) // self.ranks] * self.ranks")], ["forward (experts.py, line", "raised IndexError"]),
    ("the first expert alone", [("        for number in range(self.own):", "        for number in range(1):")], ["the output differs", "at which expert computes what"]),
    ("a stride of experts", [("up.chunk(ranks)[rank]", "up[rank::ranks]")], ["the output differs", "rank r has neighbouring ones"]),
    ("all tokens to all", [("        scores, chosen", "        everywhere = [torch.empty(10, 6, dtype=x.dtype) for _ in range(dist.get_world_size(self.group))]\n        dist.all_gather(everywhere, torch.zeros(10, 6, dtype=x.dtype), group=self.group)\n        scores, chosen")], ["a token is needed on the ranks of its 2 experts alone"]),
    ("gradients reduced again", [("        self.down = nn.Parameter(down.chunk(ranks)[rank].clone())", "        self.down = nn.Parameter(down.chunk(ranks)[rank].clone())\n        self.down.register_hook(lambda gradient: gradient / ranks)")], ["exactly x 0.5", "is whole"]),
    ("nothing is divided", [("up.chunk(ranks)[rank]", "up"), ("down.chunk(ranks)[rank]", "down"), ("self.up[number]", "self.up[number + dist.get_rank() * self.own]"), ("self.down[number]", "self.down[number + dist.get_rank() * self.own]")], ["a missing SUM", "every expert is on one rank"]),
)  # fmt: skip
SCHEDULE = rows_of(
    "schedule",
    ("a W that is missing", [(" W0.7\n", "\n")], ["rank 0 runs I0.7 but never W0.7"]),
    ("an I that is missing", [(" I0.6", "")], ["rank 0 runs W0.6 but never I0.6"]),
    ("a W before its I", [("I0.0 RECV_G0.1 W0.0", "W0.0 RECV_G0.1 I0.0")], ["rank 0 has W0.0 (action 9) before the input gradient is there"]),
    ("twice", [("W0.1 RECV_G0.2", "W0.1 W0.1 RECV_G0.2")], ["rank 0 has W0.1 (action 16) for the second time"]),
    ("a gradient that is not sent", [("I1.0 SEND_G1.0", "I1.0")], ["rank 1 never has SEND_G1.0, and stage 0 on rank 0 waits for it"]),
    ("a stage of another rank", [("F0.6 SEND_A0.6 I0.3", "F1.6 SEND_A0.6 I0.3")], ["rank 0 has F1.6 (action 22), and stage 1 lives on rank 1"]),
    ("no such action", [("W0.3\n", "X0.3\n")], ["'X0.3' has the unknown kind 'X'"]),
    ("fewer microbatches", [("microbatches 8", "microbatches 7")], ["microbatches go from 0 to 6", "and 18 more"]),
    ("more memory than it promises", [("peak 4 4 4 4", "peak 3 4 4 4")], ["rank 0 holds 4 stage activations", "and 3 are promised"]),
    ("no buffers", [("buffers 2", "buffers 0")], ["buffers: '0' is not a whole number of 1 or more"]),
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
    ("a number in quotes", [("70.6e9", '"70.6e9"')], ["parameters = '70.6e9' is no number"]),
    ("no number", [("step_seconds = 32", "step_seconds = nan")], ["step_seconds = nan is no number"]),
    ("no TOML", [("bubble = 0", "bubble: 0")], ["is no TOML"]),
)  # fmt: skip
MISTAKES = [
    *LINEAR, *ATTENTION, *SEQUENCE, *DATA_PARALLEL, *ZERO, *PIPELINE, *SCHEDULE, *RING, *EXPERTS, *DECISION
]  # fmt: skip
