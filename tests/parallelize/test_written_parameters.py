"""A forward that writes to a parameter itself trains where ranks compute with what they store, and else is refused."""

import pytest
import torch
from torch import nn

from shardwright import verify
from shardwright.analysis.recorded.parameter_writes import written_parameters
from shardwright.analysis.recorded.record_forward import record_forward
from shardwright.comm.launch import launch
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.models.losses import MeanSquaredError
from shardwright.parallelize import parallelize
from shardwright.parallelize.planning import structural_copy


class Masked(nn.Linear):
    """A layer that sets a part of its weight to zero before it uses it, as causal convolutions of some models do."""

    def __init__(self, how, width=16):
        super().__init__(width, width)
        self.how = how

    def forward(self, x):
        if self.how == "data":
            self.weight.data[:, -2:].zero_()
        elif self.how == "no_grad":
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
        elif self.how == "bias":
            self.bias.data.view(4, 4)[0] = 0
        elif self.how == "in a list":
            for row in self.weight.data.unbind(0):
                row.div_(row.norm())
        elif self.how == "replaced":
            self.weight.data = self.weight.data.renorm(2, 0, 0.5)
        return super().forward(x)


def model(how, wide=False):
    """With ``wide``, layers are added that tp cuts whatever the layer that writes does."""
    torch.manual_seed(0)
    more = (nn.ReLU(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) if wide else ()
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Masked(how), nn.ReLU(), nn.Linear(16, 16), *more)


def batches():
    return [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(2)]


class Moves(nn.Linear):
    """Moves itself to the device of its input in each forward, where it is already."""

    def forward(self, x):
        return super().to(x.device).matmul(x)

    def matmul(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own move reads it
@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "tp2x2/2d", "pp2 mb2"])
def test_a_move_to_the_device_where_a_layer_is_writes_nothing(line):
    torch.manual_seed(0)
    moving = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Moves(16, 16), nn.ReLU(), nn.Linear(16, 16))
    verdict = verify(moving, line, batches(), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


HOW = {"data": "weight", "no_grad": "weight", "bias": "bias", "replaced": "weight", "in a list": "weight"}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("line", ["dp2", "dp2/zero1", "dp2/zero2", "tp2", "pp2", "dp2 tp2"])
def test_a_forward_may_write_to_what_ranks_store(how, line):
    if how == "replaced" and "zero" in line:  # the optimizer's shard is a view of a buffer
        with pytest.raises(LayoutError, match=r"writes to the parameter '2\.weight', which 'dp2/zero"):
            verify(model(how), line, batches(), loss=MeanSquaredError())
        return
    verdict = verify(model(how, wide=True), line, batches(), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("line", ["dp2/zero3", "dp2/zero3 tp2", "pp2/1f1b mb2 dp2/zero3"])
def test_a_write_to_a_parameter_that_is_gathered_is_refused(how, line):
    with pytest.raises(LayoutError, match=rf"writes to the parameter '2.{HOW[how]}', which 'dp2/zero3' gathers"):
        verify(model(how, wide=True), line, batches(), loss=MeanSquaredError())


@pytest.mark.parametrize("how", ["data", "no_grad", "replaced", "in a list"])
@pytest.mark.parametrize("line", ["tp2/sp", "tp4/2d", "tp2x2x2/2.5d", "tp2x2x2/3d"])
def test_a_write_to_a_weight_of_which_ranks_store_parts_of_rows_is_refused(how, line):
    with pytest.raises(LayoutError, match=r"writes to the parameter '2.weight'(?s:.*)compute the changed weight anew"):
        verify(model(how), line, batches(), loss=MeanSquaredError())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("line", ["dp2 bf16", "tp2 fp16"])
def test_a_write_to_a_parameter_that_has_a_master_weight_is_refused(how, line):
    with pytest.raises(LayoutError, match="which 'mixed precision' rounds from a master weight"):
        verify(model(how, wide=True), line, batches(), loss=MeanSquaredError())


@pytest.mark.parametrize("how", [*HOW, "none"])
def test_what_a_forward_writes_to_is_found_in_its_record(how):
    found = written_parameters(record_forward(model(how).to("meta"), torch.empty(2, 16, device="meta")))
    assert found == ({} if how == "none" else {f"2.{HOW[how]}": "2"})


class Momentum(nn.Module):
    """A layer beside a frozen copy that follows it, updated in each forward."""

    def __init__(self):
        super().__init__()
        self.layer, self.slow = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.layer.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return self.layer(x) * self.slow(x)


@pytest.mark.parametrize("line", ["dp2", "mb2", "pp2/1f1b mb2 dp2"])
def test_a_momentum_encoder_is_updated_once_a_step_or_refused(line):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), Momentum())
    if "mb2" in line:
        with pytest.raises(LayoutError, match=r"writes to the frozen parameter '2\.slow\.bias', and 'mb' makes"):
            verify(model, line, batches(), loss=MeanSquaredError())
        return
    verdict = verify(model, line, batches(), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class Assigning(torch.optim.SGD):
    """An optimizer that assigns new values to ``.data`` of a parameter, as many outside of torch do."""

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


@pytest.mark.parametrize(
    "line", ["dp2", "tp2", "dp2/zero1", "dp2/zero2", "dp2/zero3", "dp2/zero3 bf16", "pp2 mb2 dp2/zero3"]
)
def test_values_that_are_assigned_to_data_of_parameters_are_trained(line):
    given, plain = batches(), model("none")
    one = torch.optim.SGD(plain.parameters(), lr=0.1)
    start = {name: p.clone() for name, p in plain.state_dict().items()}
    for inputs, targets in given:
        one.zero_grad()
        nn.functional.mse_loss(plain(inputs), targets).backward()
        one.step()
        with torch.no_grad():
            plain[0].weight.mul_(0.5)
    again = model("none")
    again.load_state_dict(start)

    def work(world):
        run = parallelize(again, line, world, loss=MeanSquaredError(), example=given[0][0])
        optimizer = run.optimizer(Assigning, lr=0.1)
        for batch in run.shard(given):
            run.step(batch, update=optimizer)
            if "0.weight" in run.parameters:
                run.parameters["0.weight"].data = run.parameters["0.weight"].data * 0.5
            run.changed()
        return run.state_dict()

    found = launch(work, Layout.parse(line).num_ranks, ranks="threads")[0]
    off = 2e-3 if "bf16" in line else 1e-6
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=off, atol=off)


