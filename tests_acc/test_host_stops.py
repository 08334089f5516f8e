"""What stops the host in a step that is not the first: how often each rank waits for the device, by layout.

A GPT with dropout, and other models, are trained by ``run.shard``, ``run.step``, ``run.clip_grad_norm_`` and AdamW.
What the first steps learn, and the comparison of ranks every so many steps, do not count. ``compile`` has a
file of its own. On a card (`make test-card`) the same numbers of stops are expected at the same files.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from weakref import ref

import pytest
import torch
from tests_acc.factors import ON_FEW_RANKS
from torch import nn

from contract import test_draws as draws
from contract.cases import CONVNET, Case, Pictures, lays_out, planned, planned_once
from contract.test_on_shards import CASES as OF_OPERATORS
from contract.test_pipeline_of_events import CASES as OF_EVENTS
from shardwright import keyed_dropout
from shardwright.comm.launch import run_threads
from shardwright.layout import Layout
from shardwright.models import CrossEntropy, GPTConfig
from shardwright.parallelize import parallelize
from shardwright.runtime.copy_stream import CopyStream, made_ahead


class Normed(nn.Module):
    """Convolutions with batch norms, and a dropout."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(4, 5)

    def forward(self, x):
        x = self.norm1(self.conv1(x)).relu()
        x = self.norm2(self.conv2(x)).relu()
        return self.head(self.drop(x.mean((2, 3))))


class Drawing(Case):
    """A model whose own code draws, by functions of torch."""

    model = property(lambda self: draws.MODELS[self.name]().double())
    batches = property(lambda self: draws.TOKEN_BATCHES)


CONFIG = GPTConfig(
    style="gpt2", vocabulary=19, max_tokens=6, num_layers=2, num_heads=2, width=12, hidden=12, dropout=0.1
)
GPT = Case("gpt with dropout", CONFIG, CrossEntropy(), num_tokens=6, num_samples=(8,))
NORMED = Pictures("convolutions with batch norms", make=Normed, shape=(2, 6, 6))
NUM_STEPS = 2


def model_and_batch(case=GPT):
    torch.manual_seed(0)  # the constructor's draws are replayed
    inputs, targets = case.batches[0]
    return case.model.float(), (inputs.float() if inputs.is_floating_point() else inputs, targets)


def stops_of(accelerator, line, case=GPT, *, clips=True, updates=False, read=None):
    """What stops the host in some steps of all ranks together, after the first ones."""
    model, batch = model_and_batch(case)
    num_ranks = Layout.parse(line).num_ranks
    everyone, found = threading.Barrier(num_ranks), []

    def work(world):
        run = parallelize(model, line, world, loss=case.loss, check_every=0, example=batch[0])
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)

        def take(num_steps):
            for part in run.shard([batch] * num_steps):
                loss = run.step(part, update=optimizer if updates else None)
                if clips:
                    run.clip_grad_norm_(1e-3)
                if not updates:
                    optimizer.step()
                if read is not None:
                    read(loss)

        take(2)
        everyone.wait()
        if world.rank == 0:
            counting = accelerator.counting()
            found.append(counting.__enter__())
        everyone.wait()
        take(NUM_STEPS)
        everyone.wait()
        if world.rank == 0:
            counting.__exit__(None, None, None)

    with planned_once():
        run_threads(work, num_ranks, device=accelerator.device)
    return {place: number / num_ranks / NUM_STEPS for place, number in found[0].items()}


def by_file(stops):
    """The stops by what stops and the file where, without the numbers of lines."""
    found = Counter()
    for place, number in stops.items():
        what, _, where = place.partition(" at ")
        found[f"{what} in {where.partition(':')[0].rpartition('/')[2]}"] += number
    return dict(found)


def told(accelerator, expected):
    """The stops that are expected, as the device tells of them.

    A card names the file alone, and counts neither events nor copies from memory that is not pinned.
    """
    if accelerator.tells_what:
        return expected
    found = Counter()
    for what, number in expected.items():
        if what not in (ARRIVED, READ):
            found[f"wait in {what.rpartition(' ')[2]}"] += number
    return dict(found)


