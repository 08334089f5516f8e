"""Runs ranks that are processes: starts all on one machine, or joins a run that torchrun, Slurm or MPI started."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing import process, spawn, util
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from shardwright.comm import failures
from shardwright.comm.backends import rank_devices
from shardwright.comm.backends.message_blocks import Link
from shardwright.comm.backends.nodes import bind_sockets, number_by_node
from shardwright.comm.backends.process_groups import Links, ProcessTransport, torch_timeout
from shardwright.comm.backends.run_folder import STORE
from shardwright.comm.backends.started_ranks import NOTE, RESULT, RankProcess, StartedRanks, answer_of
from shardwright.comm.backends.task_pickle import dumps, is_importable
from shardwright.comm.backends.watchdog import Report, end_with
from shardwright.comm.call_checker import CallChecker
from shardwright.comm.cpu_affinity import bind
from shardwright.comm.current_world import enter
from shardwright.comm.failures import LostPartnerError, StopRequested, StopStatus
from shardwright.comm.recorder import Recorder
from shardwright.comm.trained_copies import objects_of, tell_trained, trained_among
from shardwright.comm.wait_watchdog import WaitWatchdog
from shardwright.comm.world import World
from shardwright.command_signals import IS_COMMAND
from shardwright.devices import NATIVE
from shardwright.errors import CommunicationError, PlanError
from shardwright.fork_server import FORK_SERVER
from shardwright.formatting import first_line, numbered

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_GRACE_S = 30.0

_START_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2
_NETWORK = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo0" if sys.platform == "darwin" else "lo")
"""The environment variables that bind torch's own sockets to the loopback interface."""


def run_here(
    work: Callable[..., T], args: Sequence[Any], *, debug: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S,
    device: str = "auto", links: Links = "auto", folder: str | None = None, link: Link | None = None,
    bind_cores: bool = False, report: Report = end_with,
) -> T:  # fmt: skip
    """Runs ``work(world, *args)`` in this process as one rank of a run, and returns its result.

    The environment variables ``RANK``, ``WORLD_SIZE`` and so on say which rank it is. If the ranks of a node are not
    numbered one after the other, all ranks are renumbered, and ``RANK`` is changed. Torch's default process group is
    created for the call, and destroyed when all ranks have done their work; if this rank fails, it is left.

    ``links`` is "sockets" to keep ranks of one machine from using shared memory. ``folder`` is a folder for temporary
    files, given if one process has started all ranks on this machine and removes it at the end. ``report`` is called
    with the error of a call over NCCL that does not complete in time, and ends the process. The other options are those
    of :func:`~shardwright.comm.launch.launch`.

    Raises: what ``work`` raises; LostPartnerError: another rank cannot be reached, or has ended early. PlanError: the
        ranks' devices or options do not fit.
    """
    timeout = timedelta(seconds=timeout_s)
    store, rank, size, nodes = _join_store(timeout, folder)
    if bind_cores:
        mine_there = [other for other, node in enumerate(nodes) if node == nodes[rank]] or [*range(size)]
        bind(mine_there.index(rank), len(mine_there))
    mine = rank_devices.found(device, socket.gethostname(), size)
    ranks = rank_devices.exchanged(mine, store, rank, size, forked=folder is not None)
    place, backend = rank_devices.decided(ranks, rank)
    recorder = Recorder()
    with _naming_lost_partners(rank, size):
        # no device_id: with one, NCCL splits each group off a parent group, and ranks outside of the new group would
        # have to take part
        wait = torch_timeout(timeout, over_nccl=backend in NATIVE)
        dist.init_process_group(backend, timeout=wait, store=store, rank=rank, world_size=size)
        call_checker = CallChecker(rank, timeout_s) if debug else None
        transport = ProcessTransport(
            rank, size, recorder, timeout, call_checker, links, folder, link, device=place, report=report
        )
    world = World(rank, size, place, transport, recorder, nodes=nodes)
    enter(world)
    waits = WaitWatchdog(rank, size, PrefixStore("waits", store), timeout_s, transport.fail, report)
    try:
        with _forked_ends():
            result = work(world, *args)
        world.wait_pending()
    except BaseException as failure:  # a request to stop too: a checkpoint under way is finished first
        world.join_writers()
        if isinstance(failure, CommunicationError):
            time.sleep(failures.GRACE_S)  # lets the rank that failed first write its note first
        raise
    finally:
        waits.close()
        world.stop.restore()
    waits.leave()
    transport.close()
    _end_together(rank, [place.index] if backend in NATIVE else None)
    transport.disconnect()
    dist.destroy_process_group()
    return result


