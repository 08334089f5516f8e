"""Mixtures of experts whose code loops over the experts that samples chose: which ones, only a real run knows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.models.losses import MeanSquaredError
from shardwright.models.model_loss import ModelLoss
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.strategies.tensor_parallel.shards_plan import share_cut

WORDS, TOKENS, WIDTH, NUM_EXPERTS = 23, 3, 16, 6


class Mixture(nn.Module):
    """One expert for each token: the loop runs over those that some token has, by ``nonzero`` or by a mask."""

    def __init__(self, by_mask, dropout=0.0):
        super().__init__()
        self.by_mask, self.gate = by_mask, nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, WIDTH))
            for _ in range(NUM_EXPERTS)
        )

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weight, chosen = self.gate(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        if self.by_mask:
            for number, expert in enumerate(self.experts):
                mask = chosen == number
                if mask.any():
                    out[mask] = expert(flat[mask]) * weight[mask].unsqueeze(-1)
        else:
            for number in functional.one_hot(chosen, NUM_EXPERTS).sum(0).nonzero():
                rows = torch.where(chosen == number)[0]
                out.index_add_(0, rows, self.experts[number](flat[rows]) * weight[rows, None])
        return out.view(x.shape)


class Sparse(nn.Module):
    def __init__(self, by_mask=False, dropout=0.0):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.mixtures = nn.ModuleList(Mixture(by_mask, dropout) for _ in range(3))
        self.final = Mixture(by_mask, dropout)  # in no list of blocks: each expert would be a param group
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        assert tokens.size(1) <= TOKENS, "too many tokens"
        x = self.words(tokens)
        for norm, mixture in zip(self.norms, (*self.mixtures, self.final), strict=True):
            x = x + mixture(norm(x))
        return self.head(x)


def sparse(**options):
    torch.manual_seed(3)
    return Sparse(**options), [(torch.randint(WORDS, (8, TOKENS)), torch.randint(WORDS, (8, TOKENS))) for _ in range(2)]


@pytest.mark.parametrize("kilobytes", [1, 20, 60])
def test_mixtures_in_one_param_group_stay_in_it(kilobytes):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Mixture(False) for _ in range(8)), nn.Linear(WIDTH, WORDS))
    tokens = torch.randint(WORDS, (8, TOKENS))
    line = f"dp2/zero3/bucket:{kilobytes}"
    plan, _ = make_plan(job_for(model, nn.CrossEntropyLoss(), Layout.parse(line), tokens), Layout.parse(line))
    assert sorted(name for group in plan.param_groups for name in group.parameters) == sorted(
        dict(model.named_parameters())
    )
    result = verify(model, line, [(tokens, tokens)], loss=nn.CrossEntropyLoss())
    assert result.equal, str(result)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("line", [
    "dp2/zero3/bucket:0", "tp2", "dp2/zero3/bucket:0 tp2", "pp2/1f1b mb4", "pp4/zb-v mb4", "dp4/zero3/bucket:0 mb2",
    "pp2/1f1b mb2 dp2/zero3/bucket:0 tp2", "dp2/bucket:0", "dp2/zero3/bucket:0 recompute:full",
])  # fmt: skip
@pytest.mark.parametrize("by_mask", [False, True])
def test_a_mixture_trains_as_on_one_device_though_ranks_and_stages_use_other_experts(line, by_mask):
    model, batches = sparse(by_mask=by_mask)
    calls = [set(), set()]
    for rank, half in enumerate(batches[0][0].chunk(2)):
        handles = [
            module.register_forward_hook(lambda *_, path=path, rank=rank: calls[rank].add(path))
            for path, module in model.named_modules()
            if ".experts." in path
        ]
        model(half)
        for handle in handles:
            handle.remove()
    assert calls[0] != calls[1], "the halves of the batch choose other experts"
    verdict = verify(model, line, batches)
    assert verdict.equal, verdict


@pytest.mark.parametrize("by_mask", [False, True])
def test_a_record_of_a_mixture_has_every_expert(by_mask):
    model, batches = sparse(by_mask=by_mask)
    run = ModelGraph(model, batches[0][0]).run
    assert run.recording.selecting.keys() == {"mixtures.0", "mixtures.1", "mixtures.2", "final"}
    assert run.recording.parameters_used == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("line", ["tp2x2/2d", "tp2/sp", "tp2x2x2/3d"])
def test_a_mixture_is_not_cut_where_ranks_with_other_samples_would_wait_for_each_other(line):
    model, batches = sparse()
    layout = Layout.parse(line)
    job = job_for(model, nn.CrossEntropyLoss(), layout, batches[0][0])
    try:
        plan, _ = make_plan(job, layout)
    except LayoutError:
        return
    cut = [name for name, each in plan.compute.items() if each.cut_dims and ".experts." in name]
    assert not cut


@pytest.mark.parametrize("line", ["dp2", "mb2", "dp2/zero3", "tp2 mb2", "pp2/1f1b mb2 dp2", "dp2 recompute:full"])
@pytest.mark.parametrize("by_mask", [False, True])
def test_dropout_of_the_samples_that_an_expert_gets_is_that_of_one_device(line, by_mask):
    model, batches = sparse(by_mask=by_mask, dropout=0.1)
    verdict = verify(model, line, batches)
    assert verdict.equal, verdict


class RoutedByTheModel(nn.Module):
    """The model's own forward routes rows to experts, with dropout in each."""

    def __init__(self, dropout):
        super().__init__()
        self.enter, self.router, self.head = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(dropout)) for _ in range(3))

    def forward(self, x):
        rows = self.enter(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = torch.where(chosen == number)[0]
            mixed = mixed.index_add(0, mine, expert(rows[mine]) * weights[mine, None])
        return self.head(mixed.view(*x.shape[:2], -1))


def test_dropout_of_experts_that_the_models_own_forward_routes_to_is_refused_too():
    batch = torch.randn(8, 6, 8), torch.randint(4, (8, 6))
    assert verify(RoutedByTheModel(0.0), "dp2", [batch]).equal
    for line in ("dp2", "mb2"):
        with pytest.raises(
            PlanError, match=r"'experts\.0\.1' draws random numbers that mix (?s:.*)for dropout, set its p"
        ):
            verify(RoutedByTheModel(0.1), line, [batch])


class RoutedAfterBlocks(nn.Module):
    """The model's own forward calls a block for all rows, and then routes them to experts, of which some get none."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.router, self.head = nn.Linear(16, 3), nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, x):
        rows = self.block(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = torch.where(chosen == number)[0]
            if len(mine):
                mixed = mixed.index_add(0, mine, expert(rows[mine]) * weights[mine, None])
        return self.head(mixed.view(*x.shape[:2], -1))


@pytest.mark.parametrize("line", ["tp2", "tp2/sp", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d"])
def test_experts_that_the_models_own_forward_routes_to_stay_whole_where_ranks_have_other_samples(line):
    torch.manual_seed(0)
    verdict = verify(RoutedAfterBlocks(), line, [(torch.randn(8, 6, 8), torch.randint(4, (8, 6)))])
    assert verdict.equal, str(verdict)


def test_what_the_models_own_forward_calls_before_it_routes_is_cut():
    layout = Layout.parse("tp2x2/2d")
    plan, _ = make_plan(job_for(RoutedAfterBlocks(), nn.CrossEntropyLoss(), layout, torch.randn(8, 6, 8)), layout)
    cut = {name.split(".")[0] for name, each in plan.compute.items() if each.cut_dims}
    assert cut == {"block"}


class LossOfSelectedLabels(nn.Module):
    """All layers run before the loss selects labels, as the CTC losses of speech models do."""

    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(32, 16) for _ in range(3))
        self.head = nn.Linear(16, 8)

    def forward(self, x, labels):
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(functional.silu(up(x)) * up(x))
        scores = self.head(x).log_softmax(-1, dtype=torch.float32).transpose(0, 1)
        kept = labels > 0
        sizes = torch.full((len(x),), x.shape[1])
        return {"loss": functional.ctc_loss(scores, labels.masked_select(kept), sizes, kept.sum(-1))}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("line", ["tp2x2/2d", "tp2x2x2/2.5d", "tp2/sp", "pp2/1f1b mb2 dp2"])
def test_a_model_whose_loss_selects_labels_is_cut_and_its_mean_is_over_samples(line):
    torch.manual_seed(0)
    model, labels = LossOfSelectedLabels(), torch.randint(1, 8, (7, 4))
    labels[1::2, 2:] = 0  # samples with fewer labels weigh as much
    batch = {"x": torch.randn(7, 9, 16), "labels": labels}
    loss, plans = ModelLoss(over="samples"), []
    verdict = verify(model, line, [batch], loss=loss, alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert line.startswith("pp") or share_cut(plans[0]) > 0.9
    if line.startswith("pp"):
        assert not verify(model, line, [batch], loss=ModelLoss(shifted=False, ignore_index=0)).equal


class SplitBySizes(nn.Module):
    """Rows that are sorted by expert and split by numbers that the code reads from the router's choice."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, 24, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 24) / 4)

    def forward(self, x):
        rows = x.flatten(0, 1)
        weight, chosen = self.gate(rows).softmax(-1).max(-1)
        sizes = functional.one_hot(chosen, NUM_EXPERTS).sum(0).tolist()
        order = chosen.argsort(stable=True)
        parts = rows[order].split(sizes)
        found = [
            functional.linear(functional.silu(functional.linear(part, self.up[number])), self.down[number])
            for number, part in enumerate(parts)
        ]
        mixed = torch.zeros_like(rows).index_copy(0, order, torch.cat(found))
        return x + (mixed * weight[:, None]).view(x.shape)


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", ["dp2/zero3", "tp2", "tp2/sp", "pp2/1f1b mb2", "pp2/1f1b mb2 dp2/zero1 tp2"])
def test_experts_whose_rows_are_split_by_numbers_that_the_code_reads_train_as_on_one_device(line):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(SplitBySizes() for _ in range(3)), nn.Linear(WIDTH, WORDS))
    batch, plans = (torch.randint(WORDS, (8, TOKENS)), torch.randint(WORDS, (8, TOKENS))), []
    verdict = verify(model, line, [batch], alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert line != "tp2" or share_cut(plans[0]) > 0.9


class Picks(nn.Module):
    """A router of its own, which returns the rows of each expert; the model that holds it calls the experts."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(16, 4)

    def forward(self, rows):
        chosen = self.scores(rows).argmax(-1)
        return [(chosen == number).nonzero()[:, 0] for number in range(4)]


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, rows):
        return rows @ self.weight


class CallsExpertsThatAnotherPicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.picks, self.out = nn.Linear(8, 16), Picks(), nn.Linear(16, 4)
        self.experts = nn.ModuleList(Times() for _ in range(4))

    def forward(self, x):
        rows = torch.relu(self.enter(x))
        mixed = torch.zeros_like(rows)
        for picked, expert in zip(self.picks(rows), self.experts, strict=True):
            if len(picked):
                mixed = mixed.index_add(0, picked, expert(rows[picked]))
        return self.out(mixed)


class TakesAnotherPath(nn.Module):
    """Calls layers that no record sees where no row is chosen."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave, self.other, self.last = (
            nn.Linear(*sizes) for sizes in ((8, 32), (32, 4), (4, 8), (8, 4))
        )

    def forward(self, x):
        x = self.leave(torch.relu(self.enter(x)))
        picked = (x[:, 0] > 0).nonzero()[:, 0]
        if len(picked) == 0:
            return self.last(torch.relu(self.other(x)))
        return x.index_add(0, picked, x[picked])


