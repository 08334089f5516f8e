"""What ``show --explain PATH`` does: one module of a run that is rehearsed on the meta device."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardwright.comm.backends.fake import fake_world
from shardwright.layout import Layout
from shardwright.parallelize import parallelize
from shardwright.parallelize.explain import explain_text, explained, first_rank_with
from shardwright.parallelize.planning import without_storage
from shardwright.parallelize.run import Run
from shardwright.plan.plan import Job


def explanation_of(job: Job, layout: Layout, inputs: Any, path: str) -> tuple[dict[str, Any], str]:
    """What one module is on the first rank that holds it, as data and as text; ``inputs`` are a global batch's.

    Raises: PlanError: the model has no such module.
    """
    on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)

    def run_of(rank: int) -> Run:
        return parallelize(
            without_storage(job.model), layout, fake_world(rank, layout.num_ranks), loss=without_storage(job.loss),
            example=on_meta, num_tokens=job.num_tokens, roles=job.roles, seconds=job.seconds,
        )  # fmt: skip

    run = run_of(0)
    found = explained(run, path)
    rank = first_rank_with(run.plan, path)
    if rank:
        found = explained(run_of(rank), path)
    return found, explain_text(found)
