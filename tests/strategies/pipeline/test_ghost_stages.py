"""Stages that run the user's own whole forward: what they refuse, what they check, what they give back."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright import verify
from shardwright.analysis.chunks.forward_events import record_events
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.models.losses import CrossEntropy
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.plan.event_stages import EventStages
from shardwright.report.description import describe
from shardwright.report.show import show_text
from shardwright.strategies.pipeline.cut_model import runs_on_shards
from shardwright.strategies.pipeline.event_cut import cut_events

WIDTH = 8


class Layers(nn.Module):
    """Layers in a loop, with a check of shapes that a tracer cannot follow."""

    def __init__(self, num: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num))

    def forward(self, x):
        assert x.shape[1] == WIDTH
        for layer in self.layers:
            x = self.step(layer, x)
        return x

    def step(self, layer, x):
        return torch.tanh(layer(x)) + x


def batches(num=8):
    draw = torch.Generator().manual_seed(0)
    return [
        (torch.randn(num, WIDTH, generator=draw).double(), torch.randint(WIDTH, (num,), generator=draw))
        for _ in range(2)
    ]


def model_of(kind: type[nn.Module], **given) -> nn.Module:
    torch.manual_seed(0)
    return kind(**given).double()


def plan_of(model, line):
    layout = Layout.parse(line)
    return make_plan(job_for(model, CrossEntropy(), layout, batches()[0][0]), layout)[0]


def refusal(kind, line="pp2 mb2"):
    with pytest.raises(LayoutError) as found:
        plan_of(model_of(kind), line)
    return str(found.value)


def test_the_layers_are_cut_evenly_and_one_value_crosses():
    stages = plan_of(model_of(Layers), "pp2").stages
    assert isinstance(stages, EventStages)
    assert [stages.chunked.calls_of(chunk) for chunk in range(2)] == [
        ("layers.0", "layers.1"),
        ("layers.2", "layers.3"),
    ]
    assert [len(edge.values) for edge in stages.chunked.edges] == [1]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu()) + x


class Residuals(Layers):
    def __init__(self, num: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(num))

    def step(self, layer, x):
        return layer(x)


@pytest.mark.parametrize(
    ("num", "opened", "first"),
    [
        (4, ("",), ("layers.0", "layers.1")),
        (3, ("", "layers.1"), ("layers.0", "layers.1.up")),
    ],
)
def test_a_block_is_one_event_unless_a_stage_begins_inside(num, opened, first):
    model = model_of(Residuals, num=num)
    stages = plan_of(model, "pp2").stages
    assert stages.opened == opened
    assert stages.chunked.calls_of(0) == first
    assert verify(model, "pp2/1f1b mb4", batches()).equal


def test_a_block_with_a_hook_inside_stays_open_so_that_the_hook_runs_on_every_stage():
    model, seen = model_of(Residuals), []
    model.layers[0].up.register_forward_hook(lambda *_: seen.append(threading.current_thread()))
    assert plan_of(model, "pp2").stages.opened == ("", "layers.0")
    assert verify(model, "pp2 mb2", batches()[:1]).equal
    counts = Counter(thread for thread in seen if thread is not threading.main_thread())
    assert len(counts) == 2
    assert len({*counts.values()}) == 1  # the stage without the block ran it on ghosts, as often


class ReadsActivations(Layers):
    def step(self, layer, x):
        return layer(x) if x.mean() > 0 else -layer(x)


def test_a_path_that_depends_on_activations_is_refused_before_the_first_step():
    assert "cannot be recorded" in refusal(ReadsActivations)


class Deciding(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.up(x) if (x * self.up.bias[0]).isfinite().all() and self.up.bias[0] > 0 else self.down(x).tanh()


class DecidesInside(Layers):
    """The code of each layer decides by its weights and by its input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Deciding() for _ in range(8))