@contextmanager
def _forked_ends() -> Iterator[None]:
    """Returns a context for this rank's work: if the work forks a process, that process ends here and does not go on.

    Otherwise the forked process would send messages that the ranks and the launcher take for messages of this rank.
    """
    own, code = os.getpid(), 0
    try:
        yield
    except BaseException as failure:
        if os.getpid() == own:
            raise
        code = 1
        if isinstance(failure, SystemExit):
            code = failure.code if isinstance(failure.code, int) else int(failure.code is not None)
        else:
            traceback.print_exc()
    if os.getpid() != own:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # what it has printed
            with suppress(OSError):
                stream.flush()
        os._exit(code)


def _join_store(timeout: timedelta, folder: str | None) -> tuple[Any, int, int, tuple[int, ...]]:
    """Returns torch's store of the run, this rank's number, the number of ranks, and the node of each rank.

    Torch's sockets are bound first: to the loopback interface if all ranks are on this machine. If the launcher of
    ``folder`` has started the ranks, there is one node, and the nodes are empty.
    """
    rank, size = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):  # torchrun on one machine: no other one needs to be reached
        for name, value in _NETWORK.items():
            os.environ.setdefault(name, value)
    else:
        os.environ.update(bind_sockets(os.environ))
    if folder is not None:
        return FileStore(f"{folder}/{STORE}", size), rank, size, ()
    store = _new_store(rank, size, timeout)
    rank, nodes, hosts = number_by_node(store, rank, size)
    elsewhere = [host for host, node in zip(hosts, nodes, strict=True) if node != nodes[rank]]
    # to the first node MASTER_ADDR is itself, and may be a loopback address
    os.environ.update(bind_sockets(os.environ, *elsewhere[:1]))
    os.environ["RANK"] = str(rank)  # rank 0 stays what it is
    return store, rank, size, nodes


@contextmanager
def _naming_lost_partners(rank: int, size: int) -> Iterator[None]:
    """Returns a context that raises LostPartnerError for errors of torch while ranks connect to each other."""
    try:
        yield
    except RuntimeError as failure:
        if isinstance(failure, CommunicationError | torch.AcceleratorError | NotImplementedError):
            raise  # they name a problem of this rank itself
        raise LostPartnerError(  # a rank that is connected already may have been killed
            "this rank could not connect to the others",
            given=f"rank {rank} of {size}; torch reports: {first_line(failure)}",
            allowed="ranks that all start, and reach each other",
            fix="see why another rank ended, and whether a firewall stands between",
        ) from failure


def _end_together(rank: int, device_ids: list[int | None] | None) -> None:
    """Waits until all ranks have done their work, so that none closes its connections while another still reads."""
    try:
        dist.barrier(device_ids=device_ids)
    except RuntimeError as failure:
        time.sleep(2 * failures.GRACE_S)  # lets a rank that waits in a call report first, with the call
        raise LostPartnerError(
            "another rank did not reach the end of its work",
            given=f"rank {rank} has reached its own; torch reports: {first_line(failure)}",
            allowed="ranks that make the same calls, and end together",
            fix="look for a call that only some ranks make: 'if rank == 0: x.sum().item()'",
        ) from failure


