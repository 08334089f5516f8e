"""Linear layers that nothing follows in parts are cut by their outputs where gathering these costs little."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.layout import Layout
from shardwright.models.losses import MeanSquaredError
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan
from shardwright.strategies.tensor_parallel.graph_cuts import graph_cuts
from shardwright.strategies.tensor_parallel.shards_plan import share_cut

WIDTH, TOKENS = 16, 24


class Block(nn.Module):
    """A gated MLP on tokens, scaled and shifted by what a layer makes of one vector for each sample."""

    def __init__(self, per_token: bool = False):
        super().__init__()
        self.per_token = per_token
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x, condition):
        given = x + condition[:, None] if self.per_token else condition[:, None]
        scale, shift, gate = self.modulation(functional.silu(given)).chunk(3, -1)
        h = functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        return x + gate * self.down(functional.gelu(self.up(h)))


class Modulated(nn.Module):
    def __init__(self, num_blocks: int = 2, out: int = 4, per_token: bool = False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(per_token) for _ in range(num_blocks))
        self.out = nn.Linear(WIDTH, out)

    def forward(self, x, condition):
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


def gathered(model, size=2, tokens=TOKENS):
    model = model.to("meta")
    run = ModelGraph(model, (torch.empty(2, tokens, WIDTH), torch.empty(2, WIDTH))).run
    return graph_cuts(model, run.recording, run.axes, size)


def drawn(samples):
    return (torch.randn(samples, TOKENS, WIDTH), torch.randn(samples, WIDTH)), torch.randn(samples, TOKENS, 4)


@pytest.mark.parametrize(
    "line",
    [
        "tp2",
        "tp3",
        "tp4/2d",
        "tp2x2x2/3d",
        "tp2 recompute:full",
        "dp2/zero3 tp2",
        "pp2/1f1b mb2 tp2",
        "pp2/zb-v mb4 tp2",
    ],
)
def test_layers_that_modulate_blocks_are_cut_and_the_result_is_that_of_one_device(line):
    torch.manual_seed(0)
    plans = []
    # unequal batches: the last microbatch and the last rank have fewer samples
    verdict = verify(
        Modulated(4), line, [drawn(8), drawn(7)], loss=MeanSquaredError(), alter=lambda run: plans.append(run.plan)
    )
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) > 0.9
    weight = plans[0].compute["blocks.0.modulation.weight"]
    assert weight.shape == (3 * WIDTH, WIDTH)
    assert weight.local_shape(dict.fromkeys(plans[0].mesh.axes, 0))[0] < 3 * WIDTH
    role = plans[0].roles["blocks.0.modulation"]
    assert "of which the outputs are all-gathered" in role.why


def test_what_such_a_layer_sends_is_its_output_and_the_gradient_of_its_input():
    model, layout = Modulated(1), Layout.parse("tp2")
    inputs = torch.zeros(8, TOKENS, WIDTH), torch.zeros(8, WIDTH)
    job = job_for(model, MeanSquaredError(), layout, inputs)
    plan, strategies = make_plan(job, layout)
    sent = StepTraffic(job, plan, strategies, inputs).at({"tp": 0})["tensor_1d"]
    found = [(each.kind, each.num_bytes) for each in sent if each.layer == "blocks.0.modulation"]
    assert found == [("all_gather", 8 * 3 * WIDTH * 4)], "and no gradient of an input that needs none"


def test_features_that_are_gathered_divide_no_other_work():
    class Mixed(Modulated):
        def forward(self, x, condition):
            for block in self.blocks:
                x = block(x, condition)
            return self.out((x @ x.transpose(1, 2)).softmax(-1) @ x)  # by the features that were gathered

    layout = Layout.parse("tp2")
    plan, _ = make_plan(job_for(Mixed(), MeanSquaredError(), layout, drawn(8)[0]), layout)
    divided = {each.module: each.axes for each in plan.work}
    assert divided["blocks.0.modulation"] == {"tp"}
    assert divided[""] == set()


def test_only_those_are_cut_that_send_no_more_for_each_element_than_other_cuts():
    assert gathered(Modulated()).gathered == {"blocks.0.modulation", "blocks.1.modulation"}
    assert not gathered(Modulated(per_token=True)).gathered, "an output for each token is sent for each token"


@pytest.mark.parametrize(("inner", "is_cut"), [(64, True), (999, False)])
def test_a_gain_of_a_few_elements_is_left(inner, is_cut):
    model = Modulated()
    for block in model.blocks:
        block.up, block.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
    assert bool(gathered(model, tokens=40 * TOKENS).gathered) == is_cut


@pytest.mark.parametrize("why", ["hook", "read elsewhere", "output", "too few"])
def test_layers_stay_whole_with(why):
    model = Modulated()
    layers = [block.modulation for block in model.blocks]
    if why == "hook":
        for layer in layers:
            layer.register_forward_hook(lambda _, args, y: y * 2)
    elif why == "read elsewhere":
        for block, layer in zip(model.blocks, layers, strict=True):
            block.also = layer  # the same layer under two names, read by code beside its own
            block.forward = lambda x, condition, layer=layer, run=block.forward: run(x, condition) * layer.weight.mean()
    elif why == "output":
        model.out = nn.Identity()  # the features of the blocks are those of the output
    else:
        for block in model.blocks:
            block.up, block.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
    found = gathered(model, size=64 if why == "too few" else 2)
    assert found.shards
    assert not found.gathered
    assert not [name for name in found.shards if "modulation" in name]
