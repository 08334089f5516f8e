"""A function on shards of its tensors gives what it gives on the whole: results, sizes and every gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import launch, parallelize, verify, without_values
from shardwright.comm.launch import run_on_threads
from shardwright.errors import LayoutError, PlanError, RankFailedError
from shardwright.layout import Layout
from shardwright.mesh import Mesh
from shardwright.models import CrossEntropy, MeanSquaredError
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.sharding.tensor_shard import ALL, shard_of, tag, tagged
from shardwright.strategies.tensor_parallel.call_plans import Slot
from shardwright.strategies.tensor_parallel.ready_calls import filling, signature_of
from shardwright.strategies.tensor_parallel.shards_mode import ShardsMode

X = (4, 6, 8)


def heads(x):
    samples, tokens, width = x.shape
    return x.view(samples, tokens, 4, width // 4).transpose(1, 2)


def attend(x, causal=False):
    q = k = v = heads(x)
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def written(x):
    y = x * 2
    y[:, 1:3] += 1
    y.mul_(3).add_(x)
    return y


def rotated(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1) * torch.arange(8.0).to(x.dtype)


# functions of x (4, 6, 8) and weights: w (8, 8), b (8,), table (12, 8)
CASES = {
    "arithmetic": lambda x, w, b, t: (x * b + 2 - x / 3) ** 2,
    "without a history": lambda x, w, b, t: x * x.detach() + (x.round() - x).detach_() + x.sin() * x.data,
    "two operands": lambda x, w, b, t: torch.where(x > 0, x, b) + torch.maximum(x, b),
    "activations": lambda x, w, b, t: functional.gelu(x) + functional.silu(x).tanh() - x.clamp(min=-0.5),
    "linear": lambda x, w, b, t: functional.linear(x, w, b),
    "linear without a bias": lambda x, w, b, t: functional.linear(x, w),
    "addmm": lambda x, w, b, t: torch.addmm(b, x.view(-1, x.size(-1)), w).view(x.shape),
    "matmul": lambda x, w, b, t: x @ w,
    "a product of samples": lambda x, w, b, t: x @ x.transpose(1, 2),
    "einsum": lambda x, w, b, t: torch.einsum("bth,hk->bkt", x, w),
    "sums": lambda x, w, b, t: x.sum(-1) + x.mean(dim=(0, 2)) + x.sum(),
    "a mean of squares": lambda x, w, b, t: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3),
    "softmax": lambda x, w, b, t: x.softmax(-1) + x.log_softmax(1),
    "layer norm": lambda x, w, b, t: functional.layer_norm(x, (8,), b, b),
    "group norm": lambda x, w, b, t: functional.group_norm(x.transpose(1, 2), 4, b, b),
    "views": lambda x, w, b, t: x.reshape(4, 48)[:, 8:40].unflatten(-1, (4, 8)).flatten(1, 2).reshape(-1),
    "dims": lambda x, w, b, t: x.permute(2, 0, 1).unsqueeze(1).squeeze(1).movedim(0, -1).mT,
    "sizes": lambda x, w, b, t: x.view(x.shape[0] * x.size(1), -1) * len(x) * x.numel() * x.ndim,
    "heads": lambda x, w, b, t: heads(x).transpose(1, 2).contiguous().view(x.shape),
    "attention": lambda x, w, b, t: attend(x),
    "causal attention": lambda x, w, b, t: attend(x, causal=True),
    "grouped heads": lambda x, w, b, t: heads(x)[:, :, None].expand(-1, -1, 2, -1, -1).reshape(4, 8, 6, 2),
    "chunks": lambda x, w, b, t: rotated(x),
    "split": lambda x, w, b, t: torch.cat([part * (i + 1) for i, part in enumerate(x.split([2, 3, 3], dim=-1))], -1),
    "stack": lambda x, w, b, t: torch.stack([x, 2 * x], dim=1).unbind(1)[1],
    "padding": lambda x, w, b, t: functional.pad(x, (1, 2, 0, 0)),
    "repeat": lambda x, w, b, t: x.repeat(1, 2, 1) + x.repeat_interleave(2, dim=1),
    "indexing": lambda x, w, b, t: x[:, torch.tensor([3, 0])] + x[1, 2] + x[..., ::2].sum(-1, keepdim=True)[:, :2],
    "steps from behind": lambda x, w, b, t: x[..., -7::2] + x[..., -8::2],
    "slices from before the start": lambda x, w, b, t: x[..., -20:6] + x[..., -7:7],
    "picked": lambda x, w, b, t: x.gather(-1, torch.arange(6)[None, :, None].expand(4, 6, 1)).squeeze(-1),
    "flipped": lambda x, w, b, t: x.flip(-1) + x.roll(1, 1).cumsum(-1),
    "largest": lambda x, w, b, t: x.amax(-1) + x.max(dim=1).values.sum(-1, keepdim=True) + x.topk(2, -1).values.sum(-1),
    "written to": lambda x, w, b, t: written(x),
    "a mask": lambda x, w, b, t: x.masked_fill(torch.ones(6, 1).tril().bool(), 0.0),
    "a table": lambda x, w, b, t: functional.embedding(torch.arange(24).view(4, 6) % 12, t) + x,
    "a convolution": lambda x, w, b, t: functional.conv1d(x.mT, w[..., None].expand(8, 8, 3), b, padding=1),
    "groups": lambda x, w, b, t: functional.conv1d(x.transpose(1, 2), w[:, :2, None], b, groups=4),
    "a loss": lambda x, w, b, t: functional.cross_entropy(x.flatten(0, 1), torch.arange(24) % 8),
    "values": lambda x, w, b, t: x * (2.0 if x.detach().abs().max().item() > 0 else 1.0),
}  # fmt: skip
HALVES, THIRDS, FUSED = bytes([0] * 4 + [1] * 4), bytes([0] * 5 + [1] * 3), bytes([0, 0, 1, 1] * 2)
CUTS = {
    "features of x": {0: (None, None, HALVES)},
    "features of x, unevenly": {0: (None, None, THIRDS)},
    "fused features of x": {0: (None, None, FUSED)},
    "tokens of x": {0: (None, bytes([0] * 3 + [1] * 3), None)},
    "samples of x": {0: (bytes([0, 0, 0, 1]), None, None)},
    "rows of w": {1: (HALVES, None)},
    "columns of w": {1: (None, THIRDS)},
    "x and rows of w": {0: (None, None, HALVES), 1: (HALVES, None)},
    "x and columns of w": {0: (None, None, HALVES), 1: (None, HALVES)},
    "x, w and b": {0: (None, None, HALVES), 1: (HALVES, None), 2: (HALVES,)},
    "b": {2: (FUSED,)},
    "features of the table": {3: (None, HALVES)},
    "rows of the table": {3: (bytes([0] * 6 + [1] * 6), None)},
}


def given():
    draw = torch.Generator().manual_seed(3)
    shapes = (X, (8, 8), (8,), (12, 8))
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def mine(whole, part, rank):
    for dim in range(whole.dim()):
        if part is not None and part.cuts[dim] is not None:
            whole = whole.index_select(dim, torch.tensor(part.held(dim, rank)))
    return whole


def on_shards(axes, function, cuts):
    """The whole result, the shape that the code sees of it, and this rank's gradients."""
    axis, leaves = axes["tp"], []
    for number, whole in enumerate(given()):
        part = shard_of(whole.shape, cuts[number]) if number in cuts else None
        leaf = mine(whole, part, axis.index).clone().requires_grad_()
        tag(leaf, part)
        leaves.append((leaf, part))
    mode = ShardsMode(axis)
    with mode:
        result = function(*(leaf for leaf, _ in leaves))
        seen = tuple(result.shape)
    local, whole = tuple(result.shape), mode.whole(result)
    held = tagged(result)
    assert local == (seen if held is None else held.local_shape(axis.index))
    (whole * torch.arange(whole.numel(), dtype=whole.dtype).view(whole.shape)).sum().backward()
    return whole.detach(), seen, [(leaf.grad, part) for leaf, part in leaves]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(7)
