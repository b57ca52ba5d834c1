"""From logits to tokens, vectorised over rows that each have their own temperature, filters and noise.

"Processed" logits have temperature and filters applied; their softmax is the distribution that is drawn from. A
greedy row is processed to all its mass on the largest logit, so that no rule needs a special case for temperature 0.
What is kept of a greedy row beside its token are its raw logits: that it was certain is known, what it believed is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from semspec.sampling import noise
from semspec.sampling.filters import NEG_INF, top_k_top_p
from semspec.types import Decode, DecodeOutput, Sampling, Score, ScoreOutput, TokenLogprob

FEW = 256  # tokens, of which all may win
NOTHING = -2  # in place of a token, where no token is allowed; -1: logits are not numbers


class SamplingUse(NamedTuple):
    """What any row of a batch uses. Known on the host, so what no row uses costs nothing, and graphs differ by it."""

    all_greedy: bool
    some_greedy: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    @staticmethod
    def of(options: Sequence[Sampling]) -> SamplingUse:
        sampled = [o for o in options if not o.greedy]
        return SamplingUse(
            all_greedy=not sampled,
            some_greedy=len(sampled) < len(options),
            top_k=any(o.top_k > 0 for o in sampled),
            top_p=any(o.top_p < 1.0 for o in sampled),
            min_p=any(o.min_p > 0.0 for o in sampled),
        )


@dataclass(slots=True)
class SamplingRows:
    """Sampling options, one row each."""

    columns: Tensor  # [R, 4] float32: temperature, top-k, top-p, min-p; of no rows if all are greedy
    use: SamplingUse

    @staticmethod
    def of(options: Sequence[Sampling], repeats: Sequence[int], device: torch.device) -> SamplingRows:
        """Row i of `options`, repeated `repeats[i]` times."""
        use = SamplingUse.of(options)
        columns = torch.from_numpy(columns_of(options, repeats, use))
        return SamplingRows(columns.to(device, non_blocking=True), use)

    @property
    def all_greedy(self) -> bool:
        return self.use.all_greedy

    @property
    def temperature(self) -> Tensor:
        return self.columns[:, 0]

    def at(self, rows: Tensor, temperature: Tensor | None = None) -> SamplingRows:
        """The options of some rows [R'], perhaps with other temperatures."""
        if self.all_greedy:
            return self
        picked = self.columns[rows]
        if temperature is not None:
            picked[:, 0] = temperature
        return replace(self, columns=picked)


def columns_of(options: Sequence[Sampling], repeats: Sequence[int], use: SamplingUse) -> np.ndarray[Any, Any]:
    """`SamplingRows.columns`, on the host."""
    if use.all_greedy:
        return np.empty((0, 4), np.float32)
    own = np.array([(o.temperature, o.top_k, o.top_p, o.min_p) for o in options], np.float32)
    return np.repeat(own, repeats, axis=0)


class Processed:
    """Rows of logits [R, V] with temperature, then top-k, top-p and min-p applied, in the form that is asked for."""

    def __init__(self, logits: Tensor, rows: SamplingRows) -> None:
        self._raw, self._rows = logits, rows

        self._kernels = None if rows.all_greedy else noise.kernels_for(logits)

    @cached_property
    def _filter(self) -> Any:
        assert self._kernels is not None
        return self._kernels.Filter(self._raw, self._rows.columns, self._rows.use)

    @cached_property
    def logits(self) -> Tensor:
        """[R, V] float32, excluded tokens at -inf"""
        return self._filter.logits() if self._kernels else _processed_rows(self._raw.float(), self._rows)

    @cached_property
    def probs(self) -> Tensor:
        """[R, V]"""
        return self._filter.probs() if self._kernels else self.logits.softmax(-1)

    def choose(self, key: Tensor, at: Tensor | None = None) -> Tensor:
        """A draw from each row, or from each of the rows `at` [N], by keys of their own [N]: [N]; -1 where there is NaN
        in a row. Of rows that sample."""
        if self._kernels is not None:
            drawn: Tensor = self._kernels.draw(self._filter, key, at)
            return drawn
        return choose(self.logits if at is None else self.logits[at], key)


def process(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Apply temperature, then top-k, top-p and min-p. [R, V] -> [R, V] float32, excluded tokens at -inf."""
    return Processed(logits, rows).logits


def _processed_rows(logits: Tensor, rows: SamplingRows) -> Tensor:
    if rows.all_greedy:
        return _only_best(logits)
    temperature, top_k, top_p, min_p = rows.columns.unbind(1)
    greedy = temperature == 0.0 if rows.use.some_greedy else None  # [R]
    # The largest becomes 0 first, so that a temperature near 0 sends the others to -inf and nothing to +inf.
    divisor = temperature if greedy is None else torch.where(greedy, 1.0, temperature)
    scaled = (logits - logits.amax(-1, keepdim=True)) / divisor[:, None]
    if rows.use.top_k or rows.use.top_p:
        scaled = top_k_top_p(scaled, top_k, top_p)
    if rows.use.min_p:
        below = scaled - scaled.amax(-1, keepdim=True) < min_p.log()[:, None]
        scaled = scaled.masked_fill(below, NEG_INF)
    return scaled if greedy is None else torch.where(greedy[:, None], _only_best(logits), scaled)


def _only_best(logits: Tensor) -> Tensor:
    best = logits.max(-1, keepdim=True)  # [R, 1]
    return torch.full_like(logits, NEG_INF).scatter_(-1, best.indices, best.values - best.values)  # 0, or NaN as it was


def choose(log_weights: Tensor, key: Tensor) -> Tensor:
    """Draw one index per row in proportion to exp(log_weights). [R, V], [R] -> [R]; -1 where a row has NaN in it."""
    if kernels := noise.kernels_for(log_weights):
        drawn: Tensor = kernels.choose(log_weights, key)
        return drawn
    if on_host(log_weights):
        rows = log_weights.float().numpy()
        if rows.shape[-1] <= FEW:
            return torch.from_numpy(_winners(rows, key.numpy().view(np.uint64)))
        return torch.tensor([_winner(row, k) for row, k in zip(rows, key.tolist(), strict=True)], dtype=torch.long)
    scores = log_weights - noise.exponential(key, log_weights.shape[-1]).log()
    return _index(scores.max(-1))


def on_host(values: Tensor) -> bool:
    """Whether to look at them makes nobody wait."""
    return values.device.type == "cpu"


def _winners(log_weights: np.ndarray[Any, Any], keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of many rows at once, where there are so few tokens that to look for those that may win costs more than noise."""
    scores = log_weights - np.log(noise.exponential_of(keys[:, None], np.arange(log_weights.shape[-1])))
    best = scores.argmax(-1, keepdims=True)
    return np.where(np.isnan(np.take_along_axis(scores, best, -1)), -1, best)[:, 0]


def _winner(log_weights: np.ndarray[Any, Any], key: int) -> int:
    """Of one row, in NumPy: a filtered row has few tokens that may win, and only these need noise."""
    there = np.flatnonzero(log_weights != NEG_INF)  # with what is not a number
    if not len(there):
        return 0
    scores = log_weights[there] - np.log(noise.exponential_of(key, there))
    best = int(scores.argmax())
    return -1 if np.isnan(scores[best]) else int(there[best])


def softmax(logits: Tensor) -> Tensor:
    """[R, V] -> [R, V] float32"""
    kernels = noise.kernels_for(logits)
    made: Tensor = logits.float().softmax(-1) if kernels is None else kernels.softmax(logits)
    return made


def entropy(probs: Tensor) -> Tensor:
    """[..., V] -> [...] in nats"""
    return -torch.special.xlogy(probs, probs).sum(-1)


def largest(values: Tensor, n: int) -> Tensor:
    """[R, V] -> [R, n] the largest values of each row, in falling order"""
    kernels, n = noise.kernels_for(values), min(n, values.shape[-1])
    made: Tensor = values.topk(n).values if kernels is None or n > kernels.MOST else kernels.largest(values, n)
    return made


def best(logits: Tensor) -> Tensor:
    """The index of each row's largest logit; -1 where a row has NaN in it. [..., V] -> [...]"""
    return _index(logits.max(-1))


def _index(found: Any) -> Tensor:
    # max, unlike comparisons, carries NaN along; a token that is none is found out on the host.
    return torch.where(found.values.isnan(), -1, found.indices)


def draw(
    logits: Tensor, options: Sequence[Sampling], positions: Sequence[int], streams: Sequence[int], keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """One token per row: [R, V] -> [R]; beside it, if `keep` asks, [R, V]: processed, or raw where a row is greedy."""
    if all(o.greedy for o in options):
        return best_rows(logits, keep)
    if len(options) == 1 and logits.device.type == "cpu" and not options[0].filtered:
        return _draw_one(logits, options[0], noise.key_of(options[0].seed, positions[0], streams[0]), keep)
    rows = SamplingRows.of(options, [1] * len(options), logits.device)
    keys = [noise.signed(noise.key_of(o.seed, p, s)) for o, p, s in zip(options, positions, streams, strict=True)]
    return _drawn(logits, rows, torch.tensor(keys).to(logits.device, non_blocking=True), keep)


def _draw_one(logits: Tensor, o: Sampling, key: int, keep: bool) -> tuple[Tensor, Tensor | None]:
    """`process` and `choose` for one row, in NumPy: of some twenty operations each takes longer to begin than to do."""
    row = logits[0].float().numpy()
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scaled = (row - row.max()) / np.float32(o.temperature)
        if o.min_p > 0.0:
            scaled[scaled < np.log(np.float32(o.min_p))] = NEG_INF
    return torch.tensor([_winner(scaled, key)]), torch.from_numpy(scaled)[None] if keep else None


def draw_rows(
    logits: Tensor, rows: SamplingRows, key: tuple[Tensor, Tensor, Tensor], keep: bool
) -> tuple[Tensor, Tensor | None]:
    """The same with options and (seed, position, stream) on the device; nothing in it waits for the host."""
    if rows.all_greedy:
        return best_rows(logits, keep)
    return _drawn(logits, rows, noise.key(*key), keep)


def _drawn(logits: Tensor, rows: SamplingRows, key: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
    processed = process(logits, rows)
    tokens = choose(processed, key)
    if not (keep and rows.use.some_greedy):
        return tokens, processed if keep else None
    return tokens, torch.where((rows.temperature == 0.0)[:, None], logits.float(), processed)


def best_rows(logits: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
    return best(logits), logits.float() if keep else None


def next_tokens(requests: Sequence[Decode], rows: Sequence[ScoreOutput]) -> list[DecodeOutput]:
    """The next token of sequences that are decoding, each from the one row of its latest pass."""
    if not requests:
        return []
    tokens, kept = draw(
        torch.cat([_processed(request, row) for request, row in zip(requests, rows, strict=True)]),
        [r.sampling for r in requests],
        [r.runner.length(r.slot) for r in requests],
        [r.stream for r in requests],
        keep=any(r.keep_logits for r in requests),
    )
    written = []
    for i, (token, request, row) in enumerate(zip(tokens.tolist(), requests, rows, strict=True)):
        if token < 0 and request.history is not None and not bool(row.logits.isnan().any()):
            token = NOTHING
        logits = kept[i : i + 1] if request.keep_logits and kept is not None else None
        logprobs = None if request.logprobs is None else logprobs_of(row.logits, [token], request.logprobs)
        written.append(DecodeOutput([token], logits, row.hidden, logprobs))
        if request.history is not None:
            request.history.tokens.append(token)
    return written


def add_likeliest(requests: Sequence[Score], rows: Sequence[ScoreOutput]) -> None:
    """Bring the likeliest tokens to the host for those who ask for them: one copy for all, which waits for the pass."""
    asking = [(r, row) for r, row in zip(requests, rows, strict=True) if r.best and r.logits_to_keep]
    if not asking:
        return
    logits = asking[0][1].logits if len(asking) == 1 else torch.cat([row.logits for _, row in asking])
    both, at = likeliest_of(logits, max(r.best for r, _ in asking)), 0
    for r, row in asking:
        row.best = both[:, at : (at := at + len(row.logits)), : r.best]


def likeliest_of(logits: Tensor, most: int) -> np.ndarray[Any, Any]:
    """[2, R, most]: the likeliest tokens' log-probabilities, and their ids."""
    best = logits.topk(min(most, logits.shape[-1]), dim=-1)
    chances = best.values.float() - logits.float().logsumexp(-1, keepdim=True)
    return torch.stack([chances.double(), best.indices.double()]).cpu().numpy()


def _processed(request: Decode, row: ScoreOutput) -> Tensor:
    return row.logits if request.history is None else request.history.apply(row.logits, drafting=request.drafting)


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """The model's own log-probabilities of the given tokens and of its `top` best ones. [R, V], R tokens."""
    logp = logits.float().log_softmax(-1)
    there = torch.tensor(list(tokens), device=logits.device).clamp_min(0)  # -1 is no token, and ends its sequence
    own = logp.gather(-1, there[:, None])  # [R, 1]
    columns = tokens, own[:, 0].tolist(), ((logp > own).sum(-1) + 1).tolist()
    if not top:
        return [TokenLogprob(t, lp, rank=r) for t, lp, r in zip(*columns, strict=True)]
    best = logp.topk(min(top, logp.shape[-1]), dim=-1)
    values, ids = best.values.tolist(), best.indices.tolist()
    return [
        TokenLogprob(t, lp, tuple(zip(i, v, strict=True)), r)
        for t, lp, r, i, v in zip(*columns, ids, values, strict=True)
    ]