COMPARED = "_local_scalar_dense in sharded_state.py"
ARRIVED = "synchronize an event in sharded_state.py"
SCALED = "_local_scalar_dense in mixed_precision.py"
READ = "copy cpu to acc in flat_parameter.py"


def expected(line, case=GPT, *, clips=True):
    """The stops of a step by rule; a layout to which none of these applies has none.

    - ZeRO-3 reads once whether all ranks have unsharded in the same order.
    - Offloaded gradients have to be in host memory before the optimizer there reads them: ZeRO-3 has waited then.
    - fp16 reads once whether a gradient has overflowed.
    - Clipping offloaded gradients reads the factor, which the host multiplies by.
    - What lies on disk is read by the host, with each unshard: once a step, and under ZeRO-3 for the backward again.
    """
    layout, found = Layout.parse(line), Counter()
    options = [option for factor in layout.factors for option in str(factor).split("/")]
    offloads = any(option.startswith("offload") for option in options)
    if "zero3" in options:
        found[COMPARED] += 1
    elif offloads:
        found[ARRIVED] += 1
    found[SCALED] += ("fp16" in line.split()) + (offloads and clips)
    if "offload:disk" in options:
        found[READ] += len(planned(line, case)[0].param_groups) * (1 + ("zero3" in options))
    return {what: number for what, number in found.items() if number}


@pytest.mark.parametrize("factor", ON_FEW_RANKS)
def test_every_factor_stops_the_host_as_often_as_the_rules_say(accelerator, factor):
    line = f"{factor} mb3" if factor.startswith("pp") else factor
    case = next(case for case in (GPT, CONVNET) if lays_out(line, case))
    assert by_file(stops_of(accelerator, line, case)) == told(accelerator, expected(line, case))


LINES = (
    "single", "dp2 bf16", "dp2 mb2", "dp2/zero1", "dp2 recompute:full", "dp2 recompute:selective",
    "dp2 recompute:offload", "dp2/zero3 recompute:offload mb2", "pp2/1f1b mb2 dp2/zero1 tp2", "pp2/zb-v mb2 dp2/zero3",
    "dp2/zero3 mb2", "dp2/zero3 tp2/sp", "dp2x2/zero1", "dp2 fp16", "dp2/zero1 fp16", "dp2/zero3 fp16",
    "pp2/1f1b mb2 fp16", "dp2/zero1/offload", "dp2/zero3/offload", "dp2/zero1/offload fp16", "dp2/zero3/offload fp16",
)  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_precisions_recomputing_and_several_factors_stop_the_host_as_often_as_the_rules_say(accelerator, line):
    assert by_file(stops_of(accelerator, line)) == told(accelerator, expected(line))


WAITING = ("dp2/zero3", "dp2 fp16", "dp2/zero1/offload", "dp2/zero3/offload", "dp2/zero3/offload fp16")


@pytest.mark.parametrize("line", WAITING)
@pytest.mark.parametrize("updates", [False, True])
def test_without_clipping_layouts_that_wait_do_so_once_for_each_reason(accelerator, line, updates):
    assert by_file(stops_of(accelerator, line, clips=False, updates=updates)) == told(
        accelerator, expected(line, clips=False)
    )


