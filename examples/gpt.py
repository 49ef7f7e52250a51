"""A small GPT: a decoder-only transformer, pre-norm, with learned positions.

One thing is added, for a model this small and trained this briefly: a token is also told the two
before it, by embeddings of their own, so that the first layer need not learn to look back.

Written out rather than assembled from `nn.TransformerEncoder`, so that every matrix has a name that
a parallel plan can point at: the heads of `wq`, `wk` and `wv` may be split over processes (`view`
takes the number of heads from what it is given): `tp_plan`. The layers may be cut into stages:
`pp_split`.
After Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

import copy
import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

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

    max_length: the longest sequence it can read; ValueError for a longer one. A stage of a model
    that is cut takes tokens if it has their embeddings and else what the stage before it gave, and
    gives logits if it has a head.
    """

    tokens: nn.Embedding | None
    positions: nn.Embedding | None
    before: nn.ModuleList | None
    norm: nn.LayerNorm | None
    head: nn.Linear | None

    def __init__(
        self, vocabulary: int, max_length: int, width: int, num_heads: int, num_layers: int
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.num_heads = num_heads
        self.length_multiple = 1
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

    def forward(self, x: Tensor) -> Tensor:
        # A sequence that is split among ranks is split evenly; what follows its end changes nothing
        # before it.
        if self.tokens is not None:
            x = self._embed(F.pad(x, (0, -x.shape[1] % self.length_multiple)))
        for layer in self.layers.values():
            x = layer(x)
        if self.head is None or self.norm is None:
            return x
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _embed(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.max_length:
            raise ValueError(f"a sequence of {length} tokens; max_length is {self.max_length}")
        assert self.tokens is not None
        assert self.positions is not None
        assert self.before is not None
        x: Tensor = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for distance, embedding in enumerate(self.before, 1):
            x = x + embedding(F.pad(tokens, (distance, 0))[:, :length])
        return x


def tp_plan(
    model: GPT, degree: int, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> "dict[str, ParallelStyle]":
    """Each layer's matrices over `degree` ranks: heads, and the hidden width, are shared out.

    After Shoeybi et al., "Megatron-LM" (2019); sequence_parallel, where each rank also normalises
    its part of the sequence alone, after Korthikanti et al., "Reducing Activation Recomputation in
    Large Transformer Models" (2022). It makes the model pad sequences to a multiple of `degree`, so
    that logits may be longer than the tokens. loss_parallel leaves the logits split along the
    vocabulary. ValueError for a degree that does not divide the heads.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    first, *_ = model.layers
    if model.num_heads % degree:
        raise ValueError(f"tp {degree} does not divide num_heads {model.num_heads}")
    if sequence_parallel and model.max_length % degree:
        raise ValueError(f"tp {degree} does not divide max_length {model.max_length}")
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=between),
        "layers.*.feed_forward.w1": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    if sequence_parallel:
        model.length_multiple = degree
        gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan |= {
            f"layers.{first}": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
            ),
            "layers.*.*_norm": SequenceParallel(),
            "layers.*.attention": gather,
            "layers.*.feed_forward": gather,
            "norm": SequenceParallel(),
        }
    return plan


def pp_split(model: GPT, num_stages: int) -> list[nn.Module]:
    """The model as stages of as equal a number of layers as there can be; the first has the
    embeddings too, and the last the head. They share the model's parameters.

    ValueError for more stages than layers.
    """
    names = list(model.layers)
    if num_stages > len(names):
        raise ValueError(f"{num_stages} stages of the {len(names)} layers of num_layers")
    stages: list[nn.Module] = []
    for number in range(num_stages):
        stage = copy.copy(model)
        stage._modules = dict(model._modules)  # which copy() has left to be the same dict
        start, stop = (len(names) * end // num_stages for end in (number, number + 1))
        stage.layers = nn.ModuleDict({name: model.layers[name] for name in names[start:stop]})
        if number > 0:
            stage.tokens = stage.positions = stage.before = None
        if number < num_stages - 1:
            stage.norm = stage.head = None
        stages.append(stage)
    return stages
