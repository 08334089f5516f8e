"""Specs between stages survive the way, and name nothing that a message could make run."""

import json
import sys
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import pytest
import torch

from shardwright.errors import PlanError
from shardwright.sharding.tensor_shard import shard_of, tag, tagged
from shardwright.strategies.pipeline.p2p import _pack_spec, _unpack_spec, fill, spec_of
from shardwright.strategies.pipeline.spec_bytes import unpack


class Point(NamedTuple):
    x: object
    y: object


VALUES = [
    torch.ones(2, 3),
    (torch.ones(1, requires_grad=True), [None, 2, {"a": True, 3: "b", ("c", 1): 0.5}]),
    Point(torch.ones(2, dtype=torch.bfloat16), Point(1j, float("inf"))),
    OrderedDict(b=torch.int8, a=1.5),
    defaultdict(list, a=slice(1, None), b=torch.device("cuda:1")),
    [],
    None,
]


@pytest.mark.parametrize("values", VALUES, ids=lambda value: type(value).__name__)
def test_a_spec_comes_back_as_it_was(values):
    spec, tensors = spec_of(values, "chunk 0")
    found = _unpack_spec(_pack_spec(spec))
    assert found == spec
    assert [type(leaf) for leaf in found.leaves] == [type(leaf) for leaf in spec.leaves]
    assert type(fill(found, tensors)) is type(values)


@pytest.mark.parametrize(
    "message",
    [
        [["subprocess:Popen", None, [0]], ["true"]],
        [["collections:namedtuple", {"class": "subprocess:Popen"}, [0]], ["true"]],
        [["collections:namedtuple", {"class": "no.such.module:Thing"}, [0]], ["true"]],
    ],
)
def test_a_message_that_names_another_class_is_refused_and_nothing_is_imported(message):
    before = set(sys.modules)
    with pytest.raises(PlanError, match="what cannot cross"):
        unpack(json.dumps(message).encode())
    assert "no.such.module" not in set(sys.modules) - before


def test_a_part_of_a_tensor_arrives_as_that_part():
    part = shard_of((2, 6), (None, bytes([0, 0, 0, 1, 1, 1])))
    sent = torch.ones(2, 3)
    tag(sent, part)
    spec, _ = spec_of([sent, torch.ones(2)], "chunk 0")
    first, second = fill(_unpack_spec(_pack_spec(spec)), [torch.ones(2, 3), torch.ones(2)])
    assert tagged(first) is part
    assert tagged(second) is None
