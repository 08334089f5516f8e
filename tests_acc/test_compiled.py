"""Compiled blocks on the pretend accelerator: equal to the CPU, and no more that stops the host than without compiling.

Blocks run torch's own kernels (``compile:aot_eager``), since inductor makes no code for the pretend device.
"""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.utils as dynamo
from tests_acc.test_contract import check
from tests_acc.test_host_stops import by_file, expected, stops_of, told

from contract.cases import GPT2

pytestmark = [  # torch's compiler makes these while it reads code
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _compiles(caplog):
    """What torch has compiled before does not count, and each test compiles its blocks whole."""
    torch._dynamo.reset()
    dynamo.counters.clear()
    yield
    assert dynamo.counters["stats"]["unique_graphs"] > 0
    assert not dynamo.counters["graph_break"]
    assert "run uncompiled" not in caplog.text


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3 tp2/sp", "pp2/1f1b mb2 tp2 recompute:full"])
def test_compiled_blocks_equal_the_cpu(accelerator, line):
    check(accelerator, f"{line} compile:aot_eager", GPT2)


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2/1f1b mb2", "dp2/zero3", "dp2 fp16"])
def test_compiled_blocks_stop_the_host_as_often_as_others(accelerator, line):
    assert by_file(stops_of(accelerator, f"{line} compile:aot_eager")) == told(accelerator, expected(line))
