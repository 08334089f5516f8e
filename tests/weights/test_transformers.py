"""Folders of transformers: what from_pretrained wrote is loaded under any layout, and what we write it loads again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.formatting import format_count
from shardwright.layout import Layout

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LLAMA = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENS = torch.arange(8 * 6).view(8, 6) % 40


def config_of(kind: str):
    if kind == "gpt2":
        return transformers.GPT2Config(**GPT2)
    return transformers.LlamaConfig(**LLAMA, tie_word_embeddings=kind == "tied llama")


def model_of(config) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config)


class NextToken(nn.Module):
    """The sum and the count of cross entropies of the next tokens."""

    def forward(self, output, targets):
        logits = output["logits"].flatten(0, -2)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()


def _round_trip(world, line, kind, source, to, options):
    with torch.device("meta"):
        model = model_of(config_of(kind))
    run = sw.parallelize(model, line, world, loss=NextToken(), example={"input_ids": TOKENS})
    found = sw.load_weights(run, source)
    assert not found.missing + found.unexpected
    (batch,) = run.shard([({"input_ids": TOKENS}, TOKENS)])
    loss = run.evaluate(batch).item()
    sw.save_weights(run, to, format="transformers", max_file_bytes=6000, **options)
    return loss


@pytest.mark.parametrize("line", ["dp2/zero3", "tp2", "pp2 mb2"])
@pytest.mark.parametrize("kind", ["llama", "tied llama", "gpt2"])
def test_a_pretrained_model_is_loaded_and_written_as_from_pretrained_does_both(tmp_path, kind, line):
    torch.manual_seed(0)
    plain = model_of(config_of(kind)).eval()
    plain.save_pretrained(tmp_path / "given", max_shard_size="5KB")
    assert (tmp_path / "given" / "model.safetensors.index.json").exists()
    with torch.no_grad():
        expected = nn.functional.cross_entropy(plain(TOKENS).logits.flatten(0, 1), TOKENS.flatten()).item()
    layout = Layout.parse(line)
    losses = sw.launch(_round_trip, layout, line, kind, tmp_path / "given", tmp_path / "new", {}, ranks="threads")
    assert losses == pytest.approx([expected] * layout.num_ranks, rel=1e-6)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert type(again) is type(plain)
    assert again.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    if kind != "llama":
        assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    names = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())["weight_map"].keys()
    given = json.loads((tmp_path / "given" / "model.safetensors.index.json").read_text())["weight_map"].keys()
    assert names == given, "transformers leaves out the same names of tied tensors"


@pytest.mark.parametrize("line", ["tp2", "pp2 mb2"])
def test_the_files_of_the_model_are_those_of_save_pretrained(tmp_path, line):
    model_of(config_of("llama")).save_pretrained(tmp_path / "given")
    settings = {"eos_token_id": 5, "do_sample": True, "temperature": 0.5}
    transformers.GenerationConfig(**settings).save_pretrained(tmp_path / "given")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "given")
    model.save_pretrained(tmp_path / "theirs")

    def work(world):
        run = sw.parallelize(model, line, world, loss=NextToken(), example={"input_ids": TOKENS})
        sw.save_weights(run, tmp_path / "ours", format="transformers")

    sw.launch(work, Layout.parse(line), ranks="threads")
    theirs, ours = ({path.name for path in (tmp_path / name).iterdir()} for name in ("theirs", "ours"))
    assert ours == theirs == {"config.json", "generation_config.json", "model.safetensors"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.generation_config.to_dict() == model.generation_config.to_dict()
    assert settings.items() <= again.generation_config.to_dict().items()


def test_a_folder_gives_the_config_and_the_tokenizer_and_the_dtype_is_noted(tmp_path):
    torch.manual_seed(0)
    model_of(config_of("gpt2")).save_pretrained(tmp_path / "given")
    (tmp_path / "given" / "vocab.json").write_text("{}")
    (tmp_path / "given" / "notes.txt").write_text("not copied")
    sw.save_weights(
        tmp_path / "given", tmp_path / "new", format="transformers", config=tmp_path / "given", dtype=torch.bfloat16
    )
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"config.json", "generation_config.json", "vocab.json", "model.safetensors"}
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["GPT2LMHeadModel"])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert again.dtype == torch.bfloat16


@pytest.mark.parametrize("line", ["tp2", "dp2/zero3", "pp2/1f1b mb2"])
@pytest.mark.parametrize("whole", [None, ["lm_head"]])
def test_a_model_with_an_adapter_is_filled_from_its_base_model_and_from_its_own_folder(tmp_path, line, whole):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = model_of(config_of("llama"))
    base.save_pretrained(tmp_path / "base")
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    expected = base(**batch).loss.item()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=whole)
    wrapped = peft.get_peft_model(model_of(config_of("llama")), config)  # other values than those of the base model

    def run_of(world):
        return sw.parallelize(wrapped, line, world, loss=sw.ModelLoss(), example=batch)

    def tuned(world):
        run = run_of(world)
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.05)
        found = sw.load_weights(run, tmp_path / "base")
        assert not found.missing + found.unexpected
        (part,) = run.shard([batch])
        before = run.evaluate(part).item()
        for _ in range(2):
            run.step(part)
            optimizer.step()
        sw.save_weights(run, tmp_path / "adapter", format="transformers")
        return before, run.evaluate(part).item()

    def again(world):
        run = run_of(world)
        sw.load_weights(run, tmp_path / "base")
        sw.load_weights(run, tmp_path / "adapter")
        (part,) = run.shard([batch])
        return run.evaluate(part).item()

    before, after = sw.launch(tuned, line, ranks="threads")[0]
    assert before == pytest.approx(expected, rel=1e-5)
    assert after < before
    assert sw.launch(again, line, ranks="threads")[0] == pytest.approx(after, rel=1e-6)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert theirs(**batch).loss.item() == pytest.approx(after, rel=1e-5)


def _write_tokenizer(folder):
    """Writes a tokenizer whose words are letters."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {letter: number for number, letter in enumerate("?abcdefgh")}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained(folder)


