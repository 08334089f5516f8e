"""Messages of tensors on an accelerator over backends that send host memory alone."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from comm import scenarios
from shardwright.comm.backends.gloo import GlooChannel
from shardwright.comm.backends.process_groups import ProcessTransport
from shardwright.comm.backends.threads import ThreadChannel, ThreadTransport
from shardwright.comm.backends.through_host import ChannelThroughHost
from shardwright.comm.launch import run_threads
from shardwright.comm.recorder import Recorder

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "receive")


@pytest.fixture
def kinds_of_tensors(monkeypatch):
    """Wraps the channels of threads, and returns what kinds of devices the tensors have that these are given."""
    seen, lock = set(), threading.Lock()

    def noting(method):
        def call(channel, *args):
            with lock:
                seen.update(each.device.type for each in tree_leaves(args) if isinstance(each, torch.Tensor))
            return method(channel, *args)

        return call

    make = ThreadTransport.channel

    def through_host(transport, groups):
        return {place: ChannelThroughHost(channel) for place, channel in make(transport, groups).items()}

    for name in CALLS:
        monkeypatch.setattr(ThreadChannel, name, noting(getattr(ThreadChannel, name)))
    monkeypatch.setattr(ThreadTransport, "channel", through_host)
    return seen


@pytest.fixture
def held_by_on_the_device(accelerator, monkeypatch):
    """What a rank contributes lies on the device; it is drawn on the CPU, whose generator it takes."""
    plain = scenarios.held_by

    def held_by(*args, **named):
        with torch.device("cpu"):
            return plain(*args, **named).to(accelerator.device)

    monkeypatch.setattr(scenarios, "held_by", held_by)


WITHOUT_MESSAGES = {scenarios.scenario_an_axis_of_one_member_sends_nothing}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda each: each.__name__.removeprefix("scenario_"))
@pytest.mark.usefixtures("held_by_on_the_device")
def test_channels_through_the_host_do_what_every_backend_must(accelerator, kinds_of_tensors, scenario, num_ranks):
    def work(world):
        assert world.everyone().device.type == "acc"
        with world.device:  # what the scenario makes without a device
            scenario(world)

    with accelerator.counting() as stops:
        run_threads(work, num_ranks, device=accelerator.device)
    if scenario in WITHOUT_MESSAGES:
        assert not kinds_of_tensors
    else:
        assert kinds_of_tensors == {"cpu"}, "the channel below is given host memory alone"
        assert any("through_host.py" in place for place in stops), "and the host waits for it"


@pytest.fixture
def transport_on():
    """Returns a function that makes a process's transport for ranks on a device, over a group that sends nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield lambda device: ProcessTransport(
        0, 2, Recorder(), timedelta(seconds=60), None, "sockets", device=torch.device(device)
    )
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
def test_a_process_sends_through_the_host_what_lies_on_an_accelerator(accelerator, transport_on, ranks):
    channel = transport_on(accelerator.device).channel_of(ranks)
    assert isinstance(channel, ChannelThroughHost)
    assert isinstance(channel.channel, GlooChannel)
    assert isinstance(channel.subset((0,)), ChannelThroughHost)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_process_sends_what_lies_elsewhere_as_it_is(transport_on, device):
    assert isinstance(transport_on(device).channel_of((0, 1)), GlooChannel)
