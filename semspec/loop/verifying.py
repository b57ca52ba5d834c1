"""Drafts that wait to be verified: one call of a rule for all that are alike, and a check of what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from semspec.errors import SemspecError
from semspec.loop.rule_graphs import RuleGraphs
from semspec.loop.work import Task
from semspec.sampling.draw import logprobs_of
from semspec.sampling.processors import no_token
from semspec.types import Verdict, VerifyRequest

Waiting = tuple[Task, VerifyRequest]


def verdicts(
    rules: RuleGraphs, waiting: Sequence[Waiting]
) -> Iterator[tuple[Task, VerifyRequest, Verdict | Exception]]:
    """A verdict for each, or the error that ends its sequence: a rule that raises fails those that use it."""
    groups: dict[tuple[Any, ...], list[Waiting]] = {}
    for task, request in waiting:
        logits = request.rows.logits
        kind = request.draft.logits is None, request.state is None, bool(request.draft.parents)
        key = (request.rule, logits.shape[-1], logits.device, *kind, id(request.protected))
        try:
            groups.setdefault(key, []).append((task, request))
        except TypeError as error:  # a rule that cannot be hashed
            yield task, request, error
    for (rule, *_), group in groups.items():
        requests = [request for _, request in group]
        try:
            found = rules.verify(rule, requests)
            for request, verdict in zip(requests, found, strict=True):
                _add_logprobs(request, verdict)
        except Exception as error:
            yield from ((task, request, error) for task, request in group)
            continue
        for (task, request), verdict in zip(group, found, strict=True):
            yield task, request, _checked(request, verdict)


def _checked(request: VerifyRequest, verdict: Verdict) -> Verdict | Exception:
    drafted, vocab = len(request.draft.tokens), request.rows.logits.shape[-1]
    if 0 <= verdict.accepted <= drafted and 0 <= verdict.next < vocab:
        return verdict
    if verdict.next == -1:
        return no_token(request.history, bool(request.rows.logits.isnan().any()))
    what = f"accepted {verdict.accepted} of {drafted}, then token {verdict.next}"
    return SemspecError(f"verifier {request.rule.name!r} gave an impossible verdict: {what}")


def _add_logprobs(request: VerifyRequest, verdict: Verdict) -> None:
    """Those that were asked for, of what was accepted and of the token after it."""
    if request.logprobs is not None:
        tokens = [*(request.draft.tokens[i] for i in verdict.taken), verdict.next]
        rows = request.rows.logits[[0, *(i + 1 for i in verdict.taken)]]
        verdict.logprobs = logprobs_of(rows, tokens, request.logprobs)
