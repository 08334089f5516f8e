"""Models that make a tensor without a device, as ``torch.zeros(...)``, and fill it with what layers compute."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.analysis.on_meta.device_moves import IgnoresDeviceMoves, mark_made, to_meta_if_written
from shardwright.errors import LayoutError, PlanError
from shardwright.models.losses import MeanSquaredError
from shardwright.verify import verify

STEPS = 3


def by_index(h, out):
    for t in range(STEPS):
        out[:, t] = h * (t + 1)


def by_list(h, out):
    out[:, [0, 2]] = h[:, None] * 2


def added(h, out):
    for t in range(STEPS):
        out[:, t] += h


def copied(h, out):
    out.copy_(h[:, None].expand(-1, STEPS, -1))


def into_views(h, out):
    for t in range(STEPS):
        out[:, t].copy_(h * t)


def index_added(h, out):
    out.index_add_(1, torch.arange(STEPS), torch.stack([h, 2 * h, h], 1))


FILLS = (by_index, by_list, added, copied, into_views, index_added)


class Fills(nn.Module):
    """The loop of a decoder that collects its outputs."""

    def __init__(self, fill, centre=False):
        super().__init__()
        self.fill, self.centre = fill, centre
        self.a, self.b = nn.Linear(6, 32), nn.Linear(32, 8)
        self.c, self.d = nn.Linear(8, 32), nn.Linear(32, 3)

    def forward(self, x):
        h = self.b(torch.relu(self.a(x)))
        out = torch.zeros(x.size(0), STEPS, 8, dtype=x.dtype).mul_(1)  # written to before
        self.fill(h, out)
        if self.centre:
            out = out - out.mean(0)
        return self.d(torch.relu(self.c(out))).sum(1)


def batches():
    torch.manual_seed(0)
    return [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(2)]


@pytest.mark.parametrize("line", ["pp2", "pp2/1f1b mb4", "pp2 mb2 tp2"])
def test_stages_refuse_what_is_written_into_a_view_and_read_elsewhere(line):
    with pytest.raises(LayoutError, match=r"given: +copy_ on(?s:.*)allowed: +writes into a value that is then read"):
        verify(Fills(into_views), line, batches(), loss=MeanSquaredError())


@pytest.mark.parametrize(
    ("fill", "line"),
    [
        (fill, line)
        for fill in FILLS
        for line in ("dp2/zero3", "tp2", "pp2", "pp2/1f1b mb4", "pp2 mb2 tp2")
        if fill is not into_views or "pp" not in line
    ],
)
def test_what_layers_compute_reaches_a_tensor_that_code_has_made(fill, line):
    verdict = verify(Fills(fill), line, batches(), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("fill", [fill for fill in FILLS if fill is not by_list])
def test_a_mean_over_the_batch_of_such_a_tensor_is_refused(fill):
    with pytest.raises(LayoutError, match="computes a sample's values from other samples"):
        verify(Fills(fill, centre=True), "dp2", batches(), loss=MeanSquaredError())


INDEXED = {
    "index": lambda h: h[torch.arange(len(h))],
    "index and another": lambda h: h[torch.arange(len(h))[:, None], torch.arange(8)],
    "index_select": lambda h: h.index_select(0, torch.arange(len(h))),
    "index_put": lambda h: torch.zeros(len(h), 8, dtype=h.dtype).index_put((torch.arange(len(h)),), h),
    "scatter_add": lambda h: torch.zeros(len(h), 8, dtype=h.dtype).scatter_add(1, h.argsort(1), h),
    "copysign": lambda h: torch.copysign(h, torch.ones(len(h), 8, dtype=h.dtype)),
}


class Indexed(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.a, self.b, self.c = how, nn.Linear(6, 32), nn.Linear(32, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = INDEXED[self.how](self.b(torch.relu(self.a(x))))
        return self.c(h - h.mean(0))


@pytest.mark.parametrize("how", [how for how in INDEXED if how != "index and another"])
def test_samples_are_followed_through_indices_that_take_all_of_them(how):
    with pytest.raises(LayoutError, match="computes a sample's values from other samples"):
        verify(Indexed(how), "dp2", batches(), loss=MeanSquaredError())


class PicksLast(nn.Module):
    """Takes each sample's last token, as classifiers on language models do."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Embedding(20, 8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        h = self.c(torch.relu(self.b(self.a(tokens))))
        last = (tokens != 0).sum(1) - 1
        return self.head(h[torch.arange(len(tokens)), last])


