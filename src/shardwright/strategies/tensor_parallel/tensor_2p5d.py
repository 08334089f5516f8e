"""Tensor parallel in two and a half dimensions: ``depth`` 2D grids on samples of their own, with copied weights.

::

      depth 0: samples of the first half     depth 1: samples of the second half
      +-----+-----+                          +-----+-----+
      | 0,0 | 0,1 |   <- same weights ->     | 0,0 | 0,1 |     weight gradients are summed over depth
      +-----+-----+                          +-----+-----+
      | 1,0 | 1,1 |                          | 1,0 | 1,1 |
      +-----+-----+                          +-----+-----+

Shapes: between layers an activation (B, ..., H) is (B / (depth rows), ..., H / columns) on a rank; a weight has
    1 / (R C) of its elements. Depth 1 is 2D.
    With ``seq``, or for a batch with too few samples, tokens are cut as in 2D: (B, T / (depth rows), H / columns).
Traffic: of each 2D grid on its share of the samples, and 2 (D-1)/D W / (R C) elements for each weight's gradient.
Source: Solomonik, Demmel 2011 (2.5D); Wang et al. 2021, arXiv:2105.14500 (Tesseract).
"""

from __future__ import annotations

from shardwright.plan.option import StrategyOption
from shardwright.strategies.tensor_parallel.axis import PINS
from shardwright.strategies.tensor_parallel.strategy import TensorParallel

STRATEGY = TensorParallel(
    name="tensor_2p5d",
    does="A depth of 2D grids: depth cuts samples and copies weights.",
    own_options={
        "2.5d": StrategyOption(
            "depth x rows x columns: tp2x2x2/2.5d, tp8/2.5d:d2; 2.5d:summa pins, and re-gathers",
            ("2.5d:d2", "2.5d:d3", "2.5d:d1"),
            pins=PINS["2.5d"],
        )
    },
    stream={"depth": "T", "row": "T", "col": "F"},
    copied=("depth",),
    source="Wang et al. 2021, arXiv:2105.14500",
)
