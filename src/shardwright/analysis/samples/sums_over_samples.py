"""Follows the values of a recorded run that are sums over samples, that depend on parameters, and that outputs need."""

from __future__ import annotations

from collections.abc import Collection

from shardwright.analysis.dims.run_axes import DimAxis, RunAxes, leaves
from shardwright.analysis.recorded.recording import RecordedCall, Recording, TensorUse

_SUMS = frozenset((
    "sum", "nansum", "mean", "var", "std", "var_mean", "logsumexp", "prod", "norm", "linalg_vector_norm",
    "_foreach_norm", "mm", "bmm", "addmm", "baddbmm", "linear", "mv", "addmv", "dot",
))  # fmt: skip
"""Operators that compute one value from many.

Operators that pick a sample, such as an index, are left out, because masks use them. So is a maximum, because code may
use it for precision alone; :func:`meetings` reports it.
"""

_LOSSES = frozenset((
    "binary_cross_entropy", "huber_loss", "mse_loss", "nll_loss2d_forward", "nll_loss_forward", "smooth_l1_loss",
    "soft_margin_loss",
))  # fmt: skip
"""Operators that compute one value from all samples, if their result is a single number."""

_SOLVES = frozenset(("_linalg_solve_ex", "cholesky_solve", "linalg_lu_solve", "linalg_solve_triangular"))
"""Operators that solve with a matrix: one that is made of several samples goes back into each sample's result."""


def sums_over_samples(
    recording: Recording, axes: RunAxes, more: Collection[DimAxis] = ()
) -> tuple[dict[TensorUse, RecordedCall], list[RecordedCall]]:
    """Returns the values that were summed over samples, each with the operator that summed, and the sums that go back.

    Such a value depends on several samples and has no dim of samples. The list has the operators whose sums go back
    into each sample, in the order of the run. ``more`` has further axes whose indices count as samples.
    """
    samples = axes.of_samples(recording.inputs).union(more)
    known: dict[TensorUse, bool] = {}

    def has_samples(use: TensorUse) -> bool:
        if use not in known:
            known[use] = any(leaf in samples for axis in axes.of(use) if axis.size > 1 for leaf in leaves(axis))
        return known[use]

    sums: dict[TensorUse, RecordedCall] = {}
    back: list[RecordedCall] = []
    bases = recording.bases
    for call in recording.calls:
        origin = next((sums[use] for use in call.operands if use in sums and not has_samples(use)), None)
        valued = [use for use in call.operands if use.has_fractions]
        is_sum = call.name.removesuffix("_") in _SUMS or (call.name in _LOSSES and not call.results[0].shape)
        if origin is None and is_sum and any(map(has_samples, valued)):
            origin = call
        elif origin is not None and any(map(has_samples, call.operands if call.name in _SOLVES else call.results)):
            back.append(origin)
        if origin is not None:
            made = {*call.results, *call.written, *(bases.get(use, use) for use in (*call.results, *call.written))}
            sums.update((use, origin) for use in made if not has_samples(use))
    return sums, back


def trained_values(recording: Recording) -> set[TensorUse]:
    """Returns the values that depend on parameters; where code writes one into a view, so does the view's base."""
    bases, values = recording.bases, {*recording.parameters.values()}
    for call in recording.calls:
        if not values.isdisjoint(call.operands):
            values.update(call.results, call.written, (bases.get(use, use) for use in call.written))
    return values


def leading_to(recording: Recording, outputs: Collection[TensorUse] | None = None) -> set[TensorUse]:
    """Returns the values that ``outputs`` depend on, by default all outputs of the recording.

    A tensor that code writes to through a view depends on what it writes.
    """
    bases, values = recording.bases, {*(recording.outputs if outputs is None else outputs)}
    written_to = {bases.get(use, use) for use in values}
    for call in reversed(recording.calls):
        is_written = any(bases.get(use, use) in written_to for use in call.written)
        if is_written or not values.isdisjoint(call.results):
            values.update(call.operands)
            written_to.update(bases.get(use, use) for use in call.operands)
    return values
