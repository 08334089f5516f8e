"""Experts draw the same numbers for the same token under every layout, whichever tokens they are given with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright import launch, parallelize, verify
from shardwright.errors import LayoutError, PlanError, RankFailedError
from shardwright.layout import Layout
from shardwright.models.losses import MeanSquaredError
from shardwright.rng import RngTracker
from shardwright.row_numbers import rows_of
from shardwright.runtime.keyed_numbers import RowNumbers
from shardwright.runtime.selected_rows import APART, SelectedRows

W, T = 8, 3


def masked(experts, x, chosen):
    """Takes the rows of a mask over [samples * tokens, features]."""
    flat, out = x.view(-1, W), torch.zeros_like(x.view(-1, W))
    for number, expert in enumerate(experts):
        mask = chosen.view(-1) == number
        if mask.any():
            out[mask] += expert(flat[mask])
    return out.view_as(x)


def masked_tokens(experts, x, chosen):
    """The same over [samples, tokens, features]."""
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        out[chosen == number] += expert(x[chosen == number])
    return out


def numbered(experts, x, chosen):
    """Takes rows by their numbers, with a dim in front that is then merged, and adds them back by these."""
    flat = x.reshape(-1, W)
    out = torch.zeros_like(flat)
    for number, expert in enumerate(experts):
        (rows,) = torch.where(chosen.flatten() == number)
        out.index_add_(0, rows, expert(flat[None, rows].reshape(-1, flat.shape[-1])))
    return out.view(x.shape)


def selected(experts, x, chosen):
    """Takes rows by ``index_select``."""
    flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
    for number, expert in enumerate(experts):
        rows = (chosen.flatten() == number).nonzero().flatten()
        out = out.index_add(0, rows, expert(flat.index_select(0, rows)))
    return out.unflatten(0, x.shape[:2])


def tokens_first(experts, x, chosen):
    """Has the samples as the faster factor of the rows."""
    return masked(experts, x.transpose(0, 1).contiguous(), chosen.transpose(0, 1).contiguous()).transpose(0, 1)


class Expert(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.up, self.down, self.drop, self.kind = nn.Linear(W, 16), nn.Linear(16, W), nn.Dropout(0.4), kind

    def forward(self, x):
        x = functional.silu(self.up(x))
        if self.kind == "noise":
            x = x + 0.3 * torch.randn_like(x)
        if self.kind == "function":
            x = functional.dropout(x, 0.4, self.training)
        if self.kind == "reversed":
            x = self.drop(x.flip(0)).flip(0)
        return self.down(self.drop(x) if self.kind == "module" else x)


class Experts(nn.Module):
    """Routes each token to the expert whose score is the highest."""

    def __init__(self, how, kind):
        super().__init__()
        self.router, self.experts = nn.Linear(W, 3), nn.ModuleList(Expert(kind) for _ in range(3))
        self.how = how

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        best, chosen = scores.max(-1)
        return x + best[..., None] * self.how(self.experts, x, chosen)


class Model(nn.Module):
    def __init__(self, how=masked, kind="module"):
        super().__init__()
        self.first, self.mix, self.mix_again, self.last = (
            nn.Linear(W, W), Experts(how, kind), Experts(how, kind), nn.Linear(W, W),
        )  # fmt: skip

    def forward(self, x):
        return self.last(self.mix_again(torch.tanh(self.mix(self.first(x)))))


def batches(*sizes):
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(size, T, W, generator=draw), torch.randn(size, T, W, generator=draw)) for size in sizes]


LINES = [
    "dp2",
    "mb2",
    "dp2/zero3",
    "tp2 mb2",
    "pp2/1f1b mb2",
    "pp2/zb-v mb3 dp2",
    "dp2 recompute:full",
    "dp3/zero1 tp2",
]


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("how", [masked, masked_tokens, numbered, selected])
def test_dropout_in_experts_is_that_of_one_device(how, line):
    verdict = verify(Model(how), line, batches(6, 7), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["dp2", "pp2/1f1b mb2", "tp2 mb2"])
@pytest.mark.parametrize("kind", ["noise", "function"])
def test_draws_by_functions_in_experts_are_those_of_one_device(kind, line):
    verdict = verify(Model(kind=kind), line, batches(6, 7), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (Model(tokens_first), PlanError, "draws random numbers that mix the samples"),
        (Model(kind="reversed"), (PlanError, RankFailedError), "for rows that code selects by values(?s:.*)not known"),
    ],
)
def test_rows_that_are_not_known_are_refused_where_the_batch_is_cut(model, error, words):
    for line in ("dp2", "mb2"):
        with pytest.raises(error, match=words):
            verify(model, line, batches(6), loss=MeanSquaredError())
    verdict = verify(model, "tp2", batches(6), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class Odd(Experts):
    """Experts that share a dropout, or of which it cannot be known which rows they have."""

    def __init__(self, why):
        super().__init__(masked, "none")
        self.why, self.drop = why, nn.Dropout(0.4)
        self.register_buffer("table", torch.randn(30, W))

    def forward(self, x):
        flat, out = x.view(-1, W), torch.zeros_like(x.view(-1, W))
        chosen = self.router(flat).argmax(-1)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if not mask.any():
                continue
            if self.why == "one dropout for all":
                out[mask] += self.drop(expert(flat[mask]))
            elif self.why == "a function in the loop":
                out[mask] += functional.dropout(expert(flat[mask]), 0.4, self.training)
            elif self.why == "rows of a table":
                ids = flat.argmax(-1)
                out[mask] += expert.drop(self.table[ids[mask]] + flat[mask])
            elif self.why == "a checkpoint":
                out[mask] += checkpoint(lambda y, own=expert: own.drop(own(y)), flat[mask], use_reentrant=False)
        return out.view_as(x)


class TwoEach(Experts):
    """Gives each token to two experts, whose results are dropped by one dropout, called for each expert with tokens."""

    def __init__(self):
        super().__init__(masked, "module")
        self.drop = nn.Dropout(0.4)

    def forward(self, x):
        flat = x.reshape(-1, W)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        mask = functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number in mask.sum((1, 2)).nonzero().flatten():
            place, rows = torch.where(mask[number])
            y = self.experts[number](flat[None, rows].reshape(-1, W)) * weights[rows, place, None]
            out.index_add_(0, rows, functional.dropout(self.drop(y), 0.1, self.training))
        return out.view_as(x)


def sharing(make):
    return nn.Sequential(nn.Linear(W, W), make(), nn.Tanh(), make(), nn.Linear(W, W))


@pytest.mark.parametrize("line", ["pp2", "pp2/1f1b mb2", "dp2", "dp2/zero3", "mb2"])
def test_a_dropout_that_two_mixtures_share_is_refused_by_both_its_names_where_one_rank_has_not_all_of_both(line):
    model = sharing(lambda: Odd("one dropout for all"))
    model[3].drop = model[1].drop
    words = r"'1\.drop' draws random numbers(?s:.*)also '3\.drop'(?s:.*)fix: +give each module that selects rows a"
    with pytest.raises(PlanError, match=words):
        verify(model, line, batches(6, 7), loss=MeanSquaredError())
    verdict = verify(model, "tp2", batches(6, 7), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(
    "make", [lambda: Odd("one dropout for all"), lambda: Odd("a function in the loop"), TwoEach],
    ids=["one dropout for all", "a function in the loop", "two experts each"],
)  # fmt: skip
def test_a_dropout_that_experts_share_is_that_of_one_device(make, line):
    verdict = verify(sharing(make), line, batches(6, 7), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class TwoRates(Odd):
    """Routes all tokens and then every second one, of which a sample has fewer, to experts that share a dropout."""

    def __init__(self):
        super().__init__("one dropout for all")

    def forward(self, x):
        for y in (x, x[:, ::2].contiguous()):
            x = x + super().forward(y).mean(1, keepdim=True)
        return x


@pytest.mark.parametrize("line", ["dp2", "mb2", "pp2/1f1b mb2"])
def test_rows_of_sequences_of_two_lengths_that_share_a_dropout_are_told_apart(line):
    verdict = verify(sharing(TwoRates), line, batches(6), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class DrawsAround(Odd):
    """Draws by the dropout that its experts share for all tokens too: how often it was called then matters."""

    def __init__(self):
        super().__init__("one dropout for all")

    def forward(self, x):
        return super().forward(x) + self.drop(x)


def test_a_dropout_that_experts_share_with_other_code_is_refused_where_the_batch_is_cut():
    with pytest.raises(PlanError, match="that mix the samples"):
        verify(sharing(DrawsAround), "dp2", batches(6), loss=MeanSquaredError())
    for line in ("tp2", "pp2"):
        verdict = verify(sharing(DrawsAround), line, batches(6), loss=MeanSquaredError())
        assert verdict.equal, str(verdict)


class Halves(nn.Module):
    """Draws by a function of which it is not known which rows its numbers are for."""

    def forward(self, x):
        return x * torch.bernoulli(torch.full_like(x, 0.5)) if self.training else x


def test_a_module_that_two_stages_may_draw_by_in_code_that_selects_samples_is_refused():
    model = sharing(lambda: Odd("one dropout for all"))
    model[1].drop = model[3].drop = Halves()
    words = r"'1\.drop' draws random numbers in code that selects(?s:.*)also '3\.drop'"
    with pytest.raises(PlanError, match=words):
        verify(model, "pp2", batches(6, 7), loss=MeanSquaredError())
    verdict = verify(model, "tp2", batches(6, 7), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("why", ["rows of a table", "a checkpoint"])
def test_experts_whose_rows_or_calls_are_not_known_are_refused_before_the_first_step(why):
    model = sharing(lambda: Odd(why))
    for line in ("dp2", "mb2"):
        with pytest.raises(PlanError, match=r"that mix the samples|get one row for each sample"):
            verify(model, line, batches(6), loss=MeanSquaredError())
    if why != "rows of a table":  # of which the record takes each for a sample's
        verdict = verify(model, "tp2", batches(6), loss=MeanSquaredError())
        assert verdict.equal, str(verdict)


class Unpadded(nn.Module):
    """Selects rows once, before all of its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Expert("module") for _ in range(3))

    def forward(self, x):
        flat = x.reshape(-1, W)
        mask = flat.sum(-1) > flat.sum(-1).mean() - 5
        rows = flat[mask]
        for layer in self.layers:
            rows = rows + layer(rows)
        out = torch.zeros_like(flat)
        out[mask] = rows
        return out.view_as(x)