@pytest.mark.parametrize("line", ["pp2/1f1b mb8", "pp4/zb-v mb8", "pp2 mb4 dp2"])
def test_a_module_may_decide_by_values_that_only_its_stage_has(line):
    model = model_of(DecidesInside)
    assert {bool(layer.up.bias[0] > 0) for layer in model.layers} == {True, False}
    assert verify(model, line, batches()).equal


class ReadsInputs(Layers):
    """Masks samples, and leaves the mask out where it would change nothing."""

    def forward(self, x):
        mask = x[:, :1] > 100
        for layer in self.layers:
            y = torch.tanh(layer(x / 100))
            x = x + (y.masked_fill(mask, 0.0) if mask.any() else y)
        return x


def mixed_batch(num: int = 2):
    """A batch of which every second part of ``num`` has inputs that take the other path."""
    x, y = batches()[0]
    other = torch.where(torch.arange(WIDTH) == 0, 200.0, x)
    return torch.where((torch.arange(len(x)) * num // len(x) % 2 == 0)[:, None], x, other), y


@pytest.mark.parametrize("line", ["pp2 mb2", "pp2/interleaved:v2 mb4", "pp4/zb-v mb8", "pp2 mb2 dp2/zero1"])
def test_microbatches_take_the_paths_that_their_inputs_ask_for(line):
    num = 4 if "dp2" in line else Layout.parse(line).num_microbatches
    assert verify(model_of(ReadsInputs, num=8), line, [mixed_batch(num), *batches()]).equal


class SendsMore(Layers):
    """Where a sample asks for it, a second value goes to the last layer."""

    def forward(self, x):
        mask = x[:, :1] > 100
        y = self.layers[0](x / 100)
        more = self.layers[1](y) * mask if mask.any() else None
        y = self.layers[2](y)
        return self.layers[3](y if more is None else y + more)


def test_microbatches_may_send_different_values():
    assert verify(model_of(SendsMore), "pp2/cut:layers.0,layers.2 mb2", [mixed_batch(), *batches()]).equal


class SkipsLayers(Layers):
    """Leaves out layers at random, as speech models do."""

    def step(self, layer, x):
        return x if torch.rand([]) < 0.4 else super().step(layer, x)


@pytest.mark.parametrize("line", ["pp2 mb2", "pp4/gpipe mb4", "pp2/zb-v mb4", "pp2 mb2 dp2/zero1"])
def test_layers_that_are_skipped_at_random_are_skipped_on_every_stage(line):
    # also those with which a stage begins, and all layers of a stage
    result = verify(model_of(SkipsLayers), line, [*batches(), *batches(), *batches()])
    assert result.equal, str(result)


class Alternates(Layers):
    """Takes another path in every forward, whatever the inputs are."""

    def __init__(self):
        super().__init__()
        self.turns = iter([False, False, False, True] * 1000)

    def forward(self, x):
        assert x.shape[1] == WIDTH
        y, z = self.layers[0](x), self.layers[1](x)
        return self.layers[3](self.layers[2](z if next(self.turns) else y))


def test_another_path_than_the_recorded_one_raises_and_names_the_call():
    with pytest.raises(Exception, match="the forward does other calls than those that were recorded") as found:
        verify(model_of(Alternates), "pp2/cut:layers.0,layers.2 mb2", batches())
    assert "call 0 of 'layers.2' on values" in str(found.value)


class KeepsTensors(Layers):
    """Each layer leaves its output in a list that the model reads."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Leaving() for _ in range(4))

    def forward(self, x):
        assert x.shape[1] == WIDTH
        kept: list[torch.Tensor] = []
        for layer in self.layers:
            x = layer(x, Notes(kept))
        return x + sum(kept)


@dataclass
class Notes:
    kept: list


class Leaving(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x, notes):
        y = super().forward(x)
        notes.kept.append(y.tanh())
        return y


def test_a_tensor_that_leaves_a_module_on_a_hidden_way_is_refused_and_the_module_named():
    found = refusal(KeepsTensors)
    assert "code outside of 'layers.0' reads a tensor" in found or "'layers." in found


class WritesInPlace(Layers):
    """Values change in place between modules."""

    def forward(self, x):
        assert x.shape[1] == WIDTH
        total = torch.zeros_like(x)
        for layer in self.layers:
            x = self.step(layer, x)
            total += x
            total[:, 0] = x[:, 1]
            x.mul_(0.5)
        return total


@pytest.mark.parametrize("line", ["pp2 mb2", "pp4/gpipe mb2", "pp2/interleaved:v2 mb2"])
def test_values_that_change_in_place_between_modules_are_those_of_one_device(line):
    assert verify(model_of(WritesInPlace), line, batches()).equal


class TakesAnything(Layers):
    """A wrapper whose forward names no arguments, and asks for the device to choose a function."""

    def forward(self, *args, **named):
        return super().forward(*args, **named)

    def step(self, layer, x):
        return x + layer(x).sigmoid() if x.device.type == "cpu" else layer(x)


def test_a_forward_that_names_no_arguments_and_asks_for_the_device_is_cut():
    verdict = verify(model_of(TakesAnything), "pp2 mb2", batches())
    assert verdict.equal, str(verdict)


class DropsBetweenModules(Layers):
    """Attention that drops scores, called by code between modules, as most models of other packages do."""

    def step(self, layer, x):
        heads = layer(x).view(len(x), 2, 2, -1)
        return x + nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).reshape(x.shape)


@pytest.mark.parametrize("line", ["pp2 mb2", "pp4/zb-v mb4"])
def test_random_numbers_that_code_between_modules_draws_are_those_of_one_device(line):
    verdict = verify(model_of(DropsBetweenModules, num=8), line, batches())
    assert verdict.equal, str(verdict)


class WritesThroughView(Layers):
    def step(self, layer, x):
        x = layer(x).tanh()
        x[:, :2].mul_(0.5)
        return x


def test_a_write_through_a_view_that_would_cross_is_refused():
    assert "through a view" in refusal(WritesThroughView, "pp4")


@dataclass
class Made:
    logits: torch.Tensor
    first: torch.Tensor


torch.utils._pytree.register_dataclass(Made, serialized_type_name="tests.Made")


class GivesDataclass(Layers):
    def forward(self, x):
        first = self.step(self.layers[0], x)
        x = first
        for layer in self.layers[1:]:
            x = self.step(layer, x)
        assert x.shape[1] == WIDTH
        return Made(x, first)


class LossOfMade(nn.Module):
    def forward(self, made, targets):
        assert isinstance(made, Made)
        return CrossEntropy()(made.logits + made.first, targets)


def test_the_output_keeps_its_class_and_values_of_other_stages_in_it_are_received():
    assert verify(model_of(GivesDataclass), "pp2/1f1b mb2", batches(), loss=LossOfMade()).equal


class Tied(Layers):
    """The last layer's code uses the first one's weight without calling it, and a table of the model's own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        assert self.table.shape[0] == x.shape[1]
        assert self.layers[0].weight.dtype is x.dtype
        y = super().forward(x * self.scale + self.table)
        return (y * self.scale) @ self.layers[0].weight.T + self.table


@pytest.mark.parametrize("line", ["pp2 mb2", "pp4", "dp2/zero3 pp2/1f1b mb2", "pp2/zb-h1 mb2", "pp2 bf16"])
def test_parameters_that_code_between_modules_reads_are_summed_over_their_stages(line):
    plan = plan_of(model_of(Tied), line)
    assert plan.compute["layers.1.weight"].num_elements({"pp": plan.mesh["pp"] - 1, "dp": 0}) == 0
    model = model_of(Tied).float() if "bf16" in line else model_of(Tied)
    given = [(x.float(), y) for x, y in batches()] if "bf16" in line else batches()
    assert verify(model, line, given).equal


class Normed(Layers):
    """One BatchNorm that every layer's output goes through."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def step(self, layer, x):
        return self.norm(layer(x)) + x


def test_a_batch_norm_that_two_stages_call_is_refused():
    assert "'norm' updates state with every call, and several stages or chunks call it" in refusal(Normed, "pp2")


def test_stages_of_ghosts_run_layers_that_tensor_parallelism_cuts_alone():
    verdict = verify(model_of(Layers), "pp2 tp2", batches())
    assert verdict.equal, str(verdict)
    assert verdict.shares["tp2"] > 0.9


class Uneven(Layers):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 400)

    def forward(self, x):
        return self.head(super().forward(x))


def test_show_names_the_call_that_makes_a_stage_larger_than_its_share():
    layout = Layout.parse("pp2")
    inputs = batches()[0][0]
    found = describe(job_for(model_of(Uneven), CrossEntropy(), layout, inputs), layout, inputs=inputs)
    assert "larger than its share: call 0 of 'head' is" in " ".join(show_text(found).split())


def test_functions_of_inputs_alone_are_no_events():
    class Masked(Layers):
        def forward(self, x):
            mask = (x > 0).cumsum(0) > 1
            return super().forward(x) * mask

    record = record_events(Masked().to("meta"), torch.empty(3, WIDTH, device="meta"), ["layers.0"])
    assert record.events[0].name == "layers.0"
    assert "cumsum" not in {event.name for event in record.events}
    assert record.events[-1].takes[1] is None


class Gated(nn.Module):
    """A pair of layers that tensor parallelism knows."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Pairs(Layers):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(4))


def test_where_the_code_of_stages_is_not_followed_tensor_parallelism_runs_on_shards():
    model = Pairs().double()
    batch = torch.randn(4, WIDTH, dtype=torch.float64), torch.randint(WIDTH, (4,))
    plans = {}
    for line in ("tp2", "pp2 mb2 tp2"):
        layout = Layout.parse(line)
        plans[line], _ = make_plan(job_for(model, CrossEntropy(), layout, batch[0]), layout)
    assert not runs_on_shards(plans["tp2"])
    assert runs_on_shards(plans["pp2 mb2 tp2"])
    assert verify(model, "pp2 mb2 tp2", [batch], loss=CrossEntropy()).equal


class Head(nn.Module):
    """A head with a bias of its own, which its layer is tied to, as that layer's weight is to the first layer's."""

    def __init__(self, first):
        super().__init__()
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.decoder = nn.Linear(WIDTH, WIDTH)
        self.decoder.weight, self.decoder.bias = first.weight, self.bias

    def forward(self, x):
        return self.decoder(x)


class TiedHead(Layers):
    def __init__(self):
        super().__init__()
        self.head = Head(self.layers[0])

    def forward(self, x):
        return self.head(super().forward(x))


def test_a_parameter_of_two_names_has_the_first_on_every_stage():
    model = model_of(TiedHead)
    names = []
    verdict = verify(
        model,
        "pp2 mb2 dp2/zero1",
        batches(),
        alter=lambda run: names.append((set(run.parameters), set(run.plan.state))),
    )
    assert verdict.equal, str(verdict)
    assert all(held <= known for held, known in names)


class PassesOn(Layers):
    """A module without weights returns the tensor that it gets, which another stage has made."""

    def __init__(self):
        super().__init__()
        self.same = nn.ModuleList(nn.Identity() for _ in range(4))

    def forward(self, x):
        assert x.shape[1] == WIDTH
        first = self.layers[0](x)
        y = self.layers[2](self.layers[1](first))
        return self.layers[3](y + self.same[3](first))


class DropsInPlace(Layers):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5, inplace=True)

    def step(self, layer, x):
        return super().step(layer, self.drop(x * 1.5))


class DividesView(Layers):
    """Writes in place to a value of another stage, which is a view there where there is one sample."""

    def forward(self, x):
        assert x.shape[1] == WIDTH
        x = torch.tanh(self.layers[0](x)).reshape(-1, 2, WIDTH // 2).transpose(0, 1)
        query = self.layers[1](torch.cat([x, x], -1))
        key = self.layers[2](torch.cat([x, x], -1))
        query /= 3.0
        return self.layers[3](torch.tanh(query) * key).sum(0)


class Twice(nn.Module):
    """Returns one tensor in two places."""

    def __init__(self):
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.own(x)
        return y, y


class ReturnsTwice(Layers):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Twice() for _ in range(4))

    def step(self, layer, x):
        first, second = layer(x)
        return torch.tanh(first) * second


COLLECTED = threading.local()


def collect(module, given, output):
    COLLECTED.outputs.append(output)


class Collects(Layers):
    """Hooks collect what layers return, and the model reads it at the end."""

    def __init__(self):
        super().__init__()
        for layer in self.layers[:3]:
            layer.register_forward_hook(collect)

    def forward(self, x):
        COLLECTED.outputs = []
        x = super().forward(x)
        return x + COLLECTED.outputs[0] * COLLECTED.outputs[2]


@pytest.mark.parametrize(
    ("kind", "line", "num"),
    [
        (PassesOn, "pp2/cut:layers.0,layers.2 mb2", 8),
        (DropsInPlace, "pp2 mb2", 8),
        (DropsInPlace, "pp2/zb-v mb4", 8),
        (DividesView, "pp2/cut:layers.0,layers.2", 1),
        (DividesView, "pp2/cut:layers.0,layers.2 mb8", 8),
        (ReturnsTwice, "pp2/cut:layers.0,layers.2 mb2", 8),
        (Collects, "pp2 mb2", 8),
        (Collects, "pp4/gpipe mb4", 8),
    ],
)
def test_values_that_are_passed_on_overwritten_or_collected_are_those_of_one_device(kind, line, num):
    result = verify(model_of(kind), line, batches(num))
    assert result.equal, str(result)


class Sections(Layers):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layers(), Layers()])


