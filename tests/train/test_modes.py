"""Tensor modes, pipelines and ZeRO train to the curve of one device and resume from checkpoints of other layouts."""

import pytest

from shardwright.layout import Layout
from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics
from shardwright.train.sampling import sample

pytestmark = pytest.mark.usefixtures("no_predictions")

SETTINGS = {"num_layers": 2, "width": 20, "num_heads": 5, "dropout": 0.1}
MODES = ("tp3", "tp2/sp", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d")
STAGES = ("pp2/1f1b mb3", "pp3/zb-h1 mb2 dp2", "pp2/zb-v mb2 tp2", "pp2/dualpipe-v mb2 tp2x2/2d")
SLICES = ("dp2/zero1 mb2", "dp3/zero2/bucket:0 mb2", "dp2x2/zero3/bucket:0", "pp2/zb-h1 dp2/zero3/bucket:0 tp2 mb2")


def config(line, steps):
    return TrainConfig(
        settings=SETTINGS, seq=12, batch=5, steps=steps, warmup=2, lr=3e-3, layout=line, eval_every=4, eval_batches=2,
        schedule="constant",
    )  # fmt: skip


def losses(out):
    return [row["loss"] for row in read_metrics(out)]


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    out = tmp_path_factory.mktemp("single")
    train(config("single", 8), out, ranks="threads")
    return losses(out)


@pytest.mark.parametrize("line", [*MODES, *STAGES, *SLICES])
@pytest.mark.sampled(0)
def test_a_gpt_trains_to_the_losses_of_one_device(line, curve, tmp_path):
    train(config(line, 8), tmp_path, ranks="threads")
    assert losses(tmp_path) == pytest.approx(curve, rel=1e-4)  # float32, eight steps of AdamW


@pytest.mark.parametrize("line", ["dp2/zero2/bucket:0 bf16", "tp2 fp16"])
@pytest.mark.sampled(0)
def test_mixed_precision_follows_the_curve_within_its_roundings(line, curve, tmp_path):
    train(config(line, 8), tmp_path, ranks="threads")
    assert losses(tmp_path) == pytest.approx(curve, rel=0.02)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp2x2/2d", "tp1x2x2/3d"), ("tp2/sp", "single"), ("pp2/zb-v mb2", "dp3"), ("tp2", "pp3 mb2 tp2"),
        ("dp2/zero3/bucket:0 tp2", "dp3/zero1"),
    ],
)  # fmt: skip
@pytest.mark.sampled(0)
def test_a_checkpoint_of_one_mode_resumes_under_another(first, second, curve, tmp_path):
    train(config(first, 4), tmp_path, ranks="threads")
    train(config(second, 8), tmp_path, resume=True, ranks="threads")
    assert losses(tmp_path) == pytest.approx(curve, rel=1e-4)


def config_of_pictures(line, steps):
    """LeNet on pictures of 32 rows, in an uneven batch."""
    return TrainConfig(
        model="convnet", data="synthetic", batch=5, steps=steps, warmup=2, lr=3e-3, layout=line, eval_every=4,
        eval_batches=2, schedule="constant",
    )  # fmt: skip


@pytest.fixture(scope="module")
def curve_of_pictures(tmp_path_factory):
    out = tmp_path_factory.mktemp("pictures")
    train(config_of_pictures("single", 8), out, ranks="threads")
    return losses(out)


@pytest.mark.parametrize("line", ["tp3/spatial", "dp2 tp2/spatial", "pp2/1f1b mb2 tp2/spatial"])
@pytest.mark.sampled(0)
def test_a_convnet_cut_in_space_trains_to_the_losses_of_one_device(line, curve_of_pictures, tmp_path):
    train(config_of_pictures(line, 8), tmp_path, ranks="threads")
    assert losses(tmp_path) == pytest.approx(curve_of_pictures, rel=1e-4)


@pytest.mark.parametrize(("first", "second"), [("tp3/spatial", "tp2"), ("dp2", "pp2 tp2/spatial")])
@pytest.mark.sampled(2)
def test_a_convnet_goes_on_under_another_layout(first, second, curve_of_pictures, tmp_path):
    train(config_of_pictures(first, 4), tmp_path, ranks="threads")
    train(config_of_pictures(second, 8), tmp_path, resume=True, ranks="threads")
    assert losses(tmp_path) == pytest.approx(curve_of_pictures, rel=1e-4)


@pytest.mark.parametrize("line", ["tp2x2/2d", "tp3/sp", "dp2/zero3/bucket:0", "pp2/interleaved:v2 mb2"])
@pytest.mark.sampled(0)
def test_a_checkpoint_is_sampled_from_under_any_mode(line, tmp_path):
    train(config("single", 3), tmp_path, ranks="threads")
    trained, drawn = config("single", 3), {"prompt": "def ", "num": 6, "temperature": 0.0, "seed": 0}
    texts = {sample(trained, tmp_path, Layout.parse(each), **drawn, ranks="threads") for each in ("single", line)}
    assert len(texts) == 1
