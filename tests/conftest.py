"""For every test: one core for each rank, no deadline, since ranks may be threads that wait for each other; and tiers.

``--tier test``, which `make test` runs: outside of ``tests/contract`` every test, but of one that is ``sampled(n)`` the
first case and every n-th after it (of 0 none), and of one with more than three cases every fourth; in
``tests/contract`` only those that are sampled. Property tests draw few examples.
``--tier contract``, which `make contract` runs: all of ``tests/contract``, every case that `make test` leaves out, and
property tests with all their examples. Without ``--tier`` everything runs.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from one_plan import one_plan_in_verify

torch.set_num_threads(1)
settings.register_profile("shardwright", deadline=None)
settings.register_profile("few", deadline=None, max_examples=10)
settings.load_profile("shardwright")

CONTRACT = Path(__file__).parent / "contract"
MANY, MANY_EVERY = 3, 4
"""Of a test with more cases than this, `make test` runs every so many-th."""


@pytest.fixture(scope="session", autouse=True)
def _one_plan():
    with one_plan_in_verify():
        yield


def pytest_addoption(parser):
    parser.addoption("--tier", choices=("test", "contract"), help="what `make test` runs, or `make contract`")


def pytest_configure(config):
    config.addinivalue_line("markers", "sampled(n): `make test` runs the first case and every n-th after it; of 0 none")
    if config.getoption("--tier") == "test":
        settings.load_profile("few")


def tiers_of(items):
    """Each test, and the tiers that run it."""
    seen, cases = Counter(), Counter((item.path, getattr(item, "originalname", None)) for item in items)
    for item in items:
        mark, inside = item.get_closest_marker("sampled"), CONTRACT in item.path.parents
        key = item.path, getattr(item, "originalname", None)
        has_many = key[1] is not None and cases[key] > MANY  # a doctest has no such name
        every = mark.args[0] if mark is not None else 0 if inside else MANY_EVERY if has_many else 1
        among = every > 0 and seen[key] % every == 0
        seen[key] += 1
        again = inside or not among or hasattr(getattr(item, "obj", None), "hypothesis")
        yield item, {name for name, runs in (("test", among), ("contract", again)) if runs}


def pytest_collection_modifyitems(config, items):
    tier = config.getoption("--tier")
    if tier is not None:
        chosen = [item for item, tiers in tiers_of(items) if tier in tiers]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