@pytest.mark.parametrize("line", ["pp2/1f1b", "pp2/gpipe", "tp2"])
def test_a_model_that_selects_rows_around_all_its_layers_is_cut_as_before(line):
    verdict = verify(Unpadded(), line, batches(6), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


def test_two_rows_of_one_token_drop_other_features():
    rng = RngTracker(seed=1, samples=range(2))

    def numbers_of(*rows):
        rows = torch.tensor(rows)[:, None]
        before = RngTracker().draws_before("", rows)
        return RowNumbers(rng, "key", None, range(2), torch.device("cpu"), rows=rows, draws_before=before)

    numbers = numbers_of(4, 1, 4, 1)
    first, second, third, last = numbers.kept((4, 64), 0.5)
    assert not torch.equal(first, third)
    assert not torch.equal(second, last)
    assert torch.equal(numbers_of(1, 1).kept((2, 64), 0.5), torch.stack([second, last]))


def test_masks_differ_from_expert_to_expert_and_from_step_to_step():
    """Of a model whose experts all have the same weights, the outputs tell the masks."""
    model = Model(kind="module")

    def work(world):
        run = parallelize(model, "single", world, loss=MeanSquaredError(), example=batches(6)[0][0])
        seen = []
        for expert in (*run.model.mix.experts, *run.model.mix_again.experts):
            expert.drop.register_forward_hook(lambda _, given, out: seen.append((given[0] != 0) & (out == 0)))
        for batch in run.shard(batches(6) * 2):
            run.step(batch)
        return [each.flatten().tolist() for each in seen]

    (found,) = launch(work, 1, ranks="threads")
    assert all(0.2 < sum(each) / len(each) < 0.6 for each in found if len(each) > 60)
    pairs = [(a, b) for i, a in enumerate(found) for b in found[:i] if len(a) == len(b)]
    assert all(a != b for a, b in pairs)


def follow(function, rows=6, samples=range(2), width=4):
    with SelectedRows(samples):
        found = rows_of(function(torch.randn(rows, width)))
    # of two samples, as most cases have, with three rows each
    return None if found is None else [number // APART * 3 + number % APART for number in found.flatten().tolist()]


ROWS = torch.tensor([4, 1, 1])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x[ROWS], [4, 1, 1]),
        (lambda x: x[ROWS, :2] * 3, [4, 1, 1]),
        (lambda x: x[..., :2][ROWS], [4, 1, 1]),
        (lambda x: x[ROWS][:, torch.tensor([0, 3])], None),  # which of them the features are is not asked
        (lambda x: (x[ROWS] + x[ROWS].mean(0)).relu(), None),
        (lambda x: x.index_select(0, ROWS).relu(), [4, 1, 1]),
        (lambda x: x[ROWS][None].reshape(-1, 4), [4, 1, 1]),
        (lambda x: x[ROWS] * x[ROWS, :1], [4, 1, 1]),
        (lambda x: x[ROWS] + x[ROWS.flip(0)], None),
        (lambda x: x[ROWS] + x[ROWS][:1], None),
        (lambda x: x[ROWS].chunk(2, -1)[1], [4, 1, 1]),
        (lambda x: x[ROWS].view(-1), None),
        (lambda x: x[ROWS].index_select(-1, torch.tensor([3, 0])), None),
        (lambda x: torch.index_select(x, dim=0, index=ROWS), None),
        (lambda x: torch.flatten(input=x[ROWS], start_dim=1), None),
        (lambda x: torch.zeros(6, 4).index_copy_(0, ROWS, x[ROWS])[ROWS], None),
        (lambda x: x[ROWS].view(3, 2, 2), None),  # two rows of features have the number of one
        (lambda x: x[ROWS].unsqueeze(0).transpose(0, 1), [4, 1, 1]),
        (lambda x: x[ROWS].softmax(-1), [4, 1, 1]),
        (lambda x: x[ROWS].softmax(0), None),
        (lambda x: x[ROWS] @ x[ROWS].t(), None),
        (lambda x: x[ROWS].t(), None),
        (lambda x: x[ROWS].flip(0), None),
        (lambda x: x[ROWS].sort(0).values, None),
        (lambda x: torch.zeros(3, 4).add_(x[ROWS]), [4, 1, 1]),
        (lambda x: torch.zeros(6, 4).index_add_(0, ROWS, x[ROWS]), None),
        (lambda x: x[1:4], None),  # selected by numbers, which a record shows
        (lambda x: nn.Parameter(torch.randn(6, 4))[ROWS], None),
    ],
)
def test_rows_are_followed_as_far_as_they_are_computed_row_by_row(function, expected):
    assert follow(function) == expected


