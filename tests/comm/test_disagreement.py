"""Ranks that disagree on a call all get an error at once, which names both calls."""

from __future__ import annotations

import pytest
import torch

from shardwright.comm.launch import launch, run_on_threads
from shardwright.errors import CommunicationError
from shardwright.mesh import Mesh


def disagreement(num_ranks, *works):
    """The error when rank i does ``works[i]`` (the last one for all others) on the axis of all."""

    def work(world):
        axis = world.everyone().for_strategy(f"strategy {world.rank}")
        works[min(world.rank, len(works) - 1)](axis)

    with pytest.raises(CommunicationError) as caught:
        launch(work, num_ranks, ranks="threads")
    return str(caught.value)


DISAGREE = {
    "kind": (
        lambda axis: axis.all_reduce(torch.ones(2)),
        lambda axis: axis.broadcast(torch.ones(2)),
        ("all_reduce of [2] float32", "broadcast of [2] float32"),
    ),
    "kind, as one waits at a barrier": (
        lambda axis: axis.barrier(),
        lambda axis: axis.all_gather(torch.ones(1)),
        ("barrier of [1] uint8", "all_gather of [2] float32"),
    ),
    "shape": (
        lambda axis: axis.all_reduce(torch.ones(2, 3)),
        lambda axis: axis.all_reduce(torch.ones(3, 2)),
        ("all_reduce of [2, 3] float32", "all_reduce of [3, 2] float32"),
    ),
    "shape of what is not cut": (
        lambda axis: axis.all_gather(torch.ones(2, 3)),
        lambda axis: axis.all_gather(torch.ones(2, 4)),
        ("all_gather of [4, 3] float32", "all_gather of [4, 4] float32"),
    ),
    "dtype": (
        lambda axis: axis.all_reduce(torch.ones(2)),
        lambda axis: axis.all_reduce(torch.ones(2, dtype=torch.bfloat16)),
        ("all_reduce of [2] float32", "all_reduce of [2] bfloat16"),
    ),
    "sizes": (
        lambda axis: axis.all_gather(torch.ones(1), 0, [1, 2]),
        lambda axis: axis.all_gather(torch.ones(2), 0, [2, 2]),
        ("in parts [1, 2]", "in parts [2, 2]"),
    ),
    "cuts": (
        lambda axis: axis.reduce_scatter(torch.ones(3), 0, [1, 2]),
        lambda axis: axis.reduce_scatter(torch.ones(3), 0, [2, 1]),
        ("in parts [1, 2]", "in parts [2, 1]"),
    ),
    "reduction": (
        lambda axis: axis.all_reduce(torch.ones(2), "sum"),
        lambda axis: axis.all_reduce(torch.ones(2), "max"),
        ("float32 sum over", "float32 max over"),
    ),
    "source": (
        lambda axis: axis.broadcast(torch.ones(2), 0),
        lambda axis: axis.broadcast(torch.ones(2), 1),
        ("from member 0", "from member 1"),
    ),
    "message": (
        lambda axis: axis.send(torch.ones(2), 1),
        lambda axis: axis.receive((3,), torch.float32, 0),
        ("of [2] float32", "of [3] float32"),
    ),
    "part": (
        lambda axis: axis.all_to_all([torch.ones(1)] * 2, [(1,), (1,)]),
        lambda axis: axis.all_to_all([torch.ones(1)] * 2, [(3,), (1,)]),
        ("gives [1]", "takes [3]"),
    ),
}


@pytest.mark.usefixtures("ends_soon")
@pytest.mark.parametrize("about", DISAGREE)
def test_the_error_of_ranks_that_disagree_names_both_calls(about):
    one, other, words = DISAGREE[about]
    for works, said in [((one, other), words), ((other, one), words[::-1])]:
        if about in ("sizes", "message", "part") and works[0] is other:
            continue  # there the order of the ranks matters
        text = disagreement(2, *works)
        assert "ranks 0 and 1 disagree" in text
        first, second = text.splitlines()[1:3]
        assert first.startswith("  given:   rank 0: ")
        assert second.startswith("           rank 1: ")
        assert "\n  allowed: " in text
        assert "\n  fix:     " in text
        assert said[0] in first
        assert said[1] in second
        assert "over axis 'world'" in text
        assert "for strategy" in text


@pytest.mark.usefixtures("ends_soon")
def test_one_of_many_that_disagrees_is_named():
    def agree(axis):
        axis.all_reduce(torch.ones(2))

    text = disagreement(4, agree, agree, lambda axis: axis.all_reduce(torch.ones(5)), agree)
    assert "rank 2: all_reduce of [5] float32" in text
    assert "all_reduce of [2] float32" in text


@pytest.mark.usefixtures("ends_soon")
def test_every_rank_gets_the_error_of_a_disagreement():
    texts = []

    def work(world):
        try:
            world.everyone().all_reduce(torch.ones(1 + world.rank // 2))
        except CommunicationError as error:
            texts.append(str(error))
            raise

    with pytest.raises(CommunicationError):
        launch(work, 3, ranks="threads")
    assert len(texts) == 3
    assert len(set(texts)) == 1


@pytest.mark.usefixtures("ends_soon")
def test_the_error_of_ranks_that_call_over_different_axes_names_where_each_waits():
    def work(axes):
        axes["dp" if axes["tp"].index == 0 else "tp"].all_reduce(torch.ones(2))

    def mixed(axes):
        here = axes["dp"].index + axes["tp"].index
        axes["dp" if here == 0 else "tp"].all_reduce(torch.ones(2))

    run_on_threads(Mesh(dp=2, tp=1), work)
    with pytest.raises(CommunicationError) as caught:
        run_on_threads(Mesh(dp=2, tp=2), mixed)
    text = str(caught.value)
    assert "rank 0 waits in all_reduce of [2] float32 sum over axis 'dp' for core for rank 2" in text
    assert "rank 1 waits in all_reduce of [2] float32 sum over axis 'tp' for core for rank 0" in text
