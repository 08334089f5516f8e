"""Ranks as processes: joins a world that was started, or starts all ranks on one machine."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver, util
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwright.comm import failures
from shardwright.comm.backends.message_blocks import Link, folder_for_sockets
from shardwright.comm.backends.process_groups import Links, ProcessTransport
from shardwright.comm.call_checker import CallChecker
from shardwright.comm.cpu_affinity import bind
from shardwright.comm.current_world import enter
from shardwright.comm.failures import LostPartnerError, StopRequested
from shardwright.comm.recorder import Recorder
from shardwright.comm.world import World
from shardwright.errors import CommunicationError, PlanError

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0


def run_here(
    work: Callable[..., T], args: Sequence[Any], *, debug: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S,
    device: str = "auto", links: Links = "auto", folder: str | None = None, link: Link | None = None,
    bind_cores: bool = False,
) -> T:  # fmt: skip
    """Runs ``work`` in this process as the rank that the environment names (``RANK``, ``WORLD_SIZE``, ...).

    ``folder`` is where temporary files go, if the process that started the ranks removes it at the end.
    """
    rank, size, local = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if bind_cores:
        bind(local, num_local)
    place, backend = _device(device, local, num_local)
    timeout = timedelta(seconds=timeout_s)
    # no device_id: with one, NCCL splits groups off their parent, which needs the ranks that are in neither
    dist.init_process_group(backend, timeout=timeout)
    recorder = Recorder()
    call_checker = CallChecker(rank, timeout_s) if debug else None
    transport = ProcessTransport(rank, size, recorder, timeout, call_checker, links, folder, link)
    world = World(rank, size, place, transport, recorder)
    enter(world)
    try:
        result = work(world, *args)
    except CommunicationError:
        time.sleep(failures.GRACE_S)  # lets the rank that failed first write its note first
        raise
    transport.close()
    try:
        dist.barrier()  # no rank closes its connections while another still reads
    except RuntimeError as failure:
        time.sleep(2 * failures.GRACE_S)  # lets a rank that waits in a call report first, with the call
        raise LostPartnerError(
            "another rank did not reach the end of its work",
            given=f"rank {rank} has reached its own; torch reports: {str(failure).splitlines()[0]}",
            allowed="ranks that make the same calls, and end together",
            fix="look for a call that only some ranks make: 'if rank == 0: x.sum().item()'",
        ) from failure
    transport.disconnect()
    dist.destroy_process_group()
    return result


def _device(wanted: str, local_rank: int, num_local: int) -> tuple[torch.device, str]:
    """This rank's device, and the torch.distributed backend for it."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu"), "gloo"
    num_devices = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % max(num_devices, 1))
    torch.cuda.set_device(device)
    return device, "nccl" if num_devices >= num_local else "gloo"


def run_processes(
    work: Callable[..., T], num_ranks: int, args: Sequence[Any], *, debug: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S, device: str = "auto", links: Links = "auto", link: Link | None = None,
    bind_cores: bool = False,
) -> list[T]:  # fmt: skip
    """Starts the ranks on this machine through torch's elastic launcher, as ``torchrun`` does.

    Raises: RankFailedError: a rank raised or was killed; the others are ended within seconds. LayoutError, PlanError
        and CheckpointError are raised as they are.
    """
    if os.name != "posix":
        raise PlanError(
            "ranks as processes need Linux or macOS",
            given=os.name,
            allowed="ranks as threads",
            fix='pass --ranks threads, or ranks="threads"',
        )
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = {"debug": debug, "timeout_s": timeout_s, "device": device, "links": links, "link": link,
               "bind_cores": bind_cores}  # fmt: skip
    base = folder_for_sockets()
    _start_server(base)
    with tempfile.TemporaryDirectory(prefix="shardwright-", dir=base) as folder, _quiet(), _handlers_kept():
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id=f"shardwright-{os.getpid()}",
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
            start_method="forkserver", logs_specs=DefaultLogsSpecs(log_dir=folder),
        )  # fmt: skip
        # the fork server's folder is removed when this process ends; by the ranks, if this process is killed
        left = [folder] if multiprocessing.parent_process() else [folder, util.get_temp_dir()]
        try:
            found = elastic_launch(config, _rank_main)(pickle.dumps((work, tuple(args), options)), folder, left)
        except ChildFailedError as failure:
            exits = {rank: one.exitcode for rank, one in failure.failures.items()}
            raise failures.first_failure(folder, exits) from None
        except SignalException:
            raise KeyboardInterrupt from None  # the ranks got the signal too, and have ended
    return [pickle.loads(found[rank]) for rank in range(num_ranks)]


def _start_server(folder: str) -> None:
    """Starts the fork server, from which every rank is forked; it imports what takes long once.

    Its socket goes into ``folder``: the default one may have too long a path.
    """
    ours = ["shardwright", "shardwright.comm.backends.processes"]
    forkserver.set_forkserver_preload([*ours, "torch._dynamo", "torch.optim"])  # any optimizer loads torch._dynamo
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        forkserver.ensure_running()
    finally:
        tempfile.tempdir = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the launcher's own log: the failing rank's traceback comes first."""
    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing.spawn")
    loggers = [logging.getLogger(name) for name in (*prefixes, *logging.root.manager.loggerDict)]
    loggers = [logger for logger in loggers if logger.name.startswith(prefixes)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restores the caller's signal handlers, which the launcher replaces and does not restore."""
    here = threading.current_thread() is threading.main_thread()  # handlers exist in the main thread only
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) if here else ()
    before = {number: signal.getsignal(number) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set from Python, so it cannot be restored
                signal.signal(number, handler)


def _rank_main(pickled: bytes, folder: str, left: list[str]) -> bytes:
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until the work sets its own handler
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    failures.note_start(folder, rank)
    _end_with_the_launcher(rank, left)
    try:
        work, args, options = pickle.loads(pickled)
        return pickle.dumps(run_here(work, args, folder=folder, **options))
    except BaseException as failure:
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(OSError):  # the folder is gone where the launcher is
            if failures.note_failure(folder, rank, failure):
                time.sleep(failures.LATE_LAUNCHER_S)  # the launcher ends this rank once it has seen the other's exit
        # no exception leaves this function: torch would leave an error file behind
        os._exit(130 if isinstance(failure, StopRequested) else 1)


def _end_with_the_launcher(rank: int, left: Sequence[str]) -> None:
    """Ends this rank when the launcher dies, and removes the folders that it leaves behind.

    The launcher holds a pipe to each rank, which the system closes when it dies. The ranks are children of the fork
    server, which lives as long as they do.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        if rank == 0:
            sys.stderr.write("the process that started the ranks has ended, and so do they\n")
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
