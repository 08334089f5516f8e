"""Which device each rank takes, from pretended devices: every wrong start is one error, the same on every rank."""

from __future__ import annotations

import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from shardwright import devices
from shardwright.comm.backends.rank_devices import RankDevice, decided, exchanged, found
from shardwright.comm.current_world import current_world
from shardwright.errors import PlanError

PARTS = "\n  given:   .*\n  allowed: .*\n  fix:     "


@pytest.fixture
def machine(monkeypatch):
    """``machine(cards)``: what a process sees from now on, the UUIDs of its cards; none by default."""
    state = {"cards": [], "selected": None, "built": True, "kind": "cuda"}

    def select(index):
        state["selected"] = index
        return torch.device("cuda", index)

    monkeypatch.setattr(devices, "accelerator", lambda: state["kind"] if state["cards"] else "cpu")
    monkeypatch.setattr(devices, "count", lambda: len(state["cards"]))
    monkeypatch.setattr(devices, "select", select)
    monkeypatch.setattr(devices, "identity", lambda device: state["cards"][device.index])
    monkeypatch.setattr(devices, "has_backend", lambda kind: state["built"])

    def see(cards=(), **more):
        state.update(cards=list(cards), selected=None, **more)
        return state

    return see


def start(machine, ranks):
    """What each rank decides, or the text of its error; ``ranks`` are (host, cards, environment or device option)."""
    told = []
    for host, cards, given in ranks:
        machine(cards)
        environment = {"LOCAL_RANK": str(given)} if isinstance(given, int) else {}
        told.append(found(given if isinstance(given, str) else "auto", host, len(ranks), environment))
    results = []
    for rank in range(len(ranks)):
        try:
            results.append(decided(told, rank))
        except PlanError as failure:
            results.append(str(failure))
    return results


def error(machine, ranks):
    """The error, which all ranks raise alike."""
    (text,) = set(start(machine, ranks))
    assert re.search(PARTS, text), text
    return text


def cuda(number):
    return torch.device("cuda", number), "nccl"


def test_ranks_that_each_see_the_cards_of_their_machine_take_one_each_by_their_local_rank(machine):
    hosts = {host: [f"{host}{i}" for i in range(2)] for host in "ab"}
    ranks = [(host, hosts[host], local) for host in "ab" for local in range(2)]
    assert start(machine, ranks) == [cuda(0), cuda(1), cuda(0), cuda(1)]


@pytest.mark.parametrize("local", [0, 1, None])
def test_a_rank_that_sees_one_card_takes_it_whatever_its_local_rank_and_uses_nccl(machine, local):
    assert start(machine, [("a", ["x"], local), ("a", ["y"], local)]) == [cuda(0), cuda(0)]


def test_the_device_of_a_rank_becomes_the_current_one(machine):
    state = machine(["x", "y", "z"])
    found("auto", "a", 3, {"LOCAL_RANK": "2"})
    assert state["selected"] == 2


def test_a_single_rank_needs_no_local_rank(machine):
    assert start(machine, [("a", ["x", "y"], None)]) == [cuda(0)]


def test_ranks_without_a_local_rank_that_see_several_cards_are_refused(machine):
    text = error(machine, [("a", ["x", "y"], None), ("a", ["x", "y"], None)])
    assert "LOCAL_RANK" in text
    assert "ranks 0 to 1 on a" in text


def test_two_ranks_on_one_card_are_refused_by_name(machine):
    text = error(machine, [("a", ["x"], 0), ("a", ["y"], 1), ("b", ["z"], 0), ("b", ["z"], 1)])
    assert "ranks share a device" in text
    assert "ranks 2 to 3 on b share one cuda device" in text
    assert "SHARDWRIGHT_DEVICE=cuda/gloo" in text


def test_more_ranks_than_cards_are_refused_by_name(machine):
    text = error(machine, [("a", ["x", "y"], 0), ("a", ["x", "y"], 1), ("a", ["x", "y"], 2)])
    assert "there are more ranks than devices" in text
    assert "2 visible; none for rank 2 on a" in text


