"""Any model in stages: whatever its code does between its layers, the result is that of one device."""

from __future__ import annotations

import time
from io import BytesIO
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import launch, parallelize, time_layers, verify
from shardwright.analysis.chunks.call_graph import CallSite
from shardwright.analysis.chunks.costs import FLOPS_PER_S, Cost, measured
from shardwright.errors import LayoutError, PlanError, RankFailedError
from shardwright.layout import Layout
from shardwright.models import CrossEntropy, MeanSquaredError
from shardwright.parallelize.planning import StepTraffic, make_plan
from shardwright.plan.plan import Job

W = 6
LINES = ("pp2/1f1b mb3", "pp2/zb-v mb2", "pp3/gpipe mb2", "pp2/naive mb2 dp2", "pp2/interleaved:v2 mb2")


class Blocks(nn.Module):
    """Four layers, called by a function of (module, inputs)."""

    def __init__(self, code, **more):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(W, W) for _ in range(4))
        self.code = code
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.code(self, x)


def skipping(m, x):
    """Every later layer uses the first one's output."""
    first = m.layers[0](x)
    y = first
    for layer in m.layers[1:]:
        y = layer(y).tanh() + first
    return y


def beginning_and_ending(m, x):
    """A module without weights is called on the inputs, which every stage may do, and again at the end."""
    x = m.act(x)
    for layer in m.layers:
        x = layer(x)
    return m.act(x)


def u_shaped(m, x):
    down = [m.layers[0](x), None]
    down[1] = m.layers[1](down[0]).relu()
    up = m.layers[2](down[1]) + down[1]
    return m.layers[3](up) * down[0]


def called_again(m, x):
    for _ in range(2):
        for layer in m.layers:
            x = layer(x).tanh()
    return x


def in_place(m, x):
    for layer in m.layers:
        x = layer(x)
        x += 1
        functional.relu_(x)
    return x


def overwrites_what_came(m, x):
    """The second half begins by writing into the output of the first."""
    y = m.layers[1](m.layers[0](x))
    y.mul_(2)
    return m.layers[3](m.layers[2](y))


def written_and_kept(m, x):
    """A stage writes into a received tensor, and a later stage reads it under its first name."""
    y = m.layers[0](x)
    z = m.layers[1](x).tanh()
    y.add_(z)
    functional.relu(y, inplace=True)
    z = m.layers[2](z * 2)
    return m.layers[3](z) + y


def written_by_a_layer(m, x):
    y = m.layers[0](x)
    z = m.layers[1](m.relu(y))
    return m.layers[3](m.layers[2](z)) + y


def into_the_inputs(m, x):
    x.mul_(2)
    x[:, 0] = 1
    y = m.layers[1](m.layers[0](x))
    return m.layers[3](m.layers[2](y)) + x


def masked(m, x):
    """A mask that is made in pieces, by every stage for itself."""
    mask = torch.zeros_like(x)
    mask[:, 1] = 1
    mask.add_(0.5)
    for layer in m.layers:
        x = layer(x) * mask
    return x


def of_trees(m, x):
    """Values that cross in dicts and tuples, and numbers that are no tensors."""
    here = {"a": m.layers[0](x), "b": (m.layers[1](x), 3)}
    sizes = x.shape[0]
    y = m.layers[2](here["a"]) * here["b"][1] + here["b"][0]
    return m.layers[3](y.view(sizes, W))


def of_inputs(m, x):
    """Every stage computes for itself the values that depend on the inputs alone."""
    scale = x.abs().mean(-1, keepdim=True)
    for layer in m.layers:
        x = layer(x) * scale
    return x


def detached(m, x):
    """The gradient ends at a cut."""
    y = m.layers[1](m.layers[0](x)).detach()
    return m.layers[3](m.layers[2](y))


def without_gradients(m, x):
    """A part of the code runs under no_grad, and the layers there get gradients from the other parts alone."""
    y = m.layers[1](m.layers[0](x))
    with torch.no_grad():
        scale = m.layers[2](m.layers[1](y)).sigmoid()
    return m.layers[3](y * scale)


def unused_outputs(m, x):
    _, z = m.layers[0](x).chunk(2, -1)
    m.layers[1](x)
    return m.layers[3](m.layers[2](torch.cat([z, z], -1)))


def with_integers(m, x):
    """An index crosses, which has no gradient."""
    y = m.layers[0](x)
    best = y.argmax(-1, keepdim=True)
    y = m.layers[2](m.layers[1](y))
    return m.layers[3](y).gather(-1, best) + y