def run_processes(
    work: Callable[..., T], num_ranks: int, args: Sequence[Any], *, debug: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S, device: str = "auto", links: Links = "auto", link: Link | None = None,
    bind_cores: bool = False, grace_s: float = DEFAULT_GRACE_S,
) -> list[T]:  # fmt: skip
    """Runs ``work`` in ``num_ranks`` new processes of this machine, and returns the ranks' results in rank order.

    Each rank calls ``work(world, *args)``. ``work``, ``args`` and the results are pickled, by value where ranks cannot
    import what defines them (:mod:`~shardwright.comm.backends.task_pickle`). The options are those of
    :func:`~shardwright.comm.launch.launch`. The processes listen on no network but, where torch needs it, the machine's
    loopback. In this process's environment, ``OMP_NUM_THREADS`` is set to 1 if it is not set. If this is called in the
    main thread, a stop signal to this process or to the whole process group reaches every rank; ranks that have not
    ended ``grace_s`` seconds later are killed.

    Raises: RankFailedError: a rank raised or was killed; the others are ended within seconds. The library's own errors,
        such as PlanError and CommunicationError, are raised as they are. KeyboardInterrupt: the run was told to stop;
        by another signal than SIGINT it is a :class:`~shardwright.comm.failures.StopStatus`, and one line on stderr.
        PlanError: the system is not Linux or macOS, or a rank imports the program and so calls this function.
    """
    if os.name != "posix":
        raise PlanError(
            "ranks as processes need Linux or macOS",
            given=os.name,
            allowed="ranks as threads",
            fix='pass --ranks threads, or ranks="threads"',
        )
    _check_threads(os.environ.setdefault("OMP_NUM_THREADS", "1"))
    options = {"debug": debug, "timeout_s": timeout_s, "device": device, "links": links, "link": link,
               "bind_cores": bind_cores}  # fmt: skip
    try:
        program = spawn.get_preparation_data("rank")
    except RuntimeError:
        raise PlanError(
            "ranks are started while a rank imports the program",
            given="a call of launch or verify outside of if __name__ == '__main__':",
            allowed="such a call under it, since each rank that is a process imports the program first",
            fix='write if __name__ == "__main__": before the call',
        ) from None
    program["authkey"] = bytes(program["authkey"])
    work_pickled = dumps((work, tuple(args), options), main=is_importable(program))
    started = StartedRanks(grace_s)
    with started.running():
        for rank in range(num_ranks):
            pipes, pid = FORK_SERVER.fork()
            with suppress(OSError):  # the disk is full: a run needs none of these files
                (started.folder / f"{rank}.pid").write_text(str(pid))
            task = pickle.dumps((program, _environment(rank, num_ranks), str(started.folder), work_pickled))
            started.add(RankProcess.started(rank, pipes, pid, task))
        try:
            answers = [pickle.loads(result) for result in started.wait()]
        except KeyboardInterrupt as stop:
            if started.signalled in (0, signal.SIGINT):
                raise
            if not IS_COMMAND:  # the command prints its own text
                why = ": ".join(filter(None, [f"stopped by {signal.Signals(started.signalled).name}", str(stop)]))
                with suppress(OSError):  # it may be closed
                    os.write(2, f"{why}\n".encode())
            raise StopStatus(started.signalled, *stop.args) from None
    tell_trained(objects_of(work, args), (place for _, places in answers for place in places))
    return [result for result, _ in answers]


def _check_threads(text: str) -> None:
    """Raises PlanError unless a value of OMP_NUM_THREADS, such as "4" or "4,2", begins with a number of threads."""
    if not re.fullmatch("[1-9][0-9]{0,3}(,.*)?", text.strip()):
        raise PlanError(
            "OMP_NUM_THREADS is no number of threads",
            given=repr(text),
            allowed="1 to 9999 threads for each rank",
            fix="export OMP_NUM_THREADS=1, or unset it",
        )


