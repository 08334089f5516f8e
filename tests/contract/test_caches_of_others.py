"""Models of transformers with their caches on, which they return beside the logits. Needs the package."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from shardwright.analysis.chunks.forward_events import record_events
from shardwright.errors import PlanError
from shardwright.verify import verify

SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4,
    "num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
SLIDING = {"sliding_window": 4}
KINDS = {
    "Llama": {},
    "Mistral": SLIDING,
    "Gemma2": SLIDING,
    "Bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
}
"""Models by the beginning of their class, with a cache of all keys, of a window of them, and of recurrent states."""


def model_of(kind):
    transformers = pytest.importorskip("transformers", reason="make zoo-contract has it")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **KINDS[kind])
    assert config.use_cache, "as it is by default"
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def batches():
    tokens = torch.randint(1, 48, (4, 12), generator=torch.Generator().manual_seed(0))
    return [({"input_ids": tokens}, tokens)]


def loss(output, targets):
    return functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


@pytest.mark.filterwarnings("ignore")  # of a package that we do not choose the version of
@pytest.mark.parametrize("line", ["dp2", "tp2", "tp2/sp", "pp2 mb2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_with_its_cache_on(kind, line):
    verdict = verify(model_of(kind), line, batches(), loss=loss)
    assert verdict.equal, str(verdict)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Llama", "Mistral"])
def test_stages_send_no_cache(kind):
    model = model_of(kind).to("meta")
    units = [f"model.layers.{number}" for number in range(2)]
    record = record_events(model, {"input_ids": torch.ones(4, 12, dtype=torch.int64, device="meta")}, units)
    assert len(record.outputs) == 1, "the logits"


@pytest.mark.filterwarnings("ignore")
def test_a_loss_that_reads_the_keys_of_a_cache_is_refused_under_tp():
    def of_keys(output, targets):
        total, count = loss(output, targets)
        return total + output.past_key_values.layers[0].keys.pow(2).sum(), count

    with pytest.raises(PlanError, match=r"inside of an object, into(?s:.*)given: +DynamicCache"):
        verify(model_of("Llama"), "tp2", batches(), loss=of_keys)
