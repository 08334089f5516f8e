"""A flat parameter: this rank's shard of several parameters, and their unsharded buffer while they are in use.

::

    unsharded    | qkv.weight             | proj.weight    | norm |       one buffer; the parameters are views of it
    shards       | rank 0     | rank 1     | rank 2     | rank 3  |       one all-gather fills the buffer, in place

Nothing is copied to join shards or to take parameters apart. While the buffer is freed or out of date, a parameter
keeps its shape, with one NaN for all its elements, so that computing with it by mistake shows in the loss. Integers,
which are never trained, have no NaN and get a zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from shardwright.comm.axis import Axis
from shardwright.comm.pending import Pending
from shardwright.errors import PlanError
from shardwright.mesh import balanced
from shardwright.runtime.gradient_sync import UNREACHED, is_reached, mark_reached
from shardwright.runtime.offload_storage import OffloadStorage
from shardwright.strategies.zero.resharded import GatheredParameter, ShardedParameter


class UpdateState(Enum):
    """What an optimizer update in the backward changed of a flat parameter: nothing, the shard, or the buffer too."""

    NOT_UPDATED = auto()
    SHARD_UPDATED = auto()  # the shard has the next step's values; a buffer unsharded before still has this step's
    UNSHARDED_UPDATED = auto()  # it was unsharded after the update: this step's values are gone


class FlatParameter:
    """Several parameters as one flat sequence, of which this rank stores a shard (FSDP's FlatParameter).

    The constructor copies this rank's shard out of ``parameters``, which are whole, and then reshards them in place; it
    sends nothing. ``ranges`` gives each parameter's range of the shard, empty if other ranks store all of it.

    :meth:`unshard` and :meth:`wait_for_unshard` all-gather the sequence into ``unsharded``, :meth:`reshard` frees it.
    With ``keeps_buffer`` (stages 1 and 2) the buffer's memory stays allocated. ``sharded_parameters`` are the
    tensors that the optimizer steps, by name: views of ``ranges`` of ``shard``.

    The unsharded buffer has the compute ``dtype``. A wider shard is the master weights, which are rounded before they
    are gathered. With ``fp32_sums`` gradients are summed in the shard's dtype, in one flat buffer that is sent as it
    is; otherwise they are sent as autograd has left them. With ``storage`` the shard is offloaded.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        axis: Axis,
        *,
        keeps_buffer: bool,
        dtype: torch.dtype | None = None,
        fp32_sums: bool = False,
        storage: OffloadStorage | None = None,
    ) -> None:
        self.parameters, self.axis = dict(parameters), axis
        self.keeps_buffer, self.fp32_sums = keeps_buffer, fp32_sums
        self._kinds = [type(p) for p in self.parameters.values()]
        self.shapes = [p.shape for p in self.parameters.values()]
        self.sizes = [p.numel() for p in self.parameters.values()]
        cuts = balanced(sum(self.sizes), axis.size)
        self.shard_sizes = [b - a for a, b in pairwise(cuts)]
        self.shard_range = cuts[axis.index], cuts[axis.index + 1]
        # For each parameter its first element in every rank's shard: there each rank finds the mark of `mark_reached`.
        self._marked = [
            sorted({max(a, cut) - a for cut in cuts if cut < b}) if a < b else [] for a, b in self._bounds()
        ]
        masters = torch.cat([p.detach().reshape(-1) for p in self.parameters.values()])
        unsharded = masters.to(dtype)
        self._storage = storage
        # The shard can be a view of the buffer only if the buffer stays, has its dtype and is in the same memory.
        self._shard_in_buffer = keeps_buffer and unsharded is masters and storage is None
        has_nan = unsharded.dtype.is_floating_point or unsharded.dtype.is_complex
        self._placeholder = unsharded.new_full((), float("nan")) if has_nan else unsharded.new_zeros(())
        own = masters[slice(*self.shard_range)]
        if storage is not None:
            self.shard = storage.empty(own.numel(), own.dtype).copy_(own)
            storage.put_away([self.shard])
        else:
            self.shard = own if self._shard_in_buffer else own.clone()
        self.ranges = self._ranges()
        self.sharded_parameters = {
            name: nn.Parameter(self.shard[a:b], requires_grad=self.parameters[name].requires_grad)
            for name, (a, b) in self.ranges.items()
        }
        self.unsharded: Tensor | None = unsharded
        self._written = [_written(parameter) for parameter in self.parameters.values()]
        self.shard_gradient: Tensor | None = None
        self.unreached = set(self.parameters)  # parameters that this rank's backward has not reached in this step
        self.update_state = UpdateState.NOT_UPDATED
        self._pending: Pending[Tensor] | None = None
        self._sums: Tensor | None = None  # the flat buffer of fp32_sums, of which `_accumulated` are views
        self._accumulated: dict[str, Tensor] = {}
        self.reshard()

    def _bounds(self) -> Iterable[tuple[int, int]]:
        """Returns the (start, stop) of each parameter in the flat sequence."""
        return pairwise(accumulate(self.sizes, initial=0))

    def _ranges(self) -> dict[str, tuple[int, int]]:
        """Returns each parameter's (start, stop) in this rank's shard; empty if other ranks store all its elements."""
        low, high = self.shard_range
        return {
            name: (min(max(a, low), high) - low, min(max(b, low), high) - low)
            for name, (a, b) in zip(self.parameters, self._bounds(), strict=True)
        }

    # ---- parameters

    def take_assigned(self) -> None:
        """Copies tensors that code has assigned to ``.data`` of sharded parameters to the shard; restores the views.

        Ranks all-gather the shard. Without this copy the optimizer would update the assigned tensors, but the forward
        would not use them.

        Raises: PlanError: they have another dtype or shape.
        """
        first, width = self.shard.data_ptr(), self.shard.element_size()
        for name, (start, stop) in () if self.shard.is_meta else self.ranges.items():
            parameter = self.sharded_parameters[name]
            if start < stop and parameter.data_ptr() != first + start * width:
                shard, values = self.shard[start:stop], parameter.detach()
                if shard.shape != values.shape or shard.dtype != values.dtype:
                    raise PlanError(
                        f"another kind of tensor was assigned to .data of run.parameters['{name}']",
                        given=f"{values.dtype} of shape {list(values.shape)}",
                        allowed=f"{shard.dtype} of shape {list(shard.shape)}, this rank's shard",
                        fix="write into it in place: parameter.data.copy_(values)",
                    )
                parameter.data = shard.copy_(values)

    def unshard(self) -> None:
        """Starts the all-gather of the shards; :meth:`wait_for_unshard` makes its result the parameters' values.

        All ranks of the axis call it. The buffer and what is sent have the compute dtype.
        """
        if self.update_state is UpdateState.SHARD_UPDATED:
            self.update_state = UpdateState.UNSHARDED_UPDATED
        if self.unsharded is None:
            self.unsharded = self._placeholder.new_empty(sum(self.sizes))
        if not self._shard_in_buffer:
            # Rounds master weights. Offloaded ones are moved to the device first, since a copy that rounds would block.
            self.unsharded[slice(*self.shard_range)].copy_(self.shard.to(self.unsharded.device, non_blocking=True))
            if self._storage is not None:
                self._storage.put_away([self.shard])
        self._pending = self.axis.all_gather_into_async(self.unsharded, self.shard_sizes)

    def wait_for_unshard(self) -> None:
        """Waits for the all-gather and makes the parameters views of the unsharded buffer."""
        assert self._pending is not None, "unshard() comes first"
        assert self.unsharded is not None, "unshard() comes first"
        self._pending.wait()
        self._pending = None
        parts = self.unsharded.split(self.sizes)
        for parameter, kind, shape, part in zip(self.parameters.values(), self._kinds, self.shapes, parts, strict=True):
            parameter.__class__ = kind
            parameter.data = part.view(shape)
        self._written = [_written(parameter) for parameter in self.parameters.values()]

    def mark_read(self, parameter: nn.Parameter) -> bool:
        """Gives a parameter that is read between steps the class :class:`GatheredParameter`; tells whether it did."""
        for (name, candidate), kind in zip(self.parameters.items(), self._kinds, strict=True):
            if candidate is parameter and type(candidate) is kind:
                candidate.__class__ = GatheredParameter
                shard = self.sharded_parameters[name]
                vars(candidate).update(path=name, shard=shard, keeps_writes=self._shard_in_buffer)
                return True
        return False

    def unmark(self) -> None:
        """Gives parameters that :meth:`mark_read` has marked their own class again, if they are still unsharded."""
        for parameter, kind in zip(self.parameters.values(), self._kinds, strict=True):
            if isinstance(parameter, GatheredParameter):
                parameter.__class__ = kind  # type: ignore[assignment]  # the class that it had

    def reshard(self) -> None:
        """Frees the unsharded buffer and sets the parameters to NaN (integers to 0), with their shapes unchanged.

        With ``keeps_buffer`` the buffer stays allocated. The memory of a freed buffer is returned when no view of it is
        left; autograd keeps none, because :meth:`Prefetcher.pack` replaces the views that it saves.

        Raises: PlanError: other code has written to a parameter since it was unsharded, and the shard lacks what was
            written. If the shard is a part of the buffer, code may write to parameters, but not replace their tensors.
        """
        for number, (name, parameter) in enumerate(self.parameters.items()):
            if isinstance(parameter, ShardedParameter):
                continue
            (version, place), (now, place_now) = self._written[number], _written(parameter)
            is_moved = place_now != place and not self._is_unchanged(number, parameter)
            if is_moved or (place_now == place and now != version and not self._shard_in_buffer):
                raise _lost_write(name)
        for (name, parameter), kind, shape in zip(self.parameters.items(), self._kinds, self.shapes, strict=True):
            parameter.__class__ = kind
            parameter.data = self._placeholder.expand(shape)
            ShardedParameter.hide(parameter, name, self.sharded_parameters[name])
        if not self.keeps_buffer:
            self.unsharded = None

    def _is_unchanged(self, number: int, parameter: nn.Parameter) -> bool:
        """Returns whether a parameter that lies elsewhere in memory has the values of the buffer.

        ``flatten_parameters`` of torch's recurrent layers copies their weights into memory of their own, on CUDA.
        """
        assert self.unsharded is not None, "it was unsharded"
        start, part = sum(self.sizes[:number]), parameter.detach()
        return part.shape == self.shapes[number] and torch.equal(
            part.reshape(-1), self.unsharded[start : start + self.sizes[number]]
        )

    # ---- gradients

    def accumulate_wide(self) -> None:
        """Moves the parameters' gradients into sums in the shard's dtype; does nothing without ``fp32_sums``."""
        if not self.fp32_sums or all(p.grad is None for p in self.parameters.values()):
            return
        for (name, parameter), part in zip(self.parameters.items(), self._parts_of_sums(), strict=True):
            if parameter.grad is None:
                continue
            if name in self._accumulated:
                self._accumulated[name].add_(parameter.grad)
            else:
                self._accumulated[name] = part.view(parameter.shape).copy_(parameter.grad)
            with torch._C.DisableTorchFunctionSubclass():
                parameter.grad = None

    def _parts_of_sums(self) -> list[Tensor]:
        """Returns the parameters' parts of the buffer for ``fp32_sums``, and allocates it if there is none."""
        if self._sums is None:
            self._sums = self._placeholder.new_empty(sum(self.sizes), dtype=self.shard.dtype)
        return list(self._sums.split(self.sizes))

    def reduce_scatter(self) -> Pending[Tensor]:
        """Starts the reduce-scatter of the parameters' gradients; returns a handle that waits for this rank's result.

        The result is 1-D, of the size of this rank's shard. All ranks of the axis call it. The parameters' ``.grad`` is
        set to None. For a parameter that this rank's backward did not reach, negative zeros are sent: from the sum
        :func:`is_reached` tells whether any rank's backward reached it.
        """
        gradients, reached = [], []
        self.accumulate_wide()
        parts: Sequence[Tensor | None] = self._parts_of_sums() if self.fp32_sums else [None] * len(self.sizes)
        for (name, parameter), marked, part in zip(self.parameters.items(), self._marked, parts, strict=True):
            gradient = self._accumulated.pop(name, parameter.grad)
            if gradient is not None:
                self.unreached.discard(name)
                gradients.append(gradient.contiguous())
                reached.append((gradients[-1], marked))
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = None
            else:
                empty = self._placeholder.new_empty(parameter.numel()) if part is None else part
                gradients.append(empty.fill_(UNREACHED))
        mark_reached(reached)
        if self._sums is not None:
            gradients, self._sums = [self._sums], None
        return self.axis.reduce_scatter_together_async(gradients, self.shard_sizes)

    def accumulate_shard(self, gradient: Tensor) -> None:
        """Adds ``gradient``, the result of one reduce-scatter, to the shard's gradient, in the shard's dtype."""
        gradient = gradient.to(self.shard.dtype)
        self.shard_gradient = gradient if self.shard_gradient is None else self.shard_gradient.add_(gradient)

    def summing(self) -> Iterator[Tensor]:
        """Yields the tensors that sum gradients until these are published (set as ``.grad``)."""
        return (tensor for tensor in (self.shard_gradient, self._sums) if tensor is not None)

    def discard_gradients(self) -> None:
        """Drops all gradients of the parameters and of the shard that are not published (set as ``.grad``) yet.

        It is called before each step and each evaluation, because the step before may have failed.
        """
        self.shard_gradient, self.unreached = None, set(self.parameters)
        self._accumulated.clear()
        self._sums = None
        with torch._C.DisableTorchFunctionSubclass():  # clears no .grad of shards: published ones stay
            for parameter in self.parameters.values():
                parameter.grad = None

    def publish_gradients(self) -> None:
        """Sets ``.grad`` of the sharded parameters for the optimizer, and clears the accumulated gradient of the shard.

        A parameter that no rank's backward has reached gets None, as on one device; where this rank stores none of its
        elements, the gradient may be empty instead. If the shard is offloaded, the copy of the gradient to the host is
        only started.
        """
        summed = self.shard_gradient
        gradient = None if summed is None else summed.to(self.shard.device, non_blocking=True)
        for name, (a, b) in self.ranges.items():
            part = None if gradient is None else gradient[a:b]
            if name in self.unreached and summed is not None and a < b and not is_reached(summed[a:b]):
                part = None  # no rank's backward reached it: no gradient and no weight decay, as on one device
            self.sharded_parameters[name].grad = part
        self.shard_gradient, self.unreached = None, set(self.parameters)


def _written(parameter: nn.Parameter) -> tuple[int, int]:
    """Returns a number that changes when code writes to the parameter, and the place of its elements in memory.

    The number is 0 for a parameter of which torch does not count the writes.
    """
    return 0 if parameter.is_inference() else parameter._version, parameter.data_ptr()


def _lost_write(name: str) -> PlanError:
    return PlanError(
        f"what was written to '{name}' of run.model would be lost: it is gathered from the ranks' shards",
        given="a write to the unsharded copy of a parameter, as by torch.nn.init or in a forward",
        allowed="writes to the plain model before sw.parallelize, and to run.parameters",
        fix="write run.load_state_dict({...}, strict=False), which takes whole tensors by name",
    )
