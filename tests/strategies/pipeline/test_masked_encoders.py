"""torch's encoders and decoders are cut between their layers, masked or not."""

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize, verify
from shardwright.models import CrossEntropy

TOKENS = torch.randint(19, (5, 8), generator=torch.Generator().manual_seed(0))


class Causal(nn.Module):
    """Six layers that see what came before, by a mask that the forward makes."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.1, batch_first=True)
        self.token = nn.Embedding(19, 12)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(12, 19)

    def forward(self, tokens):
        size = (tokens.shape[1], tokens.shape[1])
        mask = torch.full(size, float("-inf"), device=tokens.device, dtype=self.token.weight.dtype).triu(1)
        return self.head(self.encoder(self.token(tokens), mask=mask))


class Translates(nn.Module):
    """An encoder under a padding mask, and a decoder under a causal one that reads what it gives."""

    def __init__(self):
        super().__init__()
        kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        first, second = (kind(12, 2, 16, dropout=0.1, batch_first=True) for kind in kinds)
        self.token = nn.Embedding(19, 12)
        self.encoder, self.decoder = nn.TransformerEncoder(first, 2), nn.TransformerDecoder(second, 2)
        self.head = nn.Linear(12, 19)

    def forward(self, tokens):
        size = (tokens.shape[1], tokens.shape[1])
        mask = torch.ones(size, device=tokens.device, dtype=torch.bool).triu(1)
        x, padded = self.token(tokens), tokens.cumsum(1) > 50
        memory = self.encoder(x, src_key_padding_mask=padded)
        return self.head(self.decoder(x, memory, tgt_mask=mask) + memory)


def test_an_encoder_with_a_mask_is_cut_into_even_stages():
    model = Causal()

    def work(world):
        run = parallelize(model, "pp3 mb3", world, loss=CrossEntropy(), example=TOKENS[:, :-1])
        return {name.split(".")[2] for name, _ in run.model.named_parameters() if "layers" in name}

    assert launch(work, 3, ranks="threads") == [{"0", "1"}, {"2", "3"}, {"4", "5"}]


@pytest.mark.parametrize("line", ["pp3/1f1b mb3", "pp2/zb-v mb2 tp2"])
@pytest.mark.parametrize("kind", [Causal, Translates])
@pytest.mark.sampled(0)
def test_masked_layers_in_stages_train_as_on_one_device(kind, line):
    torch.manual_seed(0)
    verdict = verify(kind(), line, [(TOKENS[:, :-1], TOKENS[:, 1:])])
    assert verdict.tolerance == 1e-10
    assert verdict.equal, str(verdict)
