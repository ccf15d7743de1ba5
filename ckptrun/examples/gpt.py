"""What does a small transformer over bytes look like? Only the network; ``stdlib_gpt.py`` trains it.

Decision: bytes are the vocabulary, so there is no tokenizer to build or to ship, rotary positions and tied
embeddings, so that nearly all of the parameters do the work. Turned down: a transformer from a library, whose
many options hide what is being saved and restored.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name that PyTorch's users know
from torch import Tensor, nn

NUM_BYTES = 256


class Block(nn.Module):
    """Attention to the past, then a perceptron at each position, both added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.project_attention = nn.Linear(width, width, bias=False)
        self.norm_perceptron = nn.LayerNorm(width, bias=False)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.project_perceptron = nn.Linear(4 * width, width, bias=False)

    def forward(self, stream: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, width = stream.shape
        mixed = self.query_key_value(self.norm_attention(stream))
        heads = mixed.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key = rotate(heads[0], cosine, sine), rotate(heads[1], cosine, sine)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, heads[2], dropout_p=dropout, is_causal=True)
        stream = stream + self._drop(
            self.project_attention(seen.transpose(1, 2).reshape(batch, length, width))
        )
        hidden = F.gelu(self.expand(self.norm_perceptron(stream)))
        return stream + self._drop(self.project_perceptron(hidden))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn pairs of channels by an angle that grows with the position; ``x`` is [..., length, channels]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class GPT(nn.Module):
    """A decoder-only transformer that predicts the next byte.

    Args:
        width: channels of the stream; a multiple of twice the number of heads.
        depth: number of blocks.
        heads: attention heads in each block.
        context: the longest input, in bytes.
        dropout: share of activations dropped in training.
    """

    cosine: Tensor
    sine: Tensor

    def __init__(
        self, width: int = 128, depth: int = 4, heads: int = 4, context: int = 128, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width {width} is not a multiple of twice the number of heads, {2 * heads}")
        self.context = context
        self.embedding = nn.Embedding(NUM_BYTES, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        half = width // heads // 2
        angles = torch.arange(context)[:, None] / 10_000 ** (torch.arange(half) / half)
        # Computed, not learned: no reason to keep them in every checkpoint.
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What writes into the stream starts smaller the more blocks there are.
                shrink = math.sqrt(2 * depth) if ".project_" in name else 1.0
                nn.init.normal_(parameter, std=0.02 / shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, 256] of the byte after each one of ``tokens`` [batch, length].

        Raises:
            ValueError: the input is longer than ``context``.
        """
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"the input is {length} bytes long; the model's context is {self.context}")
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream, self.cosine[:length], self.sine[:length])
        return F.linear(self.norm(stream), self.embedding.weight)

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, *, temperature: float, top_k: int, end: int) -> bytes:
        """Up to ``num_bytes`` bytes that go on from ``prompt``; stops before the byte ``end``.

        Draws from torch's global random state, so that the same seed writes the same text.
        """
        tokens = torch.tensor([list(prompt)], device=self.embedding.weight.device)
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.context :])[0, -1].float() / temperature
            likeliest, which = logits.topk(min(top_k, NUM_BYTES))
            drawn = which[torch.multinomial(likeliest.softmax(0), 1)]
            if int(drawn) == end:
                break
            tokens = torch.cat((tokens, drawn[None]), dim=1)
        return bytes(tokens[0, len(prompt) :].tolist())
