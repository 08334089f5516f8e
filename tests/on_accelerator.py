"""A plugin of pytest with which the contract's lines are compared on the pretend accelerator: `make test-acc-contract`.

Every comparison with one device by ``contract.cases`` then has its ranks there. Other promises of the contract, such as
what is sent and held, are checked as they are without it.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest

from accelerator import set_up
from shardwright.comm.launch import run_threads
from shardwright.layout import Layout
from shardwright.verify import verify


def verify_on(device, model, line, *args, **named):
    """As ``verify``, with ranks on ``device``."""

    def launcher(work, *given):
        return run_threads(work, Layout.parse(line).num_ranks, *given, device=device)

    return verify(model, line, *args, launcher=launcher, **named)


@pytest.fixture(scope="session", autouse=True)
def _on_accelerator():
    """Not when this file is imported, as where doctests are looked for: torch keeps the device for good."""
    from contract import cases

    with mock.patch.object(cases, "verify", partial(verify_on, set_up().device)):
        yield
