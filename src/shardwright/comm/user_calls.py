"""Finds the call of the library that user code has made, such as ``sw.save``, in the frames of a rank's thread."""

from __future__ import annotations

from pathlib import Path
from types import FrameType

_COMM = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])


def call_of_user(frame: FrameType | None) -> str:
    """Returns the function of the library through which user code, or the start of a rank, came to ``frame``.

    The innermost frames, those of this package ``comm``, do not count. The library may call user code in turn, such as
    a model's forward, which calls the library again: then the outermost call counts, such as ``run.step``.
    """
    return place_of_user(frame)[0]


def place_of_user(frame: FrameType | None) -> tuple[str, str]:
    """Returns the user's call of the library, as :func:`call_of_user`, and where user code makes it.

    The place is text such as "line 12 of train.py", or "" if no user code is among the frames.
    """
    call, outer, where = "", "", ""
    while frame is not None and frame.f_code.co_filename.startswith(_COMM):
        outer, frame = frame.f_code.co_qualname, frame.f_back
    inside = True
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_COMM):  # the start of a rank
            break
        if name.startswith(_PACKAGE):
            call, inside = frame.f_code.co_qualname, True
        elif inside and not name.endswith("contextlib.py"):  # torch's too, as of torch.no_grad
            where, inside = f"line {frame.f_lineno} of {Path(name).name}", False
        frame = frame.f_back
    if not call:
        return outer, where
    if "." not in call:
        return f"sw.{call}", where
    return (f"run.{call[4:]}" if call.startswith("Run.") else call), where
