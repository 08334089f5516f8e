"""A model whose code needs values of its inputs, as those of images and text do, is planned by the example's values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwright import CrossEntropy, launch, parallelize, plan_layouts, verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.ledger import measure_memory, predict_memory
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan
from shardwright.plan.plan import Job

WIDTH, IMAGE, TOKENS, WORDS, PATCHES = 16, 15, 6, 16, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(self.up(y) * nn.functional.silu(self.gate(y)))


class ImagesAndText(nn.Module):
    """Puts the features of images in the places of their tokens, of which it checks the number."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.projection, self.blocks = nn.Linear(8, WIDTH), nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids, pictures):
        x, features = self.embedding(ids), self.projection(pictures).flatten(0, 1)
        mask = (ids == IMAGE).unsqueeze(-1).expand_as(x)
        if x[mask].numel() != features.numel():
            raise ValueError(f"{x[mask].numel()} numbers for tokens of images, {features.numel()} of features")
        x = x.masked_scatter(mask, features)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(num=8):
    ids = torch.randint(IMAGE, (num, TOKENS))
    places = torch.rand(num, TOKENS).topk(PATCHES).indices  # other ones in each sample
    return (ids.scatter(1, places, IMAGE), torch.randn(num, PATCHES, 8, dtype=torch.float64)), ids


@pytest.mark.parametrize("line", ["dp2/zero3", "tp2/auto", "tp2/sp", "tp4/2d", "pp2/zb-h1 mb4", "pp2/1f1b mb2 dp2 tp2"])
def test_a_model_of_images_and_text_is_cut_and_equal(line):
    torch.manual_seed(0)
    result = verify(ImagesAndText(), line, [batch(), batch()])
    assert result.equal, str(result)
    assert "cannot be recorded" not in result.left_whole
    assert all(share > 0.7 for factor, share in result.shares.items() if factor.startswith("tp"))


def test_without_values_the_text_on_what_is_cut_says_what_the_code_raised():
    (ids, pictures), _ = batch()
    graph = ModelGraph(ImagesAndText(), (ids.to("meta"), pictures.to("meta")))
    assert not graph.reads_values
    assert "tokens of images" in graph.failure
    given = ModelGraph(ImagesAndText(), (ids.to("meta"), pictures.to("meta")), (ids, pictures.float()))
    assert given.reads_values
    assert given.failure == ""
    assert given.run.recording.inputs[0].shape[0] not in (8, *ids.shape)


def test_ranks_with_examples_of_other_values_are_refused():
    torch.manual_seed(0)
    model, examples = ImagesAndText().double(), [batch()[0] for _ in range(2)]

    def work(world):
        return parallelize(model, "tp2", world, example=examples[world.rank])

    with pytest.raises(PlanError, match=r"different examples(?s:.*)tensor 0"):
        launch(work, 2, ranks="threads")


class Writes(ImagesAndText):
    """Writes to its inputs, and takes just so many tokens of images."""

    def forward(self, ids, pictures):
        if int((ids == IMAGE).sum()) != 8 * PATCHES:
            raise ValueError("another number of images")
        ids[ids == IMAGE] = 0
        x = self.embedding(ids) + self.projection(pictures[:, :1])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_the_example_keeps_its_values_where_the_code_writes_to_its_inputs():
    (ids, pictures), _ = batch()
    kept, layout = ids.clone(), Layout.parse("pp2")
    job = job_for(Writes().double(), CrossEntropy(), layout, (ids, pictures))
    assert job.graph.run.recording.inputs[0].shape == ids.shape  # no other number of samples has as many images
    plan, strategies = make_plan(job, layout)
    assert plan.stages.num_chunks == 2
    StepTraffic(job, plan, strategies, (ids, pictures)).at(plan.mesh.coord(0))
    assert torch.equal(ids, kept)


def test_traffic_is_known_of_a_model_that_needs_values_of_its_inputs():
    layout, (inputs, _) = Layout.parse("pp2/1f1b mb2 tp2"), batch()
    job = job_for(ImagesAndText().double(), CrossEntropy(), layout, inputs)
    plan, strategies = make_plan(job, layout)
    sent = StepTraffic(job, plan, strategies, inputs).at(plan.mesh.coord(0))
    assert sum(each.num_bytes for traffic in sent.values() for each in traffic) > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("line", ["dp2/zero3", "tp4/2d", "pp2 mb2"])
