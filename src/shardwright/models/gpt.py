"""Decoder-only language models on one device, in two styles.

``gpt2``: learned positions, LayerNorm, biases, fused QKV, a GELU MLP.
``llama``: rotary positions, RMSNorm, no biases, grouped heads, a gated SiLU MLP.

B batch, T tokens, H width, F feed-forward width, V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.models.attention import Attention, check_heads
from shardwright.models.eval_mode import eval_mode
from shardwright.models.settings import check_fraction, check_sizes

_STD = 0.02  # the standard deviation of GPT-2's initial weights, which are normally distributed


MOST_LAYERS = 10_000
"""The most layers that a config allows. More are taken for a typing error: GPT-3 has 96, and 1,600 take 20 s to build
even without values, a time that grows faster than their number (measured)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The settings of a ``GPT``: style, sizes and options.

    ``num_kv_heads=0`` means ``num_heads``, ``hidden=0`` the style's own feed-forward width. ``tied``: the head and the
    token embedding are one parameter. Only ``gpt2`` uses ``bias`` and limits sequences to ``max_tokens``; only
    ``llama`` uses ``theta``, its rotary base.

    Raises: PlanError: there is no such style, a size is too small, there are more than 10,000 layers, ``dropout`` is
        not from 0 to below 1, or the heads do not fit (:func:`~.attention.check_heads`).

    >>> GPTConfig(width=96).feed_forward_width, GPTConfig(style="llama", width=96).feed_forward_width
    (384, 256)
    """

    style: Literal["gpt2", "llama"] = "gpt2"
    vocabulary: int = 256
    max_tokens: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 0
    width: int = 128
    hidden: int = 0
    dropout: float = 0.0
    tied: bool = True
    bias: bool = True
    theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.style not in ("gpt2", "llama"):
            raise PlanError("no such style", given=self.style, allowed="gpt2, llama", fix="set style=gpt2")
        check_sizes(self, 1, "vocabulary", "max_tokens", "num_layers", "num_heads", "width", "theta")
        check_sizes(self, 0, "num_kv_heads", "hidden")
        if self.num_layers > MOST_LAYERS:
            num_layers, fix = self.num_layers, "set num_layers=4"
            raise PlanError("too many layers", given=num_layers, allowed=f"1 to {MOST_LAYERS}", fix=fix)
        check_fraction("dropout", self.dropout)
        check_heads(self.width, self.num_heads, self.num_kv_heads, 0, rotary=self.style == "llama")

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads: ``num_kv_heads``, or ``num_heads`` if that is 0."""
        return self.num_kv_heads or self.num_heads

    @property
    def feed_forward_width(self) -> int:
        """The hidden size of the feed-forward network: ``hidden`` or, if that is 0, the default of the style.

        The default is 4 times ``width``, the model's, for ``gpt2``. For the gated MLP of ``llama`` it is 8/3 times
        ``width``, rounded up to a multiple of 8.
        """
        if self.hidden or self.style == "gpt2":
            return self.hidden or 4 * self.width
        return -(-8 * self.width // 24) * 8


class MLP(nn.Module):
    """The feed-forward network of ``gpt2``: down(gelu(up(x))), from (B, T, H) to (B, T, H)."""

    def __init__(self, width: int, hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.activation = nn.GELU(approximate="tanh")
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Returns the feed-forward output of each token, (B, T, H)."""
        y_BTH: Tensor = self.down(self.activation(self.up(x_BTH)))
        return y_BTH


class GatedMLP(nn.Module):
    """The feed-forward network of ``llama``: down(silu(gate(x)) * up(x)), from (B, T, H) to (B, T, H).

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, width: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.activation = nn.SiLU()
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Returns the feed-forward output of each token, (B, T, H)."""
        y_BTH: Tensor = self.down(self.activation(self.gate(x_BTH)) * self.up(x_BTH))
        return y_BTH


class Block(nn.Module):
    """One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x)), from (B, T, H) to (B, T, H).

    Dropout is applied to the outputs of attention and MLP before they are added.

    >>> [name for name, _ in Block(GPTConfig()).named_children()]
    ['norm1', 'attention', 'dropout1', 'norm2', 'mlp', 'dropout2']
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        llama = config.style == "llama"
        bias = config.bias and not llama
        self.norm1 = _norm(config)
        heads, dropout = (config.num_heads, config.kv_heads), config.dropout
        self.attention = Attention(
            config.width, *heads, bias=bias, dropout=dropout, rotary=llama, theta=config.theta, fused=not llama
        )
        self.dropout1 = nn.Dropout(config.dropout)
        self.norm2 = _norm(config)
        self.mlp = (GatedMLP if llama else MLP)(config.width, config.feed_forward_width, bias=bias)
        self.dropout2 = nn.Dropout(config.dropout)
        for linear in (self.attention.o, self.mlp.down):
            object.__setattr__(linear, "ends_branch", True)  # in its __dict__, so that a copy of the layer has it too

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Returns the residual stream with the outputs of attention and MLP added, (B, T, H)."""
        x_BTH = x_BTH + self.dropout1(self.attention(self.norm1(x_BTH)))
        y_BTH: Tensor = x_BTH + self.dropout2(self.mlp(self.norm2(x_BTH)))
        return y_BTH


def _norm(config: GPTConfig) -> nn.Module:
    if config.style == "llama":
        return nn.RMSNorm(config.width, eps=1e-5)
    return nn.LayerNorm(config.width, bias=config.bias)


class Positions(nn.Module):
    """A module that returns the position of each token in its sequence, 0 to T - 1, and checks the sequence's length.

    Shapes: tokens_BT (B, T); returns (T,) int64.
    Raises: PlanError: a sequence longer than ``max_tokens``.

    >>> Positions(8)(torch.zeros(2, 3))
    tensor([0, 1, 2])
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Returns the positions 0 to T - 1 on the tokens' device."""
        self.check(tokens_BT.shape[1])
        return torch.arange(tokens_BT.shape[1], device=tokens_BT.device)

    def check(self, num_tokens: int) -> None:
        """Raises PlanError if a sequence is longer than ``max_tokens``."""
        if num_tokens > self.max_tokens:
            raise PlanError(
                "the sequence is longer than the learned positions",
                given=f"{num_tokens} tokens",
                allowed=f"1 to {self.max_tokens}",
                fix=f"set max_tokens={num_tokens}, or use shorter sequences",
            )