class HookedSections(Sections):
    """Hooks on whole sections, each more than a stage can hold, keep what the head reads and change what goes on."""

    def __init__(self):
        super().__init__()
        for section in self.layers:
            section.register_forward_hook(collect)
        self.layers[1].register_forward_pre_hook(lambda module, given: (given[0] * torch.sigmoid(given[0]),))
        self.layers[1].register_forward_hook(lambda module, given, output: output * torch.cos(given[0]))

    def forward(self, x):
        COLLECTED.outputs = []
        x = super().forward(x)
        return x + COLLECTED.outputs[0] * COLLECTED.outputs[1]


@pytest.mark.parametrize("line", ["pp2 mb2", "pp4/1f1b mb4", "pp4/zb-v mb8"])
def test_a_module_with_forward_hooks_is_cut_inside_where_stages_are_even_no_other_way(line):
    model = model_of(HookedSections)
    assert ("layers.0" in plan_of(model, line).stages.opened) == (line != "pp2 mb2")
    result = verify(model, line, batches())
    assert result.equal, str(result)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_module_with_a_backward_hook_is_never_cut_inside():
    def hooked(kind):
        model = model_of(kind)
        for section in model.layers:
            section.register_full_backward_hook(
                lambda module, given, taken: tuple(x if x is None else x.cos() for x in given)
            )
        return model

    assert verify(hooked(Sections), "pp2 mb2", batches()).equal
    with pytest.raises(LayoutError, match="cannot be cut into 4 chunks"):
        plan_of(hooked(Sections), "pp4/1f1b")
    with pytest.raises(LayoutError, match="makes and does not return"):
        plan_of(hooked(HookedSections), "pp2")  # the collected tensor is not the one that the hook's module returns


