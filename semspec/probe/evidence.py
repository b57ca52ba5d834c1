"""What a scoring pass says about a step besides its states: how the target finds the step's tokens, in a few numbers.

A mean of states drowns one wrong digit; the probability of that digit does not. The numbers come from logits that the
pass has computed anyway, at temperature 1 whatever the request's is. How sure the draft was while it wrote the step is
known as well, for the price of keeping its logits. Fitting and run time share this.

Numbers come in groups, each of which a probe may do without:
    tokens    log-probabilities of the step's tokens: lowest, second lowest, mean, widest gap to a favourite
    numbers   the lowest log-probability among tokens with a digit in them
    entropy   mean and highest entropy of what the target might have written
    length    the logarithm of the number of tokens
    draft     the draft's own confidence: lowest and mean log-probability of its tokens, mean and highest entropy
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest

NAMES = ("lowest", "second_lowest", "mean", "lowest_number", "widest_gap", "mean_entropy", "highest_entropy", "length")
WIDTH = len(NAMES)
CONFIDENCE = ("draft_lowest", "draft_mean", "draft_mean_entropy", "draft_highest_entropy")
GROUPS = {
    "tokens": ("lowest", "second_lowest", "mean", "widest_gap"),
    "numbers": ("lowest_number",),
    "entropy": ("mean_entropy", "highest_entropy"),
    "length": ("length",),
    "draft": CONFIDENCE,
}
FAR = -30.0  # no log-probability counts as less: what is impossible is not infinitely impossible


def evidence(logits: Tensor, rows: Tensor, ids: Tensor, exists: Tensor, numbers: Tensor) -> Tensor:
    """[R, V], [B, K], [B, K], [B, K] bool, [V] bool -> [B, WIDTH] float32, without a host synchronisation.

    rows[b, k] is the row that predicts token ids[b, k] of step b, where it exists. Log-probabilities are those of the
    step's tokens; a gap is how far one lies below the favourite's; numbers are tokens with a digit in them.
    """
    logp, own, entropy = _log_probs(logits, rows, ids)
    gap = logp.amax(-1)[rows] - own
    counts = exists.sum(-1).clamp_min(1)
    low = torch.where(exists, own, 0.0)
    if low.shape[1] < 2:
        low = torch.nn.functional.pad(low, (0, 2 - low.shape[1]))
    lowest = low.topk(2, dim=-1, largest=False).values  # [B, 2]
    columns = [
        lowest[:, 0],
        lowest[:, 1],
        _mean(own, exists),
        torch.where(exists & numbers[ids], own, 0.0).amin(-1),
        torch.where(exists, gap, 0.0).amax(-1),
        _mean(entropy, exists),
        torch.where(exists, entropy, 0.0).amax(-1),
        counts.float().log(),
    ]
    return torch.stack(columns, -1)


def confidence(logits: Tensor, rows: Tensor, ids: Tensor, exists: Tensor) -> Tensor:
    """[D, V], [B, K], [B, K], [B, K] bool -> [B, len(CONFIDENCE)] float32, without a host synchronisation.

    The logits are the draft's own, at temperature 1, with what its sampling leaves out at -inf (see `at_one`)."""
    _, own, entropy = _log_probs(logits, rows, ids)
    columns = [
        torch.where(exists, own, 0.0).amin(-1),
        _mean(own, exists),
        _mean(entropy, exists),
        torch.where(exists, entropy, 0.0).amax(-1),
    ]
    return torch.stack(columns, -1)


def at_one(processed: Tensor, temperature: Tensor) -> Tensor:
    """Logits that a temperature was applied to [D, V], without it [D]; 0, greedy, means that none was.

    What filters have left out stays out: it is not known any more."""
    return processed * torch.where(temperature == 0.0, 1.0, temperature)[:, None]


def _log_probs(logits: Tensor, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [R, V], those of the step's tokens [B, K], and the entropies they were drawn with [B, K]."""
    logp = logits.float().log_softmax(-1)
    entropy = -(logp.exp() * logp.clamp_min(FAR)).sum(-1)
    return logp, logp[rows, ids].clamp_min(FAR), entropy[rows]


def _mean(values: Tensor, exists: Tensor) -> Tensor:
    # In doubles, so that the order of summing, which depends on how long the steps beside it are, rounds away.
    total = torch.where(exists, values, 0.0).sum(-1, dtype=torch.float64)
    return (total / exists.sum(-1).clamp_min(1)).float()


def known_groups(groups: Iterable[str]) -> tuple[str, ...]:
    """The groups of these names, in their own order, each once."""
    names = set(groups)
    if unknown := sorted(names - set(GROUPS)):
        raise BadRequest(f"there is no evidence {unknown[0]!r}; give some of: {', '.join(GROUPS)}")
    return tuple(group for group in GROUPS if group in names)


def select(seen: Tensor, groups: Iterable[str]) -> Tensor:
    """The columns of these groups, from all that was seen: `evidence`, followed by `confidence` where it is known.

    [B, WIDTH (+ len(CONFIDENCE))] -> [B, width_of(groups)]"""
    chosen = {name for group in groups for name in GROUPS[group]}
    return torch.stack([seen[:, i] for i, name in enumerate((*NAMES, *CONFIDENCE)) if name in chosen], -1)


def width_of(groups: Iterable[str]) -> int:
    return sum(len(GROUPS[group]) for group in groups)


def number_tokens(tokenizer: PreTrainedTokenizerBase, vocab: int) -> Tensor:
    """[V] tokens with a digit in their text. Takes about a second for a large vocabulary: keep the result."""
    mask = torch.zeros(vocab, dtype=torch.bool)
    ids = [i for i in sorted(tokenizer.get_vocab().values()) if i < vocab]
    for i, text in zip(ids, tokenizer.batch_decode([[i] for i in ids]), strict=True):
        mask[i] = any(letter.isdigit() for letter in text)
    return mask
