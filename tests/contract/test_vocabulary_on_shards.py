"""Tables and logits of which each rank holds some rows or classes: lookups, and losses beside the model or inside."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from tests.contract.cases import Case, check_equal, check_traffic, job_of, planned, two_steps
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.comm.launch import launch
from shardwright.models.given_loss import as_loss
from shardwright.models.losses import CrossEntropy
from shardwright.models.model_loss import MeanLoss, ModelLoss
from shardwright.parallelize.planning import structural_copy
from shardwright.sharding.tensor_shard import shard_of, tag
from shardwright.strategies.tensor_parallel import graph_cuts
from shardwright.strategies.tensor_parallel.shards_plan import ShardsNote
from shardwright.strategies.tensor_parallel.vocabulary_on_shards import cross_entropy_on_shards, embedding_on_shards

WIDTH, CLASSES, SAMPLES, TOKENS = 8, 22, 8, 5
LINES = ["tp2", "tp3 dp2/zero3", "tp4/2d", "tp2x2x2/2.5d", "pp2/1f1b mb2 tp2"]


class Block(nn.Module):
    """Two layers that are written with matrix products, so that no rule knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(*size) / 3) for size in ((WIDTH, 12), (12, WIDTH)))

    def forward(self, x):
        return x + torch.tanh(x @ self.up) @ self.down


