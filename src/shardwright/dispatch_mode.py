"""The base class of shardwright's dispatch modes, which see every operator that torch runs."""

from __future__ import annotations

import sys
from typing import Any

from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does not make torch import its compiler, which takes about a second.

    torch keeps its compiler out of the code of a mode, and imports it for that at the mode's first operator. Here the
    compiler is kept out once something else has imported it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        own = cls.__dict__.get("__torch_dispatch__")
        if own is not None:
            apart = _disable_dynamo(own)  # imports the compiler when it is called

            def dispatch(*args: Any, **named: Any) -> Any:
                return (apart if "torch._dynamo" in sys.modules else own)(*args, **named)

            cls.__torch_dispatch__ = dispatch  # type: ignore[method-assign]  # as torch's own class does
