import torch
import torch.distributed as dist


def pass_on(tensor, group):
    """To the next rank of the ring, from the one before."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor.contiguous(), group_dst=(rank + 1) % ranks, group=group)
    dist.recv(received, group_src=(rank - 1) % ranks, group=group)
    sending.wait()
    return received


def scores_of(q, k, causal, rows, columns):
    """Of a block; -inf where a token does not see a key."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = columns.unsqueeze(0) > rows.unsqueeze(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, group):
        rank, ranks, tokens = dist.get_rank(group), dist.get_world_size(group), q.shape[2]
        positions = torch.arange(tokens)
        output, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=q.dtype)
        block = torch.stack([k, v])
        for step in range(ranks):
            source = (rank - step) % ranks
            scores = scores_of(q, block[0], causal, rank * tokens + positions, source * tokens + positions)
            own = scores.logsumexp(-1)
            merged = torch.logaddexp(lse, own)
            output = output * (lse - merged).exp().unsqueeze(-1) + (scores - merged.unsqueeze(-1)).exp() @ block[1]
            lse = merged
            if step < ranks - 1:
                block = pass_on(block, group)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.causal, ctx.group = causal, group
        return output

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, output, lse = ctx.saved_tensors
        rank, ranks, tokens = dist.get_rank(ctx.group), dist.get_world_size(ctx.group), q.shape[2]
        positions, scale = torch.arange(tokens), q.shape[-1] ** -0.5
        of_rows = (gradient * output).sum(-1, keepdim=True)
        of_q, block, of_block = torch.zeros_like(q), torch.stack([k, v]), torch.zeros(2, *k.shape, dtype=k.dtype)
        for step in range(ranks):
            source = (rank - step) % ranks
            scores = scores_of(q, block[0], ctx.causal, rank * tokens + positions, source * tokens + positions)
            weights = (scores - lse.unsqueeze(-1)).exp()
            of_scores = weights * (gradient @ block[1].transpose(-1, -2) - of_rows) * scale
            of_q = of_q + of_scores @ block[0]
            of_block = of_block + torch.stack([of_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient])
            of_block = pass_on(of_block, ctx.group)
            if step < ranks - 1:
                block = pass_on(block, ctx.group)
        return of_q, of_block[0], of_block[1], None, None


def ring_attention(q, k, v, causal, group):
    return RingAttention.apply(q, k, v, causal, group)
