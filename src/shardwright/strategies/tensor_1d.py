"""Tensor parallelism in one dimension: each layer's features cut over ``tp``.

::

    x ---> [ up: columns ] ---> gelu ---> [ down: rows ] ---> sum ---> y        rank 0
    |      [ up: columns ] ---> gelu ---> [ down: rows ] ---> sum ---> y        rank 1
    x is whole        features cut                      all-reduce   y is whole

| module | cut | traffic over tp |
|---|---|---|
| ``Linear -> elementwise -> Linear`` | out-features, then in-features | all-reduce of y; backward, of dx |
| attention | heads; inside the head where ranks exceed heads | the same; inside the head also the scores |
| embedding | rows | all-reduce of the output |
| head and cross entropy | classes | backward, all-reduce of dx; a gather of three numbers a token |
| norms, dropout, all else | copied | none |

Key and value heads that are fewer than the ranks are held by every rank that needs them, and the gradients summed.

Traffic: 2 (p-1)/p T h elements per all-reduce; one forward and one backward for each pair of layers.
Source: Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import functional

from shardwright.boxes import Ranges, balanced_ranges, concat
from shardwright.comm import Axis
from shardwright.errors import LayoutError, explain
from shardwright.mesh import Coord
from shardwright.models.attention import Attention
from shardwright.models.losses import CrossEntropy
from shardwright.models.structure import find_chains, find_head, is_exactly, owners, registered_twice
from shardwright.product import (
    Forwarding,
    attend_inside,
    attend_selected,
    cut_cross_entropy,
    cut_embedding,
    enter,
    guard,
    head_rows,
    head_slices,
    kv_heads,
    query_heads,
    row_linear,
)
from shardwright.strategy import (
    LOSS,
    OUTPUT,
    Activation,
    Batch,
    Job,
    Partial,
    Plan,
    Shard,
    Traffic,
    sync_traffic,
)

NAME = "tensor_1d"


@dataclass(frozen=True)
class Tensor1D:
    """Cuts the features of chains, attention, embeddings and the head over ``tp``."""

    name: ClassVar[str] = NAME
    axis: ClassVar[str] = "tp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "operators"
    default: ClassVar[bool] = True
    options: ClassVar[Mapping[str, str]] = {}
    source: ClassVar[str] = "Shoeybi et al. 2019, arXiv:1909.08053"

    def place(self, job: Job, plan: Plan) -> Plan:
        """Finds what can be cut and cuts it. Raises LayoutError when nothing can be, naming the sizes found."""
        shared = _shared_parameters(job.model)
        plan = _place_attention(job.model, plan, shared)
        plan = _place_chains(job.model, plan, shared)
        plan = _place_vocabulary(job, plan, shared)
        if not any(role.strategy == NAME for role in plan.roles.values()) and plan.mesh["tp"] > 1:
            raise _nothing_to_cut(job.model, plan)
        for path, module, _, _ in owners(job.model):
            if path not in plan.roles:
                plan = plan.role(path, NAME, "copied", f"{type(module).__name__}: every rank computes it whole")
        return plan

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> None:
        """Gives each module the forward of its role."""
        tp, forwarding = axes["tp"], Forwarding()
        forwarding.watch(job.model)
        for path, role in plan.roles.items():
            if role.strategy != NAME:
                continue
            if path == LOSS:
                _apply_loss(job, plan, tp)
                continue
            module = job.model.get_submodule(path)
            if role.name in ("entry", "column", "head"):
                enter(module, tp)
            if role.name in ("column", "column of entry", "head"):
                module.forward = partial(_column_forward, module)
            if role.name == "row":
                module.forward = partial(_row_forward, module, tp)
            if role.name == "rows of a table":
                start = _start(plan, _names(job.model, path)["weight"], tp)
                module.forward = partial(_embedding_forward, module, start, tp)
            if isinstance(module, Attention):
                _apply_attention(module, role.name, tp)
            if module._parameters and role.name != "copied" and tp.size > 1:
                guard(module, path, forwarding)

    def traffic(self, plan: Plan, batch: Batch, coord: Coord) -> tuple[Traffic, ...]:
        """The calls of one step: each microbatch's forward and backward, then shared gradients."""
        found = []
        for visits in batch.visits:
            for path, role in plan.roles.items():
                for visit in visits.get(path, ()) if role.strategy == NAME else ():
                    x_bytes = prod(visit.x_shape) * visit.element_bytes
                    y_bytes = prod(visit.y_shape) * visit.element_bytes
                    if role.name in ("entry", "column", "head", "heads", "inside a head") and visit.needs_gradient:
                        found.append(Traffic("all_reduce", "tp", x_bytes, plan.mesh["tp"]))
                    if role.name in ("row", "rows of a table"):
                        found.append(Traffic("all_reduce", "tp", y_bytes, plan.mesh["tp"]))
                    if role.name == "inside a head":
                        num_samples, num_tokens = visit.x_shape[:2]
                        members = len(_head_members(plan, path, coord["tp"]))
                        scores_bytes = num_samples * num_tokens**2 * visit.element_bytes
                        if members > 1:
                            found.append(Traffic("all_reduce", "tp", scores_bytes, members, times=2))
            if LOSS in plan.roles and plan.roles[LOSS].strategy == NAME and plan.mesh["tp"] > 1:
                found.append(_loss_traffic(plan, visits))
        return (*(each for each in found if each.num_ranks > 1), *sync_traffic(plan, batch, coord, "tp"))