OTHERS = {
    "pictures": (CONVNET, ("dp2", "tp2", "tp2x2/2d", "dp2/zero3", "tp2/spatial dp2/zero1")),
    "batch norms": (
        NORMED,
        ("single", "dp2", "tp2", "tp2/spatial", "dp2 mb2/own-statistics", "pp2/1f1b mb2/own-statistics", "dp2/zero3"),
    ),
    "recorded parts": (OF_OPERATORS["FusedBlock"], ("tp2", "tp2x2/2d", "dp2/zero3", "pp2 tp2 recompute:full mb2")),
    "recorded events": (OF_EVENTS["fused"], ("pp2/1f1b mb2", "pp2/zb-h1 mb2", "pp2/interleaved:v2 mb2")),
    "draws inside of attention": (Drawing("fused", None, CrossEntropy()), ("dp2", "tp2", "pp2/1f1b mb2", "dp2/zero3")),
    "draws by heads": (Drawing("by heads", None, CrossEntropy()), ("dp2", "tp2x2/2d", "pp2/1f1b mb2")),
}


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, (_, lines) in OTHERS.items() for line in lines])
def test_other_models_stop_the_host_as_often_as_the_rules_say(accelerator, name, line):
    case, _ = OTHERS[name]
    assert by_file(stops_of(accelerator, line, case)) == told(accelerator, expected(line, case))


@pytest.mark.parametrize("line", ["dp2", "tp2", "tp2x2/2d"])
def test_a_constant_that_a_models_own_code_makes_stops_the_host_at_each_call_as_on_one_device(accelerator, line):
    of_each_block = 1  # torch.tensor([...], device=x.device) in GroupedBlock's forward, which has two blocks
    (found,) = by_file(stops_of(accelerator, line, OF_OPERATORS["GroupedBlock"])).items()
    assert found[0].startswith("copy cpu to acc" if accelerator.tells_what else "wait")
    assert found[1] == 2 * of_each_block


@pytest.mark.pretended
def test_activations_that_go_to_disk_are_written_and_read_by_the_host(accelerator):
    found = by_file(stops_of(accelerator, "dp2 recompute:offload:disk"))
    written, read = (f"copy {way} in activation_offload.py" for way in ("acc to cpu", "cpu to acc"))
    assert set(found) == {written, read}
    assert found[written] == found[read]


def test_dropout_makes_masks_in_the_steps_that_are_counted(accelerator, monkeypatch):
    rates, make = Counter(), keyed_dropout.dropout_mask

    def counted(*args, **named):
        rates[threading.current_thread().name] += 1
        return make(*args, **named)

    monkeypatch.setattr(keyed_dropout, "dropout_mask", counted)
    assert stops_of(accelerator, "dp2") == {}
    masks = 1 + 3 * CONFIG.num_layers  # of the embedding; of weights of attention, after it, and after the MLP
    assert list(rates.values()) == [masks * (2 + NUM_STEPS)] * 2


@pytest.mark.parametrize("line", ["dp2", "tp2"])
def test_reading_the_loss_stops_the_host_once(accelerator, line):
    found = stops_of(accelerator, line, read=float)
    assert list(found.values()) == [1]
    assert "test_host_stops.py" in next(iter(found))


