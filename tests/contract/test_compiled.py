"""Layouts with ``compile``: what compiled blocks compute, send and are compiled for.

Nearly all tests use ``aot_eager``: torch reads the code, derives the backward and checks what the code depends on as
it does for its own compiler, and no C++ compiler is started.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
import torch
import torch._dynamo.utils as dynamo
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.convert_frame import compile_lock

from contract.cases import CONVNET, GPT2, LLAMA_GROUPED, Blocks, check_equal, check_traffic
from shardwright import launch, parallelize, verify
from shardwright.errors import LayoutError, PlanError
from shardwright.runtime import compiled_blocks
from shardwright.runtime.compiled_blocks import CompiledCode

pytestmark = [  # torch's compiler makes these while it reads code
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]
DROPOUT = 0.2
CASES = {c.name: replace(c, config=replace(c.config, dropout=DROPOUT)) for c in (GPT2, LLAMA_GROUPED)}
LINES_OF_BLOCKS = [
    "dp2 mb3", "tp2/seq", "tp2/sp/regather recompute:blocks.1", "dp2/zero2/bucket:0 mb2 fp16", "dp2/zero1/offload bf16",
    "dp2/zero3/ahead:0/bucket:0 recompute:full", "pp2/interleaved mb2 dp2/zero3/bucket:0", "tp2 recompute:full",
    "dp2 recompute:offload:disk",
]  # fmt: skip


@pytest.fixture(autouse=True)
def forgets():
    """What torch has compiled before does not count: each test sees what it compiles itself."""
    torch._dynamo.reset()
    dynamo.counters.clear()


def said(caplog):
    return [record.message for record in caplog.records if record.name == "shardwright.runtime.compiled_blocks"]


def numbers(num_samples=4, width=8, num_classes=5):
    generator = torch.Generator().manual_seed(num_samples)
    return torch.randn(num_samples, width, generator=generator), torch.randint(
        num_classes, (num_samples,), generator=generator
    )


def sequences(num_samples, num_tokens):
    x, targets = numbers(num_samples * num_tokens)
    return x.view(num_samples, num_tokens, -1), targets.view(num_samples, num_tokens)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Dropping(Residual):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.dropout(super().forward(x))


def check_all_compiled(caplog):
    assert dynamo.counters["stats"]["unique_graphs"] > 0
    assert not dynamo.counters["graph_break"]
    assert not said(caplog)


def test_a_compiled_gpt_with_dropout_equals_one_device_and_sends_what_is_stated(caplog):
    check_equal("tp2/sp compile:aot_eager", CASES["gpt2 tied"])
    check_all_compiled(caplog)
    check_traffic("tp2/sp compile:aot_eager", CASES["gpt2 tied"])


def test_a_compiled_llama_equals_one_device_in_stages_that_recompute(caplog):
    check_equal("pp2/1f1b mb2 tp2 recompute:full compile:aot_eager", CASES["llama grouped heads"])
    check_all_compiled(caplog)


@pytest.mark.parametrize("line", LINES_OF_BLOCKS)
@pytest.mark.sampled(0)
def test_compiled_blocks_compute_what_one_device_does_on_batches_of_other_sizes(line, caplog):
    batches = [numbers(7), numbers(5)] if "/seq" not in line else [sequences(4, 6), sequences(3, 5)]
    assert verify(Blocks(Dropping), f"{line} compile:aot_eager", batches).equal
    check_all_compiled(caplog)


def test_a_rank_without_samples_computes_and_sends_as_the_others_do(caplog):
    assert verify(Blocks(Dropping), "dp3 compile:aot_eager", [numbers(2), numbers(7), numbers(1)]).equal
    check_all_compiled(caplog)


def test_stages_compile_a_sequence_of_layers_as_one_block(caplog):
    model = Blocks(lambda: nn.Sequential(Residual(), nn.Dropout(0.3)))
    assert verify(model, "pp3 mb3 compile:aot_eager", [numbers(7), numbers(5)]).equal
    check_all_compiled(caplog)


def test_compiled_runs_evaluate_and_predict_as_uncompiled_ones():
    def work(world, line):
        run = parallelize(plain, line, world, example=numbers()[0])
        found = []
        for num_samples in (4, 6, 5):
            part = next(run.shard([numbers(num_samples)]))
            found += [run.step(part), run.evaluate(part), *run.predict(numbers(num_samples)[0]).flatten()]
            for parameter in run.parameters.values():
                parameter.grad = None
        return torch.stack(found)

    plain = Blocks(Dropping)
    for line in ("dp2", "tp2/sp"):
        compiled, uncompiled = (
            launch(work, 2, f"{line}{word}", ranks="threads") for word in (" compile:aot_eager", "")
        )
        torch.testing.assert_close(compiled, uncompiled)


@pytest.mark.parametrize("line", ["tp2", "dp2/zero3/bucket:0", "pp3 mb3"])
@pytest.mark.sampled(100)
def test_blocks_alike_are_compiled_once_for_all_ranks(line):
    assert verify(Blocks(Dropping), f"{line} compile:aot_eager", [numbers(12), numbers(12)]).equal
    assert dynamo.counters["stats"]["unique_graphs"] == 1


def test_a_layout_is_verified_on_compiled_code_from_the_first_compared_step(monkeypatch):
    inner = CompiledCode.__call__
    monkeypatch.setattr(CompiledCode, "__call__", lambda *given: 1.001 * inner(*given))
    verdict = verify(Blocks(Residual), "dp2 compile:aot_eager", [numbers()])
    assert verdict.gradients_error > 1e-5
    assert not verdict.equal


def test_lengths_that_change_from_step_to_step_are_compiled_twice():
    batches = [numbers(n) for n in (6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28)]
    assert verify(Blocks(Residual), "dp2 compile:aot_eager", batches).equal
    assert dynamo.counters["stats"]["unique_graphs"] == 2


class Counted(nn.Module):
    """Its code depends on a number that changes in every call."""

    def __init__(self):
        super().__init__()
        self.layer, self.num_calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.num_calls += 1
        return self.layer(x) * (1 + self.num_calls % 2**20 / 100)


def test_code_that_changes_in_every_call_is_not_compiled_without_end():
    assert verify(Blocks(Counted, 1), "compile:aot_eager", [numbers()] * 12, dtype=torch.float64).steps == 12
    assert 0 < dynamo.counters["stats"]["unique_graphs"] <= 8


class Odd(nn.Module):
    """Its code decides by a value: no compiler can read it whole."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x) if x.detach().abs().sum().item() >= 0 else -self.layer(x)


