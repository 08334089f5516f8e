"""Short texts for reports: tensor layouts such as "dim 0 over tp", and lists of ranks such as "0..3"."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from shardwright.sharding.tensor_layout import TensorLayout


def cut_words(layout: TensorLayout) -> str:
    """Returns a tensor layout as a short text, such as "dim 0 over tp" or "flat slices over dp".

    >>> cut_words(TensorLayout.whole((4, 6))), cut_words(TensorLayout.whole((4, 6)).flat("dp", 3).only("pp", [1]))
    ('copied', 'only at pp 1, flat slices over dp')
    >>> cut_words(TensorLayout.whole((3,)).cut("tp", 0, (((0, 2),), ((1, 3),))))
    'dim 0 over tp (parts overlap)'
    """
    words = []
    for step in layout.steps:
        fields = step._asdict()  # the step is a cut, flat slices, or a restriction to some indices
        if "ranges" in fields:
            held = sum(b - a for ranges in fields["ranges"] for a, b in ranges)
            overlap = " (parts overlap)" if held > layout.shape[fields["dim"]] else ""
            words.append(f"dim {fields['dim']} over {step.axis}{overlap}")
        elif "parts" in fields:
            words.append(f"flat slices over {step.axis}")
        else:
            words.append(f"only at {step.axis} {numbers(fields['indices'])}")
    return ", ".join(words) or "copied"


def numbers(every: Sequence[int]) -> str:
    """Returns sorted integers as a short text, such as "0..3".

    Of three integers or more that are not consecutive, only the first two and the last are named.

    >>> numbers([0, 1, 2, 3]), numbers([0, 8, 16, 24]), numbers([3, 5]), numbers([0, 1, 2, 3, 9])
    ('0..3', '0, 8 .. 24', '3, 5', '0, 1 .. 9')
    """
    if len(every) < 3:
        return ", ".join(map(str, every))
    if all(b - a == 1 for a, b in pairwise(every)):
        return f"{every[0]}..{every[-1]}"
    return f"{every[0]}, {every[1]} .. {every[-1]}"
