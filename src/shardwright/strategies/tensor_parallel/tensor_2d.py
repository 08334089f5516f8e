"""Tensor parallel in two dimensions: activations and weights are all sharded over a grid of rows and columns.

::

      X (T x k)         W (k x h)         Y (T x h)         each rank holds one block of each; for Y it
    +-----+-----+     +-----+-----+     +-----+-----+       needs the X of its row and the W of its column,
    | 0,0 | 0,1 |     | 0,0 | 0,1 |     | 0,0 | 0,1 |       or what another cut needs if it sends less
    +-----+-----+  *  +-----+-----+  =  +-----+-----+
    | 1,0 | 1,1 |     | 1,0 | 1,1 |     | 1,0 | 1,1 |
    +-----+-----+     +-----+-----+     +-----+-----+

Shapes: between layers an activation (B, ..., H) is (B / rows, ..., H / columns) on a rank; a weight has 1 / (R C) of
    its elements. A side of 1 is left out: 1x4 cuts features alone.
    With ``seq``, or for a batch with too few samples, it is (B, T / rows, H / columns): the tokens of every sample
    are cut, and attention gathers keys and values over the axes that cut its tokens.
Traffic: each block's layers are cut so that least is sent; the classic cut, of samples by row and output features
    by col, sends 2 [(C-1) X + (R-1) W] / (R C) elements for each layer. ``summa`` pins that cut and, as the
    papers do, keeps no gathered operand: its backward re-gathers X and W, so the factor is 3 in place of 2. With
    ``summa`` the option ``regather`` changes nothing.
Source: van de Geijn, Watts 1997 (SUMMA); Xu et al. 2021, arXiv:2104.05343 (Optimus).
"""

from __future__ import annotations

from shardwright.plan.option import StrategyOption
from shardwright.strategies.tensor_parallel.axis import PINS
from shardwright.strategies.tensor_parallel.strategy import TensorParallel

STRATEGY = TensorParallel(
    name="tensor_2d",
    does="Samples over rows, features over columns; the roles that send least.",
    own_options={
        "2d": StrategyOption(
            "a grid of rows and columns, tp2x3/2d; 2d:summa pins the classic roles, and re-gathers",
            pins=PINS["2d"],
        )
    },
    stream={"row": "T", "col": "F"},
    source="Xu et al. 2021, arXiv:2104.05343",
)
