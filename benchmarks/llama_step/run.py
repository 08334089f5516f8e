"""What a training step of a model that others wrote costs: Llama of transformers, unmodified, beside limits and peers.

Every variant lives in the same two processes and takes the same steps from the same start. Before anything is timed,
its losses are compared with the limit's. A round runs each variant in turn; the one-process limit runs while the other
rank waits in a barrier.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import time
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.comm.autograd import cut_to_whole, partial_to_whole, sum_gradient
from shardwright.mesh import Mesh
from shardwright.strategies.pipeline.ghost_mode import GhostMode
from shardwright.strategies.pipeline.ghost_stage import GhostStage

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import in_turn, machine, options_of, sized, write
from benchmarks.gpt_step.run import adamw
from benchmarks.llama_step.peers import torch_pipeline, transformers_tp
from benchmarks.pipeline_step.peers import cross_entropy
from benchmarks.pipeline_step.run import check, losses_of, table_of

CONFIG = sized(
    {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4,
     "vocab_size": 1024},
    {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64},
)  # fmt: skip
BATCH, SEQ, MICROBATCHES = 8, sized(128, 16), 4
PIPELINE = f"pp2/1f1b mb{MICROBATCHES}"
OURS, SILENT, BY_HAND = ("tp2", PIPELINE), "tp2 silent", "tp2 by hand"
PEERS = {"tp2 transformers": lambda: transformers_tp(plain(), batch_of()),
         "pp2 torch 1F1B": lambda: torch_pipeline(plain(), batch_of(), MICROBATCHES, adamw)}  # fmt: skip


def plain(**changed):
    """The model as its package makes it; no cache of keys and values, which training does not read."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**CONFIG, **changed}, use_cache=False)).train()


def batch_of():
    tokens = torch.randint(CONFIG["vocab_size"], (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def alone(world):
    """The limit: one process, two threads, the whole batch at once, plain torch."""
    model, batch = plain(), batch_of()
    optimizer = adamw(model.parameters())

    def step():
        if world.rank:
            return None
        torch.set_num_threads(2)
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]).logits, batch[1])
        loss.backward()
        optimizer.step()
        torch.set_num_threads(1)
        return loss.item()

    return step


