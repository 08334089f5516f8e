"""The factors of a layout line that the contract spells: every option of every strategy, on each number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from contract.cases import SIZES, STRATEGIES, further_sizes, spelling, spellings, whole_size, written

EVERY = tuple(
    factor
    for strategy in STRATEGIES.values()
    for size in SIZES
    for factor in dict.fromkeys(spellings(strategy, size) + further_sizes(strategy, size))
)

_OF_TWO_STAGES = ("cut:token,blocks.1", "cut:conv1,conv2", *written(STRATEGIES["pipeline"], "file"))
_TWO_STAGES_OF_ZERO = ("zero2/zero3/bucket:0", "zero1/zero3/bucket:0", "zero1/zero3/bucket:0/offload:disk")
_BESIDE_A_STAGE_OF_ZERO = ("ahead:0", "ahead:2", "offload:disk")

REFUSED = frozenset(
    {f"pp{size}/{option}" for size in SIZES if size != 2 for option in _OF_TWO_STAGES}
    | {f"dp{size}/{option}" for size in SIZES for option in _TWO_STAGES_OF_ZERO + _BESIDE_A_STAGE_OF_ZERO}
)
"""What no model is laid out under: cuts and a schedule for two stages, two stages of ZeRO, and options without one."""


def _on_few_ranks() -> Iterator[str]:
    for strategy in STRATEGIES.values():
        size = whole_size(strategy)
        if size > 4:
            yield spelling(strategy, size)
        yield from spellings(strategy, min(size, 4)) + further_sizes(strategy, 4)


ON_FEW_RANKS = tuple(factor for factor in _on_few_ranks() if factor not in REFUSED)
"""Every option on as many ranks as the strategy's axes need; of 2.5D and 3D, which need eight, on four."""
