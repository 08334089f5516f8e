"""What global tensors make of dtypes: torch's default one, narrow ones, complex ones."""

from __future__ import annotations

import torch

from shardwright.global_tensor import arange, placement, sbp


def halved_under_two_defaults(world) -> None:
    two = placement("cpu", ranks=[0, 1])

    def halves():
        return arange(6, placement=two, sbp=sbp.split(0)) / 2

    assert halves().dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        found = halves()  # ranks that compute nothing are told the dtype of now
        assert found.dtype == found.to_local().dtype == torch.float64
        assert found.full_tensor().tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    finally:
        torch.set_default_dtype(torch.float32)


def test_another_default_dtype_counts_from_the_next_operator_on(pools):
    pools(4).run(halved_under_two_defaults)
