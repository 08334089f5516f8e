"""ZeRO beside pipelines and grids at once, also with schedules that split the backward."""

import pytest
import torch

from shardwright.models import CrossEntropy, GPTConfig
from shardwright.models.gpt import GPT
from shardwright.verify import verify

LINES = (
    "dp2/zero3 tp2x2/2d", "pp2 dp2/zero3 mb2", "pp2 dp2/zero3 tp2 mb2", "pp2/zb-h1 dp2/zero1 mb3",
    "pp2/zb-h1 dp2/zero2 tp2 mb3", "pp2/zb-h1 dp2/zero3 mb3", "pp2/zb-v dp2/zero3 tp2 mb4", "pp2/zb-v dp2/zero1 mb4",
    "pp2/interleaved:v2 dp2/zero3 mb2", "pp2 dp2/zero2 tp1x2x2/2.5d mb2", "dp2x2/zero3 tp2/sp mb2", "dp2x2/zero1 tp3",
    "pp2 dp2x2/zero3 mb2", "dp2/zero3 tp2x2x2/3d", "dp2/zero2 tp2x2x2/3d mb2", "dp2/zero3/ahead:0 tp2x2/2d/regather",
)  # fmt: skip


def gpt(**changes):
    settings = {"num_layers": 3, "width": 12, "num_heads": 2, "vocabulary": 20, "max_tokens": 8, "dropout": 0.1}
    with torch.device("meta"):
        return GPT(GPTConfig(**{**settings, **changes}))


def batches(batch, steps=2):
    draw = torch.Generator().manual_seed(1)
    pairs = [torch.randint(20, (batch, 7), generator=draw) for _ in range(steps)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in pairs]


@pytest.mark.parametrize(("line", "style"), [(line, ("gpt2", "llama")[n % 2]) for n, line in enumerate(LINES)])
@pytest.mark.sampled(100)
def test_zero_equals_one_device_beside_pipelines_and_grids(line, style):
    name, _, rest = line.partition("/zero")
    line = f"{name}/zero{rest[0]}/bucket:0{rest[1:]}"
    loss = CrossEntropy(label_smoothing=0.1, ignore_index=3)
    verdict = verify(gpt(style=style, num_kv_heads=1), line, batches(5), loss=loss)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["dp3/zero1/bucket:0 tp4", "dp3/zero3/bucket:0 tp4 mb2", "dp2x3/zero2/bucket:0 tp4"])
@pytest.mark.sampled(0)
def test_a_gradient_shared_in_part_is_summed_by_ranks_whose_slices_differ(line):
    # 6 heads over 4 ranks, of 2 of keys and values: some ranks hold one of these, some both, at other places
    model = gpt(style="llama", num_heads=6, num_kv_heads=2)
    verdict = verify(model, line, batches(5), loss=CrossEntropy())
    assert verdict.equal, str(verdict)