class Block(nn.Module):
    """Leaves itself out: by a random number, or where its mask hides every sample."""

    def __init__(self, masked: bool):
        super().__init__()
        self.own, self.masked = nn.Linear(WIDTH, WIDTH), masked

    def forward(self, x, mask):
        if mask.all() if self.masked else torch.rand(1).item() < 0.4:
            return x
        return x + torch.tanh(self.own(x)) * ~mask


class DecidingBlocks(Layers):
    def __init__(self, masked: bool):
        super().__init__()
        self.layers = nn.ModuleList(Block(masked) for _ in range(8))

    def forward(self, x):
        assert x.shape[1] == WIDTH
        mask = x[:, :1] > 100
        x = x / 100
        for layer in self.layers:
            x = layer(x, mask)
        return x


class DrawsAtOnce(Layers):
    """Draws all numbers at the beginning; most layers are left out most of the time."""

    def forward(self, x):
        assert x.shape[1] == WIDTH
        drawn = torch.rand(len(self.layers))
        for number, layer in enumerate(self.layers):
            if number == 0 or drawn[number] > 0.7:
                x = torch.tanh(layer(x)) + x
        return x


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return self.own(x), int(mask.sum())


class TrimsAndCounts(Layers):
    """Cuts a dim to a length that is read from the inputs, and uses a number that a layer counts on another stage."""

    def __init__(self):
        super().__init__(8)
        self.counts = Counts()

    def forward(self, x):
        length = 1 + int((x[0] > 0).sum())
        y, number = self.counts(torch.tanh(self.layers[0](x)), x > 0)
        y = y.unsqueeze(1).expand(-1, WIDTH, -1)[:, :length]
        for layer in self.layers[1:]:
            y = self.step(layer, y)
        return y.mean(1) * (1 + number)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("model", "line"),
    [
        (lambda: DecidingBlocks(masked=False), "pp2 mb2"),
        (lambda: DecidingBlocks(masked=True), "pp2 mb2"),
        (lambda: DecidingBlocks(masked=True), "pp2/zb-v mb4"),
        (lambda: DrawsAtOnce(4), "pp2 mb2"),
        (lambda: DrawsAtOnce(3), "pp3"),
        (TrimsAndCounts, "pp2"),
    ],
)
def test_what_a_layer_decides_by_inputs_or_random_numbers_is_decided_on_every_stage(model, line):
    torch.manual_seed(0)
    result = verify(model().double(), line, [*batches(), mixed_batch(4), *batches(), *batches()])
    assert result.equal, str(result)


