"""Records how a constructor fills a model's tensors on the meta device, so that each can be filled later on its own.

A constructor may write a parameter several times, and by rules that look at the whole model: ``normal_`` with a smaller
deviation for the last layer of each block, a copy of another layer, a table made with ``torch.arange``. On the meta
device these calls compute nothing. :class:`WriteRecorder` notes every operator that writes, so that the values of one
tensor can be computed without those of the others::

    constructor    a.normal_(0, 1)    b.normal_(0, 1)    a.mul_(0.5)    b.copy_(a)    b.zero_()
    values of a    a.normal_(0, 1)                       a.mul_(0.5)
    values of b                                                                       b.zero_()

Views need no record: a tensor is identified by its storage and by its offset, shape and strides there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn, strided
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from shardwright.initial_values.recorded_writes import RecordedValues, view_of
from shardwright.initial_values.write_recorder import RECORDED, WriteRecorder

__all__ = ["ModuleRecorder", "keep_record", "recorded_values"]

_OF_THREAD = threading.local()


class ModuleRecorder:
    """A context that records how new modules fill their parameters and buffers on the meta device.

    :func:`recorded_values` returns the records. Modules that other threads make are not recorded.

    Raises: NoValuesError: a constructor reads values that are not known, such as random ones; or, at the end of the
        context, it has written to host memory whose values were already recorded.
    """

    def __init__(self) -> None:
        self.recorder = WriteRecorder()
        self.registered: list[ReferenceType[Tensor]] = []

    def __enter__(self) -> None:
        self._outer = getattr(_OF_THREAD, "recorder", None)
        _OF_THREAD.recorder = self
        self.recorder.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self.recorder.__exit__(*failure)
        _OF_THREAD.recorder = self._outer
        if failure[0] is None:
            self.recorder.check_kept()
        self.recorder.mark()
        for weak in self.registered:
            tensor = weak()
            if tensor is not None and tensor.is_meta and not is_lazy(tensor):
                setattr(tensor, RECORDED, self.recorder.of(tensor))


def recorded_values(tensor: Tensor) -> RecordedValues | None:
    """Returns the record of how a module's constructor filled a tensor, or None if it was not recorded."""
    record: RecordedValues | None = getattr(tensor, RECORDED, None)
    if record is None and tensor.is_meta and tensor.layout is strided:
        written, number = getattr(tensor.untyped_storage(), RECORDED, (None, 0))
        record = None if written is None else RecordedValues(written, view_of(tensor, number))
    return record


def keep_record(tensor: Tensor, copy: Tensor) -> Tensor:
    """Attaches to ``copy``, a copy of a meta tensor, the record of how ``tensor`` was filled, and returns ``copy``.

    Nothing is attached if ``tensor`` has no record, or if ``copy`` is not on the meta device.
    """
    record = recorded_values(tensor)
    if record is not None and copy.is_meta:
        setattr(copy, RECORDED, record)
    return copy


def _register(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    recorder = getattr(_OF_THREAD, "recorder", None)
    if recorder is not None and tensor is not None:
        recorder.registered.append(ref(tensor))


register_module_parameter_registration_hook(_register)
register_module_buffer_registration_hook(_register)


@contextmanager
def without_values() -> Iterator[None]:
    """Returns a context in which models are built on the meta device, so that no initial values are drawn or stored.

    Use it to build a model that is too large for one host. How the constructors would have filled the parameters is
    recorded, and a run draws such values when it starts, on each rank those of its shard alone.

    Raises: NoValuesError: a constructor needs values that are not known, such as random ones.

    >>> with without_values():
    ...     layer = nn.Embedding(10**9, 4096)
    >>> layer.weight.device.type
    'meta'
    """
    with torch.device("meta"), ModuleRecorder():
        yield
