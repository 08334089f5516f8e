"""The Protocol was frozen only after these two ran under it: where such protocols break is stages and cut state."""

import pytest
import torch

from prototypes import zero3
from shardwright.layout import Layout
from shardwright.models import CrossEntropy, GPTConfig
from shardwright.models.gpt import GPT
from shardwright.strategies import STRATEGIES, choose
from shardwright.verify import verify

KNOWN = {**STRATEGIES, "zero3": zero3.Zero3()}


def gpt(**changes):
    settings = {"num_layers": 3, "width": 12, "num_heads": 2, "vocabulary": 20, "max_tokens": 8, "dropout": 0.1}
    with torch.device("meta"):
        return GPT(GPTConfig(**{**settings, **changes}))


def batches(batch, steps=2):
    draw = torch.Generator().manual_seed(1)
    pairs = [torch.randint(20, (batch, 7), generator=draw) for _ in range(steps)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in pairs]


@pytest.mark.parametrize(
    "line",
    [
        "dp2/zero3", "dp3/zero3 mb2", "dp2/zero3 tp2", "pp2 mb3", "pp3 mb4", "pp2 tp2 mb2", "pp2 dp2 mb2",
        "pp2 dp2/zero3 mb2", "pp2 dp2/zero3 tp2 mb2", "pp3 tp2", "pp2 tp2/sp mb2", "pp2 tp2x2/2d mb2",
        "pp3 tp2x1x2/2.5d", "pp2 tp2x2x2/3d mb2", "dp2/zero3 tp2x2/2d",
    ],
)  # fmt: skip
@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_stages_and_cut_state_equal_one_device_beside_the_other_strategies(line, style):
    layout = Layout.parse(line)
    verdict = verify(
        gpt(style=style, num_kv_heads=1),
        layout,
        batches(5),
        loss=CrossEntropy(label_smoothing=0.1, ignore_index=3),
        strategies=choose(layout, KNOWN),
    )
    assert verdict.equal, str(verdict)


def test_a_stage_holds_its_own_blocks_and_no_others():
    from shardwright import launch, parallelize

    def work(world):
        layout = Layout.parse("pp3 mb2")
        run = parallelize(gpt(tied=False), layout, world, strategies=choose(layout, KNOWN))
        return {name.split(".")[1] for name, _ in run.model.named_parameters() if name.startswith("blocks")}

    assert launch(work, 3, ranks="threads") == [{"0"}, {"1"}, {"2"}]


def test_between_steps_a_rank_holds_only_its_slices():
    from shardwright import launch, parallelize

    def work(world):
        layout = Layout.parse("dp4/zero3")
        run = parallelize(gpt(), layout, world, strategies=choose(layout, KNOWN))
        run.step(next(run.shard(batches(4))))
        held = sum(p.untyped_storage().nbytes() for p in run.model.parameters())
        return held, sum(p.numel() for p in run.parameters.values())

    found = launch(work, 4, ranks="threads")
    total = sum(p.numel() for p in gpt().parameters())
    assert [held for held, _ in found] == [0] * 4
    assert sum(size for _, size in found) == total


@pytest.mark.parametrize(("mode", "parts"), [("tp2x2/2d", 4), ("tp2x1x2/2.5d", 4), ("tp2x2x2/3d", 8), ("tp2/sp", 2)])
def test_between_stages_an_activation_moves_as_the_blocks_that_it_is(mode, parts):
    from shardwright import launch, parallelize

    layout = Layout.parse(f"pp2 {mode}")
    ((tokens, targets),) = batches(8, steps=1)

    def work(world):
        run = parallelize(gpt(), layout, world, loss=CrossEntropy(), strategies=choose(layout, KNOWN))
        with world.recorder.recording() as records:
            (batch,) = run.shard([(tokens, targets)])
            run.step(batch)
        return [r.num_bytes for r in records if r.source == "pipeline" and r.kind == "send"]

    whole = 8 * 6 * 12 * 4  # samples, tokens, width, bytes
    for sent in launch(work, layout, ranks="threads"):
        assert sent == [whole // parts]