STRATEGY = Tensor1D()


# ---- place


def _shared_parameters(model: nn.Module) -> set[str]:
    uses = Counter(name for _, _, _, name in owners(model))
    twice = registered_twice(model)
    shared = {name for _, module, _, name in owners(model) if id(module) in twice}
    return shared | {name for name, count in uses.items() if count > 1}


def _names(model: nn.Module, path: str) -> dict[str, str]:
    """The parameters of one module: its own name for each, and the global one."""
    return {own: name for at, _, own, name in owners(model) if at == path}


def _cut_linear(model: nn.Module, plan: Plan, path: str, ranges: Ranges, *, dim: int) -> Plan:
    """Cuts a Linear's out-features (dim 0, the bias too) or in-features (dim 1)."""
    for own, name in _names(model, path).items():
        if own == "weight" or dim == 0:
            plan = plan.cut(name, "tp", dim, ranges)
    return plan.use(path, dy={"tp": Shard(-1)}) if dim == 0 else plan.use(path, x={"tp": Shard(-1)})


def _is_free(model: nn.Module, path: str, shared: set[str]) -> bool:
    return not any(name in shared for name in _names(model, path).values())


def _place_chains(model: nn.Module, plan: Plan, shared: set[str]) -> Plan:
    tp = plan.mesh["tp"]
    for chain in find_chains(model):
        layers = (*chain.columns, chain.row)
        row = model.get_submodule(chain.row)
        assert isinstance(row, nn.Linear)
        features = row.in_features
        if any(layer in plan.roles for layer in layers) or not all(_is_free(model, n, shared) for n in layers):
            continue
        if features < tp:
            for layer in layers:
                plan = plan.role(layer, "", "copied", f"{features} features cannot be cut over tp={tp}")
            continue
        ranges = balanced_ranges(features, tp)
        if chain.entry is not None:
            plan = plan.role(chain.entry, NAME, "entry", "its layers share one input: one all-reduce backward")
        for column in chain.columns:
            plan = _cut_linear(model, plan, column, ranges, dim=0)
            name = "column" if chain.entry is None else "column of entry"
            plan = plan.role(column, NAME, name, f"{features} out-features over tp={tp}, before '{chain.row}'")
        plan = _cut_linear(model, plan, chain.row, ranges, dim=1)
        plan = plan.role(chain.row, NAME, "row", f"{features} in-features over tp={tp}: one all-reduce forward")
        for inner in chain.between:
            plan = plan.cut_activation(inner, Activation("tp", -1, features, ranges))
    return plan


def _place_attention(model: nn.Module, plan: Plan, shared: set[str]) -> Plan:
    for path, module in model.named_modules():
        if not is_exactly(module, Attention):
            continue
        assert isinstance(module, Attention)
        layers = [f"{path}.{own}".lstrip(".") for own in (("qkv", "o") if module.fused else ("q", "k", "v", "o"))]
        if all(_is_free(model, layer, shared) for layer in layers):
            plan = _place_heads(model, plan, path, module)
    return plan


