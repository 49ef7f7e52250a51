"""A small GPT: a decoder-only transformer, pre-norm, with learned positions.

One thing is added, for a model this small and trained this briefly: a token is also told the two
before it, by embeddings of their own, so that the first layer need not learn to look back.

Written out rather than assembled from `nn.TransformerEncoder`, so that every matrix has a name that
a parallel plan can point at: the heads of `wq`, `wk` and `wv` may be split over processes (`view`
takes the number of heads from what it is given), and `layers` may be split into pipeline stages.
After Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LOOK_BACK = 2


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width ({width}) must be a multiple of num_heads ({num_heads})")
        self.head_dim = width // num_heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.wq(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """Two linear maps with a GELU between them, applied to each position alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, 4 * width, bias=False)
        self.w2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.gelu(self.w1(x)))
        return out


class Block(nn.Module):
    """One layer: attention, then feed-forward, each added to what came in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class GPT(nn.Module):
    """Tokens (batch, length) of int64 to logits (batch, length, vocabulary).

    max_length: the longest sequence it can read; ValueError for a longer one.
    """

    def __init__(
        self, vocabulary: int, max_length: int, width: int, num_heads: int, num_layers: int
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_length, width)
        self.before = nn.ModuleList(nn.Embedding(vocabulary, width) for _ in range(_LOOK_BACK))
        self.layers = nn.ModuleDict(
            {str(index): Block(width, num_heads) for index in range(num_layers)}
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._initialise(width, num_layers)

    def _initialise(self, width: int, num_layers: int) -> None:
        std = 1 / math.sqrt(width)
        for name, weight in self.named_parameters():
            if name.endswith(("wo.weight", "w2.weight")):
                # Each layer adds to the residual stream twice: keep its variance at one layer's.
                nn.init.normal_(weight, std=std / math.sqrt(2 * num_layers))
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=std)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens; max_length is {self.max_length}")
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for distance, embedding in enumerate(self.before, 1):
            x = x + embedding(F.pad(tokens, (distance, 0))[:, :length])
        for layer in self.layers.values():
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
