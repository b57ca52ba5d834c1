"""From requests to verdicts: one call of a rule for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from semspec import tree
from semspec.types import Verdict, VerifyRequest
from semspec.verify.base import Rule
from semspec.verify.collate import collate, join_segments, verdicts


def decide(rule: Rule, requests: Sequence[VerifyRequest]) -> list[Verdict]:
    """They share what `collate` says; all drafts branch, or none does."""
    batch = collate(requests)
    if batch.branches is None:
        return join_segments(verdicts(rule.verify(batch)), requests)
    found = verdicts(rule.verify_tree(batch))
    for verdict, request in zip(found, requests, strict=True):
        verdict.path = tree.path(request.draft.parents, verdict.last)
    return found