class GPT(nn.Module):
    """A decoder-only language model in the style of GPT-2 or LLaMA.

    Shapes: tokens_BT (B, T) int64; returns logits (B, T, V).
    Raises: PlanError: more tokens than ``max_tokens`` where positions are learned.
    Source: Radford et al. 2019 (gpt2); Touvron et al. 2023, arXiv:2302.13971 (llama).

    >>> model = GPT(GPTConfig(num_layers=1, width=8))
    >>> model(torch.zeros(2, 5, dtype=torch.int64)).shape, model.head.weight is model.token.weight
    (torch.Size([2, 5, 256]), True)
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.max_tokens, config.width) if config.style == "gpt2" else None
        self.positions = Positions(config.max_tokens)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.token.weight
        self.apply(self._init_weights)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Returns the logits (B, T, V) of the token that follows each token."""
        x_BTH = self.token(tokens_BT)
        if self.position is not None:
            x_BTH = x_BTH + self.position(self.positions(tokens_BT))
        x_BTH = self.dropout(x_BTH)
        for block in self.blocks:
            x_BTH = block(x_BTH)
        logits_BTV: Tensor = self.head(self.norm(x_BTH))
        return logits_BTV

    def _init_weights(self, module: nn.Module) -> None:
        """Initializes one leaf module as GPT-2 does: the last layer of a residual branch is scaled down by depth."""
        if isinstance(module, nn.Linear | nn.Embedding):
            ends_branch = getattr(module, "ends_branch", False)
            nn.init.normal_(module.weight, std=_STD / sqrt(2 * self.config.num_layers) if ends_branch else _STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()


@torch.no_grad()
def generate(model: GPT, tokens_BT: Tensor, num_new: int, temperature: float, generator: torch.Generator) -> Tensor:
    """Returns the tokens followed by ``num_new`` tokens, each sampled from the model's prediction for the next one.

    A temperature of 0 takes the likeliest token. For each new token the model runs in eval mode on all of the last
    ``max_tokens`` tokens: keys and values are not cached.

    Shapes: tokens_BT (B, T), T at least 1; returns (B, T + num_new).

    >>> model = GPT(GPTConfig(num_layers=1, width=8))
    >>> generate(model, torch.zeros(2, 3, dtype=torch.int64), 4, 0.8, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 7])
    """
    with eval_mode(model):
        for _ in range(num_new):
            logits_BV = model(tokens_BT[:, -model.config.max_tokens :])[:, -1]
            if temperature > 0:
                probabilities_BV = (logits_BV.float() / temperature).softmax(dim=-1)
                next_B1 = torch.multinomial(probabilities_BV, 1, generator=generator)
            else:
                next_B1 = logits_BV.argmax(dim=-1, keepdim=True)
            tokens_BT = torch.cat((tokens_BT, next_B1), dim=1)
    return tokens_BT
