import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers

from shardwright.errors import PlanError
from shardwright.models import MODELS, AttentionConfig, ConvNetConfig, GPTConfig, MLPConfig
from shardwright.train.data import Cifar10, SampleOrder, Synthetic, TextTokens, epoch_order, global_batch, open_data


def write_records(path, labels, seed=0):
    """A file of CIFAR-10's binary format with random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1).tofile(path)
    return pixels


@pytest.fixture
def cifar(tmp_path):
    write_records(tmp_path / "data_batch_1.bin", [0, 1, 2], seed=1)
    write_records(tmp_path / "data_batch_2.bin", [3, 4], seed=2)
    write_records(tmp_path / "test_batch.bin", [9], seed=3)
    return tmp_path


def test_text_windows_do_not_overlap_and_the_splits_share_no_byte(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    seen = []
    for split in ("train", "eval"):
        text = TextTokens(path, seq=4, split=split)
        for index in range(len(text)):
            tokens, targets = text.sample(index)
            assert torch.equal(tokens[1:], targets[:-1])
            seen += [*tokens.tolist(), targets[-1].item()]
    assert seen == list(range(200))


def test_the_standard_library_is_text_and_the_same_each_time():
    first, again = TextTokens("stdlib", seq=64), TextTokens("stdlib", seq=64)
    assert len(first) > 10_000
    assert torch.equal(first.sample(77)[0], again.sample(77)[0])
    assert "import" in "".join(map(chr, torch.cat([first.sample(i)[0] for i in range(200)]).tolist()))
    assert len(TextTokens("stdlib", seq=64, split="eval")) > 1000


@pytest.mark.parametrize("content", [b"", b"four"])
def test_a_text_too_short_for_one_sample_is_refused(tmp_path, content):
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(PlanError, match="shorter than one sample"):
        TextTokens(path, seq=4)


def test_a_missing_text_is_refused(tmp_path):
    with pytest.raises(PlanError, match="cannot read the text"):
        TextTokens(tmp_path / "none.txt", seq=4)


def test_pictures_are_the_files_bytes_from_minus_one_to_one(cifar):
    data = Cifar10(cifar)
    assert [data.sample(index)[1].item() for index in range(len(data))] == [0, 1, 2, 3, 4]
    pixels = np.fromfile(cifar / "data_batch_2.bin", dtype=np.uint8)[1:3073].reshape(3, 32, 32)
    picture, _ = data.sample(3)
    assert picture.dtype == torch.float32
    torch.testing.assert_close((picture + 1) * 127.5, torch.from_numpy(pixels.astype(np.float32)))
    assert -1 <= picture.min() <= picture.max() <= 1
    assert [len(Cifar10(cifar, split="eval")), Cifar10(cifar, split="eval").sample(0)[1].item()] == [1, 9]


def test_missing_cifar_files_are_named(cifar, tmp_path):
    (cifar / "data_batch_1.bin").unlink()
    (cifar / "test_batch.bin").unlink()
    with pytest.raises(PlanError, match=r"missing: data_batch_1.bin, test_batch.bin"):
        Cifar10(cifar)
    with pytest.raises(PlanError, match="no such folder"):
        Cifar10(tmp_path / "nowhere")


@pytest.mark.parametrize("size", [0, 3072, 3074])
def test_a_cifar_file_whose_size_is_not_a_multiple_of_a_record_is_refused(cifar, size):
    (cifar / "test_batch.bin").write_bytes(bytes(size))
    with pytest.raises(PlanError, match="a multiple of 3073 bytes"):
        Cifar10(cifar, split="eval")


def test_a_label_above_nine_is_refused(cifar):
    write_records(cifar / "test_batch.bin", [3, 10])
    with pytest.raises(PlanError, match="a label of 10"):
        Cifar10(cifar, split="eval")


@pytest.mark.parametrize("name", MODELS)
def test_synthetic_samples_are_the_same_each_time_and_differ_from_each_other(name):
    config = MODELS[name].config()
    data, again = Synthetic(config, seq=4), Synthetic(config, seq=4)
    assert torch.equal(data.sample(5)[0], again.sample(5)[0])
    assert not torch.equal(data.sample(5)[0], data.sample(6)[0])
    held_out = Synthetic(config, seq=4, split="eval")
    assert len(data) + len(held_out) == 1024
    assert not torch.equal(data.sample(0)[0], held_out.sample(0)[0])


@given(integers(1, 60), integers(1, 70), integers(-5, 5), integers(0, 3))
def test_every_sample_comes_once_per_epoch(num_samples, batch_size, seed, epoch):
    order = SampleOrder(num_samples, batch_size, seed)
    steps = range(epoch * order.num_steps_per_epoch, (epoch + 1) * order.num_steps_per_epoch)
    batches = [order.batch(step) for step in steps]
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_samples))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert len(batches[-1]) >= 1


def test_the_batch_of_a_step_does_not_depend_on_the_order_of_calls():
    order = SampleOrder(100, 7, seed=3)
    forwards = [order.batch(step).tolist() for step in range(40)]
    epoch_order.cache_clear()
    assert [SampleOrder(100, 7, seed=3).batch(step).tolist() for step in reversed(range(40))] == forwards[::-1]


def test_epochs_and_seeds_shuffle_differently():
    orders = [epoch_order(50, seed, epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(50)) not in orders


def test_the_shuffle_is_pinned_so_that_a_run_resumes_after_an_update():
    assert epoch_order(8, seed=0, epoch=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]


def test_a_caller_cannot_change_the_order_by_writing_to_a_batch():
    order = SampleOrder(10, 4, seed=0)
    before = order.batch(0).tolist()
    order.batch(0)[:] = 0
    assert order.batch(0).tolist() == before


def test_parts_of_a_batch_collated_separately_make_up_the_batch():
    data, indices = Synthetic(MLPConfig(), seq=1), SampleOrder(100, 8, seed=0).batch(3)
    whole = global_batch(data, indices)
    parts = [global_batch(data, indices[a:b]) for a, b in ((0, 3), (3, 3), (3, 8))]
    for ours, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(ours), expected)


def test_data_is_chosen_by_name_and_by_what_the_model_reads(cifar, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(1000))
    assert isinstance(open_data("stdlib", seq=8, model=GPTConfig()), TextTokens)
    assert isinstance(open_data(str(text), seq=8, model=GPTConfig(), split="eval"), TextTokens)
    assert isinstance(open_data(str(cifar), seq=8, model=ConvNetConfig()), Cifar10)
    assert isinstance(open_data("stdlib", seq=8, model=AttentionConfig()), Synthetic)
    assert isinstance(open_data("synthetic", seq=8, model=GPTConfig(vocabulary=7)), Synthetic)
    assert isinstance(open_data("stdlib", seq=8, model="a user model"), TextTokens)
    assert isinstance(open_data(str(cifar), seq=8, model="a user model"), Cifar10)


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("stdlib", GPTConfig(vocabulary=100), "this model cannot read 'stdlib'"),
        ("stdlib", GPTConfig(max_tokens=8), "longer than the model's learned positions"),
        (__file__, ConvNetConfig(), "bytes of text"),
        (".", GPTConfig(), "pictures of 10 classes"),
        (".", ConvNetConfig(image_size=64), "pictures of 10 classes"),
        ("synthetic", "a user model", "no synthetic samples"),
        ("no/such/thing", GPTConfig(), "there is no data"),
    ],
)
def test_data_that_the_model_cannot_read_is_refused(name, model, message):
    with pytest.raises(PlanError, match=message):
        open_data(name, seq=16, model=model)
