"""The FLOPs of recorded operators are those that torch counts when the model runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from shardwright.analysis.chunks.costs import flops_of
from shardwright.analysis.recorded.record_forward import record_forward

attend = functional.scaled_dot_product_attention


class Runs(nn.Module):
    """A function of x (2, 6, 8) and two weights, (8, 8) and (4, 4, 3)."""

    def __init__(self, function):
        super().__init__()
        self.w, self.kernel, self.function = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(4, 4, 3)), function

    def forward(self, x):
        return self.function(x, self.w, self.kernel)


CASES = {
    "a linear layer": lambda x, w, k: functional.linear(x, w, w[0]),
    "matrix products": lambda x, w, k: torch.addmm(w, w, x[0].T @ x[1]),
    "products of samples": lambda x, w, k: torch.baddbmm(x @ w, x, x.mT @ x),
    "attention": lambda x, w, k: attend(x[:, None], x[:, None], x[:, None]),
    "attention to more keys": lambda x, w, k: attend(x[:, None, :2], x[:, None], x[:, None]),
    "a convolution": lambda x, w, k: functional.conv1d(x[:, :4], k, padding=1),
    "a convolution of groups": lambda x, w, k: functional.conv1d(x[:, :4], k[:, :2], groups=2),
    "a transposed convolution": lambda x, w, k: functional.conv_transpose1d(x[:, :4], k, stride=2),
    "no product": lambda x, w, k: (x * w[0]).softmax(-1).sum(),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_flops_of_recorded_operators_are_those_that_torch_counts(name):
    model, x = Runs(CASES[name]), torch.ones(2, 6, 8)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(x)
    recording = record_forward(model.to("meta"), x.to("meta"))
    assert sum(map(flops_of, recording.calls)) == counter.get_total_flops()


def test_attention_of_grouped_heads_costs_what_it_costs_with_as_many_keys():
    def grouped(x, w, k):
        heads = x.view(2, 6, 4, 2).transpose(1, 2)
        return attend(heads, heads[:, :2], heads[:, :2], enable_gqa=True)

    recording = record_forward(Runs(grouped).to("meta"), torch.empty(2, 6, 8, device="meta"))
    assert sum(map(flops_of, recording.calls)) == 2 * (2 * 4 * 6 * 6 * 2) * 2
