"""Recurrent networks on sequences that are packed by the lengths among the inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from shardwright.errors import PlanError
from shardwright.models.losses import MeanSquaredError
from shardwright.verify import verify

SAMPLES, TOKENS = 8, 10
LINES = [
    "dp2", "dp2/zero3", "tp2", "tp2/sp", "tp4/2d", "pp2 mb2", "pp2/interleaved:v2 mb4", "pp4 mb4",
    "pp2 mb2 dp2/zero1 tp2", "tp2 mb2",
]  # fmt: skip


class Recurrent(nn.Module):
    """Layers before and after a recurrent network, to which padding is not given."""

    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.recurrent = kind(16, 16, batch_first=True, **options)
        self.both = 2 if options.get("bidirectional") else 1
        self.first, self.second, self.head = nn.Linear(16 * self.both, 32), nn.Linear(32, 16), nn.Linear(16, 3)

    def lengths(self, given):
        return given.cpu()

    def read(self, packed, lengths):
        outputs, _ = self.recurrent(packed)
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=TOKENS)
        return padded.sum(1) / lengths[:, None]

    def forward(self, tokens, lengths):
        h = self.down(torch.relu(self.up(self.table(tokens))))
        packed = pack_padded_sequence(h, self.lengths(lengths), batch_first=True, enforce_sorted=False)
        return self.head(self.second(torch.relu(self.first(self.read(packed, lengths)))))


class AsNumbers(Recurrent):
    """The lengths are a list of numbers."""

    def lengths(self, given):
        return given.tolist()


class InNumPy(Recurrent):
    """The lengths go through NumPy, as in Tacotron 2, and dropout is where samples are in dim 1."""

    def lengths(self, given):
        return given.cpu().numpy()

    def read(self, packed, lengths):
        read = super().read(packed, lengths)
        return read + nn.functional.dropout(self.down(torch.ones(4, len(read), 32)), 0.5, self.training).sum(0)


class LastState(Recurrent):
    """The last state of each sequence is read, and no padded outputs are made."""

    def read(self, packed, lengths):
        _, states = self.recurrent(packed)
        last = states[0] if isinstance(states, tuple) else states
        return last[-self.both :].transpose(0, 1).flatten(1)


class AsLongAsTheLongest(Recurrent):
    """The outputs are padded to the longest sequence of the samples at hand."""

    def read(self, packed, lengths):
        padded, found = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        return padded.sum(1) / found[:, None].to(padded.device)


KINDS = {
    "lstm": Recurrent, "numbers": AsNumbers, "numpy": InNumPy, "last state": LastState, "longest": AsLongAsTheLongest,
    "gru": lambda: Recurrent(nn.GRU), "both ways": lambda: LastState(nn.LSTM, num_layers=2, bidirectional=True),
}  # fmt: skip


def batches():
    numbers = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS)
    for place, lengths in enumerate(([10, 8, 9, 7, 10, 6, 5, 4], [3, 9, 1, 10, 2, 2, 8, 10])):
        yield (numbers * (7 + place) % 20, torch.tensor(lengths)), torch.arange(SAMPLES) % 3


@pytest.mark.sampled(9)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_networks_on_packed_sequences_are_equal(kind, line):
    found = verify(KINDS[kind](), line, list(batches()))
    assert found.equal, found


class DropsPackedRows(nn.Module):
    """Drops out of the packed rows between two recurrent layers, as readers of documents do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LSTM(6, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 6)

    def forward(self, x, lengths):
        rows = self.first(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[0]
        kept = functional.dropout(rows.data, 0.3, self.training)
        rows = PackedSequence(kept, rows.batch_sizes, rows.sorted_indices, rows.unsorted_indices)
        return self.head(pad_packed_sequence(self.second(rows)[0], batch_first=True, total_length=x.shape[1])[0])


@pytest.mark.parametrize("lengths", [[9, 5, 7, 9, 4, 9, 8, 9], [9, 5, 7, 7, 4, 9, 8, 7]], ids=["60 rows", "56 rows"])
@pytest.mark.parametrize("line", ["single", "tp2", "pp2/1f1b", "dp2", "mb2"])
def test_dropout_of_packed_rows_is_that_of_one_device_or_refused_where_the_batch_is_cut(line, lengths):
    x = torch.randn(8, 9, 6, generator=torch.Generator().manual_seed(0))
    batch = (x, torch.tensor(lengths)), x
    if line in ("dp2", "mb2"):
        with pytest.raises(PlanError, match="for rows of which it is not known whose they are"):
            verify(DropsPackedRows(), line, [batch], loss=MeanSquaredError())
        return
    verdict = verify(DropsPackedRows(), line, [batch] * 2, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
