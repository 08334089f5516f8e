"""Which features of weights a recorded model lets ranks share, whatever views its code makes of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.strategies.tensor_parallel.graph_cuts import _TURNS
from shardwright.strategies.tensor_parallel.on_parts import share_cut, work_cut


class Squeezed(nn.Module):
    """Code of its own that reads a weight or a bias through views."""

    def __init__(self, how):
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(16, 64, bias=False), nn.Linear(64, 16)
        self.scores = nn.Parameter(torch.randn(1, 16))

    def forward(self, x):
        hidden = functional.silu(functional.linear(x, self.up.weight))
        return self.down(hidden) + self.how(self.scores)


HOW = {
    "no dim": lambda t: t.squeeze(),
    "a dim": lambda t: t.squeeze(0),
    "a dim from the end": lambda t: t.squeeze(-2),
    "a dim of more than one": lambda t: t.squeeze(1).squeeze(0),
    "dims": lambda t: t.squeeze((0, 1)),
    "transposed": lambda t: t.transpose(0, 1).squeeze(1),
    "a number": lambda t: t[0, 0].squeeze(-1).transpose(0, -1) + t.squeeze(),
    "turned and back": lambda t: t.T.unsqueeze(0).permute(0, 2, 1).squeeze(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_weight_that_code_reads_through_views_keeps_no_other_weight_whole(how):
    torch.manual_seed(0)
    plans = []
    batch = torch.randn(4, 16), torch.randint(16, (4,))
    verdict = verify(Squeezed(how), "tp2", [batch], alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) > 0.95


VIEWS = {
    "t": ((2, 3), lambda t: t.t(), ()),
    "squeeze": ((2, 1, 3), lambda t: t.squeeze(), ()),
    "squeeze of a dim": ((2, 1, 3), lambda t: t.squeeze(1), (1,)),
    "squeeze of a dim of more than one": ((2, 1, 3), lambda t: t.squeeze(0), (0,)),
    "squeeze of dims": ((1, 2, 1, 3), lambda t: t.squeeze((0, -2)), ((0, -2),)),
    "squeeze of a number": ((), lambda t: t.squeeze(-1), (-1,)),
    "transpose of a number": ((), lambda t: t.transpose(0, -1), (0, -1)),
    "unsqueeze": ((2, 3), lambda t: t.unsqueeze(-1), (-1,)),
    "transpose": ((2, 3, 4), lambda t: t.transpose(0, -1), (0, -1)),
    "permute": ((2, 3, 4), lambda t: t.permute(2, 0, 1), ((2, 0, 1),)),
}


@pytest.mark.parametrize(("shape", "view", "args"), VIEWS.values(), ids=VIEWS)
def test_the_dims_of_a_view_are_those_that_its_elements_had(shape, view, args, request):
    name = request.node.callspec.id.split(" ")[0]
    tensor = torch.empty(shape)
    turned = view(tensor)
    dims = _TURNS[name](tuple(range(len(shape))), shape, *args)
    strides = [None if dim == -1 else tensor.stride(dim) for dim in dims]
    assert len(strides) == turned.dim()
    assert all(stride in (None, seen) for stride, seen in zip(strides, turned.stride(), strict=True))


class Places(nn.Embedding):
    """A table of positions, which no rank shares: a sum over the ranks would save little."""

    def forward(self, x):
        return super().forward(torch.arange(x.shape[1], device=x.device))


class MostlyPlaces(nn.Module):
    """Few of the parameters do all of the work."""

    def __init__(self):
        super().__init__()
        self.places = Places(4096, 16)
        self.layers = nn.ModuleList(Squeezed(lambda scores: scores.squeeze()) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = x + self.places(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_a_model_that_is_mostly_a_table_of_positions_is_cut_for_its_work():
    torch.manual_seed(0)
    plans = []
    batch = torch.randn(4, 6, 16), torch.randint(4, (4, 6))
    verdict = verify(MostlyPlaces(), "tp2", [batch], alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) < 0.1
    assert work_cut(plans[0]) > 0.9
