"""docs/transformers.md: its lines run in their order, and what its two ways print is the same."""

from __future__ import annotations

import importlib
import shlex
import sys
from pathlib import Path

import pytest
import torch
from tools.site_pages import blocks
from typer.testing import CliRunner

from shardwright.cli.main import app

transformers = pytest.importorskip("transformers", reason="make zoo-contract has it")

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
LETTERS = "abcdefgh"


def write_pretrained():
    """What the page says that a reader has: a folder of a model with its tokenizer, and two texts."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {letter: number for number, letter in enumerate(("?", *LETTERS, "<s>"))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", words["<s>"])]
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?").save_pretrained("pretrained")
    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained("pretrained")
    for split, times in (("train", 160), ("eval", 32)):
        Path(f"{split}.txt").write_text(" ".join(LETTERS * 2 * times))


def in_small(words):
    """A command with ranks that are threads, and a rate at which so few steps of so small a model learn something."""
    rate = words.index("--lr") + 1 if "--lr" in words else None
    found = [*words[:rate], "0.03", *words[rate + 1 :]] if rate else list(words)
    return [*found, "--ranks", "threads"] if words[0] in ("train", "verify", "sample") else found


@pytest.mark.filterwarnings("ignore")  # of a package that we do not choose the version of
@pytest.mark.timeout(300)
def test_the_page_runs_from_a_pretrained_folder_to_the_same_text_by_both_libraries(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "my_llm", raising=False)
    write_pretrained()
    names, printed = {}, {}
    for language, text in blocks(PAGE):
        if text.startswith("# my_llm.py\n"):
            Path("my_llm.py").write_text(text)
            importlib.invalidate_caches()
        elif language == "python":
            exec(compile(text, str(PAGE), "exec"), names)
        for line in text.split("\n") if language == "sh" else ():
            words = shlex.split(line)[1:]
            found = CliRunner().invoke(app, in_small(words), catch_exceptions=False)
            assert found.exit_code == 0, f"{line}\n{found.stderr}"
            printed.setdefault(words[0], []).append(found.stdout)
    by_transformers = capsys.readouterr().out.strip().split("\n")[-1]
    assert printed["sample"][0].strip() == by_transformers
    assert by_transformers == "<s> a b c d e f g h a b c"  # it has learned the order of the letters
    assert "equal to one device" in printed["verify"][0]
    assert "tp2 dp2 on 4 ranks: 10 steps" in printed["train"][0].replace("dp2 tp2", "tp2 dp2")
    assert "pp2 mb2 on 2 ranks: 20 steps" in printed["train"][1]
