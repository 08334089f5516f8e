"""The base class of shardwright's dispatch modes, which see every operator that torch runs."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not make torch import its compiler, which takes a second in each rank.

    By default torch keeps its compiler out of the code of a mode, for which it imports it at the mode's first operator.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
