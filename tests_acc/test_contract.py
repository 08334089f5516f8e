"""The contract's layouts on the pretend accelerator: loss, gradients, parameters and buffers equal to the CPU's.

Every factor that the contract spells: every option of every strategy, on each number of ranks. Every pair of
strategies on the fewest ranks, and every model of the contract under lines of every kind. Models of operators and of
events, and models that draw, under a few lines each. What is refused is listed: nothing is skipped.
"""

from __future__ import annotations

import pytest
import torch
from tests_acc.factors import EVERY, REFUSED

from contract import test_draws as draws
from contract.cases import (
    ATTENTION,
    CASES,
    CONVNET,
    DEEP,
    FUSED,
    GPT2,
    GPT2_APART,
    LLAMA_ONE_KV,
    OPTION_CASES,
    Case,
    known_once,
    lays_out,
    line_of,
    pairs,
    spelling,
)
from contract.test_on_shards import CASES as OF_OPERATORS
from contract.test_pipeline_of_events import CASES as OF_EVENTS
from shardwright.comm.launch import run_threads
from shardwright.layout import Layout
from shardwright.models import CrossEntropy
from shardwright.verify import verify


def check(accelerator, line, case):
    def on_the_device(work, *args):
        return run_threads(work, Layout.parse(line).num_ranks, *args, device=accelerator.device)

    with known_once(line, case):
        verdict = verify(case.model, line, case.batches, loss=case.loss, launcher=on_the_device)
    assert verdict.equal, str(verdict)


LONG = Case("attention of nine tokens", ATTENTION.config, ATTENTION.loss, num_tokens=9)
SMALL = (GPT2, CONVNET, DEEP, GPT2_APART)  # the last two in three microbatches
OF_ITS_OWN = {"tp8/seq": (LONG,)}
"""A factor that cuts a sequence into more parts than the small models have tokens."""


@pytest.mark.parametrize("factor", EVERY)
def test_every_option_equals_the_cpu_or_is_listed_as_refused(accelerator, factor):
    cases = [case for case in OF_ITS_OWN.get(factor, SMALL) if case.has_sequences or "/seq" not in factor]
    case = next((case for case in cases if lays_out(line_of(case, factor), case)), None)
    assert (case is None) == (factor in REFUSED)
    if case is not None:
        check(accelerator, line_of(case, factor), case)


def test_only_factors_that_are_spelled_are_listed_as_refused():
    assert set(EVERY) > REFUSED


@pytest.mark.parametrize(("one", "other"), pairs(), ids=lambda strategy: strategy.name)
def test_every_pair_equals_the_cpu(accelerator, one, other):
    factors = spelling(one, 2), spelling(other, 2)
    case = next(case for case in OPTION_CASES if lays_out(line_of(case, *factors), case))
    check(accelerator, line_of(case, *factors), case)


MODEL_LINES = (
    "dp2", "tp2", "pp2/1f1b", "dp2/zero3", "tp2/sp", "pp2/interleaved:v2", "dp2/zero3/offload", "dp2 recompute:full",
)  # fmt: skip
REFUSED_MODELS = {
    (ATTENTION, "dp2 recompute:full"): "it has no blocks",
    (FUSED, "dp2 recompute:full"): "it has no blocks",
    (FUSED, "pp2/interleaved:v2"): "it makes fewer calls than chunks",
}


@pytest.mark.parametrize("line", MODEL_LINES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_model_equals_the_cpu_or_is_listed_as_refused(accelerator, case, line):
    fits = lays_out(line_of(case, line), case)
    assert fits == ((case, line) not in REFUSED_MODELS)
    if fits:
        check(accelerator, line_of(case, line), case)


WORDS = (
    "single", "dp2 bf16", "dp2 fp16", "dp2/zero3 bf16", "pp2/1f1b mb4 dp2/zero1 tp2", "dp2 mb3 recompute:full",
    "dp2 recompute:selective", "dp2 recompute:offload", "dp2 recompute:offload:disk", "dp2/zero1/offload",
    "pp2 mb2 dp2/zero1/offload", "dp2/zero3/offload", "dp2/zero3 recompute:offload mb2", "dp2/zero2/offload tp2 mb2",
)  # fmt: skip


@pytest.mark.parametrize("line", WORDS)
def test_precisions_recomputing_and_offload_equal_the_cpu(accelerator, line):
    check(accelerator, line, GPT2)


def test_offloaded_gradients_that_ranks_share_in_part_equal_the_cpus(accelerator):
    check(accelerator, "dp2/zero1/offload tp2", LLAMA_ONE_KV)


LINES = ("dp2/zero3", "tp2", "tp2x2/2d", "pp2/1f1b mb2", "pp2 tp2 recompute:full")


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("case", [OF_OPERATORS["GroupedBlock"], OF_EVENTS["Paired"]], ids=str)
def test_models_that_no_pattern_knows_equal_the_cpu(accelerator, case, line):
    check(accelerator, line, case)


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2/1f1b mb2"])
@pytest.mark.parametrize("name", ["fused", "by heads"])
def test_models_that_draw_equal_the_cpu(accelerator, name, line):
    def on_the_device(work, *args):
        return run_threads(work, 2, *args, device=accelerator.device)

    verdict = verify(draws.MODELS[name](), line, draws.TOKEN_BATCHES, loss=CrossEntropy(), launcher=on_the_device)
    assert verdict.equal, str(verdict)


def test_buffers_of_batch_norms_equal_the_cpus(accelerator):
    from contract.test_every_strategy import FITTING

    line, make, shape = FITTING["tp2 of a batch norm"]
    torch.manual_seed(0)
    batch = torch.randn(shape, dtype=torch.float64), torch.arange(shape[0]) % 2

    def on_the_device(work, *args):
        return run_threads(work, 2, *args, device=accelerator.device)

    for each in (line, "dp2", "dp2 mb2/own-statistics"):
        verdict = verify(make(), each, [batch] * 2, launcher=on_the_device)
        assert verdict.equal, str(verdict)