def test_an_adapter_is_tuned_by_the_command_from_its_base_model_and_written_as_peft_reads_it(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    from typer.testing import CliRunner

    from shardwright.cli.main import app

    def run(*words):
        return CliRunner().invoke(app, list(words))

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    torch.manual_seed(0)
    base = model_of(transformers.LlamaConfig(**LLAMA | {"vocab_size": 60, "max_position_embeddings": 512}))
    base.save_pretrained("pretrained")
    _write_tokenizer("pretrained")
    for split, times in (("train", 12), ("eval", 2)):
        Path(f"{split}.txt").write_text("a b c d e f g h " * 64 * times)
    own = ("--model", "tuned_llama:build", "--data", "tuned_llama:data")
    trained = run(
        "train", *own, "--weights", "pretrained", "--layout", "tp2", "--ranks", "threads", "--batch", "4",
        "--steps", "3", "--lr", "0.05", "--warmup", "0", "--out", "run",
    )  # fmt: skip
    assert trained.exit_code == 0, trained.stderr
    of_adapter = 2 * (8 * (16 + 16) + 8 * (16 + 8))  # two layers: q, and v of half as many heads
    numbers = f"{format_count(base.num_parameters() + of_adapter)} parameters, {of_adapter} of them trained"
    assert f"3 steps, {numbers}\n" in trained.stdout
    exported = run("checkpoint", "export", "run", "adapter", "--format", "transformers", "--model", "tuned_llama:build")
    assert exported.exit_code == 0, exported.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    tokens = transformers.AutoTokenizer.from_pretrained("pretrained").encode(Path("train.txt").read_text())
    every = torch.tensor(tokens).unfold(0, 512, 512)
    with torch.no_grad():
        before = base(input_ids=every, labels=every).loss.item()
        after = peft.PeftModel.from_pretrained(base, "adapter").eval()(input_ids=every, labels=every).loss.item()
    assert after < before
    assert losses[0] == pytest.approx(before, rel=0.1)  # of other samples, by the values of the base model
    wrong = run("checkpoint", "export", "run", "again", "--format", "transformers", "--model", "tuned_llama:data")
    assert wrong.exit_code == 2
    assert "write --model tuned_llama:build" in wrong.stderr
    untouched = transformers.AutoModelForCausalLM.from_pretrained("pretrained")
    tuned = peft.PeftModel.from_pretrained(untouched, "adapter").eval()
    words = transformers.AutoTokenizer.from_pretrained("pretrained")
    prompt = torch.tensor([words.encode("a b c")])
    expected = tuned.generate(input_ids=prompt, max_new_tokens=5, do_sample=False)[0]
    ids = " ".join(map(str, prompt[0].tolist()))
    greedy = ("--num", "5", "--temperature", "0", "--ranks", "threads")
    for layout in ("single", "tp2", "pp2 mb2"):
        found = run("sample", "run", *own, *greedy, "--layout", layout, "--prompt", ids)
        assert found.stdout.split() == [str(token) for token in expected.tolist()], found.stderr
    found = run("sample", "run", *own, *greedy, "--tokenizer", "pretrained", "--prompt", "a b c")
    assert found.stdout.strip() == words.decode(expected)
    drawn = [run("sample", "run", *own, "--num", "9", "--seed", seed, "--prompt", ids).stdout for seed in "001"]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].startswith(ids)
    on_threads = ("--num", "9", "--seed", "0", "--prompt", ids, "--layout", "tp2", "--ranks", "threads")
    assert run("sample", "run", *own, *on_threads).stdout == drawn[0]
    assert run("sample", "run", *own, "--num", "0", "--prompt", ids).stdout.strip() == ids
    for given, text in {
        ("--prompt", "a b c"): 'write --prompt "1 15 27"',
        ("--prompt", "1 60"): "from 0 to 59",
        ("--prompt", ids, "--tokenizer", "run"): "the tokenizer cannot be read",
    }.items():
        refused = run("sample", "run", *own, "--num", "2", *given)
        assert refused.exit_code == 2
        assert text in refused.stderr


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_of_transformers_is_planned_on_a_batch_as_its_tokenizer_gives_it(kind):
    with sw.without_values():
        model = model_of(config_of(kind))
    ids = torch.empty(8, 16, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids}
    plans = sw.plan_layouts(model, "a100-80gb:1x2", batch, loss=sw.ModelLoss(), layout="tp2")
    assert plans.fits(plans.best)
    assert plans.best.traffic_by_axis["tp"] > 0


