"""DETR's sine embedding and transformer, under the reference's names.

Tokens are (N, tokens, D). Source: DETR ``models/position_encoding.py`` and ``models/transformer.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Transformer", "TransformerSettings", "sine_embedding"]

_TEMPERATURE = 10000.0
_EPSILON = 1e-6


def sine_embedding(keep: torch.Tensor, width: int, normalize: bool = True) -> torch.Tensor:
    """Where each place of a map lies among the valid ones, as sines and cosines.

    Args:
        keep: bool (N, h, w), False where there is padding.
        width: channels; half of them tell the row, half the column.
        normalize: the last row and column are 2 pi, whatever the image's size.

    Returns:
        float32 (N, width, h, w), sines and cosines in turn.
    """
    half = width // 2
    rows, columns = keep.cumsum(1, dtype=torch.float32), keep.cumsum(2, dtype=torch.float32)
    if normalize:
        rows = rows / (rows[:, -1:, :] + _EPSILON) * (2 * math.pi)
        columns = columns / (columns[:, :, -1:] + _EPSILON) * (2 * math.pi)
    index = torch.arange(half, dtype=torch.float32, device=keep.device)
    wave = _TEMPERATURE ** (2 * torch.div(index, 2, rounding_mode="floor") / half)
    found = []
    for count in (rows, columns):
        angle = count[..., None] / wave
        found.append(torch.stack((angle[..., 0::2].sin(), angle[..., 1::2].cos()), dim=4).flatten(3))
    return torch.cat(found, dim=3).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class TransformerSettings:
    """What a transformer is made of; ``pre_norm`` normalises what goes into each part, not what comes out."""

    width: int = 256
    heads: int = 8
    hidden: int = 2048
    encoder: int = 6
    decoder: int = 6
    dropout: float = 0.1
    pre_norm: bool = False


class Attention(nn.Module):
    """Attention of several heads, with the names of ``nn.MultiheadAttention``; no weights are given back."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.zeros(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Args: query (N, Q, D); key and value (N, K, D); keep, bool (N, K): which keys count (all)."""
        width = query.shape[2]
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if query is key:
            q, k = F.linear(query, weight[: 2 * width], bias[: 2 * width]).chunk(2, dim=2)
        else:
            q = F.linear(query, weight[:width], bias[:width])
            k = F.linear(key, weight[width : 2 * width], bias[width : 2 * width])
        v = F.linear(value, weight[2 * width :], bias[2 * width :])
        q, k, v = (x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        found = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if keep is None else keep[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out_proj(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """What the layers of both halves share: an MLP, and how a part is added to what came in."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        self.pre_norm = settings.pre_norm
        self.linear1 = nn.Linear(settings.width, settings.hidden)
        self.linear2 = nn.Linear(settings.hidden, settings.width)
        self.dropout = nn.Dropout(settings.dropout)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.dropout(F.relu(self.linear1(x))))  # type: ignore[no-any-return]

    def added(
        self, x: torch.Tensor, norm: nn.Module, part: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        if self.pre_norm:
            return x + self.dropout(part(norm(x)))
        return norm(x + self.dropout(part(x)))  # type: ignore[no-any-return]


class EncoderLayer(Layer):
    """Attention among the places of the map, then an MLP. Positions are added to queries and keys alone."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__(settings)
        self.self_attn = Attention(settings.width, settings.heads, settings.dropout)
        self.norm1 = nn.LayerNorm(settings.width)
        self.norm2 = nn.LayerNorm(settings.width)

    def forward(self, x: torch.Tensor, place: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
        def among_places(y: torch.Tensor) -> torch.Tensor:
            placed = y + place
            return self.self_attn(placed, placed, y, keep)  # type: ignore[no-any-return]

        return self.added(self.added(x, self.norm1, among_places), self.norm2, self.mlp)


class DecoderLayer(Layer):
    """Attention among the queries, of the queries to the map, then an MLP."""

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__(settings)
        self.self_attn = Attention(settings.width, settings.heads, settings.dropout)
        self.multihead_attn = Attention(settings.width, settings.heads, settings.dropout)
        self.norm1 = nn.LayerNorm(settings.width)
        self.norm2 = nn.LayerNorm(settings.width)
        self.norm3 = nn.LayerNorm(settings.width)

    def forward(
        self,
        x: torch.Tensor,
        memory: torch.Tensor,
        placed: torch.Tensor,
        query: torch.Tensor,
        keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """Args: x (N, Q, D); memory and the same with its positions (N, places, D); query (Q, D)."""

        def among_queries(y: torch.Tensor) -> torch.Tensor:
            asking = y + query
            return self.self_attn(asking, asking, y)  # type: ignore[no-any-return]

        x = self.added(x, self.norm1, among_queries)
        x = self.added(x, self.norm2, lambda y: self.multihead_attn(y + query, placed, memory, keep))
        return self.added(x, self.norm3, self.mlp)


class Stack(nn.Module):
    """Layers, and the norm after the last one."""

    def __init__(self, layers: list[Layer], norm: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class Transformer(nn.Module):
    """An encoder of a map, and a decoder that turns queries into objects.

    All weights of more than one dimension are drawn from Xavier's uniform distribution.
    """

    def __init__(self, settings: TransformerSettings) -> None:
        super().__init__()
        after = nn.LayerNorm(settings.width) if settings.pre_norm else None
        self.encoder = Stack([EncoderLayer(settings) for _ in range(settings.encoder)], after)
        self.decoder = Stack(
            [DecoderLayer(settings) for _ in range(settings.decoder)], nn.LayerNorm(settings.width)
        )
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self,
        features: torch.Tensor,
        place: torch.Tensor,
        query: torch.Tensor,
        keep: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode a map.

        Args:
            features: (N, D, h, w).
            place: its positions, the same shape.
            query: (Q, D), added as positions; the decoder starts from zeros.
            keep: bool (N, h, w), False where there is padding; None: nowhere.

        Returns:
            What every layer of the decoder says (layers, N, Q, D), and the encoded map (N, h * w, D).
        """
        memory, place = (x.flatten(2).transpose(1, 2) for x in (features, place))
        keep = None if keep is None else keep.flatten(1)
        for layer in self.encoder.layers:
            memory = layer(memory, place, keep)
        if self.encoder.norm is not None:
            memory = self.encoder.norm(memory)
        placed = memory + place
        x = torch.zeros_like(query).expand(len(memory), -1, -1)
        said = []
        for layer in self.decoder.layers:
            x = layer(x, memory, placed, query, keep)
            said.append(x)
        assert self.decoder.norm is not None
        return self.decoder.norm(torch.stack(said)), memory