class ChecksIds(nn.Module):
    """Counts ids in the inputs, as code does that puts the features of pictures in the places of their tokens."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, ids):
        if int((ids == 7).sum()) != 2 * len(ids):
            raise ValueError("two places are for pictures")
        return self.head(self.embedding(ids))


def test_code_that_checks_values_of_inputs_is_cut_by_those_of_the_example():
    ids = torch.tensor([[1, 7, 7, 2], [7, 0, 1, 7]] * 2)
    result = verify(ChecksIds(), "pp2 mb2", [(ids, ids)])
    assert result.equal, str(result)
    layout = Layout.parse("pp2 mb2")
    with pytest.raises(LayoutError, match=r"cannot be recorded(?s:.*)two places are for pictures(?s:.*)a real batch"):
        make_plan(job_for(ChecksIds(), CrossEntropy(), layout, ids.to("meta")), layout)


class Autocasting(Residuals):
    def __init__(self, num):
        super().__init__(num)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.last(super().forward(x))  # in bfloat16
        return y.float()


@pytest.mark.parametrize("line", ["pp2 mb2", "pp4/zb-v mb4", "pp2 mb2 tp2"])
def test_autocast_may_be_around_modules_of_several_stages(line):
    verdict = verify(model_of(Autocasting, num=8), line, batches(), dtype=torch.float32)
    assert verdict, str(verdict)


class Reentrant(Residuals):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(self.first(x))

    def step(self, layer, x):
        return checkpoint(layer, x, use_reentrant=True)


@pytest.mark.parametrize("line", ["pp2 mb2", "pp2 mb2 tp2"])
def test_layers_of_reentrant_checkpoints_lie_on_several_stages(line):
    verdict = verify(model_of(Reentrant), line, batches())
    assert verdict, str(verdict)


class ChecksRunCode(Reentrant):
    def step(self, layer, x):
        return checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=True)


@pytest.mark.parametrize("line", ["pp2 mb2", "pp2 mb2 tp2"])
def test_a_checkpoint_that_cannot_be_cut_is_named_with_tensor_parallelism_too(line):
    with pytest.raises(LayoutError, match="torch runs code of ChecksRunCode as a whole"):
        plan_of(model_of(ChecksRunCode), line)


class MapsRows(nn.Module):
    """A layer whose code runs under ``torch.vmap``."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.vmap(lambda row: (row @ self.up).tanh())(x))


