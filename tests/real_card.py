"""A card that is there in place of the pretend accelerator, for the tests of ``tests_acc`` that mean the same on both.

``make test-card`` runs them. Ranks are threads of one process, and share the card.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from accelerator import short_file
from shardwright.element_hash import random_bits

_OWN_FILES = ("tests/real_card.py", "warnings.py", "contextlib.py")
_WAITS = "synchronizing CUDA operation"
"""What torch says of each operator for which the host waits, in its debugging mode."""


class Card:
    """The card that torch takes by default; ``device`` is what tensors are moved to."""

    tells_what = False
    """torch says where the host waits for a card, and not for which operator."""

    def __init__(self) -> None:
        self.device = torch.device(torch.accelerator.current_accelerator().type, 0)
        random_bits([1], torch.arange(2, device=self.device), torch.zeros(2, dtype=torch.int64, device=self.device), [])
        # the kernel of dropout is compiled here, since torch's compiler is not for several threads at once

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Returns a context with a counter of the places where the host waits in it, on all threads of ranks."""
        stops: Counter[str] = Counter()
        module, lock = torch.get_device_module(self.device.type), threading.Lock()

        def count(message: object, *_: object, **__: object) -> None:
            if _WAITS in str(message) and not threading.current_thread().name.startswith("ThreadPoolExecutor"):
                with lock:
                    stops[f"wait at {_place()}"] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = count
            module.set_sync_debug_mode("warn")
            try:
                yield stops
            finally:
                module.set_sync_debug_mode("default")


def _place() -> str:
    """Returns the file and line of the library, or of the test, that asked for what the host waits for."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.endswith(_OWN_FILES):
            return f"{short_file(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
