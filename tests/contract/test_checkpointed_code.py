"""Code that a model passes to a checkpoint is cut like other code, whichever kind of checkpoint it is."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from contract.cases import CHECKS, NUM_SAMPLES, Pictures
from shardwright import verify
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.errors import PlanError
from shardwright.strategies.tensor_parallel.shards_plan import share_cut

WIDTH, HEADS, VOCABULARY, TOKENS = 16, 4, 11, 5


class OfDiffusion(torch.autograd.Function):
    """A checkpoint as diffusion models have one of their own: it is given the parameters that its code uses."""

    @staticmethod
    def forward(ctx, run_function, length, *args):
        ctx.run_function, ctx.inputs, ctx.parameters = run_function, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.run_function(*ctx.inputs)

    @staticmethod
    def backward(ctx, *gradients):
        inputs = [each.detach().requires_grad_(True) for each in ctx.inputs]
        with torch.enable_grad():
            outputs = ctx.run_function(*[each.view_as(each) for each in inputs])
        return None, None, *torch.autograd.grad(outputs, inputs + ctx.parameters, gradients, allow_unused=True)


class OfFairscale(torch.autograd.Function):
    """A checkpoint whose function is its second argument, and takes some of its inputs by name."""

    @staticmethod
    def forward(ctx, dummy, run_function, names, *args):
        ctx.run_function, ctx.names = run_function, names
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return run_function(*args[: -len(names)], **dict(zip(names, args[-len(names) :], strict=True)))

    @staticmethod
    def backward(ctx, *gradients):
        args = [each.detach().requires_grad_(each.requires_grad) for each in ctx.saved_tensors]
        with torch.enable_grad():
            named = dict(zip(ctx.names, args[-len(ctx.names) :], strict=True))
            output = ctx.run_function(*args[: -len(ctx.names)], **named)
        torch.autograd.backward(output, *gradients)
        return None, None, None, *(each.grad for each in args)


def by_name(module, run, *inputs):
    dummy = torch.ones((), requires_grad=True)
    return OfFairscale.apply(dummy, lambda *args, last: run(*args, last), ("last",), *inputs)


KINDS = {
    "torch's": lambda module, run, *inputs: checkpoint(run, *inputs, use_reentrant=False),
    "reentrant": lambda module, run, *inputs: checkpoint(run, *inputs, use_reentrant=True),
    "of diffusion models": lambda module, run, *x: OfDiffusion.apply(run, len(x), *x, *module.parameters()),
    "of fairscale": by_name,
}


class Block(nn.Module):
    """Attention and MLPs in methods and a lambda: weights that functions read, heads, dropout, two inputs."""

    def __init__(self, kind: str):
        super().__init__()
        self.again = partial(KINDS[kind], self)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.empty(WIDTH))
        self.qkv, self.out = nn.Parameter(torch.empty(3 * WIDTH, WIDTH)), nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.gate, self.up, self.down = (nn.Linear(WIDTH, n * WIDTH) for n in (2, 4, 1))
        self.last = nn.Linear(4 * WIDTH, WIDTH)
        self.reset_parameters()

    def reset_parameters(self):
        for weight in (self.qkv, self.out, self.scale):
            nn.init.normal_(weight, std=0.2)

    def attend(self, x):
        num, tokens, _ = x.shape
        qkv = functional.linear(self.norm(x), self.qkv).view(num, tokens, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = functional.dropout(torch.softmax(q @ k.transpose(-1, -2) / 2, -1), 0.1, self.training)
        return x + functional.linear((scores @ v).transpose(1, 2).reshape(x.shape), self.out) * self.scale

    def gated(self, x):
        a, b = self.gate(x).chunk(2, -1)
        return x + self.down(functional.silu(a) * b)

    def forward(self, x):
        x = self.again(self.gated, self.again(self.attend, x))
        return self.again(lambda x, hidden: x + self.last(functional.gelu(hidden) + 1), x, self.up(x))


class Language(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.table, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Tokens(Pictures):
    """A model made by a function, on random tokens in place of pictures."""

    @property
    def batches(self):
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randint(VOCABULARY, (2, num, TOKENS), generator=generator) for num in NUM_SAMPLES]
        return [tuple(each) for each in drawn]


CASES = {kind: Tokens(kind, make=partial(Language, kind)) for kind in KINDS}


@pytest.mark.parametrize(
    "line",
    [
        "tp2", "tp2x2/2d", "tp4/2d", "tp2/sp", "tp2x2x2/3d", "tp2 recompute:full", "tp2 recompute:selective",
        "dp2/zero3 tp2", "pp2/1f1b mb2 tp2", "pp2/zb-h1 mb2", "dp2/zero3", "dp2/zero1 mb2",
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(15)
def test_code_in_a_checkpoint_keeps_every_promise(kind, line):
    for check in CHECKS:
        check(line, CASES[kind])


@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_much_is_cut_as_without_a_checkpoint(kind, line):
    plans = []
    case = CASES[kind]
    verify(case.model, line, case.batches, loss=case.loss, alter=lambda run: plans.append(run.plan))
    assert share_cut(plans[0]) > 0.95


class Plain(nn.Module):
    """Two layers inside of what ``call`` makes of them."""

    def __init__(self, call):
        super().__init__()
        self.call, self.up, self.down = call, nn.Linear(8, 16), nn.Linear(16, 8)

    def run(self, x):
        return self.down(self.up(x).relu())

    def forward(self, x):
        return x + self.call(self.run, x)


def numbers():
    return torch.randn(6, 8), torch.randint(8, (6,))


@pytest.mark.parametrize("line", ["dp2", "pp2", "tp2 dp2"])
def test_a_checkpoint_that_trains_none_of_the_parameters_of_its_code_trains_none_under_a_layout(line):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), Plain(lambda run, x: OfDiffusion.apply(run, 1, x)), Plain(lambda run, x: run(x))
    )
    verdict = verify(model, line, [numbers()])
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["dp2", "tp2"])
def test_nothing_is_trained_inside_of_a_reentrant_checkpoint_whose_inputs_need_no_gradient(line):
    torch.manual_seed(0)
    model = nn.Sequential(
        Plain(lambda run, x: checkpoint(run, x, use_reentrant=True)), nn.Linear(8, 32), nn.Linear(32, 8)
    )
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        verdict = verify(model, line, [numbers()])
    assert verdict.equal, str(verdict)


class Scales(OfDiffusion):
    """No checkpoint, though it inherits from one."""

    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, dy):
        return 3 * dy


def test_a_function_that_inherits_from_a_checkpoint_and_is_none_runs_as_it_is():
    x = torch.ones(2, requires_grad=True)
    y = call_model(nn.Sequential(nn.Identity(), Applies(Scales)), x)
    y.sum().backward()
    assert (y.tolist(), x.grad.tolist()) == ([3, 3], [3, 3])


class Applies(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


class Doubles(OfDiffusion):
    """Not only runs code again, but changes what it returns."""

    @staticmethod
    def forward(ctx, run_function, x):
        ctx.run_function = run_function
        return 2 * run_function(x)

    @staticmethod
    def backward(ctx, dy):
        torch.autograd.backward(ctx.run_function(dy), dy)  # it does not come so far


def test_a_checkpoint_that_changes_the_result_of_its_code_is_found_once_and_then_left_as_it_is():
    model = nn.Sequential(nn.Linear(8, 8), Plain(lambda run, x: Doubles.apply(run, x)))
    with pytest.raises(PlanError, match="'Doubles' returns other tensors than the code inside of it"):
        call_model(model, torch.ones(2, 8))
    assert type(call_model(model, torch.ones(2, 8)).grad_fn.next_functions[1][0]).__name__ == "DoublesBackward"


def of_copies(before, behind):
    """A checkpoint class that runs its code on what ``before`` makes of its input, and returns ``behind`` of it."""

    def forward(ctx, run_function, x):
        ctx.run_function, ctx.x = run_function, x
        return behind(run_function(before(x)))

    def backward(ctx, dy):
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            torch.autograd.backward(ctx.run_function(x), dy)
        return None, x.grad

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("OfCopies", (torch.autograd.Function,), methods)


def same(x):
    return x


COPIES = {
    "detached inputs": (torch.Tensor.detach, same),
    "cloned inputs": (torch.clone, same),
    "detached outputs": (same, torch.Tensor.detach),
    "cloned outputs": (same, torch.clone),
}


@pytest.mark.parametrize("line", ["dp2", "pp2/1f1b mb2", "mb2"])
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.filterwarnings("ignore:the backward of 'OfCopies' adds a term")
def test_a_checkpoint_that_copies_what_it_is_given_or_returns_has_all_gradients(name, line):
    torch.manual_seed(0)
    again = of_copies(*COPIES[name])
    blocks = [Plain(lambda run, x: again.apply(run, x)), Plain(lambda run, x: run(x))]
    verdict = verify(nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 8)), line, [numbers()] * 2)
    assert verdict.equal, str(verdict)


class InsideAtOnce(nn.Module):
    """A checkpoint whose code is another one at once, on activations that are cut."""

    def __init__(self, kind):
        super().__init__()
        self.again = partial(KINDS[kind], self)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        def run(hidden):
            return self.again(lambda each: self.down(each.relu()), hidden)

        return x + self.again(run, self.up(x))


@pytest.mark.parametrize("kind", ["torch's", "reentrant"])
@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d", "pp2/1f1b mb2 tp2"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_at_once_in_another_one_on_shards(line, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), InsideAtOnce(kind), InsideAtOnce(kind), nn.Linear(8, 8))
    verdict = verify(model, line, [numbers()] * 2)
    assert verdict.equal, str(verdict)


def test_outside_of_the_library_checkpoints_are_those_that_the_user_has_written():
    x = torch.ones(2, 8, requires_grad=True)
    model = Plain(lambda run, x: checkpoint(run, x, use_reentrant=True))
    assert call_model(model, x).grad_fn.next_functions[1][0].name() == "AddmmBackward0"
    assert type(model(x).grad_fn.next_functions[1][0]).__name__ == "CheckpointFunctionBackward"


class DropPath(nn.Module):
    """Drops the residual of some samples, as vision transformers do."""

    def forward(self, x):
        kept = x.new_empty((len(x),) + (1,) * (x.dim() - 1)).bernoulli_(0.7)
        return x * kept / 0.7 if self.training else x


class DropsTwice(nn.Module):
    """A block that calls one DropPath, and one dropout, twice."""

    def __init__(self):
        super().__init__()
        self.path, self.drop = DropPath(), nn.Dropout(0.2)
        self.up, self.down, self.same = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.path(self.drop(self.same(x)))
        return x + self.path(self.down(self.drop(self.up(x).relu())))


class Again(nn.Module):
    def __init__(self, kind, inner):
        super().__init__()
        self.again, self.inner = KINDS[kind], inner

    def forward(self, x):
        return self.again(self, self.inner, x)


@pytest.mark.parametrize(
    "line", ["single", "dp2 mb2", "tp2", "dp2/zero3", "pp2/1f1b mb2", "pp2/zb-h1 mb2 tp2", "dp2 recompute:full"]
)
@pytest.mark.parametrize("kind", list(KINDS)[:3])
def test_a_module_that_draws_several_times_in_a_checkpoint_draws_the_same_again(kind, line):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Again(kind, DropsTwice()), Again(kind, DropsTwice()), nn.Linear(8, 8))
    verdict = verify(model, line, [numbers(), numbers()])
    assert verdict.equal, str(verdict)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # inside of a reentrant one none have
@pytest.mark.parametrize("outer", ["torch's", "reentrant"])
@pytest.mark.parametrize("inner", ["torch's", "reentrant"])
@pytest.mark.parametrize("line", ["single", "dp2 mb2", "tp2"])
def test_so_does_one_in_a_checkpoint_inside_of_another(line, outer, inner):
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Again(inner, DropsTwice()) for _ in range(2)))
    model = nn.Sequential(nn.Linear(8, 8), Again(outer, blocks), nn.Linear(8, 8))
    verdict = verify(model, line, [numbers(), numbers()])
    assert verdict.equal, str(verdict)
