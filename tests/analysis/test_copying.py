"""A copy of a model is a model of its own, however its code holds modules and tensors."""

from __future__ import annotations

import functools
import types
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize, verify
from shardwright.analysis.objects.copying import check_apart, copied
from shardwright.errors import LayoutError, PlanError, RankFailedError
from shardwright.models import MeanSquaredError
from shardwright.parallelize.planning import structural_copy

LOSS = MeanSquaredError()
GLOBAL = nn.Linear(6, 6)
NESTED = {"a": {"b": nn.Linear(6, 6)}}


def batch():
    return torch.randn(4, 6), torch.randn(4, 6)


class Block(nn.Module):
    """An MLP whose forward is a closure over its modules; ``how`` says what else its code holds, and where."""

    def __init__(self, how):
        super().__init__()
        self.mlp = nn.ModuleDict({"up": nn.Linear(6, 8), "act": nn.GELU(), "down": nn.Linear(8, 6)})
        self.other = nn.Linear(6, 6)
        m, other = self.mlp, self.other
        self.run = lambda x: m.down(m.act(m.up(x)))
        self.more = lambda x: x
        HOLDERS[how](self, other)

    def forward(self, x):
        return self.run(x) + self.more(x)


def nested(self, other):
    def one(x):
        return other(x)

    def two(x, inner=one):
        return inner(x)

    self.more = two


def counting(self, other):
    """Two functions with one cell, which both write to."""
    last = other.weight

    def keep(x):
        nonlocal last
        last = other.weight * 2
        return other(x)

    self.more = lambda x: keep(x) + last.sum()


def hooked(self, other):
    self.mlp["up"].register_forward_hook(lambda module, args, y: y + other(args[0]).sum(-1, keepdim=True))


def partially(self, other):
    self.more = functools.partial(lambda f, x: other(f(x)), other)


def method(self, x):
    return self.other(x) * 2


HOLDERS = {
    "nothing": lambda self, other: None,
    "a nested function": nested,
    "a cell that two functions share": counting,
    "a bound method": lambda self, other: setattr(self, "more", other.forward),
    "a function bound to the module": lambda self, other: setattr(self, "more", types.MethodType(method, self)),
    "a partial of a closure": partially,
    "a static method": lambda self, other: setattr(self, "more", staticmethod(lambda x: other(x))),
    "a dict": lambda self, other: setattr(self, "more", (lambda held: lambda x: held["a"][0](x))({"a": [other]})),
    "the weight of a tied table": lambda self, other: setattr(self, "more", lambda x: x @ self.other.weight.t()),
    "a parameter itself": lambda self, other: setattr(self, "more", lambda x, w=other.weight: x @ w.t()),
    "parameters in a list": lambda self, other: setattr(self, "more", (lambda ws: lambda x: x @ ws[0])([other.weight])),
    "a method of a tensor": lambda self, other: setattr(self, "more", (lambda t: lambda x: x @ t())(other.weight.t)),
    "a hook": hooked,
    "a module that is not registered": lambda self, other: setattr(self, "more", {"a": nn.Linear(6, 6)}["a"].forward),
}
DIRECT = ("a parameter itself", "parameters in a list", "a method of a tensor", "a cell that two functions share")


@pytest.mark.parametrize("how", HOLDERS)
def test_a_copy_computes_with_its_own_values_only(how):
    model = nn.Sequential(Block(how), Block(how))
    other = structural_copy(model, torch.clone)
    check_apart(model, other)
    x = torch.randn(3, 6)
    assert torch.equal(model(x), other(x))
    other(x).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for name, parameter in other.named_parameters() if "mlp" in name)


def test_a_layer_that_keeps_the_handle_of_its_hook_is_copied_again_and_again():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model.kept = [model[0].register_forward_hook(lambda module, inputs, output: output * 2)]
    first = structural_copy(model)
    second = structural_copy(first)
    x = torch.randn(2, 6)
    expected = model(x)
    second.kept[0].remove()
    assert (len(first[0]._forward_hooks), len(second[0]._forward_hooks)) == (1, 0)
    assert torch.equal(second(x), model[1](model[0](x) / 2))
    assert torch.equal(first(x), expected)


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo):
        memo[id(self)] = other = CopiesItself(self.in_features, self.out_features)
        other.is_its_own = True
        return other


def test_functions_in_a_set_refer_to_the_copy_and_a_class_that_customizes_copying_is_asked():
    layer = nn.Linear(6, 6)
    model = nn.Sequential(layer, CopiesItself(6, 6))
    model.held = {lambda x: layer(x)}
    other = structural_copy(model)
    (run,) = other.held
    assert run.__closure__[0].cell_contents is other[0]
    assert other[1].is_its_own


