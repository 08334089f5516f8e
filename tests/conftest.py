"""For every test: one core for each rank, no deadline, since ranks may be threads that wait for each other; and tiers.

``--tier test``, which `make test` runs: outside of ``tests/contract`` every test, but of one that is ``sampled(n)`` the
first case and every n-th after it (of 0 none); in ``tests/contract`` only those. Property tests draw few examples.
``--tier contract``, which `make contract` runs: all of ``tests/contract``, every case that `make test` leaves out, and
property tests with all their examples. Without ``--tier`` everything runs.
"""

from collections import Counter
from pathlib import Path

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("shardwright", deadline=None)
settings.register_profile("few", deadline=None, max_examples=10)
settings.load_profile("shardwright")

CONTRACT = Path(__file__).parent / "contract"


def pytest_addoption(parser):
    parser.addoption("--tier", choices=("test", "contract"), help="what `make test` runs, or `make contract`")


def pytest_configure(config):
    config.addinivalue_line("markers", "sampled(n): `make test` runs the first case and every n-th after it; of 0 none")
    if config.getoption("--tier") == "test":
        settings.load_profile("few")


def tiers_of(items):
    """Each test, and the tiers that run it."""
    seen = Counter()
    for item in items:
        mark, inside = item.get_closest_marker("sampled"), CONTRACT in item.path.parents
        among = not inside
        if mark is not None:
            number = seen[item.path, item.originalname]
            among = mark.args[0] > 0 and number % mark.args[0] == 0
            seen[item.path, item.originalname] += 1
        again = inside or not among or hasattr(getattr(item, "obj", None), "hypothesis")
        yield item, {name for name, runs in (("test", among), ("contract", again)) if runs}


def pytest_collection_modifyitems(config, items):
    tier = config.getoption("--tier")
    if tier is not None:
        chosen = [item for item, tiers in tiers_of(items) if tier in tiers]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