def test_a_function_on_parts_gives_what_it_gives_on_the_whole(name, cut):
    leaves = [whole.requires_grad_() for whole in given()]
    expected = CASES[name](*leaves)
    (expected * torch.arange(expected.numel(), dtype=expected.dtype).view(expected.shape)).sum().backward()
    for rank, (found, seen, gradients) in enumerate(
        run_on_threads(Mesh(tp=2), partial(on_shards, function=CASES[name], cuts=CUTS[cut]))
    ):
        assert seen == tuple(expected.shape)
        torch.testing.assert_close(found, expected.detach())
        for leaf, (gradient, part) in zip(leaves, gradients, strict=True):
            assert (gradient is None) == (leaf.grad is None)
            if gradient is not None:
                torch.testing.assert_close(gradient, mine(leaf.grad, part, rank))


def grouped(x, w):
    """Experts: the first 10 rows by one weight, the others by another."""
    both, ends = torch.stack([w, 2 * w]), torch.tensor([10, 24], dtype=torch.int32)
    return torch._grouped_mm(x.reshape(24, -1), both, offs=ends).view(x.shape)


@pytest.mark.parametrize("cut", ["features of x", "tokens of x", "x and columns of w", "x and rows of w"])
def test_products_of_groups_on_parts_give_what_they_give_on_the_whole_in_float32(cut):
    x, w, *_ = given()
    function = lambda x, w, b, t: grouped(x.float(), w.float()).double()  # noqa: E731
    found = run_on_threads(Mesh(tp=2), partial(on_shards, function=function, cuts=CUTS[cut]))
    for result, seen, _ in found:
        assert seen == X
        torch.testing.assert_close(result, grouped(x.float(), w.float()).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("write", [lambda view: view.add_(1), lambda view: view.mul_(2.0)])
def test_a_write_to_a_view_of_a_gathered_shard_is_refused(write):
    def work(axes):
        x = torch.ones(2, 2)
        tag(x, shard_of((2, 4), (None, bytes([0, 0, 1, 1]))))
        with ShardsMode(axes["tp"]):
            write(x[:, ::3])  # every third feature: no rank has them by its shard alone

    with pytest.raises((PlanError, RankFailedError), match="writes to a tensor of which each rank holds a shard"):
        run_on_threads(Mesh(tp=2), work)


@pytest.mark.parametrize("place", [(..., 0), (slice(None), 3)])
def test_a_write_to_one_element_of_a_dim_that_is_cut_is_refused(place):
    def work(axes):
        x = torch.ones(2, 2)
        tag(x, shard_of((2, 4), (None, bytes([0, 0, 1, 1]))))
        with ShardsMode(axes["tp"]):
            x[place] = 5.0

    with pytest.raises((PlanError, RankFailedError), match="writes to a tensor of which each rank holds a shard"):
        run_on_threads(Mesh(tp=2), work)


def test_a_users_hook_on_the_gradient_of_a_part_is_refused():
    def work(axes):
        x = torch.ones(2, 2, requires_grad=True)
        tag(x, shard_of((2, 4), (None, bytes([0, 0, 1, 1]))))
        with ShardsMode(axes["tp"]):
            (x * 2).register_hook(lambda gradient: gradient / gradient.norm())

    with pytest.raises((PlanError, RankFailedError), match="a hook is registered on the gradient"):
        run_on_threads(Mesh(tp=2), work)


def test_a_repeated_call_is_not_planned_again():
    def work(axes):
        mode, x = ShardsMode(axes["tp"]), torch.ones(2, 2)
        tag(x, shard_of((2, 4), (None, bytes([0, 0, 1, 1]))))
        with mode:
            for _ in range(3):
                torch.relu(x * 2)
        return mode.num_planned

    assert run_on_threads(Mesh(tp=2), work) == [2, 2]


def test_a_call_with_one_tensor_twice_has_a_plan_of_its_own():
    x, y = torch.ones(2), torch.ones(2)
    assert signature_of(torch.mul, (x, y), {})[0] == signature_of(torch.mul, (y, x), {})[0]
    assert signature_of(torch.mul, (x, x), {})[0] != signature_of(torch.mul, (x, y), {})[0]


def test_lists_in_the_results_of_a_planned_call_are_new_each_time():
    fill = filling((Slot(0), [1, 2], {"a": Slot(1)}))
    first, second = fill("xy"), fill("xy")
    assert first == second == ("x", [1, 2], {"a": "y"})
    assert first[1] is not second[1]


def test_the_gradient_of_what_every_rank_holds_is_not_added_up():
    cut = bytes([0, 0, 0, 1, 1, 1, ALL, ALL])

    def work(axes):
        x = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
        tag(x, shard_of((2, 8), (None, cut)))
        with ShardsMode(axes["tp"]):
            own, common = x.split([6, 2], dim=-1)
            (own.sum() + common.pow(2).sum()).backward()
        return x.grad.tolist()[0]

    assert run_on_threads(Mesh(tp=2), work) == [[1.0, 1.0, 1.0, 2.0, 2.0]] * 2


def test_a_call_that_sends_nothing_and_names_no_size_runs_as_it_is():
    def work(axes):
        part = shard_of((4, 8), (None, HALVES))
        x, table, w = torch.ones(4, 4, requires_grad=True), torch.ones(8), torch.ones(8, 4)
        tag(x, part)
        tag(w, shard_of((8, 8), (None, HALVES)))
        found = {}
        with (mode := ShardsMode(axes["tp"])):
            for name, call in calls.items():
                before = set(mode._plans)
                call(x, table, w)
                found[name] = [mode._plans[key].runs_as_is for key in mode._plans.keys() - before]
        return found

    calls = {
        "elementwise": lambda x, table, w: functional.silu(x) * 2,
        "columns": lambda x, table, w: x.transpose(0, 1)[:, 1:3],
        "sizes": lambda x, table, w: x.view(2, 2, 8),
        "a slice of a whole tensor": lambda x, table, w: x * table,
        "a sum": lambda x, table, w: functional.linear(x, w),
    }
    assert run_on_threads(Mesh(tp=2), work)[1] == {
        "elementwise": [True, True],
        "columns": [True, True],
        "sizes": [False],
        "a slice of a whole tensor": [False],
        "a sum": [False],
    }


def test_a_whole_operand_is_copied_where_it_learns_and_only_there():
    def work(axes):
        x = torch.ones(4, 4, requires_grad=True)
        tag(x, shard_of((8, 4), (HALVES, None)))
        counts = []
        for learns in (False, True):
            scale = torch.ones(4, requires_grad=learns)
            with ShardsMode(axes["tp"]) as mode:
                (x * scale).sum().backward()
            counts.append((next(plan.runs_as_is for plan in mode._plans.values()), scale.grad))
        return counts

    (first, _), (second, gradient) = run_on_threads(Mesh(tp=2), work)[0]
    assert (first, second) == (True, False)
    assert gradient.tolist() == [8.0] * 4  # of all rows, also those of the other rank


def test_a_gradient_that_another_operator_has_too_is_not_summed_in_place():
    def work(axes):
        x, w, other = (torch.ones(1, 3, requires_grad=True) for _ in range(3))
        for each in (w, other):
            tag(each, shard_of((2, 3), (bytes([0, 1]), None)))
        y = x * 1
        with ShardsMode(axes["tp"]):
            functional.linear(y, w)  # its gradient of y would be a new tensor, and the loss has none of it
            (y + other).sum().backward()
        return x.grad.tolist(), other.grad.tolist()

    assert run_on_threads(Mesh(tp=2), work) == [([[2.0] * 3], [[1.0] * 3])] * 2


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(8, 600)), nn.Parameter(torch.empty(600, 8))

    def forward(self, x):
        return torch.relu(x @ self.up) @ self.down


