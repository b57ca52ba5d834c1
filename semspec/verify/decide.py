"""From requests to verdicts: one call of a rule for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from semspec import tree
from semspec.errors import SemspecError
from semspec.types import Verdict, VerifyRequest
from semspec.verify.base import Rule
from semspec.verify.collate import collate, join_segments, verdicts


def decide(rule: Rule, requests: Sequence[VerifyRequest]) -> list[Verdict]:
    """They share what `collate` says; all drafts are trees, or none is."""
    batch = collate(requests)
    if batch.trees is None:
        return join_segments(verdicts(rule.verify(batch)), requests)
    found = verdicts(rule.verify_tree(batch))
    for verdict, request in zip(found, requests, strict=True):
        parents = request.draft.parents
        verdict.path = tree.path(parents, verdict.last) if verdict.last < len(parents) else ()
        if len(verdict.path) != verdict.accepted:
            what = f"accepted {verdict.accepted} tokens of a tree, the last of them token {verdict.last}"
            raise SemspecError(f"verifier {rule.name!r} gave an impossible verdict: {what}; set Decisions.last")
    return found