CODES = (
    skipping, u_shaped, called_again, in_place, overwrites_what_came, of_trees, of_inputs, detached, without_gradients,
    unused_outputs,     with_integers, written_and_kept, written_by_a_layer, into_the_inputs, masked,
)  # fmt: skip


def pairs(count=2, samples=5):
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(samples, W, generator=draw), torch.randint(W, (samples,), generator=draw)) for _ in range(count)
    ]


def equal(model, line, batches=None, **options):
    verdict = verify(model, line, batches or pairs(), **options)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.__name__)
@pytest.mark.sampled(7)
def test_code_between_the_layers(code, line):
    equal(Blocks(code, relu=nn.ReLU(inplace=True)), line)


class Tied(nn.Module):
    """One weight that the first, the middle and the last stage use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(W, W) for _ in range(5)))
        self.layers[4].weight = self.layers[2].weight = self.layers[0].weight

    def forward(self, x):
        return self.layers(x)


def frozen(which):
    model = Blocks(skipping)
    for number in which:
        model.layers[number].requires_grad_(False)
    return model


class Dropping(nn.Module):
    """One dropout, called by every stage: its masks are numbered over all of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(W, W) for _ in range(4))
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        for layer in self.layers:
            x = self.drop(layer(x))
        return x


class Shared(nn.Module):
    """One block, with a dropout inside, that both stages call."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(W, W), nn.Dropout(0.2), nn.Linear(W, W))
        self.ends = nn.ModuleList(nn.Linear(W, W) for _ in range(3))

    def forward(self, x):
        for end in self.ends:
            x = end(self.block(x))
        return x


MODELS = {
    "a weight tied over three stages": Tied,
    "a frozen first stage": lambda: frozen([0, 1]),
    "a frozen middle": lambda: frozen([1, 2]),
    "a frozen last stage": lambda: frozen([2, 3]),
    "one dropout for all stages": Dropping,
    "a block for all stages": Shared,
    "layers without weights": lambda: nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Tanh(), nn.Identity()),
    "a layer that copies inside": lambda: nn.Sequential(nn.Linear(W, W), nn.LayerNorm(W), nn.Bilinear(W, W, W))[:2],
}


class Pairs(nn.Module):
    """Returns a tuple, if ``pairs`` is set."""

    def __init__(self, pairs):
        super().__init__()
        self.line, self.pairs = nn.Linear(W, W), pairs

    def forward(self, x):
        return (self.line(x), x) if self.pairs else self.line(x)


class Asking(Blocks):
    def __init__(self):
        super().__init__(None, one=Pairs(False), two=Pairs(True), table=nn.LSTM(W, W))

    def forward(self, x, scale=None):
        if not torch.is_tensor(x) or isinstance(x.shape[0], torch.Tensor):
            x = x[0]
        for layer in (*self.layers, self.one, self.two, self.table):
            y = layer(x)
            x = y * 2 if isinstance(y, torch.Tensor) else y[0]
        return x * scale if isinstance(x.tanh(), (torch.Tensor, float)) else x


@pytest.mark.parametrize("act", [nn.GELU(), nn.Identity(), nn.Dropout(0.3)], ids=["GELU", "Identity", "Dropout"])
@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "pp3/gpipe", "pp2/zb-v mb2 dp2"])
def test_a_module_without_weights_may_be_called_on_the_inputs_and_again_at_the_end(act, line):
    equal(Blocks(beginning_and_ending, act=act), line)


def test_code_may_ask_whether_a_value_is_a_tensor():
    equal(Asking(), "pp2", [((torch.randn(4, W), torch.ones(4, W)), torch.zeros(4, dtype=torch.int64))])


def test_code_that_asks_what_cannot_be_told_is_refused_with_its_line():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.zeroth, self.first, self.second = (nn.Linear(W, W) for _ in range(3))

        def forward(self, x):
            y = self.first(self.zeroth(x))
            return self.second(y if y.sum() > 0 else -y)

    with pytest.raises(LayoutError, match=r"here test_models\.py:\d+: return self\.second\(y if y\.sum"):
        verify(Asks(), "pp2", pairs())


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(7)
def test_weights_and_random_layers_that_stages_share(name, line):
    model = MODELS[name]()
    if line.startswith("pp3") and sum(1 for _ in model.children()) < 3:
        line = line.replace("pp3", "pp2")
    if "v" in line.split()[0] and name == "a layer that copies inside":
        line = "pp2/1f1b mb2"
    equal(model, line)


def test_stages_without_weights_of_their_own():
    model = nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Tanh(), nn.Sigmoid())
    equal(model, "pp4/1f1b mb2")
    equal(model, "pp4/cut:0,1,2,3 mb2")


@pytest.mark.parametrize("line", ["pp2", "pp3/cut:0,1,3", "pp2 dp2"])
def test_statistics_of_a_batch_are_counted_once(line):
    model = nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W), nn.ReLU(), nn.Linear(W, W), nn.BatchNorm1d(W))
    equal(model, line)

    def work(world):
        run = parallelize(model, line, world)
        for batch in run.shard(pairs()):
            run.step(batch)
        run.evaluate(next(run.shard(pairs())))
        return {
            name: buffer.tolist() for name, buffer in run.model.named_buffers() if name.endswith("num_batches_tracked")
        }

    counts = {}
    for found in launch(work, Layout.parse(line).num_ranks, ranks="threads"):
        counts.update({name: count for name, count in found.items() if count})
    assert counts == {"1.num_batches_tracked": 2, "4.num_batches_tracked": 2}


class DroppedInputs(nn.Module):
    """The inputs that every stage uses are dropped out, and normalised, once."""

    def __init__(self):
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.4), nn.BatchNorm1d(W, affine=False)
        self.layers = nn.ModuleList(nn.Linear(W, W) for _ in range(4))

    def forward(self, x):
        scale = self.norm(self.drop(x))
        for layer in self.layers:
            x = layer(x) * scale
        return x


@pytest.mark.parametrize("line", ["pp2", "pp4", "pp2/zb-v", "pp2/interleaved:v2"])
def test_state_on_the_inputs_belongs_to_one_stage(line):
    equal(DroppedInputs(), line)


class UsedOnce(nn.Module):
    """A model that decides by values, and whose forward deletes a buffer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)
        self.register_buffer("once", torch.ones(W), persistent=False)

    def forward(self, x):
        y = self.a(x)
        if bool(x[0, 0] > -1e9) and "once" in self._buffers:
            y = y * self.once
            del self.once
        return self.b(y)


