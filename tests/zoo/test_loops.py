"""Loops of the field with its real packages: transformers, peft and Accelerate; skipped where they are missing."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import shardwright as sw
from shardwright.errors import CheckpointError, LayoutError, PlanError

transformers = pytest.importorskip("transformers", reason="make zoo-contract has it")
pytestmark = pytest.mark.filterwarnings("ignore")  # of packages of others

TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))


def encodings(num_samples=12, length=8):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 32, (num_samples, length), generator=draw)
    found = []
    for number, each in enumerate(ids):
        labels = each.clone()
        labels[: number % 4] = -100  # ranks have different numbers of targets
        found.append(
            transformers.BatchEncoding({"input_ids": each, "attention_mask": each.ne(0).long(), "labels": labels})
        )
    return found


def collate(samples):
    return transformers.BatchEncoding({key: torch.stack([each[key] for each in samples]) for key in samples[0]})


def losses_of_torch(model, epochs=1):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(epochs):
        for batch in DataLoader(encodings(), batch_size=4, collate_fn=collate):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained(world, model, line):
    loader = DataLoader(encodings(), batch_size=4, collate_fn=collate)
    run = sw.parallelize(model, line, world, loss=sw.ModelLoss(), example=next(iter(loader)))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    losses = [run.step(batch, update=optimizer).item() for batch in run.shard(loader)]
    return losses, run.state_dict()


@pytest.mark.parametrize("line", ["dp2 tp2", "dp2/zero3", "pp2 mb2"])
def test_batch_encodings_and_the_labels_loss_of_transformers_train_as_on_one_device(line):
    losses, state = losses_of_torch(llama())
    model = llama()
    for found, whole in sw.launch(trained, line, model, line, ranks="threads"):
        assert found == pytest.approx(losses, abs=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(whole[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("line", ["dp2 tp2", "dp2/zero3", "pp2 mb2"])
def test_lora_by_peft_trains_its_adapters_alone(line):
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(llama(), config)

    losses, state = losses_of_torch(adapted())
    model = adapted()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for found, whole in sw.launch(trained, line, model, line, ranks="threads"):
        assert found == pytest.approx(losses, abs=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(whole[name], value, atol=1e-5, rtol=1e-4)
            assert torch.equal(whole[name], before[name]) is ("lora_" not in name), name


def test_lora_without_values_is_filled_as_with_values_and_what_copies_weights_is_refused():
    peft = pytest.importorskip("peft")

    def adapted(**options):
        with sw.without_values():
            return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options))

    def filled(world, model):
        return sw.parallelize(model, "dp2/zero3", world, loss=sw.ModelLoss()).state_dict()

    for state in sw.launch(filled, 2, adapted(), ranks="threads"):
        for name, value in state.items():
            if "lora_B" in name:
                assert not value.any(), name
            elif "lora_A" in name:  # uniform in +-1 / sqrt(16), as peft draws it
                assert 0.2 < value.abs().max() <= 0.25, name
            elif "proj" in name or "embed" in name:  # normal, as transformers draws it with initializer_range
                assert value.std().item() == pytest.approx(0.02, rel=0.2), name
    for options in ({"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"init_lora_weights": "pissa"}):
        with pytest.raises(PlanError, match="cannot be told without values"):
            sw.launch(filled, 2, adapted(**options), ranks="threads")


@pytest.mark.parametrize(("line", "options"), [
    ("dp2/zero3", {"modules_to_save": ["lm_head"], "bias": "lora_only"}), ("pp2 mb2", {"modules_to_save": ["lm_head"]}),
    ("tp2", {"use_dora": True}),
])  # fmt: skip
def test_the_folder_of_an_adapter_is_what_peft_loads_and_a_wrapped_model_is_no_folder_of_transformers(
    tmp_path, line, options
):
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    model = peft.get_peft_model(llama(), adapter)
    batch = dict(collate(encodings(4)))

    def work(world):
        run = sw.parallelize(model, line, world, loss=sw.ModelLoss(), example=batch)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
        for part in run.shard([batch]):
            run.step(part, update=optimizer)
        sw.save_weights(run, tmp_path / "adapter", format="transformers")
        sw.save_weights(run, tmp_path / "all.pt")
        return run.predict(batch)["logits"]

    expected = sw.launch(work, 2, ranks="threads")[0]
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter").eval()
    torch.testing.assert_close(loaded(**batch).logits, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(CheckpointError, match="wrapped by peft"):
        sw.save_weights(tmp_path / "all.pt", tmp_path / "folder", format="transformers")
    saved = sw.save_weights(tmp_path / "all.pt", tmp_path / "adapter", format="transformers", model=model)
    assert {file.name for file in saved.files} == {"adapter_model.safetensors", "adapter_config.json"}


@pytest.mark.parametrize("line", ["tp2", "tp2/sp", "tp4/2d", "pp2 mb2", "dp2/zero3", "tp2 dp2"])
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_a_model_with_lora_generates_as_on_one_device(line, task):
    peft = pytest.importorskip("peft")

    def adapted():
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type=task)
        settings = transformers.LlamaConfig(**TINY, bos_token_id=None, eos_token_id=None, pad_token_id=0)
        torch.manual_seed(0)
        plain = transformers.LlamaForCausalLM(settings)
        for parameter in plain.parameters():
            torch.nn.init.normal_(parameter, std=0.4)  # large enough that one token is not the likeliest for ever
        return peft.get_peft_model(plain, config).eval()

    batch = dict(collate(encodings(4)))
    ids, options = {"input_ids": batch["input_ids"]}, {"max_new_tokens": 5, "do_sample": False}
    model = adapted()
    expected = model.generate(**ids, **options), model.generate(**ids, **options, num_beams=2)
    with model.disable_adapter():
        assert not torch.equal(model.generate(**ids, **options), expected[0])

    def work(world):
        run = sw.parallelize(model, line, world, loss=sw.ModelLoss(), example=batch)
        found = run.generate(ids, **options), run.generate(ids, **options, num_beams=2)
        return found, run.model.get_base_model().generation_config.use_cache

    for found, uses_cache in sw.launch(work, line, ranks="threads"):
        assert uses_cache
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def script(accelerator, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # AdamW amplifies rounding near zero
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)
    loader = DataLoader(encodings(), batch_size=4, collate_fn=collate)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, rates = [], []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(schedule.get_last_lr()[0])
    return losses, rates, accelerator.get_state_dict(model)


@pytest.mark.parametrize(("line", "accumulated"), [("dp2 tp2", 1), ("pp2 mb2", 1), ("dp2/zero3", 3)])
def test_a_script_for_accelerate_trains_alike_with_accelerates_own_accelerator(line, accumulated):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    losses, rates, state = script(accelerator, llama())
    model = llama()

    def work(world):
        return script(sw.Accelerator(line, world, gradient_accumulation_steps=accumulated), model)

    for found, found_rates, whole in sw.launch(work, line, ranks="threads"):
        assert found == pytest.approx(losses, abs=1e-4)
        assert found_rates == pytest.approx(rates)
        for name, value in state.items():
            torch.testing.assert_close(whole[name], value, atol=1e-5, rtol=1e-4)


@pytest.fixture
def fresh_compiler():
    import torch._dynamo.utils as dynamo

    torch._dynamo.reset()
    dynamo.counters.clear()
    return dynamo.counters


@pytest.mark.parametrize("line", ["dp2 compile:aot_eager", "dp2/zero3 compile:aot_eager"])
def test_the_blocks_of_a_llama_are_compiled_whole(line, fresh_compiler):
    batches = [collate(encodings(4)) for _ in range(2)]
    assert sw.verify(llama(), line, batches, loss=sw.ModelLoss()).equal
    assert fresh_compiler["stats"]["unique_graphs"] > 0
    assert not fresh_compiler["graph_break"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("tp2 compile", "a model that is cut by its operators"),
        ("pp2/1f1b mb2 compile", "stages of a model whose code cannot be traced"),
    ],
)
def test_what_of_a_llama_cannot_be_compiled_is_refused(line, text):
    with pytest.raises(LayoutError, match=f"'compile' does not go with {text}"):
        sw.verify(llama(), line, [collate(encodings(4))], loss=sw.ModelLoss())
