import torch
import torch.distributed as dist
from torch import Tensor, nn


class DataParallel(nn.Module):
    def __init__(self, module: nn.Module, group: dist.ProcessGroup, bucket_bytes: int):
        super().__init__()
        self.module, self.group, self.bucket_bytes = module, group, bucket_bytes
        self.bucket, self.sent = [], []
        for parameter in module.parameters():
            dist.broadcast(parameter.data, group_src=0, group=group)
            parameter.register_post_accumulate_grad_hook(self.ready)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def ready(self, parameter: nn.Parameter) -> None:
        self.bucket.append(parameter)
        if sum(one.numel() * one.element_size() for one in self.bucket) >= self.bucket_bytes:
            self.send()

    def send(self) -> None:
        if not self.bucket:
            return
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in self.bucket])
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        self.sent.append((self.bucket, flat, work))
        self.bucket = []

    def finish(self) -> None:
        self.send()
        for bucket, flat, work in self.sent:
            work.wait()
            flat /= dist.get_world_size(self.group)
            for parameter, mean in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                parameter.grad.copy_(mean.view_as(parameter))
        self.sent = []