@pytest.mark.parametrize("line", ["single", "dp2", "tp2", "dp2/zero3", "dp2 mb2"])
@pytest.mark.parametrize("how", HOLDERS)
def test_a_model_with_closures_is_equal_to_one_device_and_the_callers_is_left_alone(how, line):
    torch.manual_seed(0)
    model = nn.Sequential(Block(how), Block(how), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if how in DIRECT and line == "dp2/zero3":
        with pytest.raises(LayoutError, match="would be sharded where other code uses it whole"):
            verify(model, line, [batch()] * 2, loss=LOSS)
        return
    verdict = verify(model, line, [batch()] * 2, loss=LOSS)
    assert verdict.equal, str(verdict)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


class Remembers(nn.Module):
    """A recurrent layer that leaves its last states, results of autograd, in attributes."""

    def __init__(self):
        super().__init__()
        self.mlp, self.last, self.all = nn.Linear(6, 6), None, []

    def forward(self, x):
        self.last = torch.tanh(self.mlp(x))
        self.all = [self.last * 2]
        return x + self.last


def test_a_result_that_a_forward_left_in_an_attribute_is_copied_without_its_history():
    model = nn.Sequential(Remembers(), Remembers())
    model(batch()[0])
    other = copied(model, {})
    for module, own in zip(model, other, strict=True):
        assert torch.equal(own.last, module.last)
        assert torch.equal(own.all[0], module.all[0])
        assert own.last.is_leaf
        assert own.all[0].is_leaf
        assert not module.last.is_leaf
        assert own.mlp.weight is not module.mlp.weight


@pytest.mark.parametrize("line", ["single", "dp2", "dp2/zero1", "dp2/zero3", "pp2/1f1b mb2"])
def test_a_layer_that_keeps_its_weights_in_a_list_is_trained_by_its_own(line):
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.table, self.line = nn.Linear(6, 6), nn.LSTM(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.line(self.table(self.first(x).unsqueeze(0))[0].squeeze(0))

    torch.manual_seed(0)
    verdict = verify(Last(), line, [batch()] * 2, loss=LOSS, alter=scaled_by_half)
    assert verdict.first_difference == "table.weight_ih_l0", "it has a gradient"
    verdict = verify(Last(), line, [batch()] * 2, loss=LOSS)
    assert verdict.equal, str(verdict)


def scaled_by_half(run):
    step = run.step

    def wrong(given):
        loss = step(given)
        if (weight := run.parameters.get("table.weight_ih_l0")) is not None and weight.grad is not None:
            weight.grad.mul_(0.5)
        return loss

    run.step = wrong


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = GLOBAL

    def forward(self, x):
        return GLOBAL(x)


class Attribute(nn.Module):
    """Its attribute has the name of a global that is the same module, and its code does not read the global."""

    def __init__(self):
        super().__init__()
        self.GLOBAL = GLOBAL

    def forward(self, x):
        return self.GLOBAL(x)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.run = functools.lru_cache(lambda x: self.layer(x))

    def forward(self, x):
        return self.run(x)


@pytest.mark.parametrize(("kind", "names"), [(ByName, "ByName.forward.*GLOBAL"), (Cached, "run.*the model")])
def test_what_cannot_be_copied_is_refused_by_name(kind, names):
    with pytest.raises(PlanError, match=f"(?s){names}"):
        verify(kind(), "dp2", [batch()], loss=LOSS)
    with pytest.raises((PlanError, RankFailedError), match=f"(?s){names}"):
        launch(lambda world: parallelize(kind(), "dp2", world, loss=LOSS), 2, ranks="threads")


def test_an_attribute_with_the_name_of_a_global_is_not_refused():
    assert verify(Attribute(), "dp2", [batch()], loss=LOSS).equal


class Hidden(nn.Module):
    """Uses its layer by a way that no search finds."""

    def __init__(self):
        super().__init__()
        self.layer = NESTED["a"]["b"]

    def forward(self, x):
        return NESTED["a"]["b"](x.float()).to(x.dtype) if x.is_meta is False else self.layer(x)


def test_verify_raises_where_the_callers_model_was_trained_after_all():
    with pytest.raises(PlanError, match="has used the model itself: 'layer"):
        verify(Hidden(), "single", [batch()], loss=LOSS)


def test_a_function_that_holds_nothing_of_the_model_is_shared():
    seen = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda module, args, y: seen.append(len(args[0])))
    structural_copy(layer)(torch.ones(3, 2))
    assert seen == [3]


def test_closures_on_the_meta_device_hold_the_values_that_are_drawn():
    with torch.device("meta"):
        model = nn.Sequential(Block("a parameter itself"), Block("nothing"))
    verdict = verify(model, "dp2", [batch()], loss=LOSS)
    assert verdict.equal, str(verdict)


class HoldsByClass(nn.Module):
    """A layer whose class has the activation that all of them share by default."""

    default = nn.SiLU()

    def __init__(self):
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), self.default

    def forward(self, x):
        return self.act(self.layer(x))


def test_a_class_may_hold_a_module_of_torch_that_has_nothing_of_its_own():
    model = nn.Sequential(HoldsByClass(), HoldsByClass())
    check_apart(model, copied(model, {}))
    batch = torch.randn(4, 4), torch.randn(4, 4)
    for line in ("dp2", "tp2", "pp2"):
        assert verify(model, line, [batch], loss=MeanSquaredError()).equal


