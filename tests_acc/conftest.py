"""The pretend accelerator, for the whole session: torch takes one such device in a process and keeps it."""

import pytest
import torch

import garbage
from accelerator import set_up
from one_core import stay_on_one_core
from one_plan import one_plan_in_verify

torch.set_num_threads(1)
stay_on_one_core()


def pytest_configure(config):
    if not config.pluginmanager.is_registered(garbage):  # by the other folder of tests
        config.pluginmanager.register(garbage)
    config.addinivalue_line("markers", "sampled(n): of tests/contract, whose models are used here")


@pytest.fixture(scope="session", autouse=True)
def accelerator():
    """Not when this file is imported: pytest imports it for the tests of other folders too."""
    return set_up()


@pytest.fixture(scope="session", autouse=True)
def _one_plan():
    with one_plan_in_verify():
        yield