@pytest.mark.parametrize("size", [254, 255, 256, 300])
def test_a_model_is_cut_by_its_operators_over_as_many_ranks_as_labels_of_one_byte_can_name(size):
    """One label, 255, is for all ranks: with as many a rank would be taken for all of them."""
    layout = Layout.parse(f"tp{size}")
    job = job_for(Wide(), CrossEntropy(), layout, torch.ones(4, 8))
    if size > 254:
        with pytest.raises(LayoutError, match=f"no layer of the model can be cut over tp={size}"):
            make_plan(job, layout)
    else:
        up = make_plan(job, layout)[0].compute["up"]
        assert [up.local_shape({"tp": rank}) for rank in (0, 253)] == [(8, 3), (8, 2)]


class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.up, self.down = nn.Linear(8, 24), nn.Parameter(torch.randn(24, 8))

    def forward(self, tokens):
        x = self.table(tokens)
        return self.head(x + self.up(x).relu() @ self.down)


GATHERED = {
    "classes alone": (
        "own code on shards of tensors",
        False,
        lambda o, t: functional.cross_entropy(o, t, reduction="sum"),
    ),
    "with a hook": (
        "gathered: a hook of the model",
        True,
        lambda o, t: functional.cross_entropy(o, t, reduction="sum"),
    ),
    "read otherwise": ("gathered: the loss is not F.cross_entropy", False, lambda o, t: o.logsumexp(-1).sum()),
}


