"""A plugin of pytest with which the contract's lines are compared on the pretend accelerator: `make test-acc-contract`.

Every comparison with one device by ``contract.cases`` then has its ranks there. Other promises of the contract, such as
what is sent and held, are checked as they are without it.
"""

from __future__ import annotations

from unittest import mock

import pytest

from accelerator import set_up
from shardwright.comm.launch import run_threads
from shardwright.layout import Layout
from shardwright.verify import verify

ACCELERATOR = set_up()  # once in a process: torch keeps the device


def verify_there(model, line, *args, **named):
    """As ``verify``, with ranks on the accelerator."""

    def launcher(work, *given):
        return run_threads(work, Layout.parse(line).num_ranks, *given, device=ACCELERATOR.device)

    return verify(model, line, *args, launcher=launcher, **named)


@pytest.fixture(scope="session", autouse=True)
def _there():
    from contract import cases

    with mock.patch.object(cases, "verify", verify_there):
        yield
