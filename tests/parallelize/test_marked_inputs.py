"""Inputs whose dim 0 is not the samples: ``sw.whole`` marks one for all samples, ``sw.packed`` rows of each sample."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.ledger import predict_memory
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan
from shardwright.plan.plan import Job

TOKENS, WIDTH, NUM, PATCH = 6, 16, 8, 9
LINES = [
    *("dp2", "dp2/zero3 mb2", "tp2", "tp2/sp", "tp4/2d", "pp2/1f1b mb4", "pp4/zb-v mb4", "pp2/1f1b mb2 dp2/zero1 tp2"),
    *("tp2x2x2/2.5d", "tp2x2x2/3d"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, turned):
        return x + self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x * turned)))))


class Positioned(nn.Module):
    """Embeds positions that all samples share by layers of its own, and turns its activations by them, as Flux does."""

    def __init__(self):
        super().__init__()
        self.places, self.mixed = nn.Linear(3, 24), nn.Linear(24, WIDTH)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, ids, scale):
        turned = self.dropout(self.mixed(torch.relu(self.places(ids))))
        for block in self.blocks:
            x = block(x, turned)
        return self.head(x) * scale


class Branching(Positioned):
    """The same with code that cannot be traced."""

    def forward(self, x, ids, scale):
        if x.shape[1] != ids.shape[0]:
            raise ValueError(f"{x.shape[1]} tokens, {ids.shape[0]} positions")
        return super().forward(x, ids, scale)


def positions(num=NUM):
    x = torch.randn(num, TOKENS, WIDTH, dtype=torch.float64)
    ids, scale = torch.randn(TOKENS, 3, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    return {"x": x, "ids": sw.whole(ids), "scale": sw.whole(scale)}, torch.randn(num, TOKENS, 4, dtype=torch.float64)


class Pictures(nn.Module):
    """Attends within each picture's patches, whose sizes it reads, and puts them in the places of their tokens."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding, self.patches = nn.Embedding(10, WIDTH), nn.Linear(5, WIDTH)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids, patches, sizes):
        features = self.dropout(self.patches(patches))
        lengths = sizes.prod(1).tolist()
        parts = [torch.softmax(each @ each.mT, 1) @ each for each in features.split(lengths)]
        mask = (ids == PATCH).unsqueeze(-1)
        x = self.embedding(ids)
        x = x.masked_scatter(mask.expand_as(x), torch.cat(parts))
        for block in self.blocks:
            x = block(x, 1.0)
        return self.head(x)


def pictures(num=NUM, sizes=((1, 2), (2, 2), (1, 1))):
    """A batch in which sample i has i % 3 pictures: of one, of two and of no sizes."""
    ids, own, counts = torch.randint(PATCH, (num, TOKENS)), [], [i % 3 for i in range(num)]
    rows = []
    for sample, count in enumerate(counts):
        given = [sizes[(sample + n) % 3] if count == 1 else (1, 2 + n % 2) for n in range(count)]
        own += given
        rows.append(sum(h * w for h, w in given))
        ids[sample, : rows[-1]] = PATCH
    patches = sw.packed(torch.randn(sum(rows), 5, dtype=torch.float64), rows)
    return {"ids": ids, "patches": patches, "sizes": sw.packed(torch.tensor(own), counts)}, ids % 7


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", LINES)
def test_positions_of_all_samples_are_whole_under_any_layout(line):
    torch.manual_seed(0)
    result = sw.verify(Positioned().double(), line, [positions(), positions(7)], loss=sw.MeanSquaredError())
    assert result.equal, str(result)


@pytest.mark.parametrize("line", ["tp2x2/2d", "pp2/1f1b mb2 dp2"])
def test_positions_are_whole_where_code_is_not_followed(line):
    torch.manual_seed(0)
    result = sw.verify(Branching().double(), line, [positions(), positions()], loss=sw.MeanSquaredError())
    assert result.equal, str(result)


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", LINES)
def test_rows_of_pictures_go_to_the_ranks_of_their_samples(line):
    torch.manual_seed(0)
    result = sw.verify(Pictures().double(), line, [pictures(), pictures(sizes=((1, 1), (1, 2), (1, 3)))])
    assert result.equal, str(result)


@pytest.mark.parametrize("line", ["dp2", "tp2x2/2d", "pp2 mb2"])
def test_predictions_are_of_all_samples(line):
    torch.manual_seed(0)
    plain, (inputs, _) = Pictures().double().eval(), pictures()
    args = inputs["ids"], inputs["patches"].tensor, inputs["sizes"].tensor

    def work(world):
        return sw.parallelize(plain, line, world, example=inputs).predict(inputs)

    for found in sw.launch(work, line, ranks="threads"):
        torch.testing.assert_close(found, plain(*args))


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2 mb2"])
def test_traffic_and_memory_are_predicted(line):
    torch.manual_seed(0)
    (inputs, targets), layout = pictures(), Layout.parse(line)
    job = job_for(Pictures().double(), sw.CrossEntropy(), layout, inputs)
    plan, strategies = make_plan(job, layout)
    traffic = StepTraffic(job, plan, strategies, inputs)

    def work(world):
        run = sw.parallelize(job.model, line, world, example=inputs, check_every=0)
        (part,) = run.shard([(inputs, targets)])
        with world.recorder.recording() as records:
            run.step(part)
        return sum(each.num_bytes for each in records if each.source in {s.name for s in strategies})

    for rank, sent in enumerate(sw.launch(work, line, ranks="threads")):
        stated = traffic.at(plan.mesh.coord(rank)).values()
        assert sent == sum(each.num_bytes * each.times for calls in stated for each in calls)
        assert predict_memory(Job(job.model, job.loss), line, rank, (inputs, targets), ranks="threads").peak_bytes > 0


