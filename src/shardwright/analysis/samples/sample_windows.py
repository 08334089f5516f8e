"""Tells which operators compute one sample's values from others, because a dim that they need whole holds the samples.

Examples are convolutions, pooling and norms along the dim of samples, attention whose tokens are the samples, and sums
over groups of samples.
"""

from __future__ import annotations

from collections.abc import Collection

from shardwright.analysis.dims.dim_letters import Concat, Dim, DimLetters, Role
from shardwright.analysis.dims.operator_dims import relation_of
from shardwright.analysis.dims.run_axes import DimAxis, RunAxes, leaves
from shardwright.analysis.recorded.recording import RecordedCall, TensorUse

_POOLS = frozenset((
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
))  # fmt: skip
"""Operators that pool over windows along the last dims; argument 1 is the size of the windows."""

_RESIZES = frozenset((
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "adaptive_avg_pool2d",
    "adaptive_max_pool2d", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
))  # fmt: skip
"""Operators that mix all elements along a dim if they change its size."""

_NORMS = frozenset(("_fused_rms_norm", "native_group_norm", "native_layer_norm"))

_SCATTERS = frozenset(("index_add", "index_reduce", "scatter_add", "scatter_reduce"))
"""Operators that add the elements of argument 3, along the dim of argument 1, to the places that an index names."""


_MATRIX_NAMES = ("linalg_", "_linalg_", "cholesky", "geqrf", "qr", "svd")
"""Prefixes of the names of matrix operators, such as factorizations: each element of their result depends on a whole
matrix, which is in the last two dims of the first operand."""

_OF_VECTORS = frozenset(("cholesky_solve", "linalg_cross", "linalg_vector_norm"))
"""Operators with a name like those, but whose first operand is not a matrix that is needed whole."""


def needs_other_samples(call: RecordedCall, axes: RunAxes, batch: Collection[DimAxis]) -> bool:
    """Returns whether an operator mixes samples, because a dim along which it mixes elements holds the samples.

    ``batch`` has the axes of the samples (:meth:`RunAxes.of_samples`). Known here are only convolutions, pooling,
    interpolation, norms, attention, matrix factorizations and operators that compare all rows. The result is False for
    any other operator.
    """
    x = call.operands[0] if call.operands else None
    if x is None or not x.dtype.is_floating_point:
        return False

    def holds(use: TensorUse, dim: int) -> bool:
        return any(leaf in batch for leaf in leaves(axes.of(use)[dim]))

    name, last = call.name, len(x.shape)
    if name == "convolution":
        kernel = call.operands[1].shape[2:]
        return any(size > 1 and holds(x, 2 + number) for number, size in enumerate(kernel))
    if name in _POOLS:
        sizes = [call.args[1]] if isinstance(call.args[1], int) else list(call.args[1])
        spaces = next(int(char) for char in name if char.isdigit())
        sizes = sizes * spaces if len(sizes) == 1 else sizes
        return any(size > 1 and holds(x, last - spaces + number) for number, size in enumerate(sizes))
    if name in _RESIZES:
        after = call.results[0].shape
        return any(n != m and holds(x, dim) for dim, (n, m) in enumerate(zip(x.shape, after, strict=True)))
    if name in _NORMS:
        relation = relation_of(call)
        own = relation.operands[0] or ()
        return any(_is_whole(dim, relation.letters) and holds(x, number) for number, dim in enumerate(own))
    if name == "scaled_dot_product_attention":
        keys = call.operands[1]
        is_masked = call.argument(3, "attn_mask") is not None
        tokens = set(leaves(axes.of(keys)[-2]))
        # where each sample is several tokens in a row, the mask may keep the samples apart
        return not tokens.isdisjoint(batch) and (not is_masked or tokens <= {*batch})
    return any(holds(x, dim) for dim in _mixed_dims(call, last))


def _mixed_dims(call: RecordedCall, num_dims: int) -> Collection[int]:
    """Returns the dims of operand 0, which has ``num_dims``, whose elements an operator without a dim rule mixes."""
    name = call.name.removesuffix("_")
    if name.startswith(_MATRIX_NAMES) and name not in _OF_VECTORS:
        return range(num_dims)[-2:]
    if name == "renorm":
        return {*range(num_dims)} - {call.args[2] % num_dims}
    if name in ("dist", "_pdist_forward", "pdist"):
        return range(num_dims)
    return [call.argument(4, "axis", 0) % num_dims] if name == "segment_reduce" else ()


def adds_up_groups(call: RecordedCall, axes: RunAxes, batch: Collection[DimAxis], count: int) -> bool:
    """Returns whether an operator adds up samples in groups that an index names, such as ``index_add``.

    ``count`` is the number of samples. An operator that puts its sums back into a dim of samples does not count.
    """

    def holds(use: TensorUse, dim: int) -> bool:
        return any(leaf in batch for leaf in leaves(axes.of(use)[dim]))

    name = call.name.removesuffix("_")
    if name in ("index_put", "_index_put_impl") and call.argument(3, "accumulate", False) is True:
        target, source = call.args[0], call.args[2]
        into = any(holds(target, dim) for dim in range(len(target.shape)))
        return bool(source.shape) and source.dtype.is_floating_point and not into and holds(source, 0)
    if name not in _SCATTERS or len(call.args) < 4 or not isinstance(call.args[3], TensorUse):
        return False
    target, source = call.args[0], call.args[3]
    if not source.shape or not source.dtype.is_floating_point:
        return False
    dim = call.args[1] % len(source.shape)
    into = holds(target, dim) or target.shape[dim] % count == 0
    return not into and holds(source, dim)


def _is_whole(dim: Dim, letters: DimLetters) -> bool:
    whole = (Role.WHOLE, Role.NORM)
    return any(not isinstance(piece, Concat) and letters.roles[piece] in whole for piece in dim)