@pytest.mark.parametrize("line", ["dp2/zero3", "tp2", "tp2/sp", "tp2x2/2d", "pp2/1f1b mb2"])
def test_a_token_of_each_sample_is_taken_as_on_one_device(line):
    torch.manual_seed(0)
    data = [(torch.randint(1, 20, (8, 6)), torch.randn(8, 3)) for _ in range(2)]
    verdict = verify(PicksLast(), line, data, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("function", [torch.Tensor.add_, torch.Tensor.__setitem__, torch.Tensor.add])
def test_only_what_a_function_writes_to_becomes_a_meta_tensor(function):
    made, computed = mark_made(torch.zeros(2, 3), ()), torch.empty(2, 3, device="meta")
    to_meta_if_written(function, (made, computed), {})
    assert made.is_meta == (function is not torch.Tensor.add)


def test_a_view_becomes_a_meta_tensor_with_what_it_is_a_view_of():
    made = mark_made(torch.zeros(2, 3), ()).add_(1)
    view = made[:, 1]
    to_meta_if_written(torch.Tensor.add_, (view, torch.empty(2, device="meta")), {})
    assert (made.is_meta, view.is_meta, view.stride(), view.storage_offset()) == (True, True, (3,), 1)
    assert made.untyped_storage()._cdata == view.untyped_storage()._cdata
    assert made._version == 1


def test_a_tensor_with_views_and_one_that_takes_values_stay_as_they_are():
    made = mark_made(torch.zeros(2, 3), ())
    views = made.unbind(0)
    for written in (made, views[0]):
        to_meta_if_written(torch.Tensor.add_, (written, torch.empty(3, device="meta")), {})
        assert not any(each.is_meta for each in (made, *views))
    to_meta_if_written(torch.Tensor.add_, (made, torch.ones(3)), {})
    assert not made.is_meta


SCALES = torch.zeros(8)


class WritesGlobal(Fills):
    def forward(self, x):
        SCALES.add_(0)
        SCALES.copy_(torch.arange(8.0).to(x))
        return super().forward(x)


@pytest.mark.parametrize("line", ["dp2/zero3", "tp2", "pp2"])
def test_a_tensor_that_is_not_of_the_forward_keeps_its_values(line):
    model = WritesGlobal(by_index)
    sums = torch.zeros(3)

    def hook(module, args, output):
        sums.add_(output.detach().sum((0, 1)).to(sums))

    model.d.register_forward_hook(hook)
    verify(model, line, batches(), loss=MeanSquaredError())
    assert not SCALES.is_meta
    assert SCALES.tolist() == list(range(8))
    assert not sums.is_meta


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2 mb2"])
def test_fractional_pooling_between_layers_of_torch_is_refused_by_its_name(line):
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.FractionalMaxPool2d(2, output_size=6), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(8 * 36, 64), nn.ReLU(), nn.Linear(64, 3))
    with pytest.raises(PlanError, match=r"'2' draws random numbers that would depend on the layout"):
        verify(model, line, [(torch.randn(8, 3, 10, 10), torch.randn(8, 3))], loss=MeanSquaredError())


def test_a_tensor_that_is_only_read_has_one_meta_tensor_for_all_its_uses():
    mode, mask, x = IgnoresDeviceMoves(torch.device("meta")), torch.ones(3), torch.empty(3, device="meta")
    with mode:
        mask + x
        first = mode._on_meta[mask]
        mask + x
    assert mode._on_meta[mask] is first
    assert not mask.is_meta
