"""Tensor parallel in three dimensions: a cube of ranks; weights are sharded over all three axes, so are activations.

::

            col                    X: samples over depth and row, features over col
           +---+---+               W: cut over all three, no element held twice
      row /   /   /|               Y: as X; from layer to layer the axes change their roles
         +---+---+ +
         |   |   |/| depth
         +---+---+ +
         |   |   |/
         +---+---+

Shapes: between blocks an activation (B, ..., H) is (B / (depth rows), ..., H / columns) on a rank; a weight has
    1 / (depth rows columns) of its elements. A side of 1 is left out.
    With ``seq``, or for a batch with too few samples, tokens are cut as in 2D: (B, T / (depth rows), H / columns).
Traffic: each block's layers are cut so that least is sent; the classic cut, of samples, in- and out-features by one
    axis each, the last two changing places from layer to layer, sends 2 (l-1)/l^3 (X + W + Y) elements for each layer
    of a cube. ``classic`` pins it where a block's input and output features are cut; elsewhere the cheapest cut runs.
Source: Agarwal et al. 1995 (3D multiplication); Bian et al. 2021, arXiv:2105.14450.
"""

from __future__ import annotations

from shardwright.plan.option import StrategyOption
from shardwright.strategies.tensor_parallel.axis import PINS
from shardwright.strategies.tensor_parallel.strategy import TensorParallel

STRATEGY = TensorParallel(
    name="tensor_3d",
    does="A cube: samples over two axes, features over the third, weights over all.",
    own_options={
        "3d": StrategyOption(
            "a cube, tp2x2x2/3d, tp8/3d; 3d:classic pins the classic roles where they fit", pins=PINS["3d"]
        )
    },
    stream={"depth": "T", "row": "T", "col": "F"},
    source="Bian et al. 2021, arXiv:2105.14450",
)
