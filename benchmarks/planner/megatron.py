"""A step of another system, Megatron's GPT with full recomputation, as operators and messages of the time model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.cost.cluster import Cluster
from shardwright.cost.constants import Constants
from shardwright.cost.device import profile
from shardwright.cost.operators import MESSAGE_STARTS, OperatorRecord, operator_s, smooth_max
from shardwright.nodes import Nodes

HALF = 2  # bytes of an element
OPTIMIZER_BYTES = 36  # read and written for each parameter: fp16 and fp32 copies, gradients, two moments
A_PASS = 30  # operators that the host starts in a block's forward
SCORE_BYTES = 52
"""Read and written for each logit: fp16 to fp32 (6), its maximum (4), less that (8), exp (8), their sum (4), the
quotient (8); in the backward the product with the gradient (8), and fp32 to fp16 (6)."""


@dataclass(frozen=True)
class Run:
    """One published run: its sizes as its row gives them, and the seconds of a step."""

    row: Any

    @property
    def seconds(self) -> float:
        return float(self.row["measured"]["step_time_s"])

    @property
    def model(self) -> tuple[int, ...]:
        model = self.row["model"]
        return model["hidden"], model["layers"], model["heads"], model["seq"]

    @property
    def group(self) -> tuple[Any, ...]:
        """Runs of one model, batch and number of ranks, between which a planner chooses."""
        return (*self.model, self.row["hardware"]["gpus"], self.row["train"]["global_batch"])

    @property
    def flops(self) -> float:
        """FLOPs of one rank's step, the recomputed forward included."""
        hidden, layers, _, seq = self.model
        tokens, vocabulary = self.row["train"]["global_batch"] * seq, self.row["model"]["vocab"]
        return 96 * tokens * layers * hidden**2 * (
            1 + seq / (6 * hidden) + vocabulary / (16 * layers * hidden)
        ) / self.row["hardware"]["gpus"]  # fmt: skip


def cluster_of(run: Run, constants: Constants) -> Cluster:
    hardware = run.row["hardware"]
    in_node = min(hardware["gpus"], hardware["gpus_per_node"])
    device = profile("a100-80gb")
    if "inter_GBps_per_gpu" in hardware:
        from dataclasses import replace

        device = replace(device, between_nodes_bytes_per_s=hardware["inter_GBps_per_gpu"] * 1e9)
    return Cluster(device, Nodes(hardware["gpus"] // in_node, in_node), constants)


def product(m: int, n: int, k: int, batch: int = 1) -> OperatorRecord:
    return OperatorRecord(
        "matmul", 2 * batch * m * n * k, HALF * batch * (m * k + k * n + m * n), "fp16", (batch, m, n, k)
    )


def backward_of(forward: OperatorRecord) -> list[OperatorRecord]:
    batch, m, n, k = forward.dims
    return [product(m, k, n, batch), product(k, n, m, batch)]


def block_forward(tokens: int, samples: int, seq: int, hidden: int, heads: int, tp: int) -> tuple[list[Any], int]:
    """Returns the products of a block's forward, and the bytes of its other operators."""
    own = max(1, heads // tp)
    width = hidden // heads
    products = [
        product(tokens, 3 * hidden // tp, hidden),
        product(seq, seq, width, samples * own),
        product(seq, width, seq, samples * own),
        product(tokens, hidden, hidden // tp),
        product(tokens, 4 * hidden // tp, hidden),
        product(tokens, hidden, 4 * hidden // tp),
    ]
    scores = samples * own * seq * seq
    num_bytes = HALF * tokens * hidden * (2 * 2 + 2 * 4)  # two norms; two times bias, dropout and residual
    num_bytes += HALF * tokens * (4 * hidden // tp) * 4 + HALF * tokens * (3 * hidden // tp) * 4
    num_bytes += HALF * scores * 7  # mask and scale, softmax, dropout
    return products, num_bytes


def step_s(run: Run, constants: Constants, *, sends: bool = True, moves: bool = True) -> float:
    """Returns the predicted seconds of a step.

    Without ``sends`` it is as if messages took no time; without ``moves``, all but matrix products and messages.
    """
    row, parallel = run.row, run.row["parallel"]
    hidden, layers, heads, seq = run.model
    tp, dp, pp, samples = parallel["tp"], parallel["dp"], parallel["pp"], parallel["micro_batch"]
    vocabulary = row["model"]["vocab"]
    cluster = cluster_of(run, constants)
    device, tokens = cluster.device, samples * seq
    micro = max(1.0, row["train"]["global_batch"] / (dp * samples))

    def of(records: list[OperatorRecord]) -> float:
        return sum(operator_s(each, device, constants) for each in records)

    def moved(num_bytes: float) -> float:
        return operator_s(OperatorRecord("memory", 0, int(num_bytes)), device, constants) if moves else 0.0

    products, num_bytes = block_forward(tokens, samples, seq, hidden, heads, tp)
    forward = of(products) + moved(num_bytes)
    backward = of([b for each in products for b in backward_of(each)]) + moved(2 * num_bytes)
    sums = 2 * MESSAGE_STARTS * (tp > 1)  # two all-reduces in a forward, as in a backward
    starts = ((forward, A_PASS + sums), (backward, 2 * A_PASS + sums))
    launch_s = constants.launch_s if moves else 0.0
    forward, backward = (smooth_max(seconds, number * launch_s) for seconds, number in starts)

    def message_s(kind: str, num_bytes: float, ranks: Sequence[int]) -> float:
        return cluster.message_s(kind, num_bytes, ranks) if sends else 0.0

    reduce_s = message_s("all_reduce", HALF * tokens * hidden, range(tp))
    block = 2 * forward + backward + 6 * reduce_s
    head = product(tokens, vocabulary // tp, hidden)
    head_s = of([head, *backward_of(head)]) + moved(tokens * (vocabulary // tp) * SCORE_BYTES)
    head_s += 2 * reduce_s
    per_stage = -(-layers // pp) * block
    heaviest = max(per_stage, layers // pp * block + head_s)
    crossing = message_s("send", HALF * tokens * hidden / tp, (0, dp * tp)) if pp > 1 else 0.0
    everything = layers * block + head_s
    body = everything + (micro - 1) * heaviest + 2 * crossing * (micro + pp - 2) * (pp > 1)
    parameters = (layers / pp * (12 * hidden**2 + 13 * hidden) + vocabulary * hidden) / tp
    gradients_s = message_s("all_reduce", HALF * parameters, range(0, dp * tp, tp)) if dp > 1 else 0.0
    if pp > 1:  # the tied table's gradient, between the first stage and the last
        gradients_s += message_s("all_reduce", HALF * vocabulary * hidden / tp, (0, (pp - 1) * dp * tp))
    update = OPTIMIZER_BYTES * parameters / (device.memory_bytes_per_s * constants.memory_efficiency)
    return body + gradients_s + (update + constants.step_s if moves else 0.0)
