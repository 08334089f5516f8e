"""Compiles the blocks of a model with ``torch.compile``; blocks with the same code and shapes share one function.

::

    x -> UNSHARD_BLOCK -> COMPILE [ norm . product . attend . product . gelu . product ] -> y      one graph, no break
                                           |                     the collectives of a product are one operator in it

A block runs its own code, uncompiled, while a torch mode inspects its calls, as in the first forward; if modules in it
have hooks of the user; if it may draw other random numbers than dropout's; if torch's attention in it runs replaced
code; and for good if its code cannot be compiled. Each reason but the first is logged once, as a warning, for all
blocks that share a function.

The compiler's own checks (guards) see changed sizes, settings and train/eval modes, and compile again: sizes that have
changed once may then vary freely. After torch's limit of 8 times the blocks stay uncompiled, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock, local
from types import CodeType, FunctionType, MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves

from shardwright.analysis.traced.structure import has_hooks, kind_of
from shardwright.comm.agreement import first_problem
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.formatting import first_line
from shardwright.forward_stack import Rung, stack_of, without_partials, wrap
from shardwright.keyed_dropout import KEYED_DROPOUT, KeyedDropout
from shardwright.layout import Layout
from shardwright.operators.traced import (
    TracedCall,
    define_operators,
    drops_twice,
    note_traced,
    traced_calls,
    traced_factors,
)
from shardwright.plan.plan import Job, Plan

LOG = logging.getLogger(__name__)

_SHARED: WeakValueDictionary[Any, CompiledCode] = WeakValueDictionary()
_LOCK = Lock()
_ATTRIBUTE = "_compiled_block"


def check_compiler(layout: Layout, everyone: Axis) -> None:
    """Raises PlanError, on every rank, if a rank lacks the C++ compiler that ``torch.compile`` needs on a CPU.

    Only layouts that compile with inductor, on CPUs, are checked. Traffic: one gather of text if so, else none.
    """
    if layout.compile != "inductor" or everyone.device.type != "cpu":
        return
    if problem := first_problem(everyone.for_strategy("core"), _problem_of_compiler()):
        raise PlanError(
            f"'compile' needs a C++ compiler, and rank {problem[0]} has none that runs",
            given=problem[1],
            allowed="g++ or clang++ on the PATH, or named by the variable CXX",
            fix=f"apt install g++, or leave out compile: {replace(layout, compile=None)}",
        )


def _problem_of_compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # torch's own class of it is private
        return f"{first_line(error):.200}"
    return ""


def compile_blocks(job: Job, plan: Plan, *, draws_are_known: bool) -> None:
    """Wraps the forwards of the modules that the plan lists as ``compiled``, in place, so that they run compiled code.

    ``draws_are_known`` says that a forward was recorded, which shows what code draws random numbers. Nothing is
    compiled before the first forwards.
    """
    if plan.layout.compile is None:
        return
    define_operators()
    for path in plan.compiled:
        block = job.model.get_submodule(path)
        for module in block.modules():
            without_partials(module)
            _trace_dropout(module)
        compiled = CompiledBlock(
            path or "the model", block, str(plan.layout), plan.layout.compile, draws_are_known=draws_are_known
        )
        vars(block)[_ATTRIBUTE] = compiled
        wrap(block, Rung.COMPILE, f"compiled by {plan.layout.compile}", by="core", around=compiled.around)


def compiled_blocks_in(module: nn.Module) -> tuple[CompiledBlock, ...]:
    """Returns the compiled blocks among ``module`` and the modules inside of it."""
    return tuple(vars(submodule)[_ATTRIBUTE] for submodule in module.modules() if _ATTRIBUTE in vars(submodule))


def step_uncompiled(optimizer: torch.optim.Optimizer) -> None:
    """Replaces ``optimizer.step``, in place, by one that does not run while another thread compiles code.

    It matters where ranks are threads. torch's optimizers ask ``torch.compiler.is_compiling()``, one flag for all
    threads, and round numbers to float32 while it is set: a rank that did so alone would get other parameters than the
    other ranks. A step with a closure does not wait.
    """
    from torch._dynamo.convert_frame import compile_lock

    step: Any = optimizer.step
    inner = step.__func__.__wrapped__  # without its hooks, which may wait for other ranks

    def alone(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is not None:  # it may run forwards, in which ranks wait for each other
            return inner(self, closure)
        with compile_lock:
            return inner(self)

    optimizer.step = MethodType(torch.optim.Optimizer.profile_hook_step(alone), optimizer)  # type: ignore[method-assign]


class CompiledCode:
    """A compiled function that blocks of the same class, parameter shapes, layout and backend share.

    ``problem`` is the compiler's error as text, or empty; ``num_compiled`` counts the compiled graphs. If ranks are
    threads, one of them compiles and the others wait for it.
    """

    def __init__(self, kind: str, backend: str) -> None:
        self.problem, self.num_compiled = "", 0
        self._backend, self._said = backend, set[str]()
        self._seen: set[Hashable] = set()
        self._compiles, self._mine = Lock(), local()
        # Torch caches compiled code by a function's code object, and limits how often one is compiled. So each instance
        # has a code object of its own.
        code: CodeType = _run.__code__.replace(co_name=f"run_{kind}")
        self._run = torch.compile(FunctionType(code, globals()), backend=self._compile, fullgraph=True)

    def __call__(self, sizes: Hashable, forward: Callable[..., Any], args: Any, named: Any) -> Any:
        """Runs the compiled code of ``forward``; ``sizes`` is a key of all that may make torch compile it again."""
        if sizes in self._seen:
            return self._run(forward, args, named)
        self._compiles.acquire()
        self._mine.sizes = sizes
        try:
            return self._run(forward, args, named)
        finally:
            self._has_compiled()

    def _has_compiled(self) -> None:
        """Releases the lock on compiling, so that other threads go on before this one waits in a collective."""
        sizes = getattr(self._mine, "sizes", None)
        if sizes is not None:
            self._mine.sizes = None
            self._seen.add(sizes)
            self._compiles.release()

    def _compile(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        from torch._dynamo.backends.registry import lookup_backend
        from torch._functorch import config

        if drops_twice(graph):
            raise RuntimeError("a dropout is called twice, or inside of torch.utils.checkpoint")
        # compiles the backward with the forward: under torch's lock, and so that errors come before anything runs
        with config.patch(force_non_lazy_backward_lowering=True):
            compiled = lookup_backend(self._backend)(graph, inputs)
        self.num_compiled += 1

        def run(*args: Any) -> Any:
            self._has_compiled()
            return compiled(*args)

        return run

    def say(self, path: str, reason: str) -> None:
        """Logs a warning that block ``path`` and those that share its code run uncompiled, with ``reason``.

        Each reason is logged once.
        """
        with _LOCK:
            if reason in self._said:
                return
            self._said.add(reason)
        LOG.warning("'%s' and blocks like it run uncompiled: %s", path, reason)


def _run(forward: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return forward(*args, **named)


def _shared_code(block: nn.Module, layout: str, backend: str) -> CompiledCode:
    kind = kind_of(block)
    shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())
    key = (kind, shapes, layout, backend)
    with _LOCK:
        code = _SHARED.get(key)
        if code is None:
            code = _SHARED[key] = CompiledCode(kind.__name__, backend)
        return code


class CompiledBlock:
    """A block's forward that runs compiled code, or the block's own code where compiled code cannot be used."""

    def __init__(self, path: str, block: nn.Module, layout: str, backend: str, *, draws_are_known: bool) -> None:
        self.path, self.block = path, block
        self.modules = tuple(block.modules())
        self.own_attention = any(_replaced_attention(module) for module in self.modules)
        self.may_draw, self.draws_are_known = any(_has(module, Rung.DRAWS) for module in self.modules), draws_are_known
        self.has_callers = any(_has(module, Rung.CALLERS) for module in self.modules)
        self.calls = traced_calls(block)
        self.code = _shared_code(block, layout, backend)
        self._forward: Callable[..., Any] = block.forward
        self._num_inspected = 1  # the first code comes after a forward whose calls were inspected
        self._runs_compiled: list[bool] = []  # for recomputations: whether the forward ran compiled

    def around(self, forward: Callable[..., Any]) -> CompiledBlock:
        """Sets the forward to compile, and returns this object, which the module calls in place of that forward."""
        self._forward = forward
        return self

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that makes a recomputation run compiled code if, and only if, the coming forward does.

        Activation checkpointing takes the snapshot before a forward, and calls the function before it recomputes that
        forward.
        """
        decided = self._runs_compiled = []

        def restore() -> None:
            self._runs_compiled = decided

        return restore

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Returns the block's result by its compiled code or, where that may not run, by its own forward.

        It may not run while a torch mode inspects the block's calls, and for the other reasons at the top of this file.
        """
        decided, self._runs_compiled = self._runs_compiled, []
        if not decided:
            decided.append(self._may_run_compiled(args, named))
        if decided[0]:
            for call in self.calls:
                call.refresh()
            from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

            try:
                return self.code(self._sizes(args, named), self._forward, args, named)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:  # while it compiled: nothing has run yet
                decided[0], self.code.problem = False, _reason_of(error)
                self.code.say(self.path, self.code.problem)
        return self._forward(*args, **named)

    def _may_run_compiled(self, args: Any, named: Any) -> bool:
        if self.code.problem or _is_inspected(args, named):
            return False
        if reason := self._reason():
            self.code.say(self.path, reason)
            return False
        if self.has_callers and self.code.num_compiled > self._num_inspected:
            self._num_inspected = self.code.num_compiled  # recompiled: calls may have changed too
            return False
        return True

    def _sizes(self, args: Any, named: Any) -> Hashable:
        """Returns a key of the shapes, modes and dropout calls that the compiled code may depend on."""
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else None for leaf in tree_leaves((args, named)))
        return shapes, torch.is_grad_enabled(), self.block.training, tuple(call.key.shape for call in self.calls)

    def _reason(self) -> str:
        """Returns why this call runs uncompiled, as text; an empty text if it runs compiled."""
        if self.may_draw and self.draws_are_known:
            return "their code draws random numbers by other means than nn.Dropout, or for rows that it selects"
        if self.may_draw:
            return "their code may draw random numbers: parallelize(example=inputs) shows whether it does"
        if self.own_attention:
            return "nn.MultiheadAttention in them drops weights or is cut, by code that torch.compile cannot follow"
        inside = (module for module in self.modules if module is not self.block)
        if torch_module._has_any_global_hook() or any(map(has_hooks, inside)):
            return "modules inside of them have hooks"
        return ""


def _trace_dropout(module: nn.Module) -> None:
    """Makes a module's keyed dropout one operator of compiled code."""
    drop: KeyedDropout | None = vars(module).get(KEYED_DROPOUT)
    if drop is not None:
        call = note_traced(module, TracedCall((), (), lambda x, p: [drop.factors(x, p)], list))

        def traced(x: Tensor, p: float) -> Tensor:
            return traced_factors(call, x, p)

        drop.traced = traced


def _has(module: nn.Module, rung: Rung) -> bool:
    return any(wrapper.rung is rung for wrapper in stack_of(module).wrappers)


def _replaced_attention(module: nn.Module) -> bool:
    """Returns whether ``module`` is torch's attention with its forward replaced by shardwright's."""
    own = kind_of(module) is nn.MultiheadAttention
    return own and (_has(module, Rung.OPERATOR) or _has(module, Rung.DROPOUT))


def _is_inspected(args: Sequence[Any], named: Any) -> bool:
    """Returns whether a torch mode inspects each call, or tensors are on the meta device, as in a rehearsal."""
    if torch._C._len_torch_dispatch_stack():
        return True
    if any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack()):
        return True
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, named)))


def _reason_of(error: Exception) -> str:
    """Returns the compiler's message and the line of code that it was compiling, as text."""
    cause = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    stack = getattr(error, "real_stack", None)
    where = f" ({Path(stack[-1].filename).name}, line {stack[-1].lineno})" if stack else ""
    return f"{lines[0] if lines else type(error).__name__:.300}{where}"
