"""Blocks that a forward uses in different ways are priced one by one, though they have the same code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.planner.block_runs import unlike_in_run
from shardwright.planner.blocks import alike_blocks
from shardwright.planner.plans import plan_layouts


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.blocks, self.head = nn.Linear(16, 16), self.made(), nn.Linear(16, 10)

    def made(self):
        return nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        return self.head(self.body(self.into(x)).mean(1))

    def body(self, x):
        for block in self.blocks:
            x = 0.5 * block(x)
        return x


class Twice(Net):
    def body(self, x):
        return super().body(super().body(x))


class EachTwice(Net):
    def body(self, x):
        for block in self.blocks:
            x = block(block(x))
        return x


class Shared(Net):
    """All blocks have one activation."""

    def made(self):
        blocks = super().made()
        for block in blocks:
            block.act = blocks[0].act if hasattr(blocks[0], "act") else nn.Tanh()
        return blocks

    def body(self, x):
        for block in self.blocks:
            x = block.act(block(x))
        return x


class Rotates(nn.Module):
    """Makes a table when it is first called."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(16.0).cos().to(x)
        return x * self.table


class Table(Shared):
    """All blocks share a module with a table, which is made in the first of them."""

    def made(self):
        blocks, table = super().made(), Rotates()
        for block in blocks:
            block.act = table
        return blocks


class Adds(Net):
    """A sum that begins with 0, as auxiliary losses of mixtures do."""

    def body(self, x):
        extra = 0
        for block in self.blocks:
            x = block(x)
            extra = extra + block.norm.weight.square().mean()
        return x * extra


class Totals(Net):
    """A sum of all outputs, which stages send on beside their own."""

    def body(self, x):
        total = 0
        for block in self.blocks:
            x = block(x)
            total = total + x
        return total


class OfLists(Net):
    def made(self):
        return nn.ModuleList(nn.ModuleList([Block(), nn.Linear(16, 16)]) for _ in range(4))

    def body(self, x):
        for block, layer in self.blocks:
            x = layer(torch.tanh(block(x)))
        return x


class FrozenFirst(Net):
    def body(self, x):
        with torch.no_grad():
            for block in self.blocks[:3]:
                x = block(x)
        for block in self.blocks[3:]:
            x = block(x)
        return x


class SomeOutputs(Net):
    def __init__(self):
        super().__init__()
        self.lateral = nn.Linear(16, 16)

    def body(self, x):
        kept = []
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number % 2:
                kept.append(self.lateral(x))
        return sum(kept, x)


class OwnNorms(Net):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in self.blocks)

    def body(self, x):
        for block, norm in zip(self.blocks, self.norms, strict=False):
            x = norm(block(x))
        return x


class LastOnes(Net):
    def body(self, x):
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return torch.cat(kept[-3:], 1)


class FirstAgain(Net):
    """Each block takes what the first one takes, as in nanochat: stages send it on."""

    def body(self, x):
        first = x
        for block in self.blocks:
            x = block(x + first)
        return x


class Pooled(Net):
    def body(self, x):
        for block in self.blocks:
            x = block(x)
            x = x[:, ::2] if x.shape[1] > 2 else x
        return x


class FirstFour(Net):
    def body(self, x):
        for block in self.blocks[:4]:
            x = block(x)
        return x


class Skips(Net):
    def body(self, x):
        kept = []
        for block in self.blocks[:3]:
            x = block(x)
            kept.append(x)
        for block in self.blocks[3:]:
            x = block(x + kept.pop())
        return x


class ByIndex(Net):
    def body(self, x):
        for number in range(6):
            x = self.blocks[number](x)
        return x


class LastAlone(Net):
    def body(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 5:
                x = torch.tanh(x)
        return x


ALIKE = [Net, EachTwice, OfLists, Shared, Table, FirstAgain, Adds]
UNLIKE = {
    FrozenFirst: "calls 'blocks.3' in another way than 'blocks.0'",
    SomeOutputs: "does something else before 'blocks.2' than before 'blocks.1'",
    OwnNorms: "does something else before 'blocks.2' than before 'blocks.1'",
    Pooled: "calls 'blocks.1' in another way than 'blocks.0'",
    FirstFour: "does not call the alike blocks once each, one after the other",
    Twice: "does not call the alike blocks once each, one after the other",
    Skips: "does something else before 'blocks.3' than before 'blocks.1'",
    ByIndex: "does not run with fewer of the alike blocks",
    Totals: "does something else before 'blocks.2' than before 'blocks.1'",
    LastAlone: "does something else with fewer of the alike blocks",
    LastOnes: "does something else with fewer of the alike blocks",
}
BATCH = torch.randn(8, 12, 16), torch.randint(10, (8,))


@pytest.mark.parametrize("kind", [*ALIKE, *UNLIKE])
def test_a_forward_that_uses_blocks_in_different_ways_is_found(kind):
    model = kind()
    why = unlike_in_run(model, alike_blocks(model), BATCH[0])
    assert why == (f"the forward {UNLIKE[kind]}" if kind in UNLIKE else "")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("line", ["tp2", "pp2/1f1b mb2", "mb2 dp2 recompute:full"])
@pytest.mark.parametrize("kind", [*ALIKE, *UNLIKE])
def test_a_price_is_that_of_a_rehearsal_of_all_blocks(kind, line, monkeypatch):
    model = kind()
    price = plan_layouts(model, "a100-80gb:1x2", BATCH, layout=line).best
    monkeypatch.setattr("shardwright.planner.outline.alike_blocks", lambda model: None)
    whole = plan_layouts(model, "a100-80gb:1x2", BATCH, layout=line).best
    stages_differ = kind in (OfLists, Table, FirstAgain) and line.startswith("pp")
    assert bool(price.records.note) is (kind in UNLIKE or stages_differ)
    assert price.traffic_by_axis == whole.traffic_by_axis
    assert [each.by_kind for each in price.memory] == [each.by_kind for each in whole.memory]
    assert price.step_s == pytest.approx(whole.step_s, rel=1e-9)


@pytest.mark.parametrize("kind", [ByIndex, Skips])
def test_a_search_of_a_model_that_does_not_run_with_fewer_blocks_finds_a_layout(kind):
    assert plan_layouts(kind(), "h100-80gb:1x2", BATCH).layouts
