"""torchtitan's own checkpoints are loaded under any layout, and its checkpoint code loads what is written here.

torchtitan is on PyPI, and needs packages that little else does; CONTRIBUTING.md says how to install them.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwright as sw

llama3 = pytest.importorskip("torchtitan.models.llama3", reason="torchtitan is not installed, or triton is not")
dcp = pytest.importorskip("torchtitan.components.checkpointer.dcp")


@pytest.fixture
def one_process(tmp_path):
    """The process group of one rank that torchtitan's checkpoint code asks for."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built(*, fused=False):
    """A Llama 3 of torchtitan of two blocks; fused, the projections of attention are one parameter and three names."""
    config = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = llama3._build_llama3_layers(
        n_layers=2, dim=256, n_heads=16, hidden_dim=64, rope=config.layers[0].attention.rope, attn_backend="flex",
        fuse_qkv=fused,
    )  # fmt: skip
    model = config.build()
    model.init_states()
    return model


def manager(model, folder, **options):
    config = dcp.CheckpointManager.Config(enable=True, interval=1, folder="saved", last_save_model_only=True, **options)
    return dcp.CheckpointManager(
        config, dataloader=None, model_parts=[model], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None,
        base_folder=str(folder),
    )  # fmt: skip


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("line", ["dp2/zero3", "dp3/zero1"])
@pytest.mark.parametrize("fused", [True, False])
def test_its_checkpoints_come_in_and_ours_go_back(tmp_path, line, fused):
    given = built(fused=fused)
    assert manager(given, tmp_path).save(1, last_step=True)
    expected = {name: tensor.clone() for name, tensor in given.state_dict().items()}

    plain = built()

    def work(world):
        run = sw.parallelize(plain, line, world)
        found = sw.load_weights(run, tmp_path / "saved" / "step-1")
        sw.save_weights(run, tmp_path / "ours", format="dcp")
        return found.missing + found.unexpected, run.state_dict()

    for unmatched, state in sw.launch(work, line, ranks="threads"):
        assert unmatched == ()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())

    back = built(fused=fused)
    options = {"initial_load_path": str(tmp_path / "ours"), "initial_load_model_only": True}
    assert manager(back, tmp_path / "new", **options).load()
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in expected.items())
