"""Runs one function on any number of ranks (``launch``), which are threads or processes."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

import torch

from shardwright.comm import failures
from shardwright.comm.axis import Axis
from shardwright.comm.backends.threads import StoppedError, ThreadTransport, ThreadWorld
from shardwright.comm.limits import Ranks, check_can_start
from shardwright.comm.recorder import Recorder
from shardwright.comm.started_world import is_started
from shardwright.comm.stop import Stop
from shardwright.comm.world import World
from shardwright.errors import ExplainedError, LayoutError, PlanError, RankFailedError
from shardwright.layout import Layout
from shardwright.mesh import Mesh

T = TypeVar("T")

_END_S = 5.0
"""Seconds that an interrupted launch, or one of which a rank has failed, waits for its threads to end."""

_LEFT: dict[threading.Thread, int] = {}
"""Threads that an interrupted or failed launch left computing, each with the process's exit code if it ends first."""


class HasRanks(Protocol):
    """Any object with ``num_ranks``, such as a :class:`~shardwright.layout.Layout`."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks to start."""


def launch(
    work: Callable[..., T],
    ranks_or_layout: int | str | HasRanks,
    *args: Any,
    ranks: Ranks = "processes",
    **options: Any,
) -> list[T]:
    """Runs ``work(world, *args)`` once per rank and returns the ranks' results, in rank order.

    ``ranks_or_layout`` is the number of ranks, or a layout, which may be text such as "dp2 tp2", that fixes the number.

    ``ranks="threads"`` runs the ranks as threads of this process. ``"processes"`` starts them on this machine, without
    a socket that another machine could connect to, and pickles ``work``, its arguments and its results: a model among
    these is copied, and the caller's model keeps its values; a warning says so if ranks have trained the copy.
    Functions of a notebook or an interactive session, and functions inside of functions of a script, then need the
    package cloudpickle. But in a process that is already a rank (of ``torchrun``, ``srun`` or ``mpirun``) it joins that
    run and returns a list with this rank's result alone.

    ``options`` for processes: ``debug`` checks that all ranks make the same calls; ``timeout_s`` (600) is the time
    limit of a call in seconds; ``grace_s`` (30) is how many seconds ranks have to end after a stop signal; ``device``
    is "auto", "cpu", "cuda", or "cuda/gloo" for several ranks on one GPU; ``bind_cores`` binds each rank to CPU cores;
    ``links`` is "sockets" to keep ranks of one machine from using shared memory; and ``link`` is a
    :class:`~shardwright.comm.backends.message_blocks.Link` whose latency and bandwidth are emulated, to measure on one
    machine what overlap gains. Threads use ``device`` alone, one for all ranks ("auto" is the CPU), and ignore the
    rest.

    Raises: RankFailedError: a rank raised or died; the text has the rank's traceback if there is one. An error of the
        library itself is raised as it is, and so is any error of ``work`` in a process that is already a rank.
        LayoutError: ``torchrun`` started another number of ranks, this machine cannot start as many, or a line is no
        layout. PlanError: the ranks' devices or the options do not fit. KeyboardInterrupt: the run was told to stop,
        and ``work`` did not ask for it by :meth:`~shardwright.Run.stop_requested`; uncaught after SIGTERM it ends the
        program with one line and exit code 143.

    >>> launch(lambda world: world.everyone().all_reduce(torch.tensor(world.rank)).item(), 4, ranks="threads")
    [6, 6, 6, 6]
    """
    if isinstance(ranks_or_layout, str):
        ranks_or_layout = Layout.parse(ranks_or_layout)
    _check_launch(work, ranks_or_layout, ranks, options)
    num_ranks = ranks_or_layout if isinstance(ranks_or_layout, int) else ranks_or_layout.num_ranks
    check_can_start(num_ranks, ranks)
    if ranks == "threads":
        device = options.get("device", "cpu")
        return run_threads(work, num_ranks, *args, device="cpu" if device == "auto" else str(device).partition("/")[0])
    from shardwright.comm.backends import processes  # torch.distributed is imported only when it is used

    if is_started():
        size = int(os.environ["WORLD_SIZE"])
        if size != num_ranks:
            raise LayoutError(
                "the layout does not fit the ranks that were started",
                given=f"a layout for {num_ranks} ranks, a world of {size}",
                allowed=f"layouts whose sizes multiply to {size}",
                fix=f"start {num_ranks} ranks, or change the layout",
            )
        options.pop("grace_s", None)  # torchrun has its own
        return [processes.run_here(work, args, **options)]
    return processes.run_processes(work, num_ranks, args, **options)


_OPTIONS = ("debug", "timeout_s", "device", "links", "link", "bind_cores", "grace_s")


