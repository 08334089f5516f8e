"""One rank's slice of a group of parameters, and the whole of it while that is needed.

The whole is one buffer, and the parameters are views of it: gathering fills it in place, and nothing is copied to join
or to cut. While it is not there, or is out of date, a parameter has its own shape and one NaN for all its elements: who
computes with it by mistake sees it. Integers, which nothing trains, have no NaN: there it is a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from shardwright.comm.axis import Axis, Pending
from shardwright.mesh import balanced
from shardwright.runtime.offload_storage import OffloadStorage
from shardwright.runtime.unused_parameters import NOTHING, is_reached, mark_reached


class Flat:
    """The parameters of a group, flat: this rank's slice of them, which ``resting`` parameters are views of.

    :meth:`gather` and :meth:`arrive` make the whole, :meth:`drop` ends that; with ``keeps`` its memory stays, and the
    slice is a part of it. ``gradient`` is the slice's, once it is summed.

    The whole is in the ``dtype`` that the parameters compute in; where the slice is wider, it is the master, and the
    whole is made of what it is rounded to. ``wide`` sums gradients as wide as the slice. With ``storage`` the slice
    rests there, apart from the whole. ``is_updated`` says that it has the next step's values while a backward still
    runs, ``shows_next`` that the whole has them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        axis: Axis,
        *,
        keeps: bool,
        dtype: torch.dtype | None = None,
        wide: bool = False,
        storage: OffloadStorage | None = None,
    ) -> None:
        self.parameters, self.axis, self.keeps, self.wide = dict(parameters), axis, keeps, wide
        self.shapes = [p.shape for p in self.parameters.values()]
        self.sizes = [p.numel() for p in self.parameters.values()]
        cuts = balanced(sum(self.sizes), axis.size)
        self.part_sizes = [b - a for a, b in pairwise(cuts)]
        self.range = cuts[axis.index], cuts[axis.index + 1]
        bounds = pairwise(accumulate(self.sizes, initial=0))
        self._firsts = [sorted({max(a, low) - a for low in cuts if low < b}) if a < b else [] for a, b in bounds]
        masters = torch.cat([p.detach().reshape(-1) for p in self.parameters.values()])
        whole = masters.to(dtype)
        self._storage = storage
        self._is_part = keeps and whole is masters and storage is None
        has_nan = whole.dtype.is_floating_point or whole.dtype.is_complex
        self._dropped = whole.new_full((), float("nan")) if has_nan else whole.new_zeros(())
        self.slice = self._at_rest(masters[slice(*self.range)])
        self.ranges = self._ranges()
        self.resting = {
            name: nn.Parameter(self.slice[a:b], requires_grad=self.parameters[name].requires_grad)
            for name, (a, b) in self.ranges.items()
        }
        self.whole: Tensor | None = whole
        self.gradient: Tensor | None = None
        self.unreached = set(self.parameters)
        self.is_updated = False
        self.shows_next = False
        self._pending: Pending[Tensor] | None = None
        self._kept: dict[str, Tensor] = {}
        self.drop()

    def _at_rest(self, values: Tensor) -> Tensor:
        if self._storage is None:
            return values if self._is_part else values.clone()
        home = self._storage.empty(values.numel(), values.dtype).copy_(values)
        self._storage.put_away([home])
        return home

    def _ranges(self) -> dict[str, tuple[int, int]]:
        """Of each parameter, the part of the slice that is its."""
        low, high = self.range
        bounds = pairwise(accumulate(self.sizes, initial=0))
        return {
            name: (min(max(a, low), high) - low, min(max(b, low), high) - low)
            for name, (a, b) in zip(self.parameters, bounds, strict=True)
        }

    @property
    def num_elements(self) -> int:
        """How long the whole is."""
        return sum(self.sizes)

    # ---- the whole

    def gather(self) -> None:
        """Starts to make the whole; the parameters show it once :meth:`arrive` has returned."""
        self.shows_next = self.is_updated
        if self.whole is None:
            self.whole = self._dropped.new_empty(self.num_elements)
        if not self._is_part:
            self.whole[slice(*self.range)].copy_(self.slice)
            if self._storage is not None:
                self._storage.put_away([self.slice])
        self._pending = self.axis.all_gather_into_async(self.whole, self.part_sizes)

    def arrive(self) -> None:
        """Waits for what :meth:`gather` has started."""
        assert self._pending is not None, "gathered"
        self._pending.wait()
        self._pending = None
        assert self.whole is not None, "gathered"
        for parameter, shape, part in zip(
            self.parameters.values(), self.shapes, self.whole.split(self.sizes), strict=True
        ):
            parameter.data = part.view(shape)

    def drop(self) -> None:
        """Lets go of the whole, or of showing it where it is kept, since it is out of date.

        Its memory is free as soon as nobody else holds a view of it.
        """
        for parameter, shape in zip(self.parameters.values(), self.shapes, strict=True):
            parameter.data = self._dropped.expand(shape)
        if not self.keeps:
            self.whole = None

    # ---- gradients

    def keep_gradients(self) -> None:
        """Adds a microbatch's gradients to what was kept of others, as wide as the slice, where these are summed so."""
        for name, parameter in self.parameters.items() if self.wide else ():
            if parameter.grad is not None:
                gradient = parameter.grad.to(self.slice.dtype)
                self._kept[name] = self._kept[name].add_(gradient) if name in self._kept else gradient
                parameter.grad = None

    def send_gradients(self) -> Pending[Tensor]:
        """Starts the sum of the parameters' gradients over the axis, of which each member keeps its slice's.

        The gradients are let go of. A parameter without one, which backward did not reach, counts as zeros.
        """
        gradients, reached = [], []
        self.keep_gradients()
        for (name, parameter), firsts in zip(self.parameters.items(), self._firsts, strict=True):
            gradient = self._kept.pop(name, parameter.grad)
            if gradient is not None:
                self.unreached.discard(name)
                gradients.append(gradient.contiguous())
                reached.append((gradients[-1], firsts))
                parameter.grad = None
            else:
                like = self.slice if self.wide else self._dropped
                gradients.append(like.new_full((parameter.numel(),), NOTHING))
        mark_reached(reached)
        return self.axis.reduce_scatter_together_async(gradients, self.part_sizes)

    def add_gradient(self, gradient: Tensor) -> None:
        """Adds to the slice's gradient."""
        gradient = gradient.to(self.slice.dtype)
        self.gradient = gradient if self.gradient is None else self.gradient.add_(gradient)

    def forget_gradient(self) -> None:
        """Lets go of gradients that nobody will be shown."""
        self.gradient, self.unreached = None, set(self.parameters)
        self._kept.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def show_gradient(self) -> None:
        """Gives the resting parameters their gradients; the next step starts from none."""
        gradient = None if self.gradient is None else self.gradient.to(self.slice.device)
        for name, (a, b) in self.ranges.items():
            part = None if gradient is None else gradient[a:b]
            if name in self.unreached and part is not None and part.numel() and not is_reached(part):
                part = None  # no rank's forward did: as on one device
            self.resting[name].grad = part
        self.gradient, self.unreached = None, set(self.parameters)