def test_what_cannot_be_cut_by_samples_is_refused_with_the_line_to_write():
    inputs, targets = pictures()
    plain = {name: getattr(each, "tensor", each) for name, each in inputs.items()}
    with pytest.raises(LayoutError, match=r"different numbers of samples(?s:.*)sw\.whole(?s:.*)sw\.packed"):
        sw.verify(Pictures().double(), "dp2", [(plain, targets)])
    with pytest.raises(PlanError, match="24 rows"):
        sw.packed(torch.zeros(5, 3), [12, 12])
    with pytest.raises(PlanError, match=r"given: *int"):
        sw.whole(3)
    with pytest.raises(LayoutError, match="which cuts tokens"):
        sw.verify(Positioned().double(), "tp2/sp/seq", [positions()], loss=sw.MeanSquaredError())
    with pytest.raises(PlanError, match="mix the samples"):  # its numbers would be counted by rows
        sw.verify(Pictures(dropout=0.1).double(), "dp2", [pictures()])


def test_a_grid_that_was_planned_without_the_marks_asks_for_an_example():
    torch.manual_seed(0)
    model = Positioned().double()

    def work(world):
        run = sw.parallelize(model, "tp2x2/2d", world, loss=sw.MeanSquaredError())
        run.step(next(run.shard([positions()])))

    with pytest.raises(PlanError, match=r"an input that has no samples(?s:.*)example=inputs"):
        sw.launch(work, 4, ranks="threads")


class Normed(nn.Module):
    """Batch norm of each sample, which two tensors without samples shift, one of them by its own number of rows."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(2)

    def forward(self, x, weights, rows, counts):
        own = torch.stack([each.sum(0) for each in rows.split(counts.tolist())])
        return self.norm(self.layer(x * weights.sum(0) + own))


@pytest.mark.parametrize("line", ["mb2/own-statistics", "dp2 mb2/own-statistics"])
def test_batch_statistics_of_microbatches_are_those_of_one_device_with_marks_too(line):
    torch.manual_seed(0)
    counts = torch.tensor([1, 0, 2, 1, 3, 0, 1, 1])
    marked = sw.whole(torch.randn(NUM, 4).double()), sw.packed(torch.randn(9, 4).double(), counts.tolist())
    batch = (torch.randn(NUM, 4).double(), *marked, counts), torch.arange(NUM) % 2
    found = sw.verify(Normed().double(), line, [batch])
    assert found.equal, str(found)


@pytest.mark.parametrize("places", [[1, 2, 3], [3, 0], [2, 2], [], [1], [0, 1, 2, 3]])
def test_rows_of_samples_are_taken_in_their_order_and_a_run_of_them_is_a_view(places):
    packed = sw.packed(torch.arange(6), [2, 0, 1, 3])
    each = packed.tensor.split([2, 0, 1, 3])
    found = packed.of(places)
    assert found.tensor.tolist() == [row for place in places for row in each[place].tolist()]
    assert found.counts == tuple(len(each[place]) for place in places)
    is_view = found.tensor.untyped_storage().data_ptr() == packed.tensor.untyped_storage().data_ptr()
    assert is_view == (places not in ([3, 0], [2, 2]))


class Added(nn.Linear):
    """Adds positions that all samples share to what it is given."""

    def forward(self, x, positions):
        return super().forward(x + positions)


@pytest.mark.parametrize("line", ["dp2", "pp2 mb2"])
def test_an_input_that_has_the_size_of_the_batch_by_accident_is_told_how_to_be_marked(line):
    inputs = torch.ones(4, 4), torch.arange(4.0)  # as many positions as samples
    with pytest.raises((RuntimeError, LayoutError)) as failed:
        sw.verify(Added(4, 2), line, [(inputs, torch.zeros(4, dtype=torch.int64))])
    hint = "dim 0 of inputs of shapes [2, 4], [2]; if one is the same for all samples and has the batch's size there by"
    assert hint in " ".join(str(failed.value).split())
    assert "write sw.whole(tensor)" in str(failed.value)
    marked = inputs[0], sw.whole(inputs[1])
    assert sw.verify(Added(4, 2), "dp2", [(marked, torch.zeros(4, dtype=torch.int64))]).equal


def test_an_error_of_ours_gets_no_hint_of_marks():
    model, inputs, targets = Added(4, 2), (torch.ones(4, 4), torch.ones(4, 1)), torch.zeros(4, 3, dtype=torch.int64)

    def work(world):
        run = sw.parallelize(model, "dp2", world)
        with pytest.raises(PlanError, match="targets") as failed:
            run.step(next(run.shard([(inputs, targets)])))
        return getattr(failed.value, "__notes__", [])

    assert sw.launch(work, 2, ranks="threads") == [[], []]


def test_a_batch_of_one_tensor_gets_no_hint_of_marks():
    plain, batch = nn.Sequential(nn.Linear(4, 2), nn.Unflatten(0, (4, 1))), (torch.ones(4, 4), torch.ones(4, 1, 2))
    with pytest.raises(RuntimeError) as failed:
        sw.verify(plain, "dp2", [batch], loss=sw.MeanSquaredError())
    assert "sw.whole" not in str(failed.value)