def test_rows_are_numbered_within_the_samples_that_a_rank_has():
    assert follow(lambda x: x[ROWS], samples=(7, 3)) == [3 * 3 + 1, 7 * 3 + 1, 7 * 3 + 1]
    assert follow(lambda x: x[torch.tensor([True, False, False, False, False, True])], samples=range(4, 6)) == [12, 17]
    assert follow(lambda x: x[ROWS], samples=range(4)) is None  # six rows are of no four samples


class Router(nn.Module):
    """Converts its weight to the dtype that it computes in, as that of Switch does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(W, W)

    def forward(self, x):
        self.layer = self.layer.to(torch.float32)
        return self.layer(x.float()).sigmoid().to(x.dtype)


class Converts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.router, self.last = nn.Linear(W, W), Router(), nn.Linear(W, W)

    def forward(self, x):
        return self.last(self.first(x) * self.router(x))


@pytest.mark.parametrize("line", ["dp2/zero3", "dp2/zero1 pp2/1f1b mb2", "dp2"])
def test_a_weight_that_is_converted_to_its_own_dtype_is_not_written_to(line):
    verdict = verify(Converts(), line, batches(4), loss=MeanSquaredError(), dtype=torch.float32)
    assert verdict.equal, str(verdict)


def test_a_weight_that_is_converted_to_another_dtype_than_that_of_the_layout_is_refused():
    def work(world):
        parallelize(Converts(), "dp2 bf16", world, loss=MeanSquaredError(), example=batches(4)[0][0])

    with pytest.raises((LayoutError, RankFailedError), match=r"writes to the parameter 'router\.layer\.bias'"):
        launch(work, Layout.parse("dp2").num_ranks, ranks="threads")


def test_a_model_that_converts_a_weight_is_compared_in_the_dtype_to_which_it_does():
    verdict = verify(Converts(), "dp2/zero3", batches(4), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
    assert verdict.only_float32 == "its forward converts 'router.layer.weight' to float32"