def test_the_memory_of_a_step_is_predicted_by_the_values_of_the_example(line):
    torch.manual_seed(0)
    model, ((ids, pictures), targets) = ImagesAndText(), batch()
    given = (ids, pictures.float()), targets

    def work(world):
        run = parallelize(model, line, world, example=given[0])
        optimizer = run.optimizer(torch.optim.AdamW)
        for part in run.shard([given] * 2):
            account = measure_memory(run, part, optimizer)
        return account.peak_bytes

    measured = launch(work, line, ranks="threads")
    job = Job(model, CrossEntropy())
    for rank in (0, len(measured) - 1):
        predicted = predict_memory(job, line, rank, given, ranks="threads").peak_bytes
        assert abs(predicted / measured[rank] - 1) < 0.01


def test_layouts_of_a_model_that_reads_its_inputs_are_priced():
    (ids, pictures), targets = batch()
    given = (ids, pictures.float()), targets
    plans = plan_layouts(ImagesAndText(), "a100-80gb:1x2", given, layout="pp2 mb2")
    assert plans.best.traffic_by_axis == {"pp": 2 * len(ids) * TOKENS * WIDTH * 4}  # one value, and its gradient


@pytest.mark.filterwarnings("ignore:'the model' takes a decision by a sum over all samples")
@pytest.mark.parametrize("line", ["dp2", "pp2 mb2"])
def test_what_a_rehearsal_cannot_know_is_refused_by_name(line):
    class Decides(ImagesAndText):
        def forward(self, ids, pictures):
            x = super().forward(ids, pictures)
            return x * int(x.sum())

    (ids, pictures), targets = batch()
    with pytest.raises(ValueError, match=r"cannot be re(?s:.*)given:(?s:.*)fix:") as found:
        predict_memory(Job(Decides(), CrossEntropy()), line, 0, ((ids, pictures.float()), targets), ranks="threads")
    assert isinstance(found.value, PlanError | LayoutError)


class Through(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class MasksByMap(ImagesAndText):
    """Makes a mask as transformers does: ``torch.vmap`` under a mode runs operators that no function calls."""

    def forward(self, ids, pictures):
        places = torch.arange(TOKENS)
        with Through():
            of_rows = torch.vmap(lambda sample, row: places <= row, in_dims=(None, 0))
            earlier = torch.vmap(of_rows, in_dims=(0, None))(ids[:, 0], places)
        x = earlier.double() @ self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SplitsByLength(ImagesAndText):
    """Reads a list of lengths from inputs that it has moved to the device of its activations."""

    def forward(self, ids, pictures):
        x = self.embedding(ids)
        lengths = (torch.as_tensor(ids, device=x.device) == IMAGE).sum(1).tolist()
        parts = [row[: -2 + length].sum(0) for row, length in zip(x, lengths, strict=True)]
        x = x + torch.stack(parts).unsqueeze(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_list_of_values_is_read_from_inputs_that_were_moved():
    torch.manual_seed(0)
    for line in ("tp2", "pp2 mb2"):
        result = verify(SplitsByLength(), line, [batch()])
        assert result.equal, str(result)
        assert all(share > 0.7 for factor, share in result.shares.items() if factor.startswith("tp"))


def test_a_map_over_inputs_keeps_no_model_from_being_cut():
    torch.manual_seed(0)
    result = verify(MasksByMap(), "pp2/1f1b mb2", [batch()])
    assert result.equal, str(result)


class Decides(ImagesAndText):
    """Turns its rows by a number that it computes, and takes ``form`` of that number for the others."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, ids, pictures):
        number = int(self.projection(pictures).abs().sum()) % 3
        return self.form(super().forward(ids, pictures), number)


def test_code_that_reads_numbers_of_activations_is_recorded_with_ones_in_their_place():
    torch.manual_seed(0)
    model = Decides(lambda x, number: x.roll(number, 1))
    verdict = verify(model, "tp2", [batch()])
    assert verdict.equal, str(verdict)
    assert verdict.shares["tp2"] > 0.7
    with pytest.warns(UserWarning, match="takes a decision by a sum over all samples"):
        verify(model, "dp2", [batch()])


def test_code_whose_shapes_need_values_of_activations_says_so():
    (ids, pictures), _ = batch()
    model = Decides(lambda x, number: torch.cat(x.split([number, 100], 1), 1))
    graph = ModelGraph(model, (ids.to("meta"), pictures.to("meta")), (ids, pictures.float()))
    with pytest.raises(PlanError, match="a real batch"):
        _ = graph.run
