"""A Llama of transformers with an adapter of peft, and its data, for the command; docs/guide.md has the commands."""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def build(folder: str = "pretrained", rank: int = 8) -> nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # --weights fills it
    return get_peft_model(model, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))


def data(split: str) -> list[dict[str, torch.Tensor]]:
    tokens = torch.tensor(AutoTokenizer.from_pretrained("pretrained").encode(Path(f"{split}.txt").read_text()))
    return [{"input_ids": part, "labels": part} for part in tokens.unfold(0, 512, 512)]