@pytest.mark.filterwarnings("ignore:.*a decision by a sum")
@pytest.mark.parametrize("line", ["single", "dp2", "dp2/zero3/bucket:0", "dp2 recompute:full"])
def test_a_block_that_cannot_be_compiled_runs_as_it_is_and_a_warning_names_it_once(line, caplog):
    line = f"{line} compile:aot_eager".removeprefix("single ")
    assert verify(Blocks(Odd), line, [numbers(), numbers(6)]).equal
    (text,) = said(caplog)
    assert text.startswith("'blocks.0' and blocks like it run uncompiled: ")
    assert dynamo.counters["stats"]["unique_graphs"] == 0


class Twice(Residual):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.dropout(x) + self.dropout(super().forward(x))


class ByFunction(Residual):
    def forward(self, x):
        return x + torch.nn.functional.dropout(super().forward(x), 0.3, self.training)


class Repeated(Dropping):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True)


@pytest.mark.parametrize(
    ("block", "batch", "reason"),
    [
        (Twice, numbers(), "a dropout is called twice"),
        (Repeated, numbers(), "or inside of torch.utils.checkpoint"),
        (encoder, sequences(4, 3), "nn.MultiheadAttention in them drops weights or is cut"),
        (ByFunction, numbers(), "their code draws random numbers by other means than nn.Dropout"),
    ],
)
def test_dropout_whose_calls_a_compiler_could_confuse_stays_uncompiled_and_a_warning_says_so(
    block, batch, reason, caplog
):
    assert verify(Blocks(block), "dp2 compile:aot_eager", [batch, batch]).equal
    (text,) = said(caplog)
    assert reason in text


def test_code_that_may_draw_for_all_that_is_known_stays_uncompiled_and_a_warning_says_what_helps(caplog):
    def work(world):
        run = parallelize(Blocks(Residual), "dp1 compile:aot_eager", world)
        run.step(next(run.shard([numbers()])))
        run.predict(numbers()[0])

    launch(work, 1, ranks="threads")
    (text,) = said(caplog)
    assert text.endswith("their code may draw random numbers: parallelize(example=inputs) shows whether it does")


def test_hooks_inside_of_a_block_run_in_every_call(caplog):
    def work(world):
        run = parallelize(Blocks(Residual), "dp1 compile:aot_eager", world, example=numbers()[0])
        seen = []
        for number in range(4):
            if number == 2:
                run.model.blocks[0].up.register_forward_hook(lambda *_: seen.append(1))
            run.step(next(run.shard([numbers()])))
            for parameter in run.parameters.values():
                parameter.grad = None
        return len(seen)

    assert launch(work, 1, ranks="threads") == [2]
    (text,) = said(caplog)
    assert "modules inside of them have hooks" in text


