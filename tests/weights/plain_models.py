"""The plain models of the tests of weights, with values, and runs of them under a layout."""

from __future__ import annotations

import torch
from torch import nn

import shardwright as sw
from shardwright.models import GPT, GPTConfig

LAYOUTS = [
    *("single", "dp2", "dp2/zero3", "tp2", "tp2x2/2d", "tp2x2x2/3d", "pp2 mb2", "pp2 mb2 dp2/zero1 tp2"),
    *("dp2/zero1 bf16", "tp2 fp16", "dp2/zero2/offload bf16", "dp2/zero3/offload:disk"),
]


class Normed(nn.Module):
    """A batch norm, whose statistics are buffers, a buffer that is not kept, and two names for one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def made(build) -> nn.Module:
    """A model without values: ranks that are threads would draw from one generator."""
    with sw.without_values():
        return build()


def tied_gpt(*, values: bool) -> nn.Module:
    """A GPT-2 with sizes that do not divide evenly, dropout, and a head that is tied to the table of tokens."""
    sizes = {"num_layers": 2, "num_heads": 3, "width": 12, "hidden": 7, "vocabulary": 19, "max_tokens": 8}
    config = GPTConfig(style="gpt2", dropout=0.1, **sizes)
    return with_values(GPT(config)) if values else made(lambda: GPT(config))


def with_values(model: nn.Module) -> nn.Module:
    """The model with other values than any initialization has."""
    draw = torch.Generator().manual_seed(7)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=draw) / 3)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(19, (4, 7), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def evaluated(run) -> float:
    """The loss of a run; unsharded and narrower copies of parameters, which the forward needs, are there after."""
    (part,) = run.shard([batch()])
    return run.evaluate(part).item()


def trained(run) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of a run before a step and in it, and the state after it."""
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    before = evaluated(run)
    (part,) = run.shard([batch()])
    loss = run.step(part).item()
    optimizer.step()
    return [before, loss], run.state_dict()


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts have the same names and the same bits."""
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
