"""An output projection over some tokens only: of a draft model's token, the head is the largest part.

All other tokens get a logit that no sampling draws. What a draft proposes may be any distribution, so text stays
lossless; it is only accepted less often where the target wants a token that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semspec.model import cpu_gemm
from semspec.model.int8 import Int8Linear
from semspec.model.linear import DenseLinear, Linear
from semspec.model.quantised import QuantisedLinear

LOWEST = -1e4  # finite: rules multiply log-probabilities by probabilities, which are 0 here


class LimitedHead(Linear):
    def __init__(self, inner: Linear, ids: Tensor, vocab: int, sample: Tensor | None = None) -> None:
        """`inner` has an output for each of these ids of the vocabulary."""
        self.inner, self.ids, self.vocab_size, self.bias = inner, ids, vocab, None
        self._sample = inner.sample if sample is None else sample

    @staticmethod
    def picked(head: Linear, embedding: Tensor | None, ids: Sequence[int], vocab: int) -> LimitedHead:
        """Some outputs of a head. `embedding`: its weights as floats, if these are the embedding's."""
        at = torch.tensor(ids, device=None if embedding is None else embedding.device)
        if isinstance(head, DenseLinear):
            at = at.to(head.weight.device)
            weight = head.weight[at]
            packed = None if head.packed is None else cpu_gemm.pack(weight)
            inner: Linear = DenseLinear(weight, None, head.transposed, packed)
        elif isinstance(head, QuantisedLinear):
            at = at.to(head.codes.device)
            inner = head.with_rows(1).picked(at)
        elif embedding is not None:
            inner = Int8Linear(embedding[at])
        else:
            assert isinstance(head, Int8Linear)
            inner = head.picked(at)
        return LimitedHead(inner, at, vocab, head.sample)

    def __call__(self, x: Tensor) -> Tensor:
        return self.spread(self.inner(x), x.new_empty((len(x), self.vocab_size)))

    def write(self, x: Tensor, out: Tensor) -> Tensor:
        return self.spread(self.inner(x), out)

    def spread(self, logits: Tensor, out: Tensor) -> Tensor:
        """Logits of the tokens it has [N, ids] -> of all, [N, V]."""
        return out.fill_(LOWEST).index_copy_(1, self.ids, logits.to(out.dtype))

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.ids.nbytes

    @property
    def sample(self) -> Tensor:
        return self._sample
