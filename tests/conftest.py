"""For every test: one core for each rank, no deadline, since ranks may be threads that wait for each other; and tiers.

``--tier test``, which `make test` runs: outside of ``tests/contract`` every test, but of one that is ``sampled(n)`` the
first case and every n-th after it (of 0 none), and of one with several cases the first and every fourth after it; in
``tests/contract`` only those that are sampled. Property tests draw few examples.
``--tier contract``, which `make contract` runs: all of ``tests/contract``, every case that `make test` leaves out, and
property tests with all their examples. ``--tier rest``: the same without what `make test` has run already, for
`.ci/run`, which runs both. Without ``--tier`` everything runs.

In ``tests/contract`` ranks that are threads talk over NCCL's rules (``tests/pretend_nccl.py``) in three tests of four,
each in one of three variants; ``--nccl`` takes one of them for all tests, as `make test-nccl` does with each.
"""

import signal
import sys
import threading
import warnings
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import settings

import garbage
from nccl_rules import Variant
from one_core import stay_on_one_core
from one_plan import one_plan_in_verify
from pretend_nccl import over_nccl

torch.set_num_threads(1)
stay_on_one_core()
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(_number, _handler)  # under nohup too, tests of signals send them
settings.register_profile("shardwright", deadline=None)
settings.register_profile("few", deadline=None, max_examples=10)
settings.load_profile("shardwright")

TESTS = Path(__file__).parent
CONTRACT = TESTS / "contract"
EVERY = 4
"""Of a test with several cases, `make test` runs the first and every so many-th after it."""

VARIANTS = {
    "strictest": Variant(),
    "small sends complete alone": Variant(eager_bytes=4096),
    "communicators made beforehand": Variant(made_beforehand=True),
}


@pytest.fixture(autouse=True, scope="session")
def _own_caches(tmp_path_factory):
    """What the command keeps of plans is kept in a folder of the tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture(autouse=True)
def _over_nccl(request):
    """The contract's ranks talk over NCCL's rules."""
    wanted = request.config.getoption("--nccl")
    if wanted == "in turn":
        wanted = ("no", *VARIANTS)[crc32(request.node.nodeid.encode()) % 4]
    is_exempt = request.node.get_closest_marker("of_threads") is not None
    if CONTRACT not in request.path.parents or wanted == "no" or is_exempt:
        yield
        return
    with over_nccl(VARIANTS[wanted]):
        yield


@pytest.fixture(scope="session", autouse=True)
def _seeded_by_no_rank():
    """Ranks that are threads share torch's generator: what each seeds and draws, the others may seed in between."""
    seed = torch.manual_seed

    def seed_alone(value):
        name = threading.current_thread().name
        assert not name.startswith("rank "), f"{name} seeds torch's generator, which it shares with other ranks"
        return seed(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", seed_alone)
        yield


@pytest.fixture(scope="session", autouse=True)
def _warnings_caught_by_no_rank():
    """Ranks that are threads share the filters of warnings: one would set back what another has just set."""
    enter = warnings.catch_warnings.__enter__

    def enter_alone(self):
        name, caller = threading.current_thread().name, sys._getframe(1).f_code.co_filename
        in_rank = name.startswith("rank ") and Path(caller).is_relative_to(TESTS)
        assert not in_rank, f"{name} sets filters of warnings, which it shares with other ranks"
        return enter(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings.catch_warnings, "__enter__", enter_alone)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_plan():
    with one_plan_in_verify():
        yield


def pytest_addoption(parser):
    parser.addoption(
        "--nccl", choices=("in turn", "no", *VARIANTS), default="in turn", help="what the contract's ranks talk over"
    )
    parser.addoption("--tier", choices=("test", "contract", "rest"), help="of which of the make targets")


def pytest_configure(config):
    config.addinivalue_line("markers", "of_threads: about what threads alone tell, so never over NCCL's rules")
    config.addinivalue_line("markers", "sampled(n): `make test` runs the first case and every n-th after it; of 0 none")
    if not config.pluginmanager.is_registered(garbage):  # by the other folder of tests
        config.pluginmanager.register(garbage)
    if config.getoption("--tier") == "test":
        settings.load_profile("few")


def tiers_of(items):
    """Each test, and the tiers that run it."""
    seen = Counter()
    for item in items:
        mark, inside = item.get_closest_marker("sampled"), CONTRACT in item.path.parents
        key = item.path, getattr(item, "originalname", None)
        is_doctest = key[1] is None
        every = mark.args[0] if mark is not None else 0 if inside else 1 if is_doctest else EVERY
        among = every > 0 and seen[key] % every == 0
        seen[key] += 1
        rest = not among or hasattr(getattr(item, "obj", None), "hypothesis")
        yield item, {name for name, runs in (("test", among), ("contract", inside or rest), ("rest", rest)) if runs}


def pytest_collection_modifyitems(config, items):
    tier = config.getoption("--tier")
    if tier is not None:
        chosen = [item for item, tiers in tiers_of(items) if tier in tiers]
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen
