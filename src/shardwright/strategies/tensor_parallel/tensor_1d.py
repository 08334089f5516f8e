"""Tensor parallel in one dimension: pairs of layers, the first column-parallel, the second row-parallel.

::

    x --copied--> | W1 columns | --f features--> gelu --> | W2 rows | --terms of a sum--> all-reduce --> y
      rank 0      | [:, 0:2]   |                          | [0:2, :] |
      rank 1      | [:, 2:4]   |                          | [2:4, :] |

    tp4/sp: between the pairs each rank keeps its own samples; an all-gather before W1, a reduce-scatter after W2
    tp4/seq: the same with its own tokens of every sample, also where there are fewer samples than ranks

Shapes: activations between pairs are whole on every rank, or with ``sp`` the rank's own samples, with ``seq`` its own
    tokens; inside a pair features and heads are cut.
Traffic: for each pair one all-reduce of its output forward and one of its input's gradient backward: 2 (p-1)/p T h
    elements each; with ``sp`` an all-gather and a reduce-scatter in place of each, which is the same.
Source: Shoeybi et al. 2019, arXiv:1909.08053; sequence parallel: Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from shardwright.plan.option import StrategyOption
from shardwright.strategies.tensor_parallel.strategy import TensorParallel

STRATEGY = TensorParallel(
    name="tensor_1d",
    does="Roles h, then k, over one axis: activations between them copied, or with `sp` cut by samples.",
    own_options={"sp": StrategyOption("activations between pairs of layers cut by samples", ("sp", "sp/regather"))},
    stream={"tp": "C"},
    rows_with=("sp", "seq"),
    source="Shoeybi et al. 2019, arXiv:1909.08053",
    default=True,
)