@pytest.mark.parametrize("kind", [CallsExpertsThatAnotherPicks, TakesAnotherPath])
@pytest.mark.parametrize("line", ["tp2/sp", "tp2x2/2d"])
def test_weights_stay_whole_that_values_may_decide_to_read_wherever_the_code_picks_rows(kind, line):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 8), torch.randint(4, (4,))) for _ in range(6)]
    with pytest.raises(LayoutError, match="no layer of the model can be cut"):
        verify(kind(), line, batches)


class Dispatches(nn.Module):
    """Sorts rows by the expert that they choose, splits them by counts, and calls each expert on its own."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 6)) for _ in range(4)
        )  # fmt: skip
        self.gate = nn.Parameter(torch.randn(12, 4))

    def forward(self, x):
        weights = torch.softmax(x @ self.gate, -1)
        top, chosen = weights.topk(2, 1)
        gates = torch.zeros_like(weights).scatter(1, chosen, top)
        expert, rows = torch.nonzero(gates.t()).unbind(1)
        parts = x[rows].split((gates > 0).sum(0).tolist())
        y = torch.cat([own(part) for own, part in zip(self.experts, parts, strict=True)]) * gates[rows, expert, None]
        return torch.zeros(x.size(0), 6, dtype=x.dtype).index_add(0, rows, y)


def test_a_mixture_that_cannot_be_cut_by_samples_says_why_and_names_the_layout_that_can():
    torch.manual_seed(0)
    data = [(torch.randn(8, 12), torch.randn(8, 6)) for _ in range(2)]
    verdict = verify(Dispatches(), "tp2", data, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
    for line, fix in (("tp2/sp", "write tp2, or dp2"), ("tp2x2/2d", r"write tp1x4/2d, tp4, or dp4")):
        why = r"'experts.0.0' and \d+ more are kept whole: activations decide whether it is called"
        with pytest.raises(LayoutError, match=rf"{why}(?s:.*)fix: +{fix}$"):
            verify(Dispatches(), line, data, loss=MeanSquaredError())


class LeavesOutLayers(nn.Module):
    """Leaves out a layer by one number for all samples, and then computes its own loss of the labels that are given."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, WORDS)

    def forward(self, x, labels):
        for layer in self.layers:
            number = torch.rand([])
            if not self.training or number > 0.3:
                x = torch.tanh(layer(x))
        given = labels >= 0
        logits, found = self.head(x), labels.masked_select(given)
        return {"loss": functional.cross_entropy(logits[given], found, reduction="sum") / len(x)}


