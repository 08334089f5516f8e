"""Lists with an entry for each sample, as numbers, text, dicts of boxes: each rank gets those of its samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.analysis.objects.marked_inputs import SampleValues, lists_marked
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout

NUM, WIDTH = 8, 16
LINES = ["dp2", "dp3", "dp2/zero3 mb2", "tp2", "tp2/sp", "tp4/2d", "tp2x2x2/2.5d", "pp2/1f1b mb4", "pp4/zb-v mb8"]
LINES += ["dp2/zero1 pp2 mb2 tp2", "bf16 dp2"]


class Detector(nn.Module):
    """Finds a box in each picture; with ``labels`` it gives the distance to all boxes of the picture as its loss."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(8)
        )
        self.boxes = nn.Linear(WIDTH, 4)

    def forward(self, x, labels=None, sizes=None):
        for block in self.body:
            x = x + block(x)
        found = self.boxes(x)
        if sizes is not None:
            found = torch.stack([box * height / width for box, (height, width) in zip(found, sizes, strict=True)])
        return {"boxes": found, "loss": None if labels is None else distance(found, labels)}


def distance(found, labels):
    return torch.stack([(box - each["boxes"]).square().sum() for box, each in zip(found, labels, strict=True)]).sum()


def num_boxes(labels):
    return sum(len(each["boxes"]) for each in labels)


def loss_of_model(output, labels):
    return output["loss"], num_boxes(labels)


def loss_beside(output, labels):
    return distance(output["boxes"], labels), num_boxes(labels)


def boxes(rows=lambda i: 1 + i % 3):
    return [{"boxes": torch.rand(rows(i), 4), "area": torch.tensor(0.5), "name": f"picture {i}"} for i in range(NUM)]


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("inside", [True, False])
def test_boxes_of_each_picture_go_where_the_picture_goes(line, inside):
    batches = []
    for _ in range(2):
        labels, x = boxes(), torch.randn(NUM, WIDTH)
        batches.append(({"x": x, "labels": labels} if inside else x, labels))
    verdict = sw.verify(Detector(), line, batches, loss=loss_of_model if inside else loss_beside)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["dp2", "mb2", "dp3 mb2", "tp2", "pp2 mb4"])
def test_python_values_of_each_sample_go_where_the_sample_goes(line):
    batch = {"x": torch.randn(NUM, WIDTH), "sizes": [(i + 1, 2 * i + 1) for i in range(NUM)]}
    verdict = sw.verify(Detector(), line, [(batch, boxes())], loss=loss_beside)
    assert verdict.equal, str(verdict)


def test_a_run_gives_each_rank_the_entries_of_its_samples():
    names = [f"picture {i}" for i in range(5)]
    settings = (3, 4, 5, 6, 7)
    batch = {"x": torch.ones(5, 2), "names": names, "settings": settings}

    class Named(nn.Linear):
        def forward(self, x, names, settings):
            if not x.is_meta:  # as it is where the first step looks at the code
                seen.append((names, settings))
            return super().forward(x)

    def work(world):
        run = sw.parallelize(model, "dp2 mb2", world)
        for part in run.shard([(batch, torch.zeros(5, dtype=torch.int64))]):
            run.step(part)

    seen, model = [], Named(2, 3)
    sw.launch(work, Layout.parse("dp2"), ranks="threads")
    assert sorted(name for found, _ in seen for name in found) == names
    assert {len(found) for found, _ in seen} == {1, 2}
    assert all(type(found) is list and given == settings for found, given in seen)


def test_pictures_of_several_sizes_are_marked():
    class Pictures(nn.Linear):
        def forward(self, pictures):
            return super().forward(torch.stack([picture.mean((1, 2)) for picture in pictures]))

    pictures, classes = [torch.randn(3, 4 + i, 5) for i in range(NUM)], torch.randint(2, (NUM,))
    with pytest.raises(LayoutError, match=r"sw\.per_sample\(values\) for a list"):
        sw.verify(Pictures(3, 2), "dp2", [(pictures, classes)])
    for line in ("dp2", "dp3 mb2"):
        assert sw.verify(Pictures(3, 2), line, [(sw.per_sample(pictures), classes)]).equal


def test_a_list_that_may_be_of_samples_or_of_values_of_all_samples_is_refused_with_both_ways_to_write_it():
    labels, x = boxes(rows=lambda i: NUM), torch.randn(NUM, WIDTH)
    for each in labels:
        del each["area"]
    with pytest.raises(PlanError, match=r"write tuple\(values\) .* or sw\.per_sample\(values\)"):
        sw.verify(Detector(), "dp2", [(x, labels)], loss=loss_beside)
    assert sw.verify(Detector(), "dp2", [(x, sw.per_sample(labels))], loss=loss_beside).equal


@pytest.mark.parametrize(
    ("tree", "is_marked"),
    [
        ([1, 2, 3], True),
        (["a", "b"], True),
        (("a", "b"), True),
        ((1, 2), False),
        ([torch.ones(2, 3), torch.ones(2)], False),  # arguments, or features of several scales
        ([], True),
    ],
)
def test_which_lists_are_of_samples_where_no_tensor_tells(tree, is_marked):
    assert isinstance(lists_marked(tree), SampleValues) == is_marked


@pytest.mark.parametrize(
    ("value", "is_marked"),
    [
        ([1, 2], True),
        ([1, 2, 3], False),
        ([{"n": 1}, {"n": 2}], True),
        ([torch.ones(3), torch.ones(1)], True),
        ([torch.ones(2), torch.ones(2)], False),
        ((1, 2), False),
        ([[1, 2], [3]], True),
    ],
)
def test_which_lists_are_of_samples_beside_two_samples(value, is_marked):
    assert isinstance(lists_marked({"x": torch.ones(2, 5), "value": value})["value"], SampleValues) == is_marked


def test_a_mean_over_boxes_says_how_to_write_its_count():
    labels = boxes()
    with pytest.raises(PlanError, match=r"lambda output, labels: \(output\.loss \* n\(labels\), n\(labels\)\)"):
        sw.verify(Detector(), "dp2", [{"x": torch.randn(NUM, WIDTH), "labels": labels}], loss=sw.ModelLoss())
