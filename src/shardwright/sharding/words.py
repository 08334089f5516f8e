"""How a tensor lies, in words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardwright.sharding.tensor_layout import TensorLayout


def cut_words(lies: TensorLayout) -> str:
    """How a tensor lies, in words.

    >>> cut_words(TensorLayout.whole((4, 6))), cut_words(TensorLayout.whole((4, 6)).flat("dp", 3).only("pp", [1]))
    ('copied', 'only at pp 1, flat slices over dp')
    >>> cut_words(TensorLayout.whole((3,)).cut("tp", 0, (((0, 2),), ((1, 3),))))
    'dim 0 over tp (parts overlap)'
    """
    words = []
    for step in lies.steps:
        made = step._asdict()  # a cut, flat slices, or held at some indices only
        if "ranges" in made:
            held = sum(b - a for ranges in made["ranges"] for a, b in ranges)
            overlap = " (parts overlap)" if held > lies.shape[made["dim"]] else ""
            words.append(f"dim {made['dim']} over {step.axis}{overlap}")
        elif "parts" in made:
            words.append(f"flat slices over {step.axis}")
        else:
            words.append(f"only at {step.axis} {numbers(made['indices'])}")
    return ", ".join(words) or "copied"


def numbers(every: Sequence[int]) -> str:
    """Numbers in few words.

    >>> numbers([0, 1, 2, 3]), numbers([0, 8, 16, 24]), numbers([3, 5]), numbers([0, 1, 2, 3, 9])
    ('0..3', '0, 8 .. 24', '3, 5', '0, 1 .. 9')
    """
    if len(every) < 3:
        return ", ".join(map(str, every))
    if all(b - a == 1 for a, b in pairwise(every)):
        return f"{every[0]}..{every[-1]}"
    return f"{every[0]}, {every[1]} .. {every[-1]}"
