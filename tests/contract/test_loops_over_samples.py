"""Code that computes one sample after another, with dropout and other draws, equals one device under every layout."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright import verify
from shardwright.errors import LayoutError, PlanError, RankFailedError

SAMPLES, TOKENS, WIDTH, CLASSES = 7, 5, 8, 4
LAYOUTS = ("dp2", "dp3 mb2", "dp2/zero3", "mb2", "tp2", "pp2/1f1b mb2 dp2/zero1")
CUT_ROWS = ("dp2 tp2/sp", "tp2x2/2d", "tp2x2x2/2.5d")


class Loop(nn.Module):
    """Calls ``each`` for each sample, and joins what it returns."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(WIDTH, CLASSES)

    def mlp(self, x):
        return self.down(functional.relu(self.up(x)))

    def each(self, sample):
        return self.drop(self.mlp(sample)).mean(0)

    def forward(self, x):
        return self.head(torch.stack([self.each(sample) for sample in x]))


class InPlace(Loop):
    def each(self, sample):
        return self.mlp(functional.dropout(sample, 0.3, self.training)).mean(0)

    def forward(self, x):
        x = functional.dropout(x, 0.2, self.training)  # before the loop, of all samples
        joined = torch.cat([self.each(part[0])[None] for part in x.split(1)])
        return self.head(functional.dropout(joined, 0.2, self.training))  # and after it


class Inside(Loop):
    """A loop over the tokens of each sample, as of a recurrent network, with two draws for each."""

    def each(self, sample):
        state = sample.new_zeros(WIDTH)
        for token in sample:
            state = self.drop(torch.tanh(self.mlp(token + self.drop(state))))
        return state + 0.1 * torch.randn_like(state)


