"""``show --memory`` predicts one rank of each class, and that is what each rank of the class holds."""

from __future__ import annotations

import pytest
import torch

from shardwright.initial_values import without_values
from shardwright.layout import Layout
from shardwright.ledger.account import predict_memory
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.parallelize.planning import job_for
from shardwright.report import memory


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("line", "samples", "ranks", "number"),
    [
        ("tp4", 6, "threads", 2),  # the first, and the others
        ("dp2/zero1 tp2/sp", 7, "processes", 4),  # 4 samples, 3
        ("tp2x2/2d", 8, "processes", 4),
        ("pp2/1f1b mb2 tp2", 8, "processes", 4),
    ],
)
def test_ranks_of_a_class_hold_what_is_predicted_for_one_of_them(line, samples, ranks, number, monkeypatch):
    with without_values():
        model = GPT(GPTConfig(num_layers=2, width=32, vocabulary=64))
    layout, asked = Layout.parse(line), []
    batch = tuple(torch.empty(samples, 8, dtype=torch.long, device="meta") for _ in range(2))
    job = job_for(model, CrossEntropy(), layout, batch[0])

    def predict(*given, **options):
        asked.append(given[2])
        return predict_memory(*given, **options)

    monkeypatch.setattr(memory, "predict_memory", predict)
    by_class = memory.predicted_accounts(job, layout, batch, ranks)
    assert len(asked) == number
    for rank, account in by_class.items():
        own = predict_memory(job, layout, rank, batch, ranks=ranks, device="cpu")
        assert [moment.held for moment in account.moments] == [moment.held for moment in own.moments]
