"""Draws one picture a strategy into docs/pictures/strategies, by the library's own drawing, for docs/how_it_works.md.

Each layout is trained for a step and compared with one device first, so each picture is of a run that was made. The
schedules are drawn as the simulator predicts them, where all chunks take the same time.
"""

from pathlib import Path

import torch
from PIL import Image

import shardwright as sw
from shardwright.layout import Layout
from shardwright.models import GPT, ConvNetConfig, CrossEntropy, GPTConfig, build_convnet
from shardwright.plan.plan import Job
from shardwright.report.description import describe
from shardwright.report.pictures import draw_layout
from shardwright.report.timeline_picture import draw_timelines
from shardwright.strategies.pipeline.schedules import build
from shardwright.strategies.pipeline.simulate import ChunkTimes, simulate

OUT = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "strategies"
LAYOUTS = {
    "data_parallel": "dp4",
    "zero1": "dp4/zero1",
    "zero3": "dp4/zero3",
    "tensor_1d": "tp4",
    "tensor_2d": "tp2x2/2d",
    "tensor_2p5d": "tp2x2x2/2.5d",
    "tensor_3d": "tp2x2x2/3d",
    "spatial": "tp4/spatial",
    "pipeline": "pp4/1f1b mb8",
    "all": "pp2/1f1b mb4 dp2/zero1 tp2x2/2d",
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


def job_and_batch(name: str) -> tuple[Job, tuple[torch.Tensor, torch.Tensor]]:
    """Returns the model that a strategy is shown with, and a batch of it."""
    draw = torch.Generator().manual_seed(0)
    with sw.without_values():
        convnet, gpt = build_convnet(ConvNetConfig()), GPT(GPTConfig(num_layers=4, width=64, num_heads=4))
    if name == "spatial":
        return Job(convnet, CrossEntropy()), (torch.randn(4, 3, 32, 32, generator=draw), torch.arange(4))
    tokens = torch.randint(256, (8, 17), generator=draw)
    return Job(gpt, CrossEntropy()), (tokens[:, :-1], tokens[:, 1:])


def small(path: Path) -> None:
    """Stores a picture with a palette of 64 colours, in a third of the bytes."""
    Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for name, line in LAYOUTS.items():
        job, batch = job_and_batch(name)
        verdict = sw.verify(job.model, line, [batch])
        assert verdict.equal, f"{line}: {verdict}"
        small(draw_layout(describe(job, Layout.parse(line), inputs=batch[0]), OUT / f"{name}.png"))
        print(f"{name}: {verdict}")
    timelines = []
    for name in SCHEDULES:
        schedule = build(name, 4, 8)
        share = 4 / schedule.num_chunks  # a chunk's time in that of a stage
        timelines.append(simulate(schedule, ChunkTimes.equal(schedule.num_chunks, share, share, share)))
    title = "Five schedules, predicted: four stages, eight microbatches"
    small(draw_timelines(OUT / "schedules.png", timelines, title))


if __name__ == "__main__":
    main()