class Attends(Loop):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def each(self, sample):
        q, k, v = self.qkv(sample).view(-1, 3, 2, WIDTH // 2).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2 if self.training else 0.0)
        return self.mlp(mixed.transpose(0, 1).reshape(-1, WIDTH)).mean(0)


class OfTorch(Loop):
    """A layer of torch, with an attention that draws inside."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.2, batch_first=True)

    def each(self, sample):
        return self.layer(sample[None])[0].mean(0)


class Checkpointed(Loop):
    def each(self, sample):
        return checkpoint(self.mlp_dropped, sample, use_reentrant=False).mean(0)

    def mlp_dropped(self, x):
        return functional.dropout(self.mlp(x), 0.3, self.training)


class BesideLoop(Loop):
    """Has layers that all samples go through at once, which a layout that cuts rows cuts too."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, WIDTH))

    def forward(self, x):
        return super().forward(x + self.wide(x))


class Blocks(nn.Module):
    """Modules that each loop over the samples, under ``recompute`` too."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(InBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class InBlock(Loop):
    def forward(self, x):
        return x + torch.stack([functional.dropout(self.mlp(sample), 0.3, self.training) for sample in x])


def verdict_of(model, line):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator)
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return verify(model, line, [(x, targets), (x + 1, targets)], loss=nn.CrossEntropyLoss())


def check_equal(model, line, compared=verdict_of):
    torch.manual_seed(0)
    verdict = compared(model(), line)
    assert verdict.equal, str(verdict)
    return verdict


def models(*classes, lines=LAYOUTS):
    return [pytest.param(each, line, id=f"{each.__name__}-{line}") for each in classes for line in lines]


@pytest.mark.parametrize(("model", "line"), [
    *models(Loop, InPlace, Attends),
    *models(BesideLoop, lines=(*LAYOUTS, *CUT_ROWS)),
    *models(Inside, OfTorch, lines=[line for line in LAYOUTS if "tp" not in line]),
    *models(Checkpointed, lines=[line for line in LAYOUTS if "tp" not in line and "pp" not in line]),
    *models(Blocks, lines=(*LAYOUTS, "dp2 mb2 recompute:full", "pp2 mb2 dp2 tp2")),
])  # fmt: skip
@pytest.mark.sampled(100)
def test_draws_for_one_sample_after_another_are_those_of_one_device(model, line):
    check_equal(model, line)


class OfPictures(Loop):
    """Takes a list of inputs of several sizes, as detectors do: no tensor has the samples in a dim."""

    def forward(self, pictures):
        return self.head(torch.stack([self.each(picture) for picture in pictures]))


class CentredPictures(OfPictures):
    def forward(self, pictures):
        found = torch.stack([self.mlp(picture).mean(0) for picture in pictures])
        return self.head(found - found.mean(0))


def verdict_of_list(model, line):
    generator = torch.Generator().manual_seed(0)
    pictures = [torch.randn(2 + number % 3, WIDTH, generator=generator) for number in range(SAMPLES)]
    targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return verify(model, line, [(sw.per_sample(pictures), targets)] * 2, loss=nn.CrossEntropyLoss())


class OfRows(Loop):
    """Takes the rows of all samples in one tensor, as of pictures of several sizes, and splits it."""

    def forward(self, rows, lengths):
        return self.head(torch.stack([self.each(sample) for sample in rows.split(lengths.tolist())]))


def verdict_of_rows(model, line):
    lengths = torch.tensor([3, 1, 4, 2, 5, 3, 2])
    inputs = sw.packed(torch.randn(20, WIDTH), lengths), lengths
    return verify(model, line, [(inputs, torch.arange(SAMPLES) % CLASSES)] * 2, loss=nn.CrossEntropyLoss())


@pytest.mark.parametrize("line", [line for line in LAYOUTS if line != "tp2"])
@pytest.mark.sampled(100)
def test_draws_for_the_rows_of_each_sample_are_those_of_one_device(line):
    check_equal(OfRows, line, verdict_of_rows)


@pytest.mark.parametrize("line", LAYOUTS)
@pytest.mark.sampled(2)
def test_draws_for_the_entries_of_a_list_are_those_of_one_device(line):
    check_equal(OfPictures, line, verdict_of_list)


@pytest.mark.parametrize(("line", "is_cut"), [("dp2", True), ("mb2", True), ("tp2", False)])
def test_a_mean_over_the_entries_of_a_list_is_refused_where_the_batch_is_cut(line, is_cut):
    torch.manual_seed(0)
    with pytest.raises(LayoutError, match="from other samples of the batch") if is_cut else nullcontext():
        assert verdict_of_list(CentredPictures(), line).equal


class Twice(Loop):
    def forward(self, x):
        first = torch.stack([self.drop(self.mlp(sample)) for sample in x])
        return self.head(torch.stack([self.drop(sample).mean(0) for sample in first]))


class Backwards(Loop):
    def forward(self, x):
        return self.head(torch.stack([self.each(x[number]) for number in reversed(range(len(x)))][::-1]))


class NoiseOfShape(Loop):
    """Noise that no function makes from the sample: the record shows how often it is drawn, and not for which."""

    def each(self, sample):
        noise = torch.randn(sample.shape, dtype=sample.dtype, device=sample.device)
        return self.mlp(sample + noise).mean(0)


class AllButTheLast(Loop):
    def forward(self, x):
        found = [self.each(sample) for sample in x[:-1]]
        return self.head(torch.stack([*found, self.mlp(x[-1]).mean(0)]))


class Flipped(Loop):
    def forward(self, x):
        return self.head(torch.stack([self.each(sample) for sample in x.flip(1).flip(0)]))


@pytest.mark.filterwarnings("ignore:'the model' takes flip over all samples")
@pytest.mark.parametrize("model", [Twice, Backwards, AllButTheLast, Flipped])
@pytest.mark.parametrize("line", ["dp2", "mb2"])
def test_draws_for_one_sample_in_another_order_are_refused_where_the_batch_is_cut(model, line):
    torch.manual_seed(0)
    with pytest.raises(PlanError, match="draws random numbers more often the more samples there are"):
        verdict_of(model(), line)
    assert verdict_of(model(), "tp2").equal


class NoiseBackwards(NoiseOfShape):
    forward = Backwards.forward


@pytest.mark.parametrize("line", ["dp2", "mb2", "dp2/zero3", "pp2/1f1b mb2"])
def test_noise_that_is_drawn_once_for_each_sample_is_taken_to_be_in_order_and_a_warning_says_so(line):
    with pytest.warns(UserWarning, match="draws random numbers once for each sample, and nothing shows for which"):
        check_equal(NoiseOfShape, line)
    with pytest.warns(UserWarning, match="in the order of the batch, which verify checks"):
        assert not verdict_of(NoiseBackwards(), line).equal


def test_layers_that_are_cut_inside_do_not_draw_for_one_sample():
    with pytest.raises(
        PlanError, match=r"'layer.*' draws random numbers for one sample at a time, of which ranks have"
    ):
        verdict_of(OfTorch(), "tp2")


@pytest.mark.parametrize("model", [Loop, OfTorch])
@pytest.mark.parametrize("line", CUT_ROWS)
@pytest.mark.sampled(100)
def test_ranks_that_have_other_numbers_of_samples_gather_nothing_in_layers_that_are_called_for_each(model, line):
    check_equal(model, line)


class Reordered(Loop):
    """Drops after the samples were joined in another order."""

    def forward(self, x):
        return self.head(self.drop(torch.cat([self.mlp(part) for part in x.split(1)][::-1])).mean(1))


@pytest.mark.filterwarnings("ignore:'the model' takes cat over all samples")
def test_draws_for_samples_in_another_order_are_refused():
    with pytest.raises(PlanError, match="mix the samples of a batch, or for rows of which it is not known whose"):
        verdict_of(Reordered(), "dp2")


class AsLong(Loop):
    """Draws for each token that a sample has, of which the inputs say how many these are."""

    def forward(self, x, lengths):
        return self.head(torch.stack([self.tokens(sample[:n]) for sample, n in zip(x, lengths.tolist(), strict=True)]))

    def tokens(self, sample):
        return torch.stack([self.drop(self.mlp(token)) for token in sample]).mean(0)


class AsLongInCall(AsLong):
    def tokens(self, sample):
        return torch.stack([functional.dropout(self.mlp(token), 0.3, self.training) for token in sample]).mean(0)


@pytest.mark.parametrize("model", [AsLong, AsLongInCall])
@pytest.mark.parametrize("line", ["dp2", "mb2"])
def test_a_loop_that_draws_more_often_for_some_samples_is_refused_when_it_does(model, line):
    torch.manual_seed(0)
    x, targets = torch.randn(4, TOKENS, WIDTH), torch.arange(4)
    alike, unlike = torch.full((4,), TOKENS), torch.tensor([5, 1, 3, 2])
    assert verify(model(), line, [((x, alike), targets)] * 2, loss=nn.CrossEntropyLoss()).equal
    assert verify(
        model(), "single", [((x, each), targets) for each in (alike, unlike)], loss=nn.CrossEntropyLoss()
    ).equal
    with pytest.raises((PlanError, RankFailedError), match="for one sample after another, and not equally often"):
        verify(model(), line, [((x, each), targets) for each in (alike, unlike)], loss=nn.CrossEntropyLoss())


class OnlyTheHead(Loop):
    """Calls its head for each sample; the other layers take the whole batch, in code of the model's own."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        x = x + self.narrow(functional.gelu(self.wide(x)))
        return torch.stack([self.head(sample.mean(0)) for sample in x])


@pytest.mark.parametrize("line", ["tp2/sp", "dp2 tp2/sp"])
def test_layers_beside_the_loop_are_cut_where_ranks_have_other_samples(line):
    assert check_equal(OnlyTheHead, line).shares["tp2/sp"] > 0.5


def filled(model, x):
    out = torch.zeros_like(x)
    for number in range(len(x)):
        out[number] = model.mlp(x[number])
    return out


JOINED = {
    "stack": lambda model, x: torch.stack([model.mlp(sample) for sample in x]),
    "cat": lambda model, x: torch.cat([model.mlp(part) for part in x.split(1)]),
    "cat of slices": lambda model, x: torch.cat([model.mlp(x[number : number + 1]) for number in range(len(x))]),
    "cat of rows": lambda model, x: torch.cat([model.mlp(sample) for sample in x]).view(x.shape),
    "filled": filled,
    "padded": lambda model, x: nn.utils.rnn.pad_sequence([model.mlp(sample) for sample in x], batch_first=True),
    "masked scatter": lambda model, x: model.mlp(x).masked_scatter(x > 1e9, torch.zeros_like(x)),
    "diagonal": lambda model, x: torch.diag_embed(model.mlp(x)).sum(-1),
    "bilinear": lambda model, x: functional.bilinear(model.mlp(x), x, model.table),
}


class Centred(Loop):
    """Subtracts the mean over the batch from what code has joined."""

    def __init__(self, joined):
        super().__init__()
        self.joined, self.table = JOINED[joined], nn.Parameter(torch.randn(WIDTH, WIDTH, WIDTH))

    def forward(self, x):
        x = self.joined(self, x)
        return self.head((x - x.mean(0)).mean(1))


@pytest.mark.parametrize("joined", JOINED)
def test_a_mean_over_samples_that_code_has_joined_is_refused(joined):
    with pytest.raises(LayoutError, match="computes a sample's values from other samples of the batch"):
        verdict_of(Centred(joined), "dp2")


@pytest.mark.parametrize("joined", JOINED)
@pytest.mark.sampled(2)
def test_where_all_samples_are_on_each_rank_it_is_not(joined):
    assert verdict_of(Centred(joined), "tp2").equal