@pytest.mark.parametrize("line", ["dp2", "mb2", "dp2/zero3", "pp2/1f1b mb2"])
def test_a_draw_before_code_selects_is_not_for_selected_samples(line):
    torch.manual_seed(0)
    labels = torch.randint(WORDS, (8, TOKENS))
    labels[::2, 1:] = -1
    batch = {"x": torch.randn(8, TOKENS, WIDTH), "labels": labels}
    result = verify(LeavesOutLayers(), line, [(batch, torch.zeros(8))], loss=ModelLoss(over="samples"))
    assert result.equal, str(result)


class Stretched(nn.Module):
    """Repeats each token as often as an input says, as the length regulator of FastSpeech, between two MLPs."""

    def __init__(self, *, sized):
        super().__init__()
        self.sized = sized
        self.before = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16))
        self.behind = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x, times):
        rows = [
            torch.repeat_interleave(row, number, dim=0, output_size=int(number.sum()) if self.sized else None).mean(0)
            for row, number in zip(self.before(x), times, strict=True)
        ]
        return self.behind(torch.stack(rows))


@pytest.mark.parametrize("sized", [False, True])
@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2/1f1b mb2"])
def test_tokens_are_repeated_as_often_as_an_input_says(line, sized):
    times = 1 + torch.arange(32).view(8, 4) % 3
    verdict = verify(Stretched(sized=sized), line, [((torch.randn(8, 4, 6), times), torch.arange(8) % 3)] * 2)
    assert verdict.equal, str(verdict)


class TopTwo(nn.Module):
    """A layer whose code can be traced, though values decide how many rows an expert gets."""

    def __init__(self, by_mask):
        super().__init__()
        self.by_mask, self.gate = by_mask, nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)) for _ in range(4))

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            if self.by_mask:
                mask = (chosen == number).any(-1)
                out = out.masked_scatter(mask[:, None], expert(flat[mask]))
            else:
                rows, place = torch.where(chosen == number)
                out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, place, None])
        return out.view_as(x)


class TopTwoModel(nn.Module):
    def __init__(self, by_mask):
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.layers, self.head = nn.ModuleList(TopTwo(by_mask) for _ in range(2)), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return self.head(x)


@pytest.mark.parametrize("line", ["pp2/zb-v mb2", "pp2/interleaved:v2 mb2", "pp4/1f1b mb4"])
@pytest.mark.parametrize("by_mask", [False, True])
def test_stages_begin_where_no_rows_cross_whose_number_values_decide(line, by_mask):
    torch.manual_seed(0)
    batches = [(tokens := torch.randint(0, WORDS, (8, 12)), tokens) for _ in range(3)]
    verdict = verify(TopTwoModel(by_mask), line, batches)
    assert verdict.equal, str(verdict)