class Head(nn.Module):
    """An output head of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH) / 3)

    def forward(self, x):
        return x @ self.weight.T


class Language(nn.Module):
    """A table, two blocks, and an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, WIDTH), Head()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def scores(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class GivesLogits(Language):
    def forward(self, tokens):
        return self.scores(tokens)


class Tied(GivesLogits):
    """Its table is its head's weight too."""

    def __init__(self) -> None:
        super().__init__()
        self.table.padding_idx = 3
        self.head.weight = self.table.weight


class Positions(GivesLogits):
    """A table of positions beside that of tokens, and one of two kinds of tokens: neither is worth a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.kinds = nn.Embedding(4 * TOKENS, WIDTH), nn.Embedding(2, WIDTH)

    def forward(self, tokens):
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1])) + self.kinds(tokens % 2)
        return self.head(self.blocks[1](self.blocks[0](x)))


class GivesBoth(Language):
    """As models of transformers: with labels, the mean over the tokens after each of those that are not ignored."""

    def forward(self, tokens, labels):
        logits = self.scores(tokens)
        moved = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = functional.cross_entropy(logits.float().double().view(-1, CLASSES), moved.reshape(-1), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def in_a_lambda(output, targets):
    flat = output.flatten(0, 1)
    return functional.cross_entropy(flat, targets.flatten(), reduction="sum", ignore_index=3), (targets != 3).sum()


def reads_logits(output, targets):
    """No cross entropy of torch: it takes the logits otherwise, and so whole."""
    return -output.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).sum(), targets.numel()


LOSSES = {
    "ours": CrossEntropy(ignore_index=3, label_smoothing=0.2),
    "torch's": as_loss(nn.CrossEntropyLoss(label_smoothing=0.1)),
    "a mean": MeanLoss(lambda output, targets: functional.cross_entropy(output.movedim(-1, 1), targets)),
    "a lambda": as_loss(in_a_lambda),
}


@cache
def _made(kind):
    torch.manual_seed(0)
    return kind()


@dataclass(frozen=True)
class LossCase(Case):
    """A case of a model of this file."""

    kind: type[nn.Module] = GivesLogits

    @property
    def model(self):
        return structural_copy(_made(self.kind), torch.Tensor.double)

    @property
    def batches(self):
        generator = torch.Generator().manual_seed(0)
        found = []
        for _ in range(2):
            tokens, labels = torch.randint(CLASSES, (2, SAMPLES, TOKENS), generator=generator)
            labels[:3, 2] = 3
            if self.kind is GivesBoth:
                labels[1:4, 1:] = -100
            found.append(({"tokens": tokens, "labels": labels}, labels) if self.kind is GivesBoth else (tokens, labels))
        return found


CASES = {name: LossCase(name, None, loss) for name, loss in LOSSES.items()}
CASES["labels"] = LossCase("labels", None, ModelLoss(shifted=True), kind=GivesBoth)
CASES["tied"] = LossCase("tied", None, CrossEntropy(), kind=Tied)
CASES["positions"] = LossCase("positions", None, CrossEntropy(), kind=Positions)
OTHER = LossCase("other", None, as_loss(reads_logits))


@cache
def sent(line: str, name: str) -> list[Counter]:
    """What each rank sends in the second step."""
    verdict, found = two_steps(line, CASES.get(name, OTHER))
    assert verdict.equal, str(verdict)
    return [each.recorded[1] for each in found]


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", [*CASES, "other"])
def test_a_loss_on_classes_that_are_cut_is_that_of_one_device_and_sends_what_it_says(name, line):
    case = CASES.get(name, OTHER)
    plan, _ = planned(line, case)
    assert isinstance(plan.notes[""], ShardsNote)
    cut = {each for each, at in plan.compute.items() if at.local_shape(plan.mesh.coord(0))[0] < at.shape[0]}
    assert "table.weight" in cut
    assert "head.weight" in cut or name == "tied"
    assert "places.weight" not in cut or "d" in line.split("/")[-1]  # grids cut each weight once more between steps
    check_equal(line, case)
    check_traffic(line, case)


def test_what_is_looked_up_in_a_table_is_summed_and_no_table_is_gathered():
    for name in ("ours", "tied", "positions"):
        times = Counter({key[3]: times for key, times in sent("tp2", name)[0].items() if key[1] == "all_reduce"})
        assert times == {SAMPLES * TOKENS * WIDTH * 8: 6}  # the table, 2 blocks twice, and the gradient at the head


@pytest.mark.parametrize("name", CASES)
def test_three_numbers_of_a_token_are_gathered_and_no_logits(name):
    numbers = 4 if name in ("ours", "torch's") else 3  # with label smoothing the sum of the logits too
    gathers = {key: times for key, times in sent("tp2", name)[0].items() if key[1] == "all_gather"}
    assert gathers == {("tensor_1d", "all_gather", "tp", numbers * SAMPLES * TOKENS * 2 * 8): 1}
    logits = SAMPLES * TOKENS * CLASSES * 8
    assert [key[3] for key in sent("tp2", "other")[0] if key[1] == "all_gather"] == [logits]


def test_what_reads_the_output_elsewhere_gets_the_whole_of_it():
    case = CASES["ours"]
    (tokens, labels), model = case.batches[0], case.model
    whole = model(tokens)

    def work(world):
        run = sw.parallelize(model, "tp2", world, loss=case.loss, example=tokens)
        (part,) = run.shard([(tokens, labels)])
        seen = []
        predicted = run.predict(tokens)
        run.step(part)
        by_hand = run.model(tokens).detach()
        run.model.register_forward_hook(lambda module, given, output: seen.append(output.detach()))
        loss = run.step(part)
        return predicted, by_hand, seen[0], loss

    for predicted, by_hand, seen, loss in launch(work, 2, ranks="threads"):
        for found in (predicted, by_hand, seen):
            torch.testing.assert_close(found, whole.detach())
        total, count = case.loss(whole, labels)
        torch.testing.assert_close(loss.double(), (total / count).detach())


class OwnBackward(torch.autograd.Function):
    """A sum of cross entropies with a backward of its own, which would not know that its logits are shards."""

    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits, targets)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    @staticmethod
    def backward(ctx, gradient):
        logits, targets = ctx.saved_tensors
        return gradient * (logits.softmax(-1) - functional.one_hot(targets, logits.shape[-1])), None


def own_backward(output, targets):
    return OwnBackward.apply(output, targets), targets.numel()


def recomputed(output, targets):
    def summed(output, targets):
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")

    return checkpoint(summed, output, targets, use_reentrant=False), targets.numel()


def written(output, targets):
    output[..., 0] = -9.0
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def hooked(output, targets):
    output.register_hook(lambda gradient: gradient / gradient.shape[-1])
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


@pytest.mark.parametrize("loss", [own_backward, recomputed, written, hooked])
def test_a_loss_that_shards_do_not_suit_gets_whole_logits(loss):
    check_equal("tp2", LossCase(loss.__name__, None, as_loss(loss)))


class Counting(nn.Module):
    """A loss that keeps state: it is the mean cross entropy times the number of its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, output, targets):
        self.calls = self.calls + 1
        loss = functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss * self.calls, targets.numel()


@pytest.mark.parametrize("line", ["tp2", "dp2"])
def test_looking_at_a_loss_leaves_its_state_alone(line):
    case = LossCase("counting", None, Counting())
    (tokens, labels), model = case.batches[0], case.model
    total, count = Counting()(model(tokens), labels)

    def work(world):
        run = sw.parallelize(model, line, world, loss=case.loss, example=tokens)
        (part,) = run.shard([(tokens, labels)])
        return [run.step(part) for _ in range(2)]

    for first, second in launch(work, 2, ranks="threads"):
        torch.testing.assert_close(first.double(), (total / count).detach())
        torch.testing.assert_close(second, 2 * first)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # tokens have no gradient
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook", "of all modules"])
def test_a_hook_of_a_backward_of_the_model_gets_the_whole_gradient(kind):
    case, seen = CASES["ours"], []
    (tokens, labels), model = case.batches[0], case.model
    total, count = case.loss(model(tokens), labels)

    def note(module, *gradients):
        if isinstance(module, GivesLogits):
            seen.append(gradients[-1][0].shape)

    def work(world):
        run = sw.parallelize(model, "tp2", world, loss=case.loss, example=tokens)
        (part,) = run.shard([(tokens, labels)])
        if kind == "of all modules":
            handle = register_module_full_backward_hook(note)
        else:
            handle = getattr(run.model, kind)(note)
        loss = run.step(part)
        handle.remove()
        return loss

    for loss in launch(work, 2, ranks="threads"):
        torch.testing.assert_close(loss.double(), (total / count).detach())
    assert set(seen) == {(SAMPLES, TOKENS, CLASSES)}


