"""Self-attention on one device: multi-head, grouped-query or multi-query, with rotary positions and fused QKV.

B batch, T tokens, S key and value tokens, H width, N query heads, M key and value heads, D head width,
d rotated elements of a head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import PlanError
from shardwright.models.settings import check_fraction, check_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """The settings of an ``Attention``. ``num_kv_heads=0`` means ``num_heads``; ``head_dim=0``, ``width / num_heads``.

    With ``rotary``, queries and keys are rotated by their positions, with the base ``theta``. With ``fused``, one
    linear layer computes queries, keys and values.

    Raises: PlanError: a size is too small, ``dropout`` is not from 0 to below 1, or the heads do not fit
        (:func:`check_heads`).

    >>> AttentionConfig(width=64, num_heads=8, num_kv_heads=2).kv_heads
    2
    """

    width: int = 64
    num_heads: int = 4
    num_kv_heads: int = 0
    head_dim: int = 0
    bias: bool = True
    causal: bool = True
    dropout: float = 0.0
    rotary: bool = False
    theta: float = 10000.0
    fused: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, 1, "width", "num_heads", "theta")
        check_sizes(self, 0, "num_kv_heads", "head_dim")
        check_fraction("dropout", self.dropout)
        check_heads(self.width, self.num_heads, self.num_kv_heads, self.head_dim, rotary=self.rotary)

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads: ``num_kv_heads``, or ``num_heads`` if that is 0."""
        return self.num_kv_heads or self.num_heads


def check_heads(width: int, num_heads: int, num_kv_heads: int, head_dim: int, *, rotary: bool) -> None:
    """Raises PlanError unless an attention's numbers of heads and its widths fit together.

    ``num_kv_heads`` must divide ``num_heads``; without a ``head_dim``, ``num_heads`` must divide ``width``; rotary
    embedding needs an even head width.

    >>> check_heads(64, 6, 4, 0, rotary=False)
    Traceback (most recent call last):
    shardwright.errors.PlanError: the query heads do not share the key and value heads evenly
      given:   num_heads=6, num_kv_heads=4
      allowed: num_kv_heads that divides 6
      fix:     set num_kv_heads=3
    """
    kv_heads = num_kv_heads or num_heads
    if num_heads % kv_heads:
        fits = max(heads for heads in range(1, kv_heads + 1) if num_heads % heads == 0)
        raise PlanError(
            "the query heads do not share the key and value heads evenly",
            given=f"num_heads={num_heads}, num_kv_heads={kv_heads}",
            allowed=f"num_kv_heads that divides {num_heads}",
            fix=f"set num_kv_heads={fits}",
        )
    if not head_dim and width % num_heads:
        settings, fix = f"width={width}, num_heads={num_heads}", f"set width={-(-width // num_heads) * num_heads}"
        allowed = "a width that num_heads divides, or a head_dim of your own"
        raise PlanError("the width is no whole number of heads", given=settings, allowed=allowed, fix=fix)
    head_dim = head_dim or width // num_heads
    if rotary and head_dim % 2:
        settings, fix = f"head_dim={head_dim}", f"set head_dim={head_dim + 1}"
        raise PlanError("a rotation needs pairs of elements", given=settings, allowed="an even head_dim", fix=fix)