def half_of(world):
    """The model with this rank's half of the heads, inner features and rows of the head, with values of the whole."""
    heads, inner = CONFIG["num_attention_heads"], CONFIG["intermediate_size"]
    size, whole = CONFIG["hidden_size"] // heads, plain()
    model = plain(num_attention_heads=heads // 2, head_dim=size, intermediate_size=inner // 2)
    model.lm_head = torch.nn.Linear(CONFIG["hidden_size"], CONFIG["vocab_size"] // 2, bias=False)
    with torch.no_grad():
        for name, mine in model.named_parameters():
            value = whole.get_parameter(name)
            for dim, size in enumerate(mine.shape):
                if size < value.shape[dim]:
                    value = value.narrow(dim, world.rank * size, size)
            mine.copy_(value)
    return model


def silent(world):
    """Half of the heads, inner features and rows of the head, in plain torch, nothing sent: a rank's least work."""
    model, batch = half_of(world), batch_of()
    optimizer, targets = adamw(model.parameters()), batch[1] % (CONFIG["vocab_size"] // 2)

    def step():
        optimizer.zero_grad()
        cross_entropy(model(batch[0]).logits, targets).backward()
        optimizer.step()

    return step


def by_hand(world):
    """The same with the messages of Megatron's scheme, written into the model's modules by hand: what they cost."""
    model, batch, tp = half_of(world), batch_of(), world.axes(Mesh(tp=2))["tp"]

    def around(module, sums):
        forward = module.forward

        def call(*args, **named):
            if args:
                args = (sum_gradient(args[0], tp, overwrite=True), *args[1:])
            else:
                named["hidden_states"] = sum_gradient(named["hidden_states"], tp, overwrite=True)
            found = forward(*args, **named)
            if not sums:
                return found
            return (
                (partial_to_whole(found[0], tp), *found[1:])
                if isinstance(found, tuple)
                else partial_to_whole(found, tp)
            )

        module.forward = call

    for layer in model.model.layers:
        around(layer.self_attn, True)
        around(layer.mlp, True)
    around(model.lm_head, False)
    optimizer = adamw(model.parameters())

    def step():
        optimizer.zero_grad()
        logits = cut_to_whole(model(batch[0]).logits, tp, 2, [CONFIG["vocab_size"] // 2] * 2)
        loss = cross_entropy(logits, batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


class NextToken(torch.nn.Module):
    """The sum of the cross entropies of the next tokens, and their count."""

    def forward(self, output, targets):
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, targets.numel()


def ours(world, line):
    batch = batch_of()
    run = sw.parallelize(plain(), line, world, loss=NextToken(), example=batch[0])
    optimizer, part = run.optimizer(torch.optim.AdamW, lr=1e-4), next(run.shard([batch]))

    def step():
        loss = run.step(part)
        optimizer.step()
        return loss.item()

    return step


def variants(world, lines, peers):
    """The step of every variant; and of the peers that cannot run here, why."""
    builders = {"limit": alone, SILENT: silent, BY_HAND: by_hand, **{line: partial(ours, line=line) for line in lines}}
    builders |= {name: lambda _, build=build: build() for name, build in PEERS.items() if peers}
    found, left_out, wanted = {}, {}, None
    for name, build in builders.items():
        try:
            step = build(world)
            if name != SILENT:
                losses = losses_of(world, step)
                wanted = wanted or losses
                check(name, losses, wanted)
            found[name] = step
        except Exception as problem:  # what a peer cannot do on this machine is said, not hidden
            if name not in PEERS:
                raise
            left_out[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
    return found, left_out


def ghost_share(step, steps):
    """The share of a stage's CPU seconds that its forwards spend outside of its own calls, sends and the loss.

    That is the user's code between the stage's calls, the ghosts of other stages' values, and the mode's own checks.
    """
    spent = {"run": 0.0, "finish": 0.0, "own": 0.0}

    def timed(key, function):
        def call(*args):
            start = time.thread_time()
            try:
                return function(*args)
            finally:
                spent[key] += time.thread_time() - start

        return call

    natively = GhostMode._natively

    @contextmanager
    def own(mode):
        with natively(mode):
            start = time.thread_time()
            try:
                yield
            finally:
                spent["own"] += time.thread_time() - start

    before = GhostStage._run, GhostStage._finish
    GhostMode._natively = own
    GhostStage._run, GhostStage._finish = timed("run", before[0]), timed("finish", before[1])
    start = time.process_time()
    for _ in range(steps):
        step()
    took = time.process_time() - start
    GhostMode._natively, (GhostStage._run, GhostStage._finish) = natively, before
    return (spent["run"] - spent["finish"] - spent["own"]) / took


def measure(world, lines, rounds, steps, peers):
    each, left_out = variants(world, lines, peers)
    rows, cpu_rows = in_turn(each, rounds, steps)
    dist.barrier()
    ghosts = torch.tensor([ghost_share(each[PIPELINE], 4 * steps)]) if PIPELINE in each else torch.zeros(1)
    shares = world.everyone().all_gather(ghosts).tolist()
    return rows, cpu_rows, left_out, shares


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="of each variant in its turn")
    parser.add_argument("--layouts", nargs="+", default=list(OURS))
    options = options_of(parser, smallest={"rounds": 1, "steps": 1}, ours={"rounds": 3})
    if importlib.util.find_spec("transformers") is None:
        why = "transformers is not installed (pip install -c constraints-zoo.txt transformers)"
        print(f"llama_step is left out: {why}")
        options.write = False
        return write(options, __file__, {"table": [], "left_out": {"llama_step": why}})
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    facts = {**machine(), "transformers": metadata.version("transformers")}
    facts["omp_wait_policy"] = os.environ.get("OMP_WAIT_POLICY", "")
    given = (options.layouts, options.rounds, options.steps, not options.ours)
    rows, cpu_rows, left_out, ghosts = sw.launch(measure, 2, *given)[0]
    table = table_of(rows, cpu_rows)
    for row in table:
        print(
            f"{row['name']:20} {row['ms_median']:7.1f} ms   {row['ratio_median']:.3f} limits "
            f"({row['ratio_min']:.3f} to {row['ratio_max']:.3f})   CPU seconds {row['cpu_ratio_median']:.3f}"
        )
    print(f"limit: {statistics.median(row['limit'] for row in rows) * 1000:.1f} ms")
    print(f"ghost part of the stages' steps: {', '.join(f'{share:.1%}' for share in ghosts)}")
    for name, why in left_out.items():
        print(f"{name} is left out: {why}")
    return write(options, __file__, {"machine": facts, "config": {**CONFIG, "batch": BATCH, "seq": SEQ,
                 "microbatches": MICROBATCHES}, "table": table, "ghosts": ghosts, "left_out": left_out,
                 "rounds": rows, "cpu_rounds": cpu_rows})  # fmt: skip


if __name__ == "__main__":
    main()
