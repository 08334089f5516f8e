"""Runs torchrun as a program, but exits with the code of the rank that failed first; torchrun itself exits with 1."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except ChildFailedError as failure:
        sys.stderr.write(f"{failure}\n")
        sys.exit(failure.get_first_failure()[1].exitcode)
