"""``PassCost``: the seconds and bytes of a microbatch's passes under operators cut in one way, on a single stage.

They come from rehearsals of microbatches of few samples, and are extrapolated to as many samples as a layout has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardwright.layout import Factor
from shardwright.planner.extended import extended
from shardwright.planner.layout_records import LayoutRecords
from shardwright.planner.memory import PassMemory, beside_bytes, held_at_rest, pass_memory
from shardwright.planner.price import PassTimes, Pricing
from shardwright.planner.state_shares import STATE_KINDS


class PassShares(NamedTuple):
    """The fractions of a microbatch's compute time for forward, input gradient and weight gradient; they sum to 1."""

    forward: float = 1 / 3
    inputs: float = 1 / 3
    weights: float = 1 / 3


class OperatorsAlone(NamedTuple):
    """What estimates read of the records of a layout of operators alone, such as ``tp2``, for one size of a microbatch.

    ``rest`` has the same of the model without its repeated blocks, and is empty if these cannot be told from the rest.
    """

    times: PassTimes
    memory: PassMemory
    at_rest: Mapping[str, int]
    beside: int
    rest: tuple[OperatorsAlone, ...] = ()

    @classmethod
    def of(cls, pricing: Pricing, records: LayoutRecords) -> OperatorsAlone:
        """Returns what estimates read of ``records``, extrapolated to all blocks."""
        reading = cls(
            pricing.pass_times(records), pass_memory(records, 0), held_at_rest(records, 0), beside_bytes(records, 0)
        )
        if records.note or not records.num_blocks[0]:
            return reading
        none = replace(records, num_blocks=tuple((0,) * len(blocks) for blocks in records.num_blocks))
        return reading._replace(rest=(cls.of(pricing, replace(none, note="without blocks")),))


@dataclass(frozen=True)
class PassCost:
    """The seconds and bytes of one microbatch of all blocks on one stage, under operators cut in one way."""

    operators: tuple[Factor, ...]
    recompute: str | None
    forward_s: float
    backward_s: float
    shares: PassShares
    rest_s: float
    """The seconds of the passes of what is in no block; 0 if that is not known."""
    has_rest: bool
    rest_flops: float
    """The share of FLOPs that is in no block."""
    hidden_s: float
    """The seconds of messages that are under way while gradients of weights are computed."""
    adds_s: float
    """The seconds in which gradients are added to those of microbatches before."""
    update_s: float
    update_starts_s: float
    """The seconds in which the host starts the optimizer's operators."""
    block_bytes: float
    """The bytes that the forward of a block keeps for the backward."""
    plain_bytes: float
    """The same without recomputation."""
    most_bytes: float
    """The peak bytes of the passes, not counting gradients."""
    at_rest: Mapping[str, float]
    of_block: Mapping[str, float]
    of_rest: Mapping[str, float]
    update_bytes: float
    beside: float

    @classmethod
    def of(
        cls, operators: tuple[Factor, ...], recompute: str | None, samples: int, num_blocks: int,
        sizes: Sequence[int], known: Sequence[OperatorsAlone],
    ) -> PassCost:  # fmt: skip
        """Returns the cost for a microbatch of ``samples``, extrapolated from records of the sizes in ``sizes``.

        ``known`` has what is read of the records of ``sizes[0]`` samples, of those of the last of ``sizes`` with
        recomputation as ``recompute`` says, and, if there is a second size, of those of ``sizes[1]`` samples.
        """
        few, own, *more = known
        blocks, has_rest = max(1, num_blocks), bool(few.rest)

        def scaled(read: Callable[[OperatorsAlone], float]) -> float:
            if more:
                (value,) = extended(samples, [read(few)], [read(more[0])], *sizes)
                return value
            return read(few) * samples / sizes[0]

        def at_blocks(read: Callable[[OperatorsAlone], float]) -> Callable[[OperatorsAlone], float]:
            return lambda reading: (read(reading) - (read(reading.rest[0]) if reading.rest else 0.0)) / blocks

        def with_own(read: Callable[[OperatorsAlone], float]) -> float:
            """Returns the scaled number and what recomputation adds, which is taken to grow with the samples."""
            return scaled(read) + (read(own) - read((more or [few])[0])) * samples / sizes[len(more)]

        forward_s, backward_s = scaled(lambda e: e.times.forward_s), with_own(lambda e: e.times.backward_s)
        weights_s = scaled(lambda e: e.times.weights_s)
        whole_s = forward_s + backward_s
        parts = [round(seconds / whole_s, 2) for seconds in (forward_s, weights_s)]
        read_kept = at_blocks(lambda e: e.memory.kept)
        rest = few.rest[0] if has_rest else few
        of_block = {kind: (few.at_rest[kind] - rest.at_rest[kind] * has_rest) / blocks for kind in STATE_KINDS}
        rest_s = rest_flops = 0.0
        if has_rest:
            rest_s = scaled(lambda e: e.rest[0].times.forward_s + e.rest[0].times.backward_s)
            rest_flops = rest.times.flops / (few.times.flops or 1)
        return cls(
            operators, recompute, forward_s, backward_s,
            PassShares(parts[0], round(1 - sum(parts), 2), parts[1]), rest_s, has_rest, rest_flops,
            with_own(lambda e: e.times.hidden_s), few.times.adds_s, few.times.update_s,
            few.times.update_starts_s, with_own(read_kept), scaled(read_kept), with_own(lambda e: e.memory.most),
            few.at_rest, of_block, {kind: few.at_rest[kind] - blocks * of_block[kind] for kind in STATE_KINDS},
            few.memory.update, few.beside,
        )  # fmt: skip
