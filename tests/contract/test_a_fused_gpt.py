"""A GPT as one file of plain torch has it: fused q, k, v, torch's attention with dropout, tied words, its own loss."""

from __future__ import annotations

from functools import cache
from math import prod

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.parallelize.planning import job_for, make_plan

WIDTH, HEADS, TOKENS, WORDS, LAYERS, STEPS = 16, 4, 8, 19, 2, 50
LINES = ("dp2 tp2", "pp2/1f1b mb4", "dp2/zero3")


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), None

    def forward(self, x):
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.num_heads, self.width, self.dropout = HEADS, WIDTH, 0.1
        self.drop = nn.Dropout(self.dropout)

    def forward(self, x):
        samples, tokens, width = x.size()
        parts = self.c_attn(x).split(self.width, dim=2)
        size = width // self.num_heads
        q, k, v = (each.view(samples, tokens, self.num_heads, size).transpose(1, 2) for each in parts)
        dropout = self.dropout if self.training else 0
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(samples, tokens, width)))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = Norm(), Attention(), Norm(), Inner()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class FusedGPT(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        tables = {"wte": nn.Embedding(WORDS, WIDTH), "wpe": nn.Embedding(TOKENS, WIDTH), "drop": nn.Dropout(0.1)}
        self.transformer = nn.ModuleDict({**tables, "h": blocks, "ln_f": Norm()})
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        _, tokens = idx.size()
        assert tokens <= TOKENS, f"a sequence of {tokens} tokens, and at most {TOKENS} have a place"
        places = torch.arange(0, tokens, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(places))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class MeanInside(nn.Module):
    """The model computes the mean of its loss; the sum is as many times it."""

    def forward(self, output, targets):
        return output[1] * targets.numel(), targets.numel()


def model() -> nn.Module:
    torch.manual_seed(0)
    return FusedGPT().double()


def batches():
    draw = torch.Generator().manual_seed(1)
    text = torch.randint(WORDS, (8, TOKENS + 1), generator=draw)
    for _ in range(STEPS):
        text = text[torch.randperm(len(text), generator=draw)]
        given, following = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        yield {"idx": given, "targets": following}, following


@cache
def curve(line: str) -> list[float]:
    plain = model()

    def work(world):
        every = list(batches())
        run = sw.parallelize(plain, line, world, loss=MeanInside(), example=every[0][0])
        optimizer = run.optimizer(torch.optim.AdamW, lr=3e-3)
        losses = []
        for batch in run.shard(every):
            losses.append(run.step(batch).item())
            optimizer.step()
        return losses

    return sw.launch(work, sw.Layout.parse(line), ranks="threads")[0]


@pytest.mark.parametrize("line", LINES)
def test_a_gpt_of_one_file_learns_as_on_one_device_with_dropout(line):
    alone = curve("single")
    assert alone[-1] < 0.8 * alone[0]
    assert curve(line) == pytest.approx(alone, rel=1e-6)


def test_the_fused_attention_of_a_gpt_of_one_file_is_cut():
    layout, (inputs, _) = sw.Layout.parse("dp2 tp2"), next(batches())
    plan, _ = make_plan(job_for(model(), MeanInside(), layout, inputs), layout)
    inside = {name: place for name, place in plan.compute.items() if ".h." in name}
    cut = {name for name, place in inside.items() if "tp" in place.axes}
    assert {name for name in inside if ".c_attn." in name} <= cut
    share = sum(prod(inside[name].shape) for name in cut) / sum(prod(place.shape) for place in inside.values())
    assert share >= 0.5