class MapsItself(Residuals):
    def step(self, layer, x):
        return torch.vmap(lambda row: row.tanh())(layer(x))


def test_a_module_that_uses_vmap_lies_in_one_stage_and_a_model_that_does_is_refused():
    blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), MapsRows(), MapsRows(), nn.Linear(WIDTH, WIDTH))
    example = torch.empty(2, 3, WIDTH, device="meta")
    stages = cut_events(blocks.to("meta"), 2, example)
    assert {"1", "2"} <= stages.units
    with pytest.raises(LayoutError, match=r"torch runs code of MapsItself as a whole[\s\S]*torch\.vmap"):
        plan_of(model_of(MapsItself), "pp2 mb2")


class TurnsByWeights(nn.Module):
    """Turns its result by a number that its weights decide, which only its stage has."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x).roll(int(self.layer.bias.argmax()), 1).tanh() * self.layer.weight[0, 0].item()


class Numbers(Layers):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(TurnsByWeights() for _ in range(4))


class Padded(Layers):
    """Pads by numbers that are buffers, in the code that every stage runs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("more", torch.tensor(2))

    def step(self, layer, x):
        x = nn.functional.pad(x, (self.more, self.more - 2))
        return torch.tanh(layer(x[:, : x.shape[1] - self.more.item()]) + x[:, 2:])


