"""What a stage holds, and what moves between stages."""

import pytest
import torch

from shardwright import launch, parallelize
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
@pytest.mark.sampled(4)
def test_between_stages_an_activation_moves_as_the_blocks_that_it_is(mode, parts):
    layout = Layout.parse(f"pp2 {mode}")
    tokens = torch.randint(20, (8, 7), generator=torch.Generator().manual_seed(1))

    def work(world):
        run = parallelize(gpt(), layout, world, loss=CrossEntropy())
        with world.recorder.recording() as records:
            (batch,) = run.shard([(tokens[:, :-1], tokens[:, 1:])])
            run.step(batch)
        return [r.num_bytes for r in records if r.source == "pipeline" and r.kind == "send"]

    whole = 8 * 6 * 12 * 4  # samples, tokens, width, bytes
    for sent in launch(work, layout, ranks="threads"):
        assert sent == [whole // parts]