class Rotary(nn.Module):
    """Rotary position embedding: rotates pairs of elements by angles that grow with the token's position.

    Element ``i`` is paired with element ``i + len(pairs)``. Pair ``p`` of a head is rotated by
    ``position * theta ** (-2 p / head_dim)``, so that the dot product of a rotated query and a rotated key depends on
    their positions by the distance only. ``pairs`` lists the pairs that the input holds: all, unless tensor parallelism
    shards the head.

    Shapes: x_BNTd (B, N, T, 2 * len(pairs)); returns the same.
    Source: Su et al. 2021, arXiv:2104.09864; the halves as in the LLaMA models.

    >>> rotary = Rotary(4)
    >>> rotary.pairs, rotary(torch.ones(1, 1, 2, 4))[0, 0, 0]
    ((0, 1), tensor([1., 1., 1., 1.]))
    """

    def __init__(self, head_dim: int, theta: float = 10000.0) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.pairs: tuple[int, ...] = tuple(range(head_dim // 2))

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """Returns the position of each token, 0 to ``num_tokens - 1``.

        Where ranks hold different parts of a sequence, this method is replaced on the instance.

        >>> Rotary(4).positions(3, torch.device("cpu"))
        tensor([0, 1, 2])
        """
        return torch.arange(num_tokens, device=device)

    def forward(self, x_BNTd: Tensor) -> Tensor:
        """Returns queries or keys with each token's pairs of elements rotated by its position, in the same shape."""
        # angles reach thousands of radians, where half precision has no digits left
        dtype = torch.promote_types(x_BNTd.dtype, torch.float32)
        pairs = torch.tensor(self.pairs, dtype=dtype, device=x_BNTd.device)
        positions_T = self.positions(x_BNTd.shape[-2], x_BNTd.device).to(dtype)
        angles_Tp = positions_T[:, None] * self.theta ** (-2 * pairs / self.head_dim)
        cos_Td, sin_Td = angles_Tp.cos().repeat(1, 2), angles_Tp.sin().repeat(1, 2)
        x = x_BNTd.to(dtype)
        first, second = x.chunk(2, dim=-1)
        return (x * cos_Td + torch.cat((-second, first), dim=-1) * sin_Td).to(x_BNTd.dtype)

    def extra_repr(self) -> str:
        """Returns the settings as text, for ``print(model)``."""
        return f"head_dim={self.head_dim}, theta={self.theta:g}, num_pairs={len(self.pairs)}"


class Attention(nn.Module):
    """Multi-head self-attention; with fewer key and value heads than query heads, groups of query heads share them.

    Under tensor parallelism the projections are narrower, and ``num_heads``, ``num_kv_heads`` and ``head_dim`` of the
    instance are those of this rank; ``scale`` stays that of the whole head. ``attend`` may be replaced on an instance.

    Shapes: x_BTH (B, T, H); returns (B, T, H). If ``fused``, ``qkv.weight`` has all rows of q, then of k, then of v.
    Raises: PlanError: the heads do not fit (:func:`check_heads`).
    Source: Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023, arXiv:2305.13245 (grouped heads).

    >>> attention = Attention(8, 4, num_kv_heads=2, bias=False)
    >>> attention(torch.zeros(1, 3, 8)).shape, attention.k.weight.shape
    (torch.Size([1, 3, 8]), torch.Size([4, 8]))
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = True,
        causal: bool = True,
        dropout: float = 0.0,
        rotary: bool = False,
        theta: float = 10000.0,
        fused: bool = False,
    ) -> None:
        super().__init__()
        check_heads(width, num_heads, num_kv_heads or 0, head_dim or 0, rotary=rotary)
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_dim = head_dim or width // num_heads
        self.scale = self.head_dim**-0.5
        self.causal = causal
        self.fused = fused
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if fused:
            self.qkv = nn.Linear(width, q_width + 2 * kv_width, bias=bias)
        else:
            self.q = nn.Linear(width, q_width, bias=bias)
            self.k = nn.Linear(width, kv_width, bias=bias)
            self.v = nn.Linear(width, kv_width, bias=bias)
        self.o = nn.Linear(q_width, width, bias=bias)
        self.rotary = Rotary(self.head_dim, theta) if rotary else None
        self.attention_dropout = nn.Dropout(dropout)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Returns the self-attention of a sequence, (B, T, H), projected back to the width."""
        q, k, v = self.project(x_BTH)
        q_BNTD = split_heads(q, self.num_heads, self.head_dim)
        k_BMTD = split_heads(k, self.num_kv_heads, self.head_dim)
        v_BMTD = split_heads(v, self.num_kv_heads, self.head_dim)
        if self.rotary is not None:
            q_BNTD, k_BMTD = self.rotary(q_BNTD), self.rotary(k_BMTD)
        y_BTH: Tensor = self.o(merge_heads(self.attend(q_BNTD, k_BMTD, v_BMTD)))
        return y_BTH

    def project(self, x_BTH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values with merged heads: (B, T, N * D), (B, T, M * D), (B, T, M * D)."""
        if not self.fused:
            return self.q(x_BTH), self.k(x_BTH), self.v(x_BTH)
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = self.qkv(x_BTH).split((q_width, kv_width, kv_width), dim=-1)
        return q, k, v

    def attend(self, q_BNTD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor) -> Tensor:
        """Returns the attention output of all heads, dropout(softmax(scores)) @ values: (B, N, T, D).

        The queries are those of the last T of S tokens. If the attention is causal, scores of later tokens are masked.
        """
        if not (self.attention_dropout.training and self.attention_dropout.p > 0):
            # torch's is_causal takes the queries for the first tokens, so fewer queries than keys need a mask
            masked = self.causal and q_BNTD.shape[-2] != k_BMSD.shape[-2]
            mask_TS = ~hidden_keys(q_BNTD, k_BMSD) if masked else None
            is_causal, grouped = self.causal and not masked, q_BNTD.shape[1] != k_BMSD.shape[1]
            return functional.scaled_dot_product_attention(
                q_BNTD, k_BMSD, v_BMSD, mask_TS, is_causal=is_causal, scale=self.scale, enable_gqa=grouped
            )
        # written out, so that dropout is a call of a module, which strategies can find, hook and replace
        group_size = q_BNTD.shape[1] // k_BMSD.shape[1]
        k_BNSD, v_BNSD = k_BMSD.repeat_interleave(group_size, dim=1), v_BMSD.repeat_interleave(group_size, dim=1)
        scores_BNTS = q_BNTD @ k_BNSD.mT * self.scale
        if self.causal:
            scores_BNTS = scores_BNTS.masked_fill(hidden_keys(q_BNTD, k_BNSD), -torch.inf)
        dropped_BNTS: Tensor = self.attention_dropout(scores_BNTS.softmax(dim=-1))
        return dropped_BNTS @ v_BNSD


def hidden_keys(q_BNTD: Tensor, k_BMSD: Tensor) -> Tensor:
    """Returns the causal mask, True where the key is of a later token; the queries are the last T of S tokens.

    Shapes: q_BNTD (B, N, T, D); k_BMSD (B, M, S, D); returns (T, S) bools.

    >>> hidden_keys(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4))
    tensor([[False, False,  True],
            [False, False, False]])
    """
    num_queries, num_keys = q_BNTD.shape[-2], k_BMSD.shape[-2]
    every_TS = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q_BNTD.device)
    return every_TS.triu(1 + num_keys - num_queries)


def split_heads(x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Returns ``x`` with its heads split: (B, T, heads * head_dim) becomes (B, heads, T, head_dim).

    >>> split_heads(torch.zeros(2, 3, 8), 4, 2).shape
    torch.Size([2, 4, 3, 2])
    """
    return x.reshape(*x.shape[:-1], num_heads, head_dim).transpose(1, 2)


def merge_heads(x_BNTD: Tensor) -> Tensor:
    """Returns ``x_BNTD`` with its heads merged: (B, heads, T, head_dim) becomes (B, T, heads * head_dim).

    >>> merge_heads(torch.zeros(2, 4, 3, 2)).shape
    torch.Size([2, 3, 8])
    """
    return x_BNTD.transpose(1, 2).flatten(2)