def _place_heads(model: nn.Module, plan: Plan, path: str, attention: Attention) -> Plan:
    tp, inside = plan.mesh["tp"], plan.mesh["tp"] > attention.num_heads
    heads = query_heads(attention, tp)
    q = tuple(head_rows(attention, heads[i], head_slices(attention, tp)[i]) for i in range(tp))
    kv_held = [kv_heads(attention, held) for held in heads]
    kv = tuple(head_rows(attention, kv_held[i], head_slices(attention, tp)[i]) for i in range(tp))
    held = Counter(element for ranges in kv for a, b in ranges for element in range(a, b))
    overlap: Any = Partial() if max(held.values()) > 1 else Shard(-1)
    q_width = attention.num_heads * attention.head_dim
    kv_width = attention.num_kv_heads * attention.head_dim
    prefix = f"{path}." if path else ""
    cuts = {"q": q, "k": kv, "v": kv}
    if attention.fused:
        cuts = {"qkv": concat((q_width, kv_width, kv_width), (q, kv, kv))}
    for own, ranges in cuts.items():
        plan = _cut_linear(model, plan, prefix + own, ranges, dim=0)
        plan = plan.role(prefix + own, NAME, "column of entry", f"rows of the heads that '{path}' holds")
        if own != "q":
            plan = plan.use(prefix + own, dy={"tp": overlap})
    plan = _cut_linear(model, plan, f"{prefix}o", q, dim=1)
    plan = plan.role(f"{prefix}o", NAME, "row", "in-features of the heads held: one all-reduce forward")
    activation = Activation("tp", 1, attention.num_heads, tuple(((h[0], h[-1] + 1),) for h in heads))
    plan = plan.cut_activation(f"{prefix}attention_dropout", activation)
    if inside:
        why = f"{attention.num_heads} heads on tp={tp}: each head over several ranks, scores summed"
        return plan.role(path, NAME, "inside a head", why)
    return plan.role(path, NAME, "heads", f"{attention.num_heads} heads over tp={tp}")


def _head_members(plan: Plan, path: str, index: int) -> tuple[int, ...]:
    """The indices on ``tp`` that hold parts of the same head as ``index``."""
    name = f"{path}.attention_dropout".lstrip(".")
    (activation,) = (a for a in plan.activations[name] if a.axis == "tp")
    return tuple(i for i, held in enumerate(activation.ranges) if held == activation.ranges[index])


def _place_vocabulary(job: Job, plan: Plan, shared: set[str]) -> Plan:
    """Cuts the rows of tables and the classes of the head; tied ones together or not at all."""
    tp = plan.mesh["tp"]
    head = find_head(job.model) if type(job.loss) is CrossEntropy else None
    if head is not None:
        layer = job.model.get_submodule(head)
        assert isinstance(layer, nn.Linear)
        tied = any(name in shared for name in _names(job.model, head).values())
        if head in plan.roles or layer.out_features < max(tp, 1 if tied else layer.in_features):
            head = None
    tables = [path for path, m in job.model.named_modules() if is_exactly(m, nn.Embedding) and _can_cut(m, tp)]
    cuttable = {*tables, *([head] if head is not None else [])}
    users: dict[str, set[str]] = {}
    for path, _, _, name in owners(job.model):
        users.setdefault(name, set()).add(path)
    cut = {path for path in cuttable if all(users[n] <= cuttable for n in _names(job.model, path).values())}
    done: set[str] = set()
    for path in sorted(cut):
        module = job.model.get_submodule(path)
        size = module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features
        assert isinstance(size, int)
        ranges = balanced_ranges(size, tp)
        for name in _names(job.model, path).values():
            if name not in done:
                plan = plan.cut(name, "tp", 0, ranges)
                done.add(name)
        if path == head:
            plan = plan.use(path, dy={"tp": Shard(-1)})
            plan = plan.role(path, NAME, "head", f"{size} classes over tp={tp}; the loss takes them cut")
            smoothed = isinstance(job.loss, CrossEntropy) and job.loss.label_smoothing > 0
            numbers = "four" if smoothed else "three"
            plan = plan.role(LOSS, NAME, f"{numbers} numbers", f"{size} classes over tp={tp}: a gather for each token")
            plan = plan.cut_activation(OUTPUT, Activation("tp", -1, size, ranges))
        else:
            plan = plan.role(path, NAME, "rows of a table", f"{size} rows over tp={tp}: one all-reduce forward")
    return plan


