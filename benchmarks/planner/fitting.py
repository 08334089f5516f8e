"""Fits few constants to measured steps: the least mean error of logarithms, within bounds and near their priors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, log

from shardwright.cost.constants import Constants


def simplex(
    price: Callable[[list[float]], float], start: list[float], size: float = 0.3, steps: int = 400
) -> list[float]:
    """Returns where a function is least, by the method of Nelder and Mead."""
    corners = [start, *([*start[:i], start[i] + size, *start[i + 1 :]] for i in range(len(start)))]
    ranked = sorted((price(each), each) for each in corners)
    for _ in range(steps):
        if ranked[-1][0] - ranked[0][0] < 1e-7:
            break
        *kept, (worst, last) = ranked
        centre = [sum(values) / len(kept) for values in zip(*(each for _, each in kept), strict=True)]

        def at(t: float, centre: list[float] = centre, last: list[float] = last) -> tuple[float, list[float]]:
            point = [c + t * (c - w) for c, w in zip(centre, last, strict=True)]
            return price(point), point

        tried = at(1.0)
        if tried[0] < ranked[0][0]:
            tried = min(tried, at(2.0))
        elif tried[0] >= kept[-1][0]:
            tried = min(tried, at(-0.5))
        if tried[0] < worst:
            ranked = sorted([*kept, tried])
        else:
            best = ranked[0][1]
            shrunk = [[(a + b) / 2 for a, b in zip(best, each, strict=True)] for _, each in ranked[1:]]
            ranked = sorted([ranked[0], *((price(each), each) for each in shrunk)])
    return ranked[0][1]


def fitted(
    names: Sequence[str], predict: Callable[[Constants], Sequence[float]], measured: Sequence[float],
    base: Constants, prior: float = 0.02,
) -> Constants:  # fmt: skip
    """Returns ``base`` with the named constants fitted so that predicted seconds are nearest to the measured ones."""
    rows = {row["name"]: row for row in base.rows()}
    start = [log(rows[name]["value"]) for name in names]

    def constants(point: Sequence[float]) -> Constants:
        values = {}
        for name, each in zip(names, point, strict=True):
            low, high = rows[name]["bounds"]
            values[name] = min(max(exp(min(each, 20.0)), low), high)
        return base.with_values("fitted", **values)

    def price(point: list[float]) -> float:
        predicted = predict(constants(point))
        errors = sum(abs(log(p / m)) for p, m in zip(predicted, measured, strict=True)) / len(measured)
        return errors + prior * sum((a - b) ** 2 for a, b in zip(point, start, strict=True))

    return constants(simplex(price, start))
