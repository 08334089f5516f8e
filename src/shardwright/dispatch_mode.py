"""The base class of dispatch modes that see a model's operators on the meta device, or write them down."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not make torch import its compiler, which takes about a second.

    torch keeps its compiler out of the code of a mode, for which it imports it at the mode's first operator. So this
    class is for analysis alone: under modes of real steps, which may run compiled code, the compiler must be kept out.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
