"""Forks the ranks of a world on nodes from one process, so that torch is imported once; ``nodes.world_on`` starts it.

python node_ranks.py RANKS SCRIPT WORDS...    RANKS is JSON: of each rank a process on its node, its variables, and the
descriptors of its input, its output and, if it is named, its errors. Each rank runs the script with the words.
"""

import ctypes
import gc
import json
import os
import runpy
import sys
import traceback
from importlib import import_module


def run(rank, ranks, script, words):
    """What a fork does: goes to its node, and runs the script as a program of its own."""
    pid, variables, *mine = ranks[rank]
    for descriptor in {each for _, _, *others in ranks for each in others} - {*mine}:
        os.close(descriptor)  # else a rank that ends would not be noticed
    space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(space, 0):
        raise OSError(ctypes.get_errno(), f"rank {rank} cannot go to its node")
    for number, descriptor in enumerate(mine):
        os.dup2(descriptor, number)
    os.environ.update(variables)
    sys.argv = [script, *words]
    gc.freeze()
    gc.enable()
    runpy.run_path(script, run_name="__main__")


def main():
    ranks, (script, *words) = json.loads(sys.argv[1]), sys.argv[2:]
    gc.disable()  # until ranks are forked: a quarter of the time of these imports
    for name in ("torch._dynamo", "shardwright"):  # optimizers load the first
        import_module(name)
    for rank in range(len(ranks)):
        if os.fork() == 0:
            code = 1
            try:
                run(rank, ranks, script, words)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in ranks]  # negative for a signal
    sys.exit(int(any(codes)))


if __name__ == "__main__":
    main()
