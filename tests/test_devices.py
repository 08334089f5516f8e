"""What the library asks of an accelerator, tried on a pretended one and on the CPU."""

from __future__ import annotations

import os
import time
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import backends, nn

import shardwright as sw
from shardwright import devices
from shardwright.analysis.chunks.costs import time_layers

CPU, CARD = torch.device("cpu"), torch.device("cuda", 1)


class Event:
    """An event on a device whose clock is slow: a tick a call; what is recorded is known after it was waited for."""

    ticks = 0

    def __init__(self, enable_timing):
        assert enable_timing
        self.waited = False

    def record(self, stream):
        assert stream == f"the stream of {CARD}"
        Event.ticks += 1
        self.tick = Event.ticks

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, end):
        assert end.waited
        return 1000.0 * (end.tick - self.tick)


@pytest.fixture
def two_cards(monkeypatch):
    """Two pretended CUDA devices, the second one in use; what was waited for is a list."""
    waits = []
    properties = [SimpleNamespace(name=f"card {i}", total_memory=(i + 1) << 30, uuid=f"U{i}") for i in range(2)]
    module = SimpleNamespace(
        Event=Event, get_device_properties=properties.__getitem__, current_stream=lambda card: f"the stream of {card}"
    )
    known = {"cuda": module, "bare": SimpleNamespace()}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 7 if device == CARD else 0)
    monkeypatch.setattr(torch, "get_device_module", lambda kind=None: known[str(kind)])
    return waits


def test_names_memory_and_cards_are_those_of_all_accelerators(two_cards):
    assert (devices.accelerator(), devices.count()) == ("cuda", 2)
    assert devices.names() == ["card 0", "card 1"]
    assert devices.total_bytes() == 3 << 30
    assert devices.default() == CARD
    assert devices.identity(CARD) == "U1"
    assert devices.peak_bytes(CARD) == 7


@pytest.mark.parametrize("kind", ["mps", "privateuseone"])
def test_an_accelerator_without_a_backend_that_ranks_can_call_is_not_used(two_cards, monkeypatch, kind):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    monkeypatch.setitem(torch.distributed.Backend.default_device_backend_map, "privateuseone", "of its own")
    assert (devices.accelerator(), devices.count(), devices.default()) == ("cpu", 0, CPU)


def test_times_on_an_accelerator_are_taken_with_events_and_make_the_host_wait_at_their_reading_only(two_cards):
    start = devices.moment(CARD)
    end = devices.moment(CARD)
    assert not end.waited
    assert devices.seconds_between(start, end) == 1.0
    assert not two_cards


def test_times_on_a_device_without_events_are_taken_when_it_has_finished(two_cards, monkeypatch):
    bare = SimpleNamespace(type="bare")
    assert isinstance(devices.moment(bare), float)
    assert two_cards == [bare]


def test_times_on_the_host_wait_for_nothing(two_cards):
    start = devices.moment(CPU)
    time.sleep(0.01)
    assert 0.01 <= devices.seconds_between(start, devices.moment(torch.device("meta"))) < 60
    assert not two_cards


@pytest.fixture
def ticks(monkeypatch):
    """The devices of which a moment was asked for; the moments are 1, 2, 3 and so on."""
    found = []

    def moment(device):
        found.append(device)
        return float(len(found))

    monkeypatch.setattr(devices, "moment", moment)
    monkeypatch.setattr(import_module("shardwright.parallelize.measured_timeline"), "moment", moment)
    return found


def test_layers_are_timed_with_moments_of_the_device_of_the_inputs(ticks):
    assert time_layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)) == {"0": 1.0, "1": 1.0}
    assert set(ticks) == {CPU}


def test_a_timeline_is_taken_with_moments_of_the_device_and_other_steps_are_not(ticks):
    def work(world):
        run = sw.parallelize(nn.Linear(2, 2), "mb2", world)
        (batch,) = run.shard([(torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))])
        (spans,) = run.timeline(batch).spans
        num_ticks = len(ticks)
        run.step(batch)
        return [(span.start_s, span.end_s) for span in spans], len(ticks) - num_ticks

    ((spans, later),) = sw.launch(work, 1, ranks="threads")
    assert spans == [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, 8.0)]
    assert later == 0


def precisions():
    return [each.fp32_precision for each in devices._PRECISIONS]


def own_precisions():
    """The setting for all, and what the others have where that is left out."""
    every = backends.fp32_precision
    backends.fp32_precision = "none"
    own = precisions()
    backends.fp32_precision = every
    return every, own


SETTINGS = {
    "as torch starts": lambda: None,
    "TF32 by the older setting": lambda: torch.set_float32_matmul_precision("high"),
    "TF32 by the newer setting": lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
    "TF32 for all": lambda: setattr(backends, "fp32_precision", "tf32"),
    "convolutions without": lambda: setattr(backends.cudnn, "allow_tf32", False),
}


@pytest.fixture
def restored():
    """Leaves the process with the precisions that torch starts with."""
    yield
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    for each, value in zip(devices._PRECISIONS, ["none"] * 3 + ["tf32"] * 2 + ["none"] * 3, strict=True):
        each.fp32_precision = value


@pytest.mark.parametrize("setting", SETTINGS)
def test_tf32_is_off_while_verify_runs_and_as_before_afterwards(setting, restored):
    SETTINGS[setting]()
    before, seen = own_precisions(), []

    def loss(y, targets):
        seen.append((set(precisions()), backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()))
        return nn.functional.cross_entropy(y, targets, reduction="sum"), targets.numel()

    assert sw.verify(nn.Linear(3, 2), "dp2", [(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))], loss=loss).equal
    assert len(seen) >= 3, "the reference, and each rank"
    assert set(map(str, seen)) == {str(({"ieee"}, False, "highest"))}
    assert own_precisions() == before


def test_tf32_is_as_before_when_verify_raises(restored):
    torch.set_float32_matmul_precision("high")
    with pytest.raises(sw.errors.PlanError), devices.exact_float32():
        sw.verify(nn.Linear(3, 2), "dp2", [])
    assert torch.get_float32_matmul_precision() == "high"


def test_deterministic_kernels_fix_the_workspace_of_cublas(monkeypatch):
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    devices.use_deterministic_kernels()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