def _check_launch(work: Any, ranks_or_layout: Any, ranks: Any, options: Collection[str]) -> None:
    """Raises PlanError, with the line to write, for arguments that :func:`launch` does not take."""
    argument, allowed = "", ""
    if not callable(work):
        argument, allowed = (
            f"{type(work).__name__} as work",
            "a function, not its result: a rank calls work(world)",
        )
    elif not hasattr(ranks_or_layout, "num_ranks") and not (type(ranks_or_layout) is int and ranks_or_layout > 0):
        argument, allowed = (
            f"{ranks_or_layout!r:.60} ranks",
            "a number of ranks from 1 on, or a layout such as 'dp2 tp2'",
        )
    elif ranks not in ("threads", "processes"):
        argument, allowed = f"ranks={ranks!r}", "'threads', 'processes'"
    elif unknown := [name for name in options if name not in _OPTIONS]:
        argument, allowed = f"{unknown[0]}=...", f"the options {', '.join(_OPTIONS)}; arguments of work by position"
    if argument:
        fix = "write sw.launch(train, 'dp2', ranks='threads'), with def train(world): ..."
        raise PlanError("launch takes a function and the ranks that call it", given=argument, allowed=allowed, fix=fix)


def run_threads(work: Callable[..., T], num_ranks: int, *args: Any, device: torch.device | str = "cpu") -> list[T]:
    """Runs ``work(world, *args)`` on ranks that are threads of this process, and returns their results in rank order.

    :func:`launch` calls it for ``ranks="threads"``; all ranks use one ``device``.

    Once a rank has failed, the others have five seconds to end, or until what they save is written: a thread that
    computes and makes no call of ``world`` cannot be ended, and is left behind.

    Raises: RankFailedError: a rank raised, with its traceback. An error of the library is raised as it is, and so is a
        ValueError if every rank raised an error.
    """
    hub, place, stop = ThreadWorld(num_ranks), torch.device(device), Stop()
    results: dict[int, T] = {}
    texts: dict[int, str] = {}

    def run(rank: int) -> None:
        recorder = Recorder()
        transport = ThreadTransport(hub, rank, recorder)
        world = World(rank, num_ranks, place, transport, recorder, stop=stop)
        try:
            # by default one thread runs all backwards of an accelerator, so a rank that waits in it would block others
            with torch.autograd.set_multithreading_enabled(place.type == "cpu"):
                result = work(world, *args)
            world.wait_pending()
            results[rank] = result
        except StoppedError:
            pass  # another rank's failure is the one to report
        except BaseException as failure:  # SystemExit too: the others must not wait for this rank
            texts[rank] = traceback.format_exc()
            transport.abandon(failure)
        finally:
            world.join_writers()
            transport.close()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(num_ranks)
    ]
    try:
        for thread in threads:
            thread.start()
        end_s = time.monotonic() + _END_S
        while alive := [thread for thread in threads if thread.is_alive()]:
            alive[0].join(timeout=0.5)  # short, so that Ctrl-C is seen
            if stop.wanted:
                stop.follow_signals()  # here, in the main thread
            if hub.failure is None or hub.num_saving or not (hub.failed_rank is None or hub.failed_rank in texts):
                end_s = time.monotonic() + _END_S
            elif time.monotonic() > end_s:  # a rank computes and makes no call, so it cannot be ended
                _LEFT.update(dict.fromkeys(alive, 1))
                break
    except BaseException as interruption:  # as Ctrl-C
        hub.fail(-1, interruption)
        for thread in threads:
            if thread.is_alive():  # False also if it has not begun
                thread.join(timeout=_END_S)
        _LEFT.update((thread, failures.INTERRUPTED) for thread in threads if thread.is_alive())
        raise
    finally:
        stop.restore()
    if (failure := hub.failure) is not None:
        if isinstance(failure, ExplainedError) or (isinstance(failure, ValueError) and len(texts) == num_ranks):
            if isinstance(failure, LayoutError | PlanError) and len(texts) < num_ranks:
                failure.add_note(f"raised by rank {hub.failed_rank}")
            raise failure  # an error of the user's: all ranks raise it, unless they were ended before
        assert hub.failed_rank is not None
        raise RankFailedError(f"rank {hub.failed_rank} failed\n\n{texts[hub.failed_rank]}") from failure
    return [results[rank] for rank in range(num_ranks)]


@atexit.register
def _end_left() -> None:
    """Ends the process at once if ranks of a launch that was interrupted, or has failed, still compute.

    Python's own end would abort the process where such a thread is in native code: exit code 134, and a message of C++.
    """
    if codes := [code for thread, code in _LEFT.items() if thread.is_alive()]:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed before Python started
            stream.flush()
        os._exit(codes[0])


def run_on_threads(mesh: Mesh, work: Callable[[dict[str, Axis]], T], *, device: torch.device | str = "cpu") -> list[T]:
    """Runs ``work`` on one thread for each rank of ``mesh`` and returns the results, in rank order.

    ``work`` is called with the rank's axes (process groups) by name; all ranks use one ``device``. This function is
    meant for examples and tests; it raises what :func:`run_threads` raises.

    >>> run_on_threads(Mesh(dp=2, tp=2), lambda axes: (axes["dp"].index, axes["tp"].ranks))
    [(0, (0, 1)), (0, (0, 1)), (1, (2, 3)), (1, (2, 3))]
    """
    return run_threads(lambda world: work(world.axes(mesh)), mesh.size, device=device)
