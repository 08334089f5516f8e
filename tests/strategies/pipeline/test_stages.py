"""What a stage holds, and what moves between stages."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import launch, parallelize, verify
from shardwright.layout import Layout
from shardwright.models import CrossEntropy, GPTConfig
from shardwright.models.gpt import GPT


def gpt(**changes):
    settings = {"num_layers": 3, "width": 12, "num_heads": 2, "vocabulary": 20, "max_tokens": 8, "dropout": 0.1}
    with torch.device("meta"):
        return GPT(GPTConfig(**{**settings, **changes}))


def test_a_stage_holds_its_own_blocks_and_no_others():
    def work(world):
        run = parallelize(gpt(tied=False), "pp3 mb2", world)
        return {name.split(".")[1] for name, _ in run.model.named_parameters() if name.startswith("blocks")}

    assert launch(work, 3, ranks="threads") == [{"0"}, {"1"}, {"2"}]


@pytest.mark.parametrize(("mode", "parts"), [("tp2x2/2d", 4), ("tp2x1x2/2.5d", 4), ("tp2x2x2/3d", 8), ("tp2/sp", 2)])
@pytest.mark.sampled(0)
def test_between_stages_an_activation_moves_as_the_blocks_that_it_is(mode, parts):
    layout = Layout.parse(f"pp2 {mode}")
    tokens = torch.randint(20, (8, 7), generator=torch.Generator().manual_seed(1))

    def work(world):
        run = parallelize(gpt(num_layers=4), layout, world, loss=CrossEntropy())
        with world.recorder.recording() as records:
            (batch,) = run.shard([(tokens[:, :-1], tokens[:, 1:])])
            run.step(batch)
        return [r.num_bytes for r in records if r.source == "pipeline" and r.kind == "send"]

    whole = 8 * 6 * 12 * 4  # samples, tokens, width, bytes
    for sent in launch(work, layout, ranks="threads"):
        assert sent == [whole // parts]


class TwoHeads(nn.Module):
    """A head at the end, and another that sees what the first layer has made; ``kind`` is what holds both outputs."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.aside, self.second, self.head = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        h = self.first(x)
        aside = self.aside(h)
        return self.kind((("main", self.head(self.second(h.relu()))), ("aside", aside)))


class OfSomeSamples(nn.Module):
    """Cross entropy of the main output, and the mean of the other on samples of class 0; of no such sample, nothing."""

    def __init__(self, uses_aside):
        super().__init__()
        self.uses_aside = uses_aside

    def forward(self, output, targets):
        output = dict(output)
        loss, is_zero = functional.cross_entropy(output["main"], targets, reduction="sum"), targets == 0
        if self.uses_aside and is_zero.any():
            loss = loss + output["aside"][is_zero].sum()
        return loss, len(targets)


@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "pp2/zb-v mb2", "pp2/1f1b mb2 dp2/zero2"])
@pytest.mark.parametrize("kind", [tuple, dict])
def test_what_the_loss_does_not_reach_on_another_stage_has_no_gradient_there_and_not_one_of_zeros(line, kind):
    batches = [(torch.randn(8, 4), torch.full((8,), 2)) for _ in range(2)]
    verdict = verify(TwoHeads(kind), line, batches, loss=OfSomeSamples(uses_aside=False))
    assert verdict, str(verdict)


@pytest.mark.parametrize(("kind", "line"), [(tuple, "pp2/1f1b mb2"), (dict, "pp2/1f1b mb2"), (dict, "pp2/zb-v mb2")])
def test_a_value_may_be_reached_from_one_microbatch_and_not_from_the_next(kind, line):
    orders = torch.tensor([[2, 2, 0, 0], [0, 0, 2, 2], [0, 2, 2, 2], [0, 0, 0, 0]])
    batches = [(torch.randn(4, 4), targets) for targets in orders]
    verdict = verify(TwoHeads(kind), line, batches, loss=OfSomeSamples(uses_aside=True))
    assert verdict, str(verdict)