@pytest.mark.parametrize(
    "module", [nn.Linear(4, 4), nn.Dropout(), nn.Sequential(nn.ReLU(), nn.RReLU()), type("Own", (nn.Module,), {})()]
)
def test_a_class_may_hold_no_module_of_the_model_with_weights_or_random_numbers_or_code_of_a_user(module):
    kind = type("Holds", (HoldsByClass,), {"default": module})
    model = kind()
    with pytest.raises(PlanError, match=r"Holds\.default holds a part of the model"):
        check_apart(model, copied(model, {}))


class Listed(nn.Module):
    """Keeps all instances in a list of the class, as layers do that a program resets together."""

    instances: ClassVar[list[nn.Module]] = []

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        Listed.instances.append(self)

    @classmethod
    def gains(cls):
        return [each.gain for each in cls.instances]

    def forward(self, x):
        return x * self.gain


class ReadsItself(Listed):
    def forward(self, x):
        return x * self.instances[-1].gain


class Keeps(nn.Module):
    """A neuron that keeps its membrane; a utility resets all that there are."""

    instances: ClassVar[list[nn.Module]] = []

    def __init__(self):
        super().__init__()
        self.register_buffer("membrane", torch.zeros(1, 6))
        Keeps.instances.append(self)

    def forward(self, x):
        self.membrane = 0.5 * self.membrane + x
        return self.membrane


def resets_all():
    for each in Keeps.instances:
        each.membrane = torch.zeros_like(each.membrane)


UTILITIES = SimpleNamespace(reset=resets_all)
"""Stands for an imported module, whose functions no search reads."""


class Spiking(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.neuron = nn.Linear(6, 6), Keeps()

    def forward(self, x):
        UTILITIES.reset()
        return self.neuron(self.neuron(self.layer(x)))


@pytest.mark.parametrize("kind", ["verify", "parallelize"])
def test_a_forward_that_resets_what_a_class_keeps_of_the_callers_model_is_refused_and_the_model_runs_on(kind):
    Keeps.instances.clear()
    model = Spiking()

    def used():
        if kind == "verify":
            return verify(model, "single", [batch()], loss=LOSS)
        return launch(lambda world: parallelize(model, "dp2", world, loss=LOSS, example=batch()[0]), 2, ranks="threads")

    with pytest.raises((PlanError, RankFailedError), match=r"has used the model itself: 'neuron\.membrane'"):
        used()
    assert model(torch.ones(2, 6)).device.type == "cpu"


def through(function):
    @functools.wraps(function)
    def run(self, x):
        return function(self, x)

    return run


class Decorated(Listed):
    @through
    def forward(self, x):
        return self.gains()[-1] * x


def last_gain():
    return Listed.instances[-1].gain


class ReadsByFunction(Listed):
    def forward(self, x):
        return x * last_gain()


def test_a_class_may_keep_its_instances_in_a_list_that_no_forward_reads():
    Listed.instances.clear()
    verdict = verify(nn.Sequential(nn.Linear(6, 6), Listed(), nn.Linear(6, 6)), "dp2", [batch()], loss=LOSS)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("kind", [ReadsItself, Decorated, ReadsByFunction])
def test_instances_that_a_forward_reads_from_its_class_are_refused(kind):
    Listed.instances.clear()
    with pytest.raises(PlanError, match=r"(?s)Listed\.instances.*holds a part of the model"):
        verify(nn.Sequential(nn.Linear(6, 6), kind(), nn.Linear(6, 6)), "dp2", [batch()], loss=LOSS)


class Projected(nn.Module):
    """All layers have one matrix, which the first one makes and the class keeps, as Linformer's attention does."""

    matrix: ClassVar[nn.Parameter | None] = None

    def __init__(self):
        super().__init__()
        if Projected.matrix is None:
            Projected.matrix = nn.Parameter(torch.randn(6, 6) * 0.1)
        self.shared = Projected.matrix

    def forward(self, x):
        return x + x @ self.shared


class ReadsTheClass(Projected):
    def forward(self, x):
        return x + x @ self.matrix


@pytest.mark.parametrize("line", ["single", "dp2", "dp2/zero3", "pp2/1f1b mb2"])
def test_a_parameter_that_a_class_keeps_for_its_constructors_alone_is_trained(line):
    Projected.matrix = None
    model = nn.Sequential(nn.Linear(6, 6), Projected(), nn.Tanh(), Projected(), nn.Linear(6, 6))
    verdict = verify(model, line, [batch()] * 2, loss=LOSS)
    assert verdict.equal, str(verdict)
    assert model[1].shared is model[3].shared is Projected.matrix


def test_a_parameter_that_a_forward_reads_from_its_class_is_refused():
    Projected.matrix = None
    with pytest.raises(PlanError, match=r"Projected\.matrix holds a part of the model"):
        verify(nn.Sequential(nn.Linear(6, 6), ReadsTheClass()), "dp2", [batch()], loss=LOSS)