def _can_cut(table: Any, tp: int) -> bool:
    """A table that is longer than wide: shorter ones are not worth an all-reduce."""
    plain = table.padding_idx is None and table.max_norm is None and not table.sparse
    return bool(plain and not table.scale_grad_by_freq and table.num_embeddings >= max(tp, table.embedding_dim))


def _nothing_to_cut(model: nn.Module, plan: Plan) -> LayoutError:
    sizes = ", ".join(
        f"'{path}' {tuple(m.weight.shape)}" for path, m in model.named_modules() if isinstance(m, nn.Linear)
    )
    return LayoutError(
        explain(
            f"no layer of the model can be cut over tp={plan.mesh['tp']}",
            given=f"{type(model).__name__} with " + (f"Linear {sizes}" if sizes else "no Linear layers"),
            allowed="Linear -> elementwise -> Linear, attention, or an embedding or head with many rows, each of at "
            "least tp features",
            fix=f"write dp{plan.mesh['tp']} instead of tp{plan.mesh['tp']}",
        )
    )


# ---- apply


def _start(plan: Plan, name: str, tp: Axis) -> int:
    return plan.compute[name].pieces({"tp": tp.index})[0].whole.start[0]


# These read the parameters past the guard, which stops everyone else.


def _column_forward(module: nn.Module, input: Tensor) -> Tensor:
    return functional.linear(input, _weight(module), module._parameters["bias"])


def _row_forward(module: nn.Module, tp: Axis, input: Tensor) -> Tensor:
    return row_linear(input, _weight(module), module._parameters["bias"], tp)


def _embedding_forward(module: nn.Module, start: int, tp: Axis, input: Tensor) -> Tensor:
    assert isinstance(module, nn.Embedding)
    return cut_embedding(input, _weight(module), start, module.num_embeddings, tp)


def _weight(module: nn.Module) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def _apply_loss(job: Job, plan: Plan, tp: Axis) -> None:
    loss = job.loss
    assert isinstance(loss, CrossEntropy)
    (output,) = plan.activations[OUTPUT]
    start = output.ranges[tp.index][0][0]

    def forward(logits_V: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return cut_cross_entropy(
            logits_V, targets, start, output.size, tp, ignore_index=loss.ignore_index,
            label_smoothing=loss.label_smoothing,
        )  # fmt: skip

    loss.forward = forward  # type: ignore[method-assign]


def _apply_attention(attention: Attention, role: str, tp: Axis) -> None:
    enter(attention, tp)
    heads, parts = query_heads(attention, tp.size), head_slices(attention, tp.size)[tp.index]
    own = heads[tp.index]
    kv = kv_heads(attention, own)
    group = attention.num_heads // attention.num_kv_heads
    kv_of_head = [head // group - kv[0] for head in own]
    attention.num_heads, attention.num_kv_heads = len(own), len(kv)
    if role == "inside a head":
        if attention.rotary is not None:
            attention.rotary.pairs = tuple(range(*parts))
        attention.head_dim = (parts[1] - parts[0]) * (2 if attention.rotary is not None else 1)
        axis = tp.subset([i for i, held in enumerate(heads) if held == own])
        attention.attend = partial(attend_inside, attention, axis)  # type: ignore[method-assign]
    elif len(own) % len(kv) or kv_of_head != [i * len(kv) // len(own) for i in range(len(own))]:
        attention.attend = partial(attend_selected, attention, kv_of_head)  # type: ignore[method-assign]


# ---- traffic


def _loss_traffic(plan: Plan, visits: Mapping[str, Any]) -> Traffic:
    (head,) = (path for path, role in plan.roles.items() if role.name == "head")
    ((visit,), tp) = visits[head], plan.mesh["tp"]
    numbers = {"three numbers": 3, "four numbers": 4}[plan.roles[LOSS].name]
    return Traffic("all_gather", "tp", prod(visit.y_shape[:-1]) * numbers * tp * visit.element_bytes, tp)
