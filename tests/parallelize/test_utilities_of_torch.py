"""What torch's utilities and a loop's own code do to ``run.model``: as on one device, or an error with the line.

Never NaN, one rank's part in place of the whole, or a write that is lost.
"""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from torch import fx, nn
from torch.nn import utils
from torch.nn.utils import parametrizations, prune

import shardwright as sw
from shardwright.comm.launch import launch
from shardwright.errors import PlanError
from shardwright.parallelize import parallelize

BATCH = torch.linspace(-1, 1, 24).view(4, 6), torch.arange(4) % 3


def plain():
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter).sin() * (number + 1) / 4)
    return model


def flat(state):
    return torch.cat([value.reshape(-1) for value in state.values()])


def on_ranks(line, work, *, steps=0, by_hand=False):
    """What ``work(run, optimizer)`` returns on each rank, after so many forwards and backwards."""

    def each(world, model):
        run = parallelize(model, line, world, loss=nn.CrossEntropyLoss())
        kind = torch.optim.SGD
        optimizer = kind(run.parameters.values(), lr=0.5) if by_hand else run.optimizer(kind, lr=0.5)
        for _ in range(steps):
            run.step(next(run.shard([BATCH])))
        return work(run, optimizer)

    return launch(each, line, plain(), ranks="threads")


def halve(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def clamp(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def set_data(model):
    for parameter in model.parameters():
        parameter.data = torch.ones_like(parameter)


READS = {
    "parameters_to_vector": lambda model: utils.parameters_to_vector(model.parameters()),
    "vector_to_parameters": lambda model: utils.vector_to_parameters(torch.ones(83), model.parameters()),
}
OF_SHARDS = {
    "norm": lambda model: sum(p.norm() ** 2 for p in model.parameters()),
    "penalty": lambda model: sum((p**2).sum() for p in model.parameters()),
    "averages": lambda model: [p.detach().clone() for p in model.parameters()],
    "stack_module_state": lambda model: torch.func.stack_module_state([model]),
    "halve": halve,
    "clamp": clamp,
    "set data": set_data,
    "half": nn.Module.half,
    "to": lambda model: model.to(torch.float64),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero3", "tp2", "pp2", "dp2 bf16"])
def test_a_vector_of_all_parameters_is_refused_where_a_rank_has_a_part_or_copies(line, name):
    def work(run, _):
        with pytest.raises(PlanError, match=r"torch.cat\(.*run.state_dict\(\).values"):
            READS[name](run.model)
        if "bf16" not in line:
            with pytest.raises(PlanError, match="a rank's part of the parameters"):
                utils.parameters_to_vector(run.parameters.values())
        return flat(run.state_dict())

    for found in on_ranks(line, work):
        torch.testing.assert_close(found, flat(plain().state_dict()))


def test_a_vector_of_whole_parameters_is_taken_and_set():
    def work(run, _):
        vector = utils.parameters_to_vector(run.model.parameters())
        utils.vector_to_parameters(2 * vector, run.model.parameters())
        return flat(run.state_dict())

    for found in on_ranks("dp2", work):
        torch.testing.assert_close(found, 2 * flat(plain().state_dict()))


@pytest.mark.parametrize("name", OF_SHARDS)
@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero3"])
def test_parameters_of_which_a_rank_has_a_shard_are_neither_read_nor_written_between_steps(line, name):
    def work(run, _):
        with pytest.raises(PlanError, match=r"run.parameters\['0.weight'\]"):
            OF_SHARDS[name](run.model)
        assert [p.shape for p in run.model.parameters()] == [p.shape for p in plain().parameters()]
        return flat(run.state_dict())

    for found in on_ranks(line, work):
        torch.testing.assert_close(found, flat(plain().state_dict()))


@pytest.mark.parametrize(
    "read",
    [
        lambda model: [p.grad for p in model.parameters()],
        lambda model: utils.clip_grad_value_(model.parameters(), 0.1),
        lambda model: utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
    ],
    ids=["grad", "clip_grad_value_", "get_total_norm"],
)
@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero3", "dp2 bf16", "tp2 bf16", "dp2/zero1 bf16"])
def test_the_gradient_of_a_parameter_that_has_it_elsewhere_is_refused_and_named(read, line):
    def work(run, optimizer):
        with pytest.raises(PlanError, match=r"run.parameters\['0.weight'\].grad"):
            read(run.model)
        optimizer.zero_grad()
        assert all(p.grad is None for p in run.model.parameters())

    on_ranks(line, work, steps=1)


@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero3", "tp2", "pp2"])
def test_the_norm_of_a_ranks_part_of_the_gradients_is_refused(line):
    def work(run, _):
        with pytest.raises(PlanError, match=r"write run\.clip_grad_norm_"):
            utils.get_total_norm([p.grad for p in run.parameters.values()])
        utils.clip_grad_value_(run.parameters.values(), 0.1)  # each element alone

    on_ranks(line, work, steps=1)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("line", ["dp2", "dp2/zero1", "dp2/zero3", "tp2", "dp2 bf16", "tp2 fp16"])
def test_gradients_that_zero_grad_of_the_model_clears_are_not_stepped(line, set_to_none):
    def work(run, optimizer):
        run.model[0].zero_grad(set_to_none)
        assert all(p.grad is None or not p.grad.any() for name, p in run.parameters.items() if name[0] == "0")
        others = any(p.grad is not None and p.grad.any() for name, p in run.parameters.items() if name[0] == "2")
        run.model.zero_grad(set_to_none)
        optimizer.step()
        return others, flat(run.state_dict())

    kept, found = zip(*on_ranks(line, work, steps=1), strict=True)
    assert any(kept)  # of the other modules, on the ranks that hold parts of them
    for each in found:
        torch.testing.assert_close(each, flat(plain().state_dict()))


def test_a_write_to_an_unsharded_copy_is_no_silent_loss():
    def work(run, _):
        nn.init.constant_(run.model[0].weight, 0.25)  # reading it so unshards it
        with pytest.raises(PlanError, match=r"what was written to '0.weight' of run.model would be lost"):
            run.step(next(run.shard([BATCH])))

    on_ranks("dp2/zero3", work)


@pytest.mark.parametrize("when", ["before the first step", "before an update", "after an update"])
@pytest.mark.parametrize("write", [halve, clamp, set_data], ids=["halve", "clamp", "set data"])
@pytest.mark.parametrize(("line", "by_hand"), [("dp2 bf16", False), ("dp2 bf16", True), ("pp2 bf16", False)])
def test_a_write_to_a_rounded_copy_of_a_master_weight_is_no_silent_loss(line, by_hand, write, when):
    def work(run, optimizer):
        part = next(run.shard([BATCH]))
        run.num_steps = 8  # ranks are compared, and with them what was written through .data
        if when != "before the first step":
            run.num_steps = 7
            run.step(part)
        if when == "after an update":
            optimizer.step()
        said = pytest.raises(PlanError, match=r"of run.model would be lost.*\n.*\n.*\n.*run.parameters\['\d.weight'\]")
        if write is clamp and when != "before the first step":  # through .data, which refuses it at once
            with said:
                write(run.model)
            return
        write(run.model)
        with said:
            optimizer.step() if when == "before an update" else run.step(part)

    on_ranks(line, work, by_hand=by_hand)


@pytest.mark.parametrize("mend", [lambda run: run.changed(), lambda run: run.load_state_dict(run.state_dict())])
@pytest.mark.parametrize("is_said_before", [True, False])
def test_a_run_goes_on_after_a_write_that_was_refused(mend, is_said_before):
    def work(run, optimizer, *, writes=True):
        part = next(run.shard([BATCH]))
        if writes:
            halve(run.model)
            if is_said_before:
                with pytest.raises(PlanError, match="would be lost"):
                    run.step(part)
            mend(run)
        run.step(part)
        optimizer.step()
        return flat(run.state_dict())

    expected = on_ranks("dp2 bf16", partial(work, writes=False))
    for found, without in zip(on_ranks("dp2 bf16", work), expected, strict=True):
        assert torch.equal(found, without)


def test_a_file_of_a_model_with_master_weights_holds_a_plain_model(tmp_path):
    def work(run, _):
        run.step(next(run.shard([BATCH])))
        file = tmp_path / f"{run.world.rank}.pt"
        torch.save(run.model, file)
        return torch.load(file, weights_only=False), [p.detach().clone() for p in run.model.parameters()]

    for model, expected in on_ranks("dp2 bf16", work):
        assert all(type(p) is nn.Parameter and not vars(p) for p in model.parameters())
        assert all(torch.equal(p, value) for p, value in zip(model.parameters(), expected, strict=True))
        model.zero_grad()
        assert next(model.parameters()).grad is None


def test_a_move_of_the_model_to_where_it_is_changes_nothing():
    def work(run, optimizer):
        run.step(next(run.shard([BATCH])))
        run.model.cpu().to("cpu")
        optimizer.step()
        run.step(next(run.shard([BATCH])))

    on_ranks("dp2 bf16", work)


def test_a_write_to_master_weights_trains_on():
    def work(run, optimizer):
        with torch.no_grad():
            for parameter in run.parameters.values():
                parameter.mul_(0.5)
        run.changed()
        run.step(next(run.shard([BATCH])))
        run.model.zero_grad()
        optimizer.step()
        return flat(run.state_dict())

    for found in on_ranks("dp2 bf16", work):
        torch.testing.assert_close(found, 0.5 * flat(plain().state_dict()))


@pytest.mark.parametrize("use", [lambda run, x: run.step(next(run.shard([BATCH]))), lambda run, x: run.predict(x)])
@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.double], ids=["half", "double"])
@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2", "dp2 bf16"])
def test_another_dtype_of_the_model_is_refused_with_the_word_for_the_layout(line, cast, use):
    def work(run, _):
        cast(run.model)
        with pytest.raises(PlanError, match="write 'bf16' or 'fp16' in the layout"):
            use(run, BATCH[0])

    on_ranks(line, work)


def replace(model):
    model[2] = nn.Linear(8, 3)


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "tp2"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: prune.l1_unstructured(model[0], "weight", amount=0.5),
        lambda model: parametrizations.weight_norm(model[0]),
        replace,
    ],
    ids=["prune", "weight_norm", "another layer"],
)
def test_a_model_that_was_changed_after_it_was_laid_out_does_not_train_on(line, change):
    def work(run, _):
        change(run.model)
        with pytest.raises(PlanError, match="was replaced or removed since the model was laid out"):
            run.step(next(run.shard([BATCH])))

    on_ranks(line, work)


@pytest.mark.parametrize("path", ["", "0", "1"])
def test_another_forward_of_a_module_is_refused_where_stages_have_read_the_code(path):
    def work(run, _):
        run.step(next(run.shard([BATCH])))
        run.model.get_submodule(path).forward = lambda x: x
        with pytest.raises(PlanError, match=f"'{path}{'.' if path else ''}forward' of the run's model was replaced"):
            run.step(next(run.shard([BATCH])))

    on_ranks("pp2", work)


# ---- state of optimizers by hand, hooks, attributes, modes


def of_one_device():
    """The state of an optimizer over a plain model, after a step."""
    model = plain()
    optimizer = torch.optim.Adam(model.parameters())
    torch.nn.functional.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    optimizer.step()
    return optimizer.state_dict()


def adam(run, *, by_hand=False):
    kind = torch.optim.Adam
    return kind(run.parameters.values(), lr=0.5) if by_hand else run.optimizer(kind, lr=0.5)


@pytest.mark.parametrize(
    ("line", "by_hand"),
    [("dp2/zero1", False), ("dp2/zero3", False), ("tp2", False), ("tp2", True), ("pp2", False), ("tp2 bf16", False)],
)
def test_an_optimizers_state_of_another_rank_or_of_whole_tensors_is_refused_by_a_load(line, by_hand):
    told = {}

    def work(run, optimizer):
        optimizer = adam(run, by_hand=by_hand)
        run.step(next(run.shard([BATCH])))
        optimizer.step()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        told[run.world.rank] = state
        run.world.everyone().barrier()
        with pytest.raises(PlanError, match=r"write sw\.save\(folder, run, optimizer\) and"):
            optimizer.load_state_dict(told[1 - run.world.rank])
        with pytest.raises((PlanError, ValueError), match=r"state of whole tensors|the size of optimizer's group"):
            optimizer.load_state_dict(of_one_device())
        return torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], state["state"][0]["exp_avg"])

    assert all(on_ranks(line, work))