def test_a_forward_that_deletes_a_buffer_on_which_it_branches_is_refused_before_the_first_step():
    with pytest.raises(LayoutError, match="the code of UsedOnce writes into a buffer"):
        verify(UsedOnce(), "pp2 mb2", pairs())


class Averages(nn.Module):
    """A layer that keeps a running mean of its outputs."""

    def __init__(self, norm=False):
        super().__init__()
        self.line = nn.BatchNorm1d(W) if norm else nn.Linear(W, W)
        self.register_buffer("mean", self.line.running_mean if norm else torch.zeros(W))

    def forward(self, x):
        y = self.line(x)
        if isinstance(self.line, nn.Linear):
            self.mean.mul_(0.9).add_(y.detach().mean(0))
        return y


class Subtracts(nn.Module):
    def __init__(self, mean):
        super().__init__()
        self.line = nn.Linear(W, W)
        self.register_buffer("mean", mean)

    def forward(self, x):
        return self.line(x) - self.mean


class ReadsAMean(nn.Module):
    """A buffer that one layer writes is read by the code after another layer, or by another layer."""

    def __init__(self, *, inside, norm=False):
        super().__init__()
        self.first, self.inside = Averages(norm), inside
        self.second = Subtracts(self.first.mean if inside else torch.zeros(W))
        self.third = nn.Linear(W, W)

    def forward(self, x):
        y = self.second(self.first(x))
        return self.third(y if self.inside else y - self.first.mean)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_a_buffer_that_one_stage_writes_and_another_reads_is_refused(inside, norm):
    model = ReadsAMean(inside=inside, norm=norm)
    equal(model, "pp2/cut:first,third")  # all in one stage
    with pytest.raises(PlanError, match=r"stage 0 writes into 'first\.mean', and other stages keep"):
        verify(model, "pp2/cut:first,second", pairs())


def test_a_buffer_that_no_stage_writes_may_be_read_by_all():
    class Masked(nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.line = nn.Linear(W, W)
            self.register_buffer("mask", mask)

        def forward(self, x):
            return self.line(x) * self.mask

    mask = torch.ones(W)
    equal(nn.Sequential(*(Masked(mask) for _ in range(4))), "pp2 mb2")


# ---- what goes in


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(W, W) for _ in range(3))

    def forward(self, x, scale=None, *, shift=None):
        y = self.first(x)
        if scale is not None:
            y = y * scale
        y = self.second(y)
        if shift is not None:
            y = y + shift
        return self.third(y)


def inputs_of(form, samples=5):
    draw = torch.Generator().manual_seed(3)
    x, scale, shift = (torch.randn(samples, W, generator=draw) for _ in range(3))
    forms = {
        "one": x,
        "tuple": (x, scale),
        "dict": {"x": x, "scale": scale},
        "keyword only": {"x": x, "shift": shift},
        "all": {"shift": shift, "scale": scale, "x": x},
    }
    return forms[form]


