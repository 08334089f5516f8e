"""Under ``single``, a loop of this library trains as the same loop of plain torch, to the last bit in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw

CLASSES = 7


class Labelled(nn.Module):
    """A model that computes a mean loss from its labels, as those of transformers do; it has no loss_type."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 9), nn.Linear(9, CLASSES)

    def forward(self, x, labels=None):
        logits = self.down(self.up(x).tanh())
        if labels is None:
            return logits
        return {"loss": functional.cross_entropy(logits.flatten(0, -2), labels.flatten())}


def batches(*, ignored):
    draw = torch.Generator().manual_seed(0)
    for _ in range(6):  # 1 / 41 * 41 is not 1 in float32
        x, labels = torch.randn(41, 5, generator=draw), torch.randint(CLASSES, (41,), generator=draw)
        yield x, labels.masked_fill(labels == 3, -100) if ignored else labels


def built():
    torch.manual_seed(0)
    return Labelled()


LOSSES = {
    "the model's own": sw.ModelLoss(shifted=False),
    "torch's": nn.CrossEntropyLoss(),
    "a mean": sw.MeanLoss(lambda output, targets: functional.cross_entropy(output.flatten(0, -2), targets.flatten())),
    "this library's": sw.CrossEntropy(),
}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_gradients_clipping_and_adamw_are_those_of_a_plain_loop(loss, ignored, clip):
    plain = built()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for x, labels in batches(ignored=ignored):
        optimizer.zero_grad()
        mean = plain(x, labels)["loss"]
        mean.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimizer.step()

    model = built()

    def work(world):
        run = sw.parallelize(model, "single", world, loss=LOSSES[loss])
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.01)
        of_model = loss == "the model's own"
        given = ({"x": x, "labels": labels} if of_model else (x, labels) for x, labels in batches(ignored=ignored))
        for batch in run.shard(given):
            last = run.step(batch)
            if clip is not None:
                assert run.clip_grad_norm_(clip).dtype is torch.float64
            optimizer.step()
        return last.item(), run.state_dict()

    ((last, found),) = sw.launch(work, 1, ranks="threads")
    assert all(torch.equal(found[name], parameter) for name, parameter in plain.state_dict().items())
    assert clip is None or norm > clip
    assert last == pytest.approx(mean.item(), rel=1e-6)
    if loss in ("the model's own", "a mean"):  # others add up their terms in another order
        assert last == mean.item()