OPTIONS = [
    {"reduction": "mean", "ignore_index": 2}, {"reduction": "none", "label_smoothing": 0.3}, {"reduction": "sum"},
]  # fmt: skip


@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 7, 3)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_cross_entropy_of_a_part_is_torch_s(shape, options, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(shape, dtype=torch.float64, generator=generator)).to(dtype).requires_grad_()
    dim = min(1, len(shape) - 1)
    targets = torch.randint(7, [n for d, n in enumerate(shape) if d != dim], generator=generator)
    expected = functional.cross_entropy(logits, targets, **options)
    expected.sum().backward()
    cut = bytes([0, 0, 0, 0, 1, 1, 1])
    part = shard_of(shape, [cut if d == dim else None for d in range(len(shape))])

    def work(world):
        held = slice(0, 4) if world.rank == 0 else slice(4, 7)
        local = logits.detach()[(slice(None),) * dim + (held,)].clone().requires_grad_()
        tag(local, part)
        loss = cross_entropy_on_shards(world.axis("tp", [(0, 1)]), local, targets, **options)
        loss.sum().backward()
        return loss.detach(), local.grad

    found = launch(work, 2, ranks="threads")
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), **near)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found], dim), logits.grad, **near)


def test_the_cross_entropy_of_a_part_stays_in_float32_under_autocast():
    logits, targets = torch.tensor([[0.1, 0.2, 0.4, 0.8]], dtype=torch.bfloat16), torch.tensor([2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = functional.cross_entropy(logits, targets)

    def work(world):
        local = logits[:, 2 * world.rank :][:, :2].clone()
        tag(local, shard_of((1, 4), (None, bytes([0, 0, 1, 1]))))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy_on_shards(world.axis("tp", [(0, 1)]), local, targets)

    for found in launch(work, 2, ranks="threads"):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("why", "options"),
    [("weights", {"weight": torch.ones(4)}), ("probabilities", {}), ("interleaved", {}), ("tokens", {})],
)
def test_a_cross_entropy_that_needs_all_classes_is_left_to_whole_logits(why, options):
    cuts = {"interleaved": (None, bytes([0, 1, 0, 1])), "tokens": (bytes([0, 1]), None)}
    logits, targets = torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)
    tag(logits, shard_of((2, 4), cuts.get(why, (None, bytes([0, 0, 1, 1])))))
    targets = torch.zeros(2, 4) if why == "probabilities" else targets

    def work(world):
        return cross_entropy_on_shards(world.axis("tp", [(0, 1)]), logits, targets, **options)

    assert launch(work, 2, ranks="threads") == [None, None]


@pytest.mark.parametrize("options", [{}, {"padding_idx": 5}, {"padding_idx": -1}])
def test_rows_looked_up_in_a_part_are_torch_s(options):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 3, dtype=torch.float64, generator=generator).requires_grad_()
    tokens = torch.tensor([[0, 6, 5], [3, 4, 6]])
    expected = functional.embedding(tokens, table, **options)
    (expected * torch.arange(6).view(2, 3, 1)).sum().backward()
    part = shard_of((7, 3), [bytes([0, 0, 0, 0, 1, 1, 1]), None])

    def work(world):
        local = table.detach()[slice(0, 4) if world.rank == 0 else slice(4, 7)].clone().requires_grad_()
        tag(local, part)
        axis = world.axis("tp", [(0, 1)])
        assert embedding_on_shards(axis, tokens, local, max_norm=1.0) is None
        rows = embedding_on_shards(axis, tokens, local, **options)
        (rows * torch.arange(6).view(2, 3, 1)).sum().backward()
        return rows.detach(), local.grad

    found = launch(work, 2, ranks="threads")
    for rows, _ in found:
        torch.testing.assert_close(rows, expected.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found]), table.grad)


@pytest.mark.parametrize("name", ["ours", "tied"])
def test_a_small_table_is_cut_only_if_it_is_the_output_head(name, monkeypatch):
    monkeypatch.setattr(graph_cuts, "LARGE_TABLE", CLASSES)
    run = job_of("tp2", CASES[name]).graph.run
    cut = graph_cuts.graph_cuts(CASES[name].model, run.recording, run.axes, 2).shards
    assert ("table.weight" in cut) == (name == "tied")
    assert all(f"blocks.{number}.up" in cut for number in range(2))


def test_a_step_in_bf16_takes_the_loss_of_parts_in_fp32():
    case = CASES["a lambda"]
    verdict = sw.verify(case.model, "tp2 bf16", case.batches, loss=case.loss)
    assert verdict.equal, str(verdict)