def test_an_optimizers_state_is_loaded_on_any_rank_that_has_all_of_it():
    told = {}

    def work(run, optimizer):
        optimizer = run.optimizer(torch.optim.Adam, lr=0.5)
        run.step(next(run.shard([BATCH])))
        optimizer.step()
        told[run.world.rank] = optimizer.state_dict()
        run.world.everyone().barrier()
        optimizer.load_state_dict(told[0])
        return sorted(told[0])

    assert on_ranks("dp2 bf16", work) == [["param_groups", "state"]] * 2


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(("after", "taken"), [("dp2/zero1 mb2", True), ("dp2/zero2", True), ("tp2", False)])
def test_an_optimizers_state_is_loaded_under_another_layout_if_the_rank_holds_the_same_pieces(after, taken, by_hand):
    told = {}

    def trained(run, _):
        optimizer = adam(run, by_hand=by_hand)
        run.step(next(run.shard([BATCH])))
        optimizer.step()
        told[run.world.rank] = optimizer.state_dict()

    def loads(run, _):
        optimizer = adam(run, by_hand=by_hand)
        if taken:
            optimizer.load_state_dict(told[run.world.rank])
            return torch.equal(
                optimizer.state_dict()["state"][0]["exp_avg"], told[run.world.rank]["state"][0]["exp_avg"]
            )
        with pytest.raises(PlanError, match="state that is not of this rank's part"):
            optimizer.load_state_dict(told[run.world.rank])
        return True

    on_ranks("dp2/zero1", trained)
    assert all(on_ranks(after, loads))


def test_a_save_warns_of_tensors_of_the_optimizer_that_it_leaves_out(tmp_path):
    def work(run, optimizer, *, others=()):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(size)) for size in others]})
        return sw.save(tmp_path / str(others), run, optimizer)

    on_ranks("dp2", partial(work, others=[0]), by_hand=True)  # warnings are errors here
    with pytest.warns(UserWarning, match=r"leaves out tensors .*\n.*1 of 5 tensors"):
        on_ranks("dp2", partial(work, others=[3]), by_hand=True)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize(("line", "told"), [("dp2", 1), ("mb2", 1), ("single", 0)])
def test_a_hook_that_sees_terms_of_a_gradient_is_warned_of(line, told, register, caplog):
    def work(run, _):
        getattr(run.model[0].weight, register)(lambda _: None)
        run.step(next(run.shard([BATCH])))

    on_ranks(line, work)
    found = [each for each in caplog.messages if "the hook on the gradient of" in each]
    assert len(found) == told
    assert all("'0.weight'" in each for each in found)
    assert all("change run.parameters['0.weight'].grad" in each for each in found)


@pytest.mark.parametrize("name", ["loss", "model", "parameters", "plan"])
def test_an_attribute_that_no_step_would_read_again_is_not_set(name):
    def work(run, _):
        with pytest.raises(PlanError, match=f"no step would read the new '{name}' of a run"):
            setattr(run, name, getattr(run, name))
        return run.step(next(run.shard([BATCH]))).isfinite().item()

    assert on_ranks("dp2", work) == [True, True]


@pytest.mark.parametrize("line", ["dp2/zero3", "tp2", "pp2"])
def test_a_step_in_inference_mode_is_refused(line):
    def work(run, _):
        part = next(run.shard([BATCH]))
        with torch.inference_mode():
            run.predict(BATCH[0])
            with pytest.raises(PlanError, match="take the step out of the block"):
                run.step(part)
        return run.step(part).isfinite().item()

    assert all(on_ranks(line, work))


class GeneratedCode(nn.Module):
    """Keeps code that was made by ``torch.fx`` as text, and traces it again when it is copied, as some packages do."""

    def __init__(self):
        super().__init__()
        self.weight, graph = nn.Parameter(torch.randn(6, 6) / 3), fx.Graph()
        x, weight = graph.placeholder("x"), graph.placeholder("weight")
        graph.output(graph.call_function(torch.matmul, (x, weight)))
        self.code = fx.GraphModule({}, graph)

    def __getstate__(self):
        state = {**vars(self), "_modules": dict(self._modules)}
        return {**state, "code": pickle.dumps(state["_modules"].pop("code"))}

    def __setstate__(self, state):
        code = pickle.loads(state.pop("code"))
        vars(self).update(state)
        self._modules["code"] = code

    def forward(self, x):
        return self.code(x, self.weight)


@pytest.mark.parametrize("line", ["dp4", "tp2", "dp2/zero3"])
def test_ranks_that_are_threads_copy_code_that_traces_itself_one_after_another(line):
    torch.manual_seed(0)
    model, call = nn.Sequential(*(GeneratedCode() for _ in range(20))), nn.Module.__call__
    verdict = sw.verify(model, line, [(torch.randn(8, 6), torch.randn(8, 6))], loss=sw.MeanSquaredError())
    assert verdict.equal, str(verdict)
    assert nn.Module.__call__ is call, "as torch has it"