@pytest.mark.parametrize("line", ["dp2", "dp2/zero1", "dp2/zero3", "tp2"])
def test_freezing_the_parameters_of_a_run_is_refused(line):
    given, (batch, _) = model("none"), batches()

    def work(world):
        run = parallelize(given, line, world, loss=MeanSquaredError(), example=batch[0])
        run.parameters["0.weight"].requires_grad_(False)
        with pytest.raises(PlanError, match=r"'0.weight' was frozen since the model was laid out"):
            run.step(next(run.shard([batch])))

    launch(work, Layout.parse(line).num_ranks, ranks="threads")


class Adds(nn.Module):
    """Writes into activations, and into a matrix that it makes, with parameters as operands: it writes to none."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.places, self.below = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(120) / 10)
        self.register_buffer("at", torch.tril_indices(16, 16, -1))

    def forward(self, x):
        h = self.first(x)
        h += self.places
        h += self.last(h.clone())
        matrix = self.below.new_zeros(16, 16)
        matrix[self.at[0], self.at[1]] = self.below
        matrix.fill_diagonal_(1.0)
        return torch.relu_(h @ matrix)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("line", ["dp2/zero3", "bf16 dp2", "tp2x2/2d"])
def test_a_parameter_of_which_the_elements_are_added_to_others_in_place_is_not_written(line):
    torch.manual_seed(0)
    made = Adds()
    assert written_parameters(record_forward(structural_copy(made).to("meta"), torch.empty(2, 16, device="meta"))) == {}
    verdict = verify(made, line, batches(), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