@pytest.mark.parametrize("num_cards", [1, 2])
def test_more_ranks_than_cards_use_gloo_where_that_is_asked_for_and_rank_0_warns(machine, num_cards):
    cards = ["x", "y"][:num_cards]
    machine(cards)
    told = [found("cuda/gloo", "a", 3, {"LOCAL_RANK": str(local)}) for local in range(3)]
    with pytest.warns(UserWarning, match="share one cuda device: they compute in turn, and send through host memory"):
        assert decided(told, 0) == (torch.device("cuda", 0), "gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decided(told, 1) == (torch.device("cuda", 1 % num_cards), "gloo")


def test_gloo_on_cards_of_their_own_needs_no_warning(machine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert start(machine, [("a", ["x"], "cuda/gloo"), ("a", ["y"], "cuda/gloo")])[0][1] == "gloo"


def test_ranks_of_which_only_some_have_a_card_are_refused_by_name(machine):
    text = error(machine, [("a", ["x"], 0), ("b", [], 0)])
    assert "cpu: rank 1 on b; cuda: rank 0 on a" in text


def test_ranks_with_other_device_options_are_refused(machine):
    text = error(machine, [("a", ["x"], "cuda/gloo"), ("b", ["y"], "cuda")])
    assert "cuda: rank 1 on b; cuda/gloo: rank 0 on a" in text


@pytest.mark.parametrize("wanted", ["cuda", "cuda/gloo", "gpu"])
def test_a_device_that_is_not_there_is_refused_by_name(machine, wanted):
    text = error(machine, [("a", [], wanted), ("b", [], wanted)])
    assert f"there is no device '{wanted}'" in text
    assert "rank 0 on a, rank 1 on b" in text


def test_torch_without_nccl_is_refused(machine):
    machine(built=False)
    text = error(machine, [("a", ["x"], 0), ("a", ["y"], 1)])
    assert "torch has no nccl" in text
    machine(built=False)
    assert start(machine, [("a", ["x"], "cuda/gloo"), ("a", ["y"], "cuda/gloo")])[0][1] == "gloo"


def test_without_cards_and_by_request_all_ranks_are_on_the_cpu(machine):
    for given, cards in ((0, []), ("cpu", ["x"])):
        assert start(machine, [("a", cards, given), ("a", cards, given)]) == [(torch.device("cpu"), "gloo")] * 2


def test_the_environment_says_what_to_use_where_the_caller_does_not(machine):
    machine(["x"])
    assert found("auto", "a", 1, {"SHARDWRIGHT_DEVICE": "cpu"}).use == "cpu"
    assert found("cuda", "a", 1, {"SHARDWRIGHT_DEVICE": "cpu"}).use == "cuda"
    assert found("auto", "a", 1, {"SHARDWRIGHT_DEVICE": "cuda/gloo"}).use == "cuda/gloo"


def test_cards_of_a_type_without_uuids_are_told_apart_by_host_and_number(machine):
    machine(kind="xpu")
    results = start(machine, [("a", ["", ""], 0), ("a", ["", ""], 1), ("b", [""], 0), ("b", [""], 1)])
    assert results == [(torch.device("xpu", place), "xccl") for place in (0, 1, 0, 0)]


def test_every_rank_learns_what_all_have_and_forked_ranks_without_cards_ask_nothing():
    store, told = HashStore(), [RankDevice("a", "auto", "cuda", place, 2, None, f"{place}") for place in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda rank: exchanged(told[rank], store, rank, 2), range(2))) == [told, told]
    alone = RankDevice("a", "auto")
    assert exchanged(alone, None, 1, 3, forked=True) == [alone] * 3


def test_the_world_of_a_users_own_group_is_on_the_current_device_if_the_group_is_for_it(machine, monkeypatch):
    machine(["x", "y"])
    monkeypatch.setattr(devices, "default", lambda: torch.device("cuda", 1))
    for backend, device in (("nccl", torch.device("cuda", 1)), ("gloo", torch.device("cpu"))):
        # as of init_process_group() without a backend, for which get_backend says "undefined"
        monkeypatch.setattr(dist, "get_backend_config", lambda name=backend: f"cpu:gloo,cuda:{name}")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            assert current_world().device == device
        finally:
            dist.destroy_process_group()