@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "pp3/zb-h1 mb3 dp2"])
@pytest.mark.parametrize("form", ["one", "tuple", "dict", "keyword only", "all"])
def test_inputs_are_one_value_a_tuple_or_a_dict(form, line):
    equal(Named(), line, [(inputs_of(form), torch.arange(5) % W)])


class Asks(nn.Module):
    """An argument that may be None, by itself or because it is given so; others by any name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x, mask, scale=None, **more):
        y = self.first(x)
        y = y if mask is None else y * mask
        return self.second(y if scale is None else y * scale) * more.get("more", 1)


def test_none_may_be_among_the_inputs():
    x, mask = torch.randn(5, W), torch.rand(5, W)
    inputs = [(x, None), (x, mask, None), {"mask": None, "x": x}, {"x": x, "mask": None, "scale": mask}, (x, mask)]
    equal(Asks(), "pp2 mb2", [(each, torch.arange(5) % W) for each in inputs])


@pytest.mark.parametrize(
    ("inputs", "given"),
    [
        (lambda x: {"x": x, "mask": x, "more": x}, "also more"),
        (lambda x: {"x": x, "mask": x, "maks": None}, "also maks"),
        (lambda x: (x, x, x, x), "4 values in order, for 3 arguments"),
        (lambda x: x, "nothing for mask"),
    ],
)
def test_inputs_that_the_forward_does_not_name_are_refused_on_every_stage(inputs, given):
    model = Asks()

    def work(world):
        run = parallelize(model, "pp2 mb2", world)
        batch = next(run.shard([(inputs(torch.ones(4, W)), torch.zeros(4, dtype=torch.int64))]))
        with pytest.raises(PlanError, match=rf"not those that Asks names\n  given:   {given}\n"):
            run.step(batch)

    launch(work, 2, ranks="threads")


def test_the_form_of_the_inputs_may_change_from_step_to_step():
    forms = ("one", "all", "dict", "one", "keyword only")
    equal(Named(), "pp2/1f1b mb2", [(inputs_of(form), torch.arange(5) % W) for form in forms])


@pytest.mark.parametrize("line", ["pp2/1f1b mb3", "pp2/zb-v mb2 dp2"])
def test_shapes_may_change_from_step_to_step(line):
    equal(Blocks(skipping), line, [pairs(1, samples)[0] for samples in (5, 2, 9, 5, 1)])


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "interleaved:v2", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_microbatches_may_be_unequal_and_empty(name, samples):
    equal(Blocks(skipping), f"pp2/{name} mb4", pairs(2, samples))


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "auto"])
def test_fewer_microbatches_than_stages(name):
    equal(Blocks(skipping), f"pp4/{name} mb2")


def test_the_output_may_be_more_than_a_tensor():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)

        def forward(self, x):
            hidden = self.a(x).relu()
            return {"scores": self.b(hidden), "hidden": hidden}

    class Loss(CrossEntropy):
        def forward(self, output, targets):
            loss_sum, count = super().forward(output["scores"], targets)
            return loss_sum + output["hidden"].sum(), count

    equal(Two(), "pp2/1f1b mb2", loss=Loss())


class Modes(nn.Module):
    """One branch in training, one in evaluation; a setting that a person changes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(W, W) for _ in range(4))
        self.aux, self.k = nn.Linear(W, W), 1.0

    def forward(self, x):
        y = self.layers[1](self.layers[0](x)) * self.k
        if self.training:
            y = y + self.aux(y)
        return self.layers[3](self.layers[2](y))


def of_modes(world, line, start):
    model = Modes().double()
    if start == "eval":
        model.eval()
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draw)
    run = parallelize(model, line, world)
    run.model.train()
    (batch,) = run.shard([(x.double(), t) for x, t in pairs(1)])
    found = [run.step(batch).item(), run.evaluate(batch).item(), run.step(batch).item()]
    run.model.k = 3.0
    found += [run.step(batch).item(), run.evaluate(batch).item(), *run.predict(pairs()[0][0].double())[0].tolist()]
    return found


@pytest.mark.parametrize("start", ["train", "eval"])
def test_code_may_depend_on_training_and_on_settings_that_change_between_steps(start):
    (expected,) = launch(of_modes, 1, "single", start, ranks="threads")
    for line in ("pp2 mb2", "pp4/zb-h1 mb2"):
        for found in launch(of_modes, int(line[2]), line, start, ranks="threads"):
            assert found == pytest.approx(expected, rel=1e-9)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.steps = nn.ModuleList(nn.Linear(W, W) for _ in range(2)), 0

    def forward(self, x):
        self.steps += 1
        return self.layers[1](self.layers[0](x) * min(1, self.steps / 10))


