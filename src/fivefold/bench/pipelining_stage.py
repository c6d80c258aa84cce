"""Stages of the decoder for torch.distributed.pipelining, which passes tensors only."""

from torch import Tensor, nn

from fivefold.model.decoder import Decoder
from fivefold.model.positions import TokenPositions


class Placed(nn.Module):
    """A stage that knows where its tokens stand."""

    def __init__(self, decoder: Decoder, place: TokenPositions):
        super().__init__()
        self.decoder, self.place = decoder, place

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, self.place)