class KeepsState(nn.Module):
    """Changes a buffer in each call and takes another path after a few, and replaces a buffer by another."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("lowest", torch.zeros(1))

    def forward(self, x):
        if self.calls >= 3:
            x = x.flip(1)
        self.calls += 1
        self.lowest = torch.minimum(self.lowest, x.detach().min())
        return torch.tanh(self.layer(x)) + x if self.lowest < 100 else x


class StateInside(Layers):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(KeepsState() for _ in range(4))


class StateItself(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def step(self, layer, x):
        if self.calls >= 3:
            return layer(x)
        self.calls += 1
        return layer(x).tanh()


class MasksAtRandom(nn.Module):
    """Draws which features to leave out, and leaves the mask out where it is full."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            places = torch.ones(len(x), WIDTH, device=x.device)
            kept = places.gather(1, torch.multinomial(places, 2)).sum(1) + torch.rand(len(x), device=x.device) > 2.5
            y = layer(x).tanh()
            x = x + (y if kept.all() else y.masked_fill(~kept.unsqueeze(1), 0.0))
        return x


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = MasksAtRandom()

    def forward(self, x):
        assert x.shape[1] == WIDTH
        return self.inner(x)


@pytest.mark.parametrize(("model", "line"), [
    (Numbers, "pp2/1f1b mb4"), (Numbers, "pp2/zb-v mb2"), (Padded, "pp2/1f1b mb4"), (Padded, "pp4 dp2"),
    (StateInside, "pp2"), (StateInside, "pp2/1f1b mb4/own-statistics"), (Inside, "pp2/1f1b mb8"),
    (Inside, "pp2/zb-v mb4"),
])  # fmt: skip
def test_code_may_decide_by_buffers_random_numbers_and_numbers_of_one_stage(model, line):
    verdict = verify(model_of(model), line, batches())
    assert verdict.equal, str(verdict)