class LeavesLoss(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Linear(W, W)

    def forward(self, x):
        y = self.last(self.inner(x))
        return y + self.inner.aux


class Leaves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.aux = nn.Linear(W, W), 0.0

    def forward(self, x):
        y = self.layer(x)
        self.aux = y.square().mean(-1, keepdim=True)
        return y


def test_a_value_that_a_layer_leaves_in_an_attribute_is_not_lost():
    verdict = verify(LeavesLoss(Leaves()), "pp2/cut:inner,last mb2", pairs())
    assert verdict.equal, str(verdict)


class CountsCalls(nn.Module):
    """A layer that counts its calls since the model's code has last set the count."""

    def __init__(self):
        super().__init__()
        self.layer, self.count = nn.Linear(W, W), 0

    def forward(self, x):
        self.count += 1
        return self.layer(x) * self.count


class SetsCounts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(CountsCalls() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            layer.count = 0  # what it is already where the model is traced
        for layer in self.layers:
            x = layer(x)
        return x


class Scales(nn.Module):
    """A layer that reads a factor from a dict, into which the model's code writes."""

    def __init__(self):
        super().__init__()
        self.layer, self.settings = nn.Linear(W, W), {"factor": 1.0}

    def forward(self, x):
        y = self.layer(x) * self.settings["factor"]
        self.settings["factor"] = 0.5
        return y


class SetsFactors(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scales() for _ in range(4))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            layer.settings["factor"] = 2.0 + number
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("model", [SetsCounts, SetsFactors])
@pytest.mark.parametrize("line", ["pp2", "pp2/1f1b mb2", "pp4/gpipe mb2"])
def test_what_code_sets_in_a_layer_before_it_calls_it_is_set_in_every_forward(model, line):
    equal(model(), line)


class CountsItsCalls(nn.Module):
    """A module without weights whose result depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def forward(self, x):
        self.number = self.number % 2 + 1
        return x * self.number


def test_a_module_that_keeps_a_number_is_not_called_by_every_stage_for_itself():
    with pytest.raises((LayoutError, PlanError, RankFailedError)):
        verify(Blocks(beginning_and_ending, act=CountsItsCalls()), "pp2", pairs())


def test_random_numbers_are_refused_in_training_after_an_evaluation_too():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(W, W)

        def forward(self, x):
            return self.layer(x + torch.poisson(x.detach().abs()) if self.training else x)

    def work(world):
        run = parallelize(Noisy(), "dp1", world)
        (batch,) = run.shard(pairs(1))
        run.evaluate(batch)
        with pytest.raises(PlanError, match="random numbers of 'poisson'"):
            run.step(batch)

    launch(work, 1, ranks="threads")


@pytest.mark.parametrize("line", ["single", "dp2", "pp2 mb2"])
def test_outputs_of_a_prediction_may_be_trees(line):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)

        def forward(self, x):
            hidden = self.a(x)
            return {"hidden": hidden, "both": Both(hidden, self.b(hidden))}

    torch.manual_seed(0)
    model = Two()
    x = torch.randn(1, W)
    expected = model(x)
    layout = Layout.parse(line)
    for found in launch(lambda world: parallelize(model, layout, world).predict(x), layout, ranks="threads"):
        torch.testing.assert_close(found, expected)


class Both(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def test_a_parameter_that_was_frozen_since_is_refused():
    model, partly_frozen = Blocks(skipping), Blocks(skipping)
    partly_frozen.layers[0].requires_grad_(False)

    def work(world):
        for given, trains, said in ((model, False, "was frozen since"), (partly_frozen, True, "no longer is frozen")):
            run = parallelize(given, "dp2", world)
            run.model.layers[0].requires_grad_(trains)
            with pytest.raises(PlanError, match=rf"'layers.0.weight' {said}") as refused:
                run.step(next(run.shard(pairs(1))))
            assert f"save a checkpoint, {'unfreeze' if trains else 'freeze'} the plain model's" in refused.value.fix

    launch(work, 2, ranks="threads")


def test_a_hook_that_a_person_puts_on_a_parameter_is_called_with_its_gradient():
    model = Blocks(skipping)

    def work(world):
        run = parallelize(model, "pp2/zb-h1 mb2", world)
        for parameter in run.parameters.values():
            parameter.register_hook(lambda gradient: gradient * 0)
        run.step(next(run.shard(pairs(1))))
        return max(p.grad.abs().max().item() for p in run.parameters.values())

    assert launch(work, 2, ranks="threads") == [0.0, 0.0]


def test_a_hook_after_accumulation_finds_the_gradient_where_the_backward_is_split():
    model = Blocks(skipping)

    def work(world, line):
        run, found = parallelize(model, line, world), {}
        for name, parameter in run.parameters.items():
            parameter.register_post_accumulate_grad_hook(
                lambda p, n=name: found.setdefault(n, []).append(p.grad.norm())
            )
        run.step(next(run.shard(pairs(1))))
        return found

    split, plain = (
        {k: v for each in launch(work, n, line, ranks="threads") for k, v in each.items()}
        for n, line in ((2, "pp2/zb-h1 mb2"), (1, "mb2"))
    )
    assert split.keys() == plain.keys()
    torch.testing.assert_close(split, plain)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.lines = nn.ModuleList(nn.Linear(W, W, dtype=torch.complex128) for _ in range(2))
        self.window = nn.Conv1d(1, 1, 3, padding=1, dtype=torch.complex128)

    def forward(self, x):
        z = torch.complex(x, x.roll(1, -1))
        for line in self.lines:
            z = line(z)
        return self.window(z[:, None])[:, 0].abs()


class OneTable(nn.Module):
    """A convolution of a table, which is one sample."""

    def __init__(self):
        super().__init__()
        self.table, self.window = nn.Parameter(torch.randn(3, W)), nn.Conv1d(3, 1, 3, padding=1)
        self.lines = nn.ModuleList(nn.Linear(W, W) for _ in range(2))

    def forward(self, x):
        return self.lines[1](self.lines[0](x) * self.window(self.table))


@pytest.mark.parametrize(
    ("kind", "line"), [(Complex, "pp2/zb-h1 mb2"), (Complex, "tp2x2/2d"), (OneTable, "pp2/zb-h1 mb2")]
)
def test_complex_numbers_and_convolutions_of_one_sample(kind, line):
    found = verify(kind(), line, pairs(1))
    assert found.equal, str(found)


def test_a_split_backward_under_autocast():
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(W, W), nn.Unflatten(-1, (1, W)), nn.Conv1d(1, 1, 1), nn.Flatten())

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x).float()

    torch.manual_seed(0)
    model = nn.Sequential(*(Narrow() for _ in range(3)))
    batch = torch.randn(4, W), torch.randint(W, (4,))

    def work(world, line):
        run = parallelize(model, line, world, loss=CrossEntropy())
        run.step(next(run.shard([batch])))
        return {name: p.grad for name, p in run.parameters.items()}

    found = {k: v for each in launch(work, 2, "pp2/zb-h1 mb2", ranks="threads") for k, v in each.items()}
    torch.testing.assert_close(found, launch(work, 1, "mb2", ranks="threads")[0])


def test_steps_may_be_under_autocast_and_then_not():
    model = nn.Sequential(nn.Linear(W, W), nn.Linear(W, W))

    def work(world, line):
        run = parallelize(model, line, world)
        (batch,) = run.shard(pairs(1))
        with torch.autocast("cpu", torch.bfloat16):
            narrow = run.step(batch)
        return torch.stack([narrow, run.step(batch)])

    (alone,) = launch(work, 1, "mb2", ranks="threads")
    for found in launch(work, 2, "pp2/zb-h1 mb2", ranks="threads"):
        torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_encoder_is_cut_between_its_layers(batch_first):
    layer = nn.TransformerEncoderLayer(W, 2, 8, batch_first=batch_first, dropout=0.0)
    model = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(W), enable_nested_tensor=False)
    batch = [(torch.randn(5, 5, W), torch.randn(5, 5, W))]
    equal(nn.Sequential(model, nn.Linear(W, W)), "pp4 mb1", batch, loss=MeanSquaredError())
    if batch_first:
        equal(model, "pp4/zb-h1 mb2", batch, loss=MeanSquaredError())


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x, mask=None):
        y = self.first(x)
        return self.second(y if mask is None else y * mask)


class Positioned(nn.Module):
    """Takes as much of a buffer as the sequence is long."""

    def __init__(self):
        super().__init__()
        self.first, self.table, self.last = nn.Linear(W, W), nn.Embedding(9, W), nn.Linear(W, W)
        self.register_buffer("places", torch.arange(9)[None])

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) + self.table(self.places[:, : x.shape[1]]))


def test_a_slice_of_a_buffer_as_long_as_the_input_is_followed():
    batches = [(torch.randn(5, length, W), torch.randn(5, length, W)) for length in (3, 4)]
    equal(Positioned(), "pp3/1f1b mb2", batches, loss=MeanSquaredError())


class Masked(nn.Module):
    """Its encoder checks whether the mask is causal, which no argument tells it."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(W, W), nn.Linear(W, W)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(W, 2, 8, dropout=0.0, batch_first=True), 1)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.after(self.encoder(self.before(x), mask=mask))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_an_encoder_that_looks_at_a_mask_is_weighed_and_rehearsed_without_values():
    x = torch.randn(5, 3, W)
    job = Job(Masked(), MeanSquaredError(), example=x.to("meta"))
    plan, chosen = make_plan(job, Layout.parse("pp2/1f1b mb2 tp2"))
    for rank in range(plan.mesh.size):
        assert StepTraffic(job, plan, chosen, x).at(plan.mesh.coord(rank))["pipeline"]
    verdict = verify(Masked(), "pp2/1f1b mb2 tp2", [(x, x)], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class Experts(nn.Module):
    """Each sample goes to one of two layers, as its values say."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(W, W) for _ in range(2))

    def forward(self, x):
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            here = ((x[:, 0] > 0) == bool(number)).nonzero().squeeze(-1)
            if len(here):
                y = y.index_add(0, here, expert(x[here]))
        return y


def test_a_layer_that_looks_at_values_is_weighed_by_its_weights():
    equal(nn.Sequential(nn.Linear(W, W), Experts(), Experts(), nn.Linear(W, W)), "pp2/auto mb2")


def test_blocks_with_optional_arguments_are_looked_into():
    equal(nn.Sequential(Optional(), Optional()), "pp4 mb2")


# ---- what a person does by hand


def test_parts_that_a_person_put_on_devices_are_the_stages():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(W, W), nn.Linear(W, W, device="meta")
            self.c, self.norm = nn.Linear(W, W, device="meta"), nn.LayerNorm(W)

        def forward(self, x):
            x = self.b(self.a(x).relu().to("meta")).relu()
            return self.norm(self.c(x).to("cpu", non_blocking=True))

    equal(Parts(), "pp3 mb2")
    equal(Parts(), "pp3/zb-h1 mb3 dp2")
    model = Parts()
    found = launch(lambda world: sorted(parallelize(model, "pp3 mb2", world).parameters), 3, ranks="threads")
    parts = [{name.split(".")[0] for name in names} for names in found]
    assert parts == [{"a"}, {"b", "c"}, {"norm"}]
    with pytest.raises(LayoutError, match="devices change at a, b, norm"):
        verify(Parts(), "pp2 mb2", pairs())
    equal(Parts(), "pp2/cut:a,c mb2")


def test_a_cut_by_hand_puts_layers_where_it_says():
    model = nn.Sequential(*(nn.Linear(W, W) for _ in range(6)))
    equal(model, "pp3/cut:0,1,5 mb2")
    found = launch(lambda world: sorted(parallelize(model, "pp3/cut:0,1,5 mb2", world).parameters), 3, ranks="threads")
    assert [sorted({name.split(".")[0] for name in names}) for names in found] == [["0"], ["1", "2", "3", "4"], ["5"]]


# ---- what cannot be


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x):
        y = self.a(x)
        return self.b(y) if y.sum() > 0 else y


def in_another_precision(m, x):
    y = m.layers[1](m.layers[0](x))
    with torch.autocast("cpu", torch.bfloat16):
        y = m.layers[2](y)
    return m.layers[3](y.to(x.dtype))


class DropsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(W, W), nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(self.layer(self.drop(x)))


class Texts(nn.Module):
    """A stage whose output is no tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)
        self.say, self.read = Say(), Read()

    def forward(self, x):
        return self.b(self.read(self.say(self.a(x)), x))


class Say(nn.Module):
    def forward(self, x):
        return BytesIO()


class Read(nn.Module):
    def forward(self, file, x):
        file.close()
        return x


def into_a_view(m, x):
    y = m.layers[1](m.layers[0](x))
    y[0].mul_(2)
    return m.layers[3](m.layers[2](y)) + y


def into_a_view_of_a_mask(m, x):
    mask = torch.ones_like(x)
    mask[0].mul_(2)
    for layer in m.layers:
        x = layer(x) * mask
    return x


BAD = {
    "a write into a view": (lambda: Blocks(into_a_view), "pp2/cut:layers.0,layers.2 mb2", "writes into a view"),
    "a write into a view of a mask": (lambda: Blocks(into_a_view_of_a_mask), "pp2 mb2", "writes into a view"),
    "more stages than layers": (lambda: nn.Sequential(nn.Linear(W, W), nn.ReLU()), "pp3 mb3", "1 to 2 chunks"),
    "code that depends on values": (Branching, "pp2 mb2", r"cannot be recorded[^§]*here test_models\.py"),
    "no such name": (lambda: Blocks(skipping), "pp2/cut:layers.0,layers.9 mb2", "no module 'layers.9'"),
    "too few names": (lambda: Blocks(skipping), "pp3/cut:layers.0,layers.2 mb2", "3 stages begin at 2 names"),
    "names out of order": (lambda: Blocks(skipping), "pp2/cut:layers.2,layers.0 mb2", "cut:layers.0,layers.2"),
    "code that counts": (Counts, "pp2 mb2", "each forward changes 'steps'"),
    "auto and another": (lambda: Blocks(skipping), "pp2/auto/zb-v mb2", "'auto' chooses the schedule itself"),
    "two schedules": (lambda: Blocks(skipping), "pp2/gpipe/1f1b mb2", "runs one schedule"),
    "a norm that iterates": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(W, W)), nn.Linear(W, W)),
        "pp2 mb2", "with every call"),
    "a file that is not there": (lambda: Blocks(skipping), "pp2/file:nowhere.csv mb2", "nowhere.csv"),
    "batch statistics of microbatches": (
        lambda: nn.Sequential(nn.Linear(W, W), nn.BatchNorm1d(W)), "pp2 mb2", "statistics over the batch"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_model_that_cannot_be_cut_is_refused_before_anything_runs(name):
    make, line, text = BAD[name]
    with pytest.raises(LayoutError, match=text) as refused:
        verify(make(), line, pairs())
    assert all(word in str(refused.value) for word in ("given:", "allowed:", "fix:"))


def test_a_block_of_several_stages_that_drops_twice_is_cut_by_its_record():
    model = Blocks(lambda m, x: m.twice(m.layers[1](m.twice(m.layers[0](x)))), twice=DropsTwice())
    equal(model, "pp2/cut:layers.0,layers.1 mb2")

    def work(world):
        return parallelize(model, "pp2/cut:layers.0,layers.1 mb2", world)

    with pytest.raises(LayoutError, match=r"is not called exactly once(?s:.*)example=inputs"):
        launch(work, 2, ranks="threads")


@pytest.mark.parametrize("line", ["pp2 mb2", "pp4 mb2"])
def test_code_in_another_precision_is_cut_by_its_record(line):
    equal(Blocks(in_another_precision), line)


def test_a_value_that_cannot_be_sent_is_refused_with_its_chunk():
    with pytest.raises(PlanError, match="the output of chunk 0 is no tree of tensors"):
        verify(Texts(), "pp2/cut:a,read mb2", pairs())


class Slow(nn.Linear):
    """A layer whose operators are few and whose time is long."""

    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)