@pytest.mark.parametrize("line", ["dp2/zero3/offload", "dp2/zero1/offload"])
def test_updates_in_the_backward_of_offloaded_state_equal_those_after_it(accelerator, line):
    def trained(updates):
        model, batch = model_and_batch()
        batch[1][:5, :3] = -100  # so that gradients are scaled by the number of targets

        def work(world):
            run = parallelize(model, line, world, loss=CrossEntropy(), example=batch[0])
            optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
            for part in run.shard([batch] * 3):
                run.step(part, update=optimizer if updates else None)
                if not updates:
                    optimizer.step()
            return run.state_dict()

        return run_threads(work, 2, device=accelerator.device)

    for found, expected in zip(trained(True), trained(False), strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_batch_is_copied_while_the_one_before_it_is_in_use(accelerator):
    read = []

    def batches():
        for number in range(3):
            read.append(number)
            yield torch.full((2, 4), float(number)), torch.zeros(2, dtype=torch.int64)

    def work(world):
        run = parallelize(nn.Linear(4, 3), "single", world)
        return [(len(read), batch.inputs.tolist()[0][0]) for batch in run.shard(batches())]

    assert run_threads(work, 1, device=accelerator.device) == [[(2, 0.0), (3, 1.0), (3, 2.0)]]


@pytest.mark.pretended
def test_what_is_copied_ahead_is_there_only_after_its_arrival(accelerator):
    def work(world):
        copies, host = CopyStream(world.device), torch.ones(3)
        first, arrival = copies.moved(host, world.device), copies.arrival()
        second = copies.moved(host, world.device)
        early = first.isnan().all().item()
        arrival()
        return early, first.tolist(), second.isnan().all().item()

    assert run_threads(work, 1, device=accelerator.device) == [(True, [1, 1, 1], True)]


def test_a_loader_may_write_the_next_batch_into_the_same_memory_of_the_device(accelerator):
    def work(world):
        run, memory = parallelize(nn.Linear(4, 3), "single", world), torch.empty(2, 4, device=world.device)
        targets = torch.zeros(2, dtype=torch.int64)
        batches = ((memory.fill_(float(number)), targets) for number in range(3))
        return [batch.inputs.tolist()[0][0] for batch in run.shard(batches)]

    assert run_threads(work, 1, device=accelerator.device) == [[0.0, 1.0, 2.0]]


def test_an_error_of_a_loader_comes_after_the_batches_before_it(accelerator):
    def batches():
        yield torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
        raise OSError("no more")

    def work(world):
        parts = parallelize(nn.Linear(4, 3), "single", world).shard(batches())
        next(parts)
        with pytest.raises(OSError, match="no more"):
            next(parts)

    run_threads(work, 1, device=accelerator.device)


def test_a_loader_may_write_the_next_batch_into_the_same_pinned_memory(accelerator):
    def work(world):
        run, memory = parallelize(nn.Linear(4, 3), "single", world), torch.empty(2, 4).pin_memory()
        targets = torch.zeros(2, dtype=torch.int64)
        batches = ((memory.fill_(float(number)), targets) for number in range(3))
        return [batch.inputs.tolist()[0][0] for batch in run.shard(batches)]

    assert run_threads(work, 1, device=accelerator.device) == [[0.0, 1.0, 2.0]]


@pytest.mark.pretended
def test_a_batch_that_was_made_ahead_is_whole_before_its_memory_is_used_again(accelerator):
    def work(world):
        copies, made = CopyStream(world.device), []
        ahead = made_ahead(range(3), lambda number: made.append(copies.moved(torch.ones(3), world.device)), copies)
        next(ahead)
        before = [each.isnan().any().item() for each in made]
        ahead.close()
        return before, [each.isnan().any().item() for each in made]

    assert run_threads(work, 1, device=accelerator.device) == [([False, True], [False, False])]


@pytest.mark.pretended
def test_no_more_sources_than_said_are_kept_for_copies_under_way(accelerator):
    def work(world):
        copies = CopyStream(world.device, most_under_way=2)
        sources = [torch.ones(3, device=world.device) for _ in range(5)]
        kept = [ref(source) for source in sources]
        for _ in kept:
            copies.start(torch.empty(3).pin_memory(), sources.pop(0))
        return sum(each() is not None for each in kept)

    assert run_threads(work, 1, device=accelerator.device) == [2]


@pytest.mark.parametrize("fails", ["loader", "make"])
def test_an_error_in_the_midst_of_batches_made_ahead_comes_after_those_made_before_it(accelerator, fails):
    def loader():
        for number in range(4):
            if fails == "loader" and number == 2:
                raise OSError("the disk is gone")
            yield number

    def make(copies, device, number):
        if fails == "make" and number == 2:
            raise OSError("the disk is gone")
        return copies.moved(torch.full((3,), float(number)), device)

    def work(world):
        copies, found = CopyStream(world.device), []
        with suppress(OSError):
            for each in made_ahead(loader(), partial(make, copies, world.device), copies):
                found.append(each.tolist()[0])
            found.append("no error")
        return found

    assert run_threads(work, 1, device=accelerator.device) == [[0.0, 1.0]]