@pytest.mark.parametrize("line", ["pp2 mb2", "tp4/2d"])
@pytest.mark.parametrize("kind", ["T5", "Bart"])
def test_an_encoder_decoder_generates_under_any_layout_and_encodes_once(kind, line):
    sizes = {
        "T5": {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
        "Bart": {f"{part}_{name}": size for part in ("encoder", "decoder")
                 for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))},
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=64, d_model=32, **sizes[kind])
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).double().eval()
    ids = torch.randint(3, 64, (4, 6))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([5]), 0)}
    calls = []

    def work(world, options):
        example = given | {"decoder_input_ids": ids[:, :3]}
        run = sw.parallelize(model, line, world, loss=sw.ModelLoss(), example=example)
        of_encoder = next(path for path, each in run.model.named_modules() if each is run.model.get_encoder())
        first = run.model.get_submodule(of_encoder).get_submodule("block.0" if kind == "T5" else "layers.0")
        if world.rank == 0:
            first.register_forward_hook(lambda *_: calls.append(1))
        return run.generate(given, **options)

    for beams in (1, 2):
        options = {"max_new_tokens": 4, "do_sample": False, "num_beams": beams}
        expected = model.generate(**given, **options)
        calls.clear()
        for found in sw.launch(work, line, options, ranks="threads"):
            assert torch.equal(found, expected)
        assert len(calls) == 1