def test_code_between_modules_that_decides_by_a_buffer_that_it_changes_is_refused():
    assert "decides by a buffer that each forward changes" in refusal(StateItself, "pp2")


def test_buffers_that_a_forward_replaces_are_put_back_when_it_was_recorded():
    model = model_of(StateInside).to("meta")
    before = dict(model.named_buffers())
    record_events(model, batches()[0][0], [f"layers.{number}" for number in range(4)])
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


class TurnsExceptions(Layers):
    """Code that makes errors of its own of whatever goes wrong, as libraries that check shapes do."""

    def step(self, layer, x):
        try:
            return super().step(layer, x)
        except Exception as failure:
            raise ValueError("the input has a wrong shape") from failure


@pytest.mark.parametrize("line", ["pp2/1f1b mb4", "pp4/zb-v mb8"])
def test_code_that_turns_exceptions_into_its_own_lets_a_stage_end(line):
    assert verify(model_of(TurnsExceptions, num=8), line, batches()).equal


class SharedTable(nn.Module):
    """Writes a table into a buffer in its first call, and reads it in later ones, as rotary-embedding-torch does."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.register_buffer("kept", torch.zeros(16, WIDTH), persistent=False)
        self.num_kept = 0

    def forward(self, positions):
        if self.num_kept >= len(positions):
            return self.kept[: len(positions)].detach()
        table = positions[:, None] * self.scale
        self.kept[: len(positions)] = table.detach()
        self.num_kept = len(positions)
        return table


class Turns(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.up, self.down = table, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.turned(self.up(x)) * self.turned(x)))

    def turned(self, x):
        positions = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        return x * self.table.forward(positions).cos()  # a method of a module, and not its call


class SharesTable(Layers):
    def __init__(self, num=4):
        super().__init__()
        table = SharedTable()
        self.layers = nn.ModuleList(Turns(table) for _ in range(num))

    def forward(self, x):
        x = x[:, None].expand(-1, 3, -1)
        for layer in self.layers:
            x = x + layer(x)
        return x.mean(1)


def test_a_table_that_code_keeps_is_no_value_of_the_last_record():
    model, x = model_of(SharesTable).to("meta"), torch.empty(3, WIDTH, dtype=torch.float64)
    for units in ([], [f"layers.{number}.{name}" for number in range(4) for name in ("up", "down")]):
        record = record_events(model, x, units)
        assert {name for event in record.events for name in event.takes if isinstance(name, tuple)} <= {*record.specs}


COPIES = {
    "device": lambda h: h.to("cpu", copy=True),
    "dtype": lambda h: h.to(h.dtype, copy=True),
    "all by place": lambda h: h.to("cpu", h.dtype, False, True),
}


class WritesToACopy(Layers):
    def __init__(self, copied="device"):
        super().__init__()
        self.copied = copied

    def forward(self, x):
        for layer in self.layers:
            h = layer(x)
            y = COPIES[self.copied](h)
            y.add_(3.0)
            x = x + torch.tanh(h * y)
        return x


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "dp2/zero3", "tp2/sp"])
def test_what_is_written_to_a_copy_that_a_move_makes_is_not_written_to_what_it_is_of(copied, line):
    assert verify(model_of(WritesToACopy, copied=copied), line, batches()).equal


class WritesToACopyOfAWeight(Layers):
    def forward(self, x):
        for layer in self.layers:
            weight = layer.weight.detach().to(x.device, copy=True)
            weight.mul_(2)
            x = x + torch.tanh(layer(x) + functional.linear(x, weight))
        return x


@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "dp2/zero3"])
def test_a_copy_of_a_weight_on_a_device_may_be_written_to(line):
    assert verify(model_of(WritesToACopyOfAWeight), line, batches()).equal
