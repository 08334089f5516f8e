"""The base class of the torch dispatch modes that analyze a model by the operators that it calls."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A ``TorchDispatchMode`` that does not make torch import its compiler, which takes about a second.

    torch disables its compiler inside the code of a mode, and for that imports the compiler at the mode's first
    operator. This class turns that off, so it is for analysis alone: a mode of real training steps, in which compiled
    code may run, must subclass ``TorchDispatchMode`` itself.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
