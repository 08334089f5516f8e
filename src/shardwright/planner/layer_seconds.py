"""Predicts the forward seconds of each module on a cluster, by which pipeline stages and schedules are chosen.

They replace times measured by ``time_layers``, and come from the formulas that price a layout.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.cost.cluster import Cluster
from shardwright.dispatch_mode import DispatchMode
from shardwright.layout import Layout
from shardwright.ledger.account import NATIVE_ATTENTION
from shardwright.parallelize.planning import narrow_model, without_storage
from shardwright.plan.plan import Job, Plan
from shardwright.planner.outline import ModelPlans
from shardwright.planner.price import Pricing
from shardwright.planner.rehearse import operator_record


def predicted_layer_seconds(job: Job, layout: Layout, cluster: Cluster) -> dict[str, float]:
    """Returns the predicted seconds that one forward spends in all calls of each submodule together, by its name.

    The forward is that of one microbatch of one model copy (``job.example``) on one device of the cluster, in the
    layout's precision. Tensor parallelism does not cut it, since the balance of stages does not depend on such cuts. A
    module's seconds are those of its operators and of their launches, put together as in a layout's price. The result
    is empty without an example of the inputs, and for a model that does not run on the meta device.

    >>> from torch import nn
    >>> from shardwright.parallelize.planning import job_for
    >>> layout = Layout.parse("pp2")
    >>> job = job_for(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Identity(), layout, torch.zeros(4, 8))
    >>> sorted(predicted_layer_seconds(job, layout, Cluster.parse("a100-80gb:1x2")))
    ['0', '1']
    """
    if job.example is None:
        return {}
    model = narrow_model(without_storage(job.model), Plan.of(job, layout)).eval()
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(layout.precision)
    inputs = tree_map_only(
        Tensor, lambda t: t.to(precision) if precision is not None and t.is_floating_point() else t, job.example
    )
    pricing = Pricing(cluster, ModelPlans(job.model).kind)
    clock, layer_seconds = _LayerTimes(pricing), dict[str, float]()
    began: list[tuple[float, int]] = []

    def before(*_: Any) -> None:
        began.append((clock.device_s, clock.launches))

    def after(path: str, *_: Any) -> None:
        device_s, launches = began.pop()
        seconds = pricing.together_s(clock.device_s - device_s, clock.launches - launches)
        layer_seconds[path] = layer_seconds.get(path, 0.0) + seconds

    for path, module in model.named_modules():
        if path:
            module.register_forward_pre_hook(before)
            module.register_forward_hook(partial(after, path))
    try:
        with torch.no_grad(), on_meta(model, values=False, instead=NATIVE_ATTENTION), clock:
            call_model(model, inputs)
    except (RuntimeError, TypeError, ValueError):  # a user's forward may need values; stages then go by counted work
        return {}
    return layer_seconds


class _LayerTimes(DispatchMode):
    """Adds up the predicted seconds of the operators that run inside it, and counts their launches by the host."""

    def __init__(self, pricing: Pricing) -> None:
        super().__init__()
        self._pricing = pricing
        self.device_s, self.launches = 0.0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        record = operator_record(function, args, kwargs or {}, out)
        if record is not None:
            self.device_s += self._pricing.operator_s(record)
            self.launches += record.launches
        return out
