"""Top-k and top-p in PyTorch. On a GPU kernels do it without ordering anything (kernels/filter.py).

Sorting a vocabulary takes a CPU longer than a small model's pass, and hardly any row keeps more than a few hundred
tokens. So the best few are looked at first, and only rows whose limit is not among them are sorted.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")
FEW = 512  # best tokens of a row that are looked at first


def top_k_top_p(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the k best; of those, the fewest best whose probabilities sum to at least top_p. Of equal ones the first are
    better. [R, V], [R], [R] -> [R, V], the others at -inf; every row is a function of itself alone."""
    if logits.is_cuda or logits.shape[-1] <= 2 * FEW:  # a GPU does not wait for what is found
        return _by_sorting(logits, top_k, top_p)
    kept, found = _among_the_best(logits, top_k, top_p)
    unfiltered = (top_k == 0) & (top_p >= 1)
    if bool(unfiltered.any()):
        kept = torch.where(unfiltered[:, None], logits, kept)
    left = (~(found | unfiltered)).nonzero()[:, 0]
    return kept.index_copy_(0, left, _by_sorting(logits[left], top_k[left], top_p[left])) if len(left) else kept


def _among_the_best(logits: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the best few, filtered, and in which rows that is all that a whole row would keep."""
    index = logits.topk(FEW).indices.sort().values  # equal ones in their order
    values, order = logits.gather(-1, index).sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k == 0, logits.shape[-1], top_k)[:, None]
    beyond = torch.arange(FEW, device=logits.device) >= k
    limited = values.masked_fill(beyond, NEG_INF)
    total = torch.where(k <= FEW, limited.logsumexp(-1, keepdim=True), logits.logsumexp(-1, keepdim=True))
    limited = limited.masked_fill(_past(limited.sub(total).exp_(), top_p), NEG_INF)
    # The least of the few may be one of many that are equal, and k may lie further down.
    least, last = values[:, -1], limited.where(limited > NEG_INF, torch.inf).amin(-1)
    found = ((k <= FEW) | (k >= logits.shape[-1]))[:, 0] & ((last > least) | (least == NEG_INF))
    return torch.full_like(logits, NEG_INF).scatter_(-1, index.gather(-1, order), limited), found


def _by_sorting(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k == 0, logits.shape[-1], top_k)
    ordered = ordered.masked_fill(torch.arange(logits.shape[-1], device=logits.device) >= k[:, None], NEG_INF)
    ordered = ordered.masked_fill(_past(ordered.softmax(-1), top_p), NEG_INF)
    return torch.full_like(logits, NEG_INF).scatter_(-1, index, ordered)


def _past(probs: Tensor, top_p: Tensor) -> Tensor:
    """Which of probabilities in falling order [R, n] come after top_p of them; never the first."""
    before = probs.cumsum(-1) - probs  # mass of the better tokens
    cut = (before >= top_p[:, None]) & (top_p < 1)[:, None]  # off is off: rounded sums reach 1 before the tail ends
    cut[:, 0] = False
    return cut