def _environment(rank: int, num_ranks: int) -> dict[str, str]:
    """Returns the environment of a rank on one machine: torch's variables for its rank, and the loopback network."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    return {**os.environ, **{name: str(value) for name, value in place.items()}, **_NETWORK}


def rank_main(task: int, answer: int) -> None:
    """Runs one rank in a newly forked process, and then ends the process: this function does not return.

    The pickled function to run is read from the file descriptor ``task``, and its result, or a report of its failure,
    is written to the file descriptor ``answer``.
    """
    code = 1
    try:
        length = int.from_bytes(_read(task, 8), "little")
        program, environment, folder, work_pickled = pickle.loads(_read(task, length))
    except EOFError:  # the launcher has ended
        os._exit(code)
    os.environ.clear()
    os.environ.update(environment)
    rank = int(environment["RANK"])
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"].partition(",")[0]))
    _end_with_the_launcher(rank, task, folder)
    try:
        # as in a child of multiprocessing: prepare() then raises if the main script starts ranks when it is imported
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        spawn.prepare(program)
        del process.current_process()._inheriting  # type: ignore[attr-defined]
        work, args, options = pickle.loads(work_pickled)
        report = partial(_report_and_end, rank, answer)
        objects = objects_of(work, args)
        result = run_here(work, args, folder=folder, report=report, **options)
        answer_bytes = answer_of(RESULT, dumps((result, trained_among(objects)), main=is_importable(program)))
        code = 0
    except BaseException as failure:  # whatever it is, the launcher reports it
        answer_bytes = answer_of(NOTE, pickle.dumps(failures.note_of(rank, failure)))
        code = failures.INTERRUPTED if isinstance(failure, StopRequested) else 1
    with suppress(OSError), os.fdopen(answer, "wb") as pipe:  # the launcher may have ended
        pipe.write(answer_bytes)
    if not code:
        # runs finalizers and waits for threads, as a child of multiprocessing does at its end; os._exit does not
        util._exit_function()  # type: ignore[attr-defined]
        threading._shutdown()  # type: ignore[attr-defined]
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed before Python started
        with suppress(OSError):  # its reader may have gone
            stream.flush()
    os._exit(code)


def _report_and_end(rank: int, answer: int, failure: CommunicationError) -> NoReturn:
    """Sends the launcher the error of a call that did not complete, and ends the process, whose main thread waits."""
    os.write(answer, answer_of(NOTE, pickle.dumps(failures.note_of(rank, failure))))
    os._exit(1)


def _read(pipe: int, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        more = os.read(pipe, min(num_bytes - len(data), 2**20))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def _end_with_the_launcher(rank: int, task: int, folder: str) -> None:
    """Starts a thread that ends this rank when the launcher dies, and removes the run's temporary folder.

    The launcher holds the other end of the rank's task pipe, which the system closes when it dies.
    """

    def watch() -> None:
        while os.read(task, 1):
            pass
        if rank == 0:
            with suppress(OSError):  # it may be closed
                os.write(2, b"the process that started the ranks has ended, and so do they\n")
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _connected(rank: int, wait_s: float) -> TCPStore:
    """Returns torch's store at ``MASTER_ADDR``: torchrun's, or one that rank 0 opens without a wait for other ranks."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    within = timedelta(seconds=wait_s)
    try:
        return TCPStore(address, port, None, opens, timeout=within, multi_tenant=opens)
    except RuntimeError as failure:
        raise LostPartnerError(
            "the rank at which all others meet has not come" if not opens else "rank 0 cannot open the store",
            given=f"rank {rank}, which tried {address} port {port} for up to {wait_s:g} s; torch reports: "
            f"{first_line(failure)}",
            allowed="MASTER_ADDR, the machine of rank 0, and a MASTER_PORT that is free there and reached from all",
            fix="see whether rank 0 runs on that machine, and whether a firewall stands between",
        ) from failure


def _new_store(rank: int, size: int, timeout: timedelta) -> Any:
    """Returns torch's store, with a prefix that only the ranks of this attempt use.

    torch keeps one store over all restarts, so it still holds what the ranks of earlier attempts wrote, and no number
    that it gives is the same on every machine and new at every attempt. So each rank writes a random key, rank 0
    publishes the list of them, again when one changes, and starts once each rank has found its own in the list.
    """
    wait_s = max(timeout.total_seconds(), _START_S)
    store = _connected(rank, wait_s)
    mine, end = f"{os.urandom(8).hex()}@{socket.gethostname()}", time.monotonic() + wait_s
    names = [f"shardwright/{other}" for other in range(size)]

    pause_s = _FIRST_PAUSE_S

    def pause() -> None:
        nonlocal pause_s
        time.sleep(pause_s)  # polls: keys of earlier attempts exist already, so waiting for a key returns at once
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if time.monotonic() > end:
            there = {other: store.get(name).decode() for other, name in enumerate(names) if store.check([name])}
            missing = [other for other in range(size) if other not in there]
            hosts = ", ".join(sorted({key.partition("@")[2] for key in there.values()}))
            raise LostPartnerError(
                "not all ranks came to the start",
                given=f"after {wait_s:g} s {numbered(missing) if missing else 'no rank'} of {size} had not come; "
                f"{numbered(list(there))} had, on {hosts}",
                allowed="ranks that start within the timeout, or within a minute if that is longer",
                fix="see why they ended, in the lines above or on the machines that are not named",
            )

    store.set(names[rank], mine)
    keys: list[str] = []
    while rank == 0 and not (keys and store.check([f"shardwright/{mine}/{key}" for key in keys])):
        if store.check(names) and (now := [store.get(name).decode() for name in names]) != keys:
            keys = now
            store.set("shardwright/keys", json.dumps(keys))
            store.set(f"shardwright/{mine}/{mine}", "")
        pause()
    while mine not in keys:
        keys = json.loads(store.get("shardwright/keys")) if store.check(["shardwright/keys"]) else []
        pause()
    store.set(f"shardwright/{keys[0]}/{mine}", "")
    return PrefixStore(f"shardwright/{keys[0]}", store)