@pytest.mark.parametrize("case", GATHERED)
def test_the_record_of_a_loss_says_whether_and_why_its_logits_were_gathered(case):
    words, hooked, loss = GATHERED[case]
    tokens = torch.arange(24).view(4, 6) % 16
    with without_values():
        model = TokenModel()

    def of_tokens(outputs, targets):
        return loss(outputs.flatten(0, 1), targets.flatten()), targets.numel()

    def work(world):
        run = parallelize(model, "tp2", world, loss=of_tokens, example=tokens)
        if hooked:
            run.model.register_forward_hook(lambda *_: None)
        (batch,) = run.shard([(tokens, tokens)])
        run.step(batch)
        return run.explain("(loss)")

    assert all(words in text for text in launch(work, 2, ranks="threads"))


class AsksForWeights(nn.Module):
    """Code that reads a weight by its name, and asks whether it is a parameter."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        penalty = self.get_parameter("up.weight").square().mean()
        assert isinstance(self.down.weight, nn.Parameter)
        return x + self.down(torch.tanh(self.up(x))) * penalty


@pytest.mark.parametrize("line", ["tp2/sp", "tp2x2/2d", "tp2"])
def test_a_weight_that_is_gathered_for_its_use_is_a_parameter_to_code(line):
    model = nn.Sequential(AsksForWeights(), AsksForWeights())
    batch = torch.randn(4, 8), torch.randn(4, 8)
    verdict = verify(model, line, [batch], loss=nn.MSELoss())
    assert verdict.equal, str(verdict)


class Decoder(nn.Module):
    """Layers that each read what an encoder gives twice, and three values of their own in between."""

    def __init__(self, number):
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {name: nn.Linear(8, 16) for name in ("q", "k", "v", "first", "second")} | {"out": nn.Linear(16, 8)}
            )
            for _ in range(number)
        )

    def forward(self, x):
        given = torch.tanh(self.encoder(x))
        for layer in self.layers:
            if x.shape[0] > 0:  # not followed by a trace
                x = x + layer["out"](torch.tanh(layer["first"](torch.tanh(x))))
            y = layer["q"](torch.sin(x)) * torch.sigmoid(layer["k"](given)) + layer["v"](given)
            x = x + layer["out"](torch.tanh(y) + torch.tanh(layer["second"](torch.cos(x))))
        return x


def test_what_all_layers_read_of_an_encoder_is_summed_once_in_a_backward():
    sums = []
    for number in (1, 2, 4):
        model, batch = Decoder(number), (torch.randn(4, 8), torch.randn(4, 8))

        def work(world, model=model, batch=batch):
            run = parallelize(model, "tp2", world, loss=MeanSquaredError(), example=batch[0])
            with world.recorder.recording() as records:
                run.step(next(iter(run.shard([batch]))))
            return sum(each.kind == "all_reduce" and each.source == "tensor_1d" for each in records)

        (found, _) = launch(work, 2, ranks="threads")
        sums.append(found)
    assert sums[2] - sums[1] == 2 * (sums[1] - sums[0])