def test_the_time_of_a_module_is_shared_by_its_calls():
    costs = {CallSite("a", 0): Cost(10.0), CallSite("a", 1): Cost(10.0), CallSite("b", 0): Cost(20.0)}
    work = [cost.work / FLOPS_PER_S for cost in measured(costs, {"a": 1.0}).values()]
    assert work == [0.5, 0.5, 1.0]


def test_stages_are_balanced_by_what_was_measured():
    model = nn.Sequential(Slow(W, W), *(nn.Linear(W, W) for _ in range(5)))
    seconds = time_layers(model, pairs()[0][0], repeats=3)
    assert seconds["0"] >= 0.01 > min(seconds[name] for name in "12345")
    seconds = {name: 0.01 if name == "0" else 0.0001 for name in seconds}  # what else the machine does counts no more

    def parts(**options):
        found = launch(lambda world: sorted(parallelize(model, "pp2", world, **options).parameters), 2, ranks="threads")
        return [len({name.split(".")[0] for name in names}) for names in found]

    assert parts() == [3, 3]
    assert parts(seconds=seconds) == [1, 5]

    work = []  # of stages cut by hand: it is drawn, and simulated
    cut = {"seconds": seconds, "alter": lambda run: work.append([cost.work for cost in run.plan.stages.costs])}
    assert verify(model, "pp2/cut:0,3", pairs(), **cut).equal
    assert all(first > 5 * second for first, second in work)
    for wrong in ({"9": 1.0}, {"0": -1.0}, {"0": float("nan")}):
        with pytest.raises(LayoutError, match="what time_layers"):
            parts(seconds=wrong)

    held = []
    verdict = verify(model, "pp2", pairs(), seconds=seconds, alter=lambda run: held.append(len(run.parameters)))
    assert verdict.equal
    assert sorted(held) == [2, 10]
