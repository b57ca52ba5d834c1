"""What a scoring pass says about a step besides its states: how the target finds the step's tokens, in a few numbers.

A mean of states drowns one wrong digit; the probability of that digit does not. The numbers come from logits that the
pass has computed anyway, at temperature 1 whatever the request's is. Fitting and run time share this.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

NAMES = ("lowest", "second_lowest", "mean", "lowest_number", "widest_gap", "mean_entropy", "highest_entropy", "length")
WIDTH = len(NAMES)
FAR = -30.0  # no log-probability counts as less: what is impossible is not infinitely impossible


def evidence(logits: Tensor, rows: Tensor, ids: Tensor, exists: Tensor, numbers: Tensor) -> Tensor:
    """[R, V], [B, K], [B, K], [B, K] bool, [V] bool -> [B, WIDTH] float32, without a host synchronisation.

    rows[b, k] is the row that predicts token ids[b, k] of step b, where it exists. Log-probabilities are those of the
    step's tokens; a gap is how far one lies below the favourite's; numbers are tokens with a digit in them.
    """
    logp = logits.float().log_softmax(-1)  # [R, V]
    own = logp[rows, ids].clamp_min(FAR)  # [B, K]
    gap = logp.amax(-1)[rows] - own
    entropy = -(logp.exp() * logp.clamp_min(FAR)).sum(-1)[rows]
    counts = exists.sum(-1).clamp_min(1)
    low = torch.where(exists, own, 0.0)
    if low.shape[1] < 2:
        low = torch.nn.functional.pad(low, (0, 2 - low.shape[1]))
    lowest = low.topk(2, dim=-1, largest=False).values  # [B, 2]
    columns = [
        lowest[:, 0],
        lowest[:, 1],
        torch.where(exists, own, 0.0).sum(-1) / counts,
        torch.where(exists & numbers[ids], own, 0.0).amin(-1),
        torch.where(exists, gap, 0.0).amax(-1),
        torch.where(exists, entropy, 0.0).sum(-1) / counts,
        torch.where(exists, entropy, 0.0).amax(-1),
        counts.float().log(),
    ]
    return torch.stack(columns, -1)


def number_tokens(tokenizer: PreTrainedTokenizerBase, vocab: int) -> Tensor:
    """[V] tokens with a digit in their text. Takes about a second for a large vocabulary: keep the result."""
    mask = torch.zeros(vocab, dtype=torch.bool)
    ids = [i for i in sorted(tokenizer.get_vocab().values()) if i < vocab]
    for i, text in zip(ids, tokenizer.batch_decode([[i] for i in ids]), strict=True):
        mask[i] = any(letter.isdigit() for letter in text)
    return mask
