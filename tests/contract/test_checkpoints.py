"""Promise 4, its second half: saved under one mesh, loaded under another, the same bits."""

import pytest
import torch

from contract.cases import (
    CASES,
    CONVNET,
    DEEP,
    GPT2,
    LLAMA_ONE_KV,
    PAIR_CASES,
    STRATEGIES,
    lays_out,
    line_of,
    pairs,
    planned_once,
    spelling,
    whole_size,
)
from shardwright.checkpoint.loading import load, read_whole
from shardwright.checkpoint.manifest import find, read
from shardwright.checkpoint.saving import save
from shardwright.comm.launch import launch
from shardwright.layout import Layout
from shardwright.parallelize import parallelize


def save_after_a_step(line, case, folder):
    def work(world):
        run = parallelize(case.model, line, world, loss=case.loss, example=case.batches[0][0])
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        run.step(next(run.shard(case.batches[:1])))
        optimizer.step()
        save(folder, run, optimizer)

    with planned_once():
        launch(work, Layout.parse(line), ranks="threads")


def load_and_save_again(line, case, folder, again):
    def work(world):
        run = parallelize(case.model, line, world, loss=case.loss, seed=99, example=case.batches[0][0])
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        load(folder, run, optimizer)
        save(again, run, optimizer)

    with planned_once():
        launch(work, Layout.parse(line), ranks="threads")


def bits_of(folder):
    path = find(folder)
    manifest = read(path)
    return {name: read_whole(path, manifest, name) for name in manifest.tensors}, manifest.scalars, manifest.groups


def check_same_bits(first, second, case, tmp_path):
    save_after_a_step(first, case, tmp_path / "a")
    load_and_save_again(second, case, tmp_path / "a", tmp_path / "b")
    (tensors, scalars, groups), (again, scalars_again, groups_again) = bits_of(tmp_path / "a"), bits_of(tmp_path / "b")
    named = {name for name, _ in case.model.named_parameters()}
    assert tensors.keys() == again.keys() >= named
    assert any(name.startswith("optimizer/") for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, again[name]), f"{name} has other bits under {second} than under {first}"
    assert scalars == scalars_again
    assert groups == groups_again


# every case for what is asked for without an option; three for each grid, whose parameters are cut by the same code
ALONE = [
    # `make test` takes one model of each strategy's that cuts parameters another way
    pytest.param(n, c, marks=[pytest.mark.sampled(1)] if (n, c) in (("tensor_1d", GPT2), ("zero", DEEP)) else [])
    for n in sorted(STRATEGIES)
    for c in CASES
    if STRATEGIES[n].default or c in PAIR_CASES
]


@pytest.mark.sampled(100)
@pytest.mark.parametrize(("name", "case"), ALONE, ids=str)
def test_what_one_mesh_saves_another_loads_bit_for_bit(name, case, tmp_path):
    strategy = STRATEGIES[name]
    lines = [line_of(case, spelling(strategy, size)) for size in (1, 2, max(3, whole_size(strategy)))]
    fitting = [line for line in lines if lays_out(line, case)]
    if len(fitting) > 1:
        check_same_bits(fitting[-1], fitting[0], case, tmp_path / "down")
        check_same_bits(fitting[0], fitting[-1], case, tmp_path / "up")


def of_pair(number, one, other):
    """Two models a pair, in turn; every model alone is above. Only pictures are cut in space."""
    two = (DEEP, LLAMA_ONE_KV) if number % 2 else (GPT2, CONVNET)
    return two if CONVNET in two or "spatial" not in (one.name, other.name) else (*two, CONVNET)


OF_PAIRS = [(a, b, case) for number, (a, b) in enumerate(pairs()) for case in of_pair(number, a, b)]


@pytest.mark.parametrize(("one", "other", "case"), OF_PAIRS, ids=lambda value: getattr(value, "name", str(value)))
def test_what_a_pair_saves_either_alone_loads_bit_for_bit(one, other, case, tmp_path):
    both = line_of(case, spelling(one, 2), spelling(other, 2))
    if not lays_out(both, case):
        assert any(lays_out(line_of(other_case, both), other_case) for other_case in PAIR_CASES)
        return
    for number, alone in enumerate((one, other)):
        line = line_of(case, spelling(alone, 3))
        if lays_out(line, case):
            check_same_bits(both, line, case, tmp_path / str(number))