def test_without_a_compiler_of_c_an_error_comes_before_the_first_step_on_every_rank(monkeypatch, tmp_path):
    from torch._inductor import cpp_builder

    def work(world):
        with pytest.raises(PlanError) as refused:
            parallelize(Blocks(Residual).to("meta"), "dp2 compile", world)
        return str(refused.value)

    cpp_builder.cpp_compiler_search.cache_clear()  # torch remembers which one it has found
    monkeypatch.setenv("PATH", str(tmp_path))
    text, other = launch(work, 2, ranks="threads")
    assert text == other
    assert "'compile' needs a C++ compiler, and rank 0 has none that runs" in text
    assert "fix:     apt install g++, or leave out compile: dp2" in text


def test_a_compiler_that_cxx_names_and_that_does_not_run_is_none(tmp_path):
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    # torch reads CXX when it is imported
    with config.patch({"cpp.cxx": (None, str(tmp_path / "g++"))}):
        assert compiled_blocks._problem_of_compiler() != ""


def test_a_compiler_that_one_rank_alone_lacks_is_an_error_on_every_rank(monkeypatch):
    found = iter(["", "no g++"])
    monkeypatch.setattr(compiled_blocks, "_problem_of_compiler", lambda: next(found))

    def work(world):
        with pytest.raises(PlanError, match="has none that runs"):
            parallelize(Blocks(Residual).to("meta"), "dp2 compile", world)

    launch(work, 2, ranks="threads")


def test_an_optimizer_of_ranks_that_are_threads_waits_while_one_compiles():
    begun, updates = Event(), Event()

    class Noted(torch.optim.AdamW):
        def step(self, closure=None):
            updates.set()
            return super().step(closure)

    def work(world):
        run = parallelize(Blocks(Residual), "dp1 compile:aot_eager", world)
        optimizer = run.optimizer(Noted)
        optimizer.register_step_pre_hook(lambda *_: begun.set())
        run.step(next(run.shard([numbers()])))
        with ThreadPoolExecutor(1) as other:
            with compile_lock:
                stepped = other.submit(optimizer.step)
                assert begun.wait(60)
                at_once = updates.wait(0.2)
            stepped.result()
        return at_once, updates.is_set(), len(optimizer.state) > 0

    assert launch(work, 1, ranks="threads") == [(False, True, True)]


@pytest.mark.timeout(400)  # of a C++ compiler, beside other work
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler for CPUs needs g++")
def test_with_torchs_own_compiler_a_layout_equals_one_device(caplog):
    assert verify(Blocks(Dropping), "dp2 tp2 compile", [numbers()]).equal
    check_all_compiled(caplog)


REFUSED = [
    ("recompute:selective compile", "fix:     recompute:full compile, or leave out compile: recompute:selective"),
    ("tp2x2/2d compile", "fix:     tp4 compile, or leave out compile: tp2x2/2d"),
    ("tp2x2x2/2.5d compile", "fix:     tp8 compile"),
    ("tp8/3d compile", "fix:     tp8 compile"),
    ("pp2/zb-v mb4 compile", "allowed: 1f1b, gpipe, interleaved"),
    ("pp2/zb-h1 mb4 compile", "given:   pp2/zb-h1 mb4 compile"),
    ("pp2/zb-h1 mb4 compile", "allowed: 1f1b, gpipe, interleaved"),
]


@pytest.mark.parametrize(("line", "text"), REFUSED)
def test_what_cannot_be_compiled_is_refused_with_a_line_that_works(line, text):
    case = CASES["gpt2 tied"]
    with pytest.raises(LayoutError, match="'compile' does not go with") as refused:
        verify(case.model, line, case.batches, loss=case.loss)
    assert text in str(refused.value)


def test_a_model_that_is_cut_by_its_operators_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))

        def forward(self, x):
            return x + torch.tanh(x @ self.up) @ self.down

    with pytest.raises(LayoutError, match="does not go with a model that is cut by its operators"):
        verify(Blocks(Scaled), "tp2 compile", [numbers()])


def test_maps_that_are_cut_in_space_are_refused():
    with pytest.raises(LayoutError, match="'compile' does not go with 'tp2/spatial'") as refused:
        verify(CONVNET.model, "tp2/spatial compile", CONVNET.batches, loss=CONVNET.loss)
    assert "fix:     tp2 compile, or leave out compile: tp2/spatial" in str(refused.value)


def test_stages_of_code_that_cannot_be_traced_are_refused():
    class Deciding(Blocks):
        def forward(self, x):
            return super().forward(x) if len(x.tolist() if x.dim() == 0 else x) else x

    with pytest.raises(LayoutError, match="does not go with stages of a model whose code cannot be traced"):
        verify(Deciding(Residual), "pp2/1f1b mb2 compile", [numbers()])
