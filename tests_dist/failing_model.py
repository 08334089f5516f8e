"""A model of somebody's own that fails on one rank, or kills it, in a forward of a run's fourth step."""

import os

from torch import Tensor, nn

from shardwright.checkpoint import survivors


class Failing(nn.Module):
    """Counts its training forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.num_calls = 0
        if "RANK" in os.environ:  # in the process of a rank; 2 s for the others to come are few on a busy machine
            survivors.JOIN_S = 60.0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.out(self.embedding(tokens))
        if os.environ.get("FAILS_ON") == os.environ.get("RANK", "none") and x.requires_grad and not x.is_meta:
            self.num_calls += 1
            if self.num_calls == 4:
                if "FAILS_BY" in os.environ:
                    os.kill(os.getpid(), int(os.environ["FAILS_BY"]))
                raise ArithmeticError("the fourth step is too much")
        return x


def failing() -> nn.Module:
    return Failing()
