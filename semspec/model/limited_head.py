"""An output projection over some tokens only: of a draft model's token, the head is the largest part.

All other tokens get a logit that no sampling draws. What a draft proposes may be any distribution, so text stays
lossless; it is only accepted less often where the target wants a token that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semspec.errors import ModelError
from semspec.model import cpu_gemm
from semspec.model.int8 import Int8Linear
from semspec.model.linear import DenseLinear, Linear
from semspec.model.quantised import QuantisedLinear

LOWEST = -1e4  # finite: rules multiply log-probabilities by probabilities, which are 0 here


class LimitedHead(Linear):
    def __init__(self, head: Linear, embedding: Tensor | None, ids: Sequence[int], vocab: int) -> None:
        """`embedding`: the head's weights as floats, if these are the embedding's."""
        self.vocab, self.bias = vocab, None
        self.ids = torch.tensor(ids, device=None if embedding is None else embedding.device)
        if isinstance(head, DenseLinear):
            self.ids = self.ids.to(head.weight.device)
            weight = head.weight[self.ids]
            packed = None if head.packed is None else cpu_gemm.pack(weight)
            self.inner: Linear = DenseLinear(weight, None, head.transposed, packed)
        elif isinstance(head, QuantisedLinear):
            self.ids = self.ids.to(head.codes.device)
            self.inner = head.with_rows(1).picked(self.ids)
        elif embedding is not None:
            self.inner = Int8Linear(embedding[self.ids])
        else:
            raise ModelError("a head of int8 weights cannot be made smaller on a CPU; give another draft_dtype")
        self._sample = head.sample

    def __call__(self, x: Tensor) -> Tensor:
        return self.spread(self.inner(x), x.new_empty((len(x), self.vocab)))

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
