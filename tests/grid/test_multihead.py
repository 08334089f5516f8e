"""``nn.MultiheadAttention`` under every mode: all that its arguments may be, against torch's own forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from contract.cases import check_shapes, check_traffic
from shardwright import verify, without_values
from shardwright.comm import launch
from shardwright.errors import PlanError, RankFailedError
from shardwright.layout import Layout
from shardwright.models.losses import MeanSquaredError
from shardwright.parallelize import make_plan, parallelize
from shardwright.product.multihead import SomeHeads, multihead
from shardwright.strategy import Job

WIDTH, TOKENS, KEYS, SAMPLES = 12, 4, 3, 5


class Model(nn.Module):
    """A layer, an attention in its own way, and a layer that sees what comes out."""

    def __init__(self, num_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, num_heads, **{"batch_first": True, **options})

    def forward(self, x):
        return self.after(self.attend(self.before(x)))


class SelfAttention(Model):
    def attend(self, x):
        return x + self.attn(x, x, x, need_weights=False)[0]


class WithoutBias(SelfAttention):
    def __init__(self):
        super().__init__(bias=False)


class ThreeHeads(SelfAttention):
    def __init__(self):
        super().__init__(num_heads=3)


class SamplesInDimOne(Model):
    def __init__(self):
        super().__init__(batch_first=False)

    def attend(self, x):
        x = x.transpose(0, 1)
        return self.attn(x, x, x)[0].view(TOKENS, -1, WIDTH).transpose(0, 1)


class MeanWeights(Model):
    def attend(self, x):
        y, weights = self.attn(x, x, x)
        return y + weights @ x


class WeightsOfEachHead(Model):
    def attend(self, x):
        y, weights = self.attn(x, x, x, average_attn_weights=False)
        return y + (weights[:, 1] - 2 * weights[:, 3]) @ x


def _causal() -> torch.Tensor:
    return torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)


class Causal(Model):
    def attend(self, x):
        return self.attn(x, x, x, attn_mask=_causal().to(x.device))[0]


class HintedCausal(Model):
    def attend(self, x):
        return self.attn(x, x, x, attn_mask=_causal().to(x.device), is_causal=True, need_weights=False)[0]


class LearnedMask(Model):
    def __init__(self):
        super().__init__()
        self.bias = nn.Linear(TOKENS, TOKENS, bias=False)

    def attend(self, x):
        return self.attn(x, x, x, attn_mask=self.bias.weight, need_weights=False)[0]


class MaskOfEachSample(Model):
    def __init__(self):
        super().__init__()
        self.bias = nn.Linear(WIDTH, 4 * TOKENS)

    def attend(self, x):
        mask = self.bias(x).unflatten(-1, (4, TOKENS)).transpose(1, 2).flatten(0, 1)
        return self.attn(x, x, x, attn_mask=mask)[0]


class Padding(Model):
    def forward(self, x, padding):
        x = self.before(x)
        return self.after(self.attn(x, x, x, key_padding_mask=padding, need_weights=False)[0])


class PaddingAndMask(Model):
    def forward(self, x, padding):
        x = self.before(x)
        mask = _causal().to(x.device)
        return self.after(self.attn(x, x, x, key_padding_mask=padding, attn_mask=mask, is_causal=True)[0])


class PaddingAndMaskOfEachSample(MaskOfEachSample):
    def forward(self, x, padding):
        x = self.before(x)
        mask = self.bias(x).unflatten(-1, (4, TOKENS)).transpose(1, 2).flatten(0, 1)
        padding = torch.zeros_like(padding, dtype=x.dtype).masked_fill(padding, -torch.inf)
        return self.after(self.attn(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0])


class Cross(Model):
    def forward(self, x, memory):
        return self.after(self.attn(self.before(x), memory, memory)[0])


class CrossOfLearned(Model):
    def __init__(self):
        super().__init__()
        self.memory = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory):
        memory = self.memory(memory)
        return self.after(self.attn(self.before(x), memory, memory, need_weights=False)[0])


class ThreeInputs(CrossOfLearned):
    def forward(self, x, memory):
        values = self.memory(memory)
        return self.after(self.attn(self.before(x), memory * 2, values, need_weights=False)[0])


class QueriesAsValues(Model):
    def attend(self, x):
        return self.attn(x, torch.tanh(x), x)[0]


class OtherWidths(Model):
    def __init__(self):
        super().__init__(kdim=5, vdim=7)
        self.k, self.v = nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 7)

    def forward(self, x, memory):
        return self.after(self.attn(self.before(x), self.k(memory), self.v(memory))[0])


class OtherWidthsWithoutBias(OtherWidths):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, kdim=5, vdim=7, bias=False, batch_first=True)


class Drops(Model):
    def __init__(self):
        super().__init__(dropout=0.3)

    def attend(self, x):
        return x + self.attn(x, x, x, need_weights=False)[0]


class DropsWeights(Drops):
    def forward(self, x, padding):
        x = self.before(x)
        y, weights = self.attn(x, x, x, key_padding_mask=padding)
        return self.after(y + weights @ x)


class DropsTwice(Drops):
    def attend(self, x):
        mask = _causal().to(x.device)
        x = x + self.attn(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.attn(x, x, x)[0]


class DropsInDimOne(Model):
    def __init__(self):
        super().__init__(dropout=0.3, batch_first=False)

    def attend(self, x):
        x = x.transpose(0, 1)
        return self.attn(x, x, x)[0].transpose(0, 1)


class PartlyFrozen(SelfAttention):
    def __init__(self):
        super().__init__()
        self.attn.in_proj_weight.requires_grad_(False)
        self.attn.out_proj.bias.requires_grad_(False)


CUT = [
    SelfAttention, WithoutBias, ThreeHeads, SamplesInDimOne, MeanWeights, WeightsOfEachHead, Causal, HintedCausal,
    LearnedMask, MaskOfEachSample, Padding, PaddingAndMask, PaddingAndMaskOfEachSample, Cross, CrossOfLearned,
    ThreeInputs, QueriesAsValues, OtherWidths, OtherWidthsWithoutBias, Drops, DropsWeights, DropsTwice, DropsInDimOne,
    PartlyFrozen,
]  # fmt: skip


def batches(kind: type[Model]) -> list[Any]:
    """Two global batches for a model: inputs by the names of its arguments."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    given = {
        "x": lambda: numbers(SAMPLES, TOKENS, WIDTH),
        "memory": lambda: numbers(SAMPLES, KEYS, WIDTH),
        "padding": lambda: torch.arange(TOKENS) >= torch.tensor([[4], [3], [2], [1], [4]]),
    }
    names = kind.forward.__code__.co_varnames[1 : kind.forward.__code__.co_argcount]
    return [({name: given[name]() for name in names}, numbers(SAMPLES, TOKENS, WIDTH)) for _ in range(2)]


