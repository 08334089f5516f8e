"""torch's loops over layers compute the same without the questions that they ask."""

from itertools import product

import pytest
import torch
from torch import nn

from shardwright.analysis.traced.torch_loops import loop_of

T, S = 5, 4
PADDED = torch.tensor([[False] * 5, [False, False, False, True, True], [False] * 4 + [True]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
MASKS = {"none": None, "causal": CAUSAL, "boolean": CAUSAL < 0, "of heads": torch.ones(6, T, T, dtype=torch.float64)}
PADDINGS = {"none": None, "at the end": PADDED, "in between": PADDED.flip(1), "float": PADDED * -1e9}


def equal(found, expected):
    assert torch.equal(found.isnan(), expected.isnan())  # torch's evaluation takes any float for a refusal
    assert (found - expected).nan_to_num().abs().max().item() < 1e-10


@pytest.mark.filterwarnings("ignore:Support for mismatched", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [True, False])
def test_an_encoder_that_asks_nothing_computes_what_torchs_does(nested):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=nested).double()
    loop, x = loop_of(encoder), torch.randn(3, T, 8, dtype=torch.float64)
    for mask, padding, training, learns in product(MASKS, PADDINGS, (True, False), (True, False)):
        encoder.train(training)
        given = {"mask": MASKS[mask], "src_key_padding_mask": PADDINGS[padding]}
        for is_causal in (None, False, True) if mask == "causal" else (None, False):
            with torch.set_grad_enabled(learns):
                found, expected = (each(x, **given, is_causal=is_causal) for each in (loop, encoder))
            if nested and padding in ("at the end", "float") and not training and not learns and mask == "none":
                found, expected = found[~PADDED], expected[~PADDED]  # torch writes zeros at the others
            equal(found, expected)
            if learns:
                weights = list(encoder.parameters())
                sums = [torch.autograd.grad(each.square().sum(), weights) for each in (found, expected)]
                for ours, theirs in zip(*sums, strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_a_decoder_that_asks_nothing_computes_what_torchs_does():
    torch.manual_seed(0)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2).double()
    x, memory = torch.randn(3, T, 8, dtype=torch.float64), torch.randn(3, S, 8, dtype=torch.float64)
    seen = torch.arange(T)[:, None] + 1 < torch.arange(S)
    for mask, padding, memory_mask, there in product(
        MASKS.values(), (None, PADDED), (None, seen), (None, PADDED[:, 1:])
    ):
        given = {"tgt_mask": mask, "memory_mask": memory_mask}
        given |= {"tgt_key_padding_mask": padding, "memory_key_padding_mask": there}
        equal(loop_of(decoder)(x, memory, **given), decoder(x, memory, **given))
