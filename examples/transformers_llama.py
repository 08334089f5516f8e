"""Fine-tunes a Llama of transformers under any layout: load, lay out, train, save in transformers' format, generate.

python examples/transformers_llama.py --layout "tp2"                             a tiny model, on this program's text
python examples/transformers_llama.py --layout "dp2/zero3 tp2" --model FOLDER --text FILE --out FOLDER
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import shardwright as sw

TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}  # fmt: skip


def built(folder: str | None) -> LlamaForCausalLM:
    """Returns the model of a folder's config, or a tiny one, in which every byte is a token, without values."""
    with sw.without_values():
        return LlamaForCausalLM(LlamaConfig(**TINY) if folder is None else LlamaConfig.from_pretrained(folder))


def tokens_of(text: str, folder: str | None) -> Tensor:
    """Returns the tokens of a text."""
    return torch.tensor(list(text.encode()) if folder is None else AutoTokenizer.from_pretrained(folder).encode(text))


def text_of(tokens: Tensor, folder: str | None) -> str:
    """Returns the text of tokens."""
    return "".join(map(chr, tokens)) if folder is None else AutoTokenizer.from_pretrained(folder).decode(tokens)


def batches(tokens: Tensor, steps: int, num_samples: int = 8, length: int = 64) -> Iterator[tuple[dict, Tensor]]:
    """Yields windows of the text at random places, each with the tokens that come next: the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length, (num_samples,), generator=draw)
        windows = torch.stack([tokens[start : start + length + 1] for start in starts])
        yield {"input_ids": windows[:, :-1]}, windows[:, 1:]


class NextToken(nn.Module):
    """The sum and the count of cross entropies of the next tokens."""

    def forward(self, output: dict, targets: Tensor) -> tuple[Tensor, int]:
        logits = output["logits"].flatten(0, -2)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()


def train(world: sw.World, options: argparse.Namespace) -> list[float]:
    """Runs once per rank: trains, and writes the model in transformers' format."""
    every = list(batches(tokens_of(options.text.read_text(), options.model), options.steps))
    run = sw.parallelize(built(options.model), options.layout, world, loss=NextToken(), example=every[0][0])
    if options.model is not None:
        sw.load_weights(run, options.model)  # each rank reads its own parts of the files
    target = {"to": options.out, "format": "transformers", "config": options.model}
    sw.save_weights(run, **target, check_only=True)  # what cannot be written is refused now, not after training
    optimizer = run.optimizer(torch.optim.AdamW, lr=options.lr)
    losses = []
    for batch in run.shard(every):
        losses.append(run.step(batch).item())
        optimizer.step()
    sw.save_weights(run, **target)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="tp2")
    parser.add_argument("--model", metavar="FOLDER", help="as from_pretrained takes it; a tiny model by default")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="a text file; this program by default")
    parser.add_argument("--out", type=Path, default=Path("runs/llama"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-2)
    options = parser.parse_args()
    losses = sw.launch(train, sw.Layout.parse(options.layout), options)[0]
    print(f"{options.layout}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    prompt = tokens_of("def ", options.model)[None]
    found = LlamaForCausalLM.from_pretrained(options.out).generate(prompt, max_new_tokens=40, do_sample=False)
    print(f"saved to {options.out}; it says: {text_of(found[0], options.model)!r}")


if __name__ == "__main__":
    main()
