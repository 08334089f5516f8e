"""Runs torchrun as a program that says which nodes it waits for, and exits with the code of the rank that failed first.

torchrun itself waits in silence, ends with a timeout that names nobody, and exits with 1. Options and environment
variables are those of torchrun::

    python -m shardwright.cluster.torchrun --nnodes 2 --nproc-per-node 8 ... --module shardwright.cli train ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import get_rdzv_endpoint, main, parse_args

from shardwright.cluster.node_wait import NodeWait
from shardwright.errors import CommunicationError

PORTS = {"static": 29500, "c10d": 29400}
"""The ports at which torchrun's nodes meet if its options name none, by the kind of rendezvous."""


def wait_of(words: Sequence[str]) -> NodeWait | None:
    """Returns the :class:`NodeWait`, which tells which nodes have come, for the arguments of a torchrun command.

    The result is None if the command is for one node, if the nodes do not meet at a TCP store of torch, or if torchrun
    refuses the options, for which it gives its own error.
    """
    try:
        with redirect_stderr(StringIO()):
            args = parse_args([*words])
        fewest, _, most = str(args.nnodes).partition(":")
        if args.standalone or args.rdzv_backend not in PORTS or "store_type=file" in args.rdzv_conf.replace(" ", ""):
            return None
        is_static = args.rdzv_backend == "static"
        num_nodes = int(most or fewest if is_static else fewest)
        endpoint = get_rdzv_endpoint(args).removesuffix(":None")
        host, port = parse_rendezvous_endpoint(endpoint, default_port=PORTS[args.rdzv_backend])
    except (ValueError, TypeError, SystemExit):
        return None
    if num_nodes < 2:
        return None
    rank = args.node_rank if is_static else None
    return NodeWait(host, port, num_nodes, rank, args.local_addr or "", str(args.rdzv_id))


@contextmanager
def named_if_missing(wait: NodeWait) -> Iterator[None]:
    """Returns a context that says which nodes have come, and raises an error that names them if the others never come.

    Raises: CommunicationError: torchrun gave up before all nodes had come.
    """
    with wait:
        try:
            yield
        except (RendezvousError, DistError, TimeoutError) as failure:
            if wait.are_complete or wait.is_started:
                raise
            longer = "timeout=SECONDS" if wait.has_number else "join_timeout=SECONDS,read_timeout=SECONDS"
            raise CommunicationError(
                "not all nodes came",
                given=f"after {wait.waited_s:.0f} s {wait.seen()}",
                allowed=f"{wait.num_nodes} nodes",
                fix=f"start the same command on each of them; --rdzv-conf {longer} waits longer",
            ) from failure


def run(words: Sequence[str]) -> int:
    """Runs torchrun with these arguments, and returns the exit code of the rank that failed first, or 0."""
    wait = wait_of(words)
    try:
        with nullcontext() if wait is None else named_if_missing(wait):
            main([*words])
    except ChildFailedError as failure:
        sys.stderr.write(f"{failure}\n")
        return int(failure.get_first_failure()[1].exitcode)
    except CommunicationError as failure:
        sys.stderr.write(f"error: {failure}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