@dataclass(frozen=True, eq=False)
class Case:
    """What the contract's checks are held to."""

    kind: type[Model]
    loss: nn.Module

    @property
    def model(self) -> nn.Module:
        with without_values():
            return self.kind().double()

    @property
    def batches(self) -> list[Any]:
        return batches(self.kind)


LINES = ["tp2", "tp3", "tp4/sp", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d", "dp2 tp2 mb2"]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("kind", CUT, ids=lambda kind: kind.__name__)
def test_an_attention_cut_by_heads_equals_torchs(kind, line):
    case = Case(kind, MeanSquaredError())
    plan, _ = make_plan(Job(case.model, case.loss), Layout.parse(line))
    if line not in ("tp4/sp", "dp2 tp2 mb2") or kind is not ThreeHeads:
        assert plan.compute["attn.out_proj.weight"].axes, plan.roles["attn"]
    verdict = verify(case.model, line, case.batches, loss=case.loss)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["tp2", "tp3/sp", "tp2x2/2d", "tp2x2x2/3d"])
@pytest.mark.parametrize("kind", CUT, ids=lambda kind: kind.__name__)
def test_an_attention_sends_and_holds_what_the_plan_says(kind, line):
    case = Case(kind, MeanSquaredError())
    check_shapes(line, case)
    check_traffic(line, case)
