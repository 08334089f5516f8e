"""The pretend accelerator, for the whole session: torch takes one such device in a process and keeps it.

With ``--card``, as `make test-card` has it, the card of this machine is in its place. Then only those tests run that
mean the same there: not those of files in ``ABOUT_PRETENDED``, and none that is marked ``pretended``.
"""

import pytest
import torch

import garbage
from accelerator import set_up
from one_core import stay_on_one_core
from one_plan import one_plan_in_verify
from real_card import Card

ABOUT_PRETENDED = ("test_accelerator.py", "test_nccl_on_accelerator.py", "test_through_host.py")
"""Files about the pretend device itself, or about what it alone tells."""

torch.set_num_threads(1)
stay_on_one_core()


def pytest_configure(config):
    if not config.pluginmanager.is_registered(garbage):  # by the other folder of tests
        config.pluginmanager.register(garbage)
    config.addinivalue_line("markers", "sampled(n): of tests/contract, whose models are used here")
    config.addinivalue_line("markers", "of_threads: of tests/contract, whose models are used here")
    config.addinivalue_line("markers", "pretended: needs what the pretend accelerator alone does, so not on a card")
    if config.getoption("--card", default=False):
        for what in (
            "`torch.jit.script_method` is deprecated",
            "Attempting to run cuBLAS",
            "TensorFloat32 tensor cores",
        ):
            config.addinivalue_line("filterwarnings", f"ignore:{what}")  # torch's own, while it compiles and starts


def pytest_addoption(parser):
    parser.addoption("--card", action="store_true", help="on the card of this machine, not on the pretend accelerator")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--card", default=False):
        return
    left = [item for item in items if item.path.name in ABOUT_PRETENDED or item.get_closest_marker("pretended")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session", autouse=True)
def accelerator(pytestconfig):
    """Not when this file is imported: pytest imports it for the tests of other folders too."""
    return Card() if pytestconfig.getoption("--card", default=False) else set_up()


@pytest.fixture(scope="session", autouse=True)
def _one_plan():
    with one_plan_in_verify():
        yield
