"""What a client can choose: every rule with its options in words, and questions to begin with."""

from __future__ import annotations

from typing import Any

from semspec import pocket, verify
from semspec.catalogue import about, default_length, option
from semspec.draft import REGISTRY as DRAFTERS
from semspec.options import AUTO, REPEATABLE
from semspec.pair import Pair
from semspec.serve.limits import Settings
from semspec.verify import REGISTRY
from semspec.verify.checked import option_fields

POCKET_STEPS = (3, 3, 4, 5)  # of a solution, for each example
BEGINNINGS = ("Once upon a time", "The three laws of motion are:", "def fibonacci(n):", "1, 1, 2, 3, 5, 8,")
GENERAL = (
    "Explain to a ten-year-old why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a short explanation.",
    "Compare tea and coffee in a small table: taste, caffeine, preparation.",
    "Tom reads 12 pages a day. How many days does he need for a book of 200 pages?",
)


def menu(settings: Settings) -> dict[str, Any]:
    """Every rule with its options, for /v1/methods."""
    defaults = settings.defaults
    default = verify.make(defaults.verifier)
    own = defaults.drafter.partition(":")[0]  # no more: its options may be paths
    drafters, _ = DRAFTERS.load_all()
    return {
        "default": {
            "verifier": default.name,
            "num_draft_tokens": defaults.num_draft_tokens,
            "drafter": own,
            "relax_span": defaults.relax_span,
        },
        "allow_lossy": settings.allow_lossy,
        "max_draft_tokens": settings.limits.draft_tokens,
        "max_new_tokens": settings.limits.new_tokens,
        # Weights are loaded where the server is started, not by a request.
        "drafters": [AUTO, *(name for name, kind in drafters.items() if name == own or not kind.reads_target)],
        "auto": AUTO,
        "draft_lengths": [AUTO, REPEATABLE],
        "verifiers": [
            {
                "name": name,
                "title": rule.title or name,
                "about": about(rule),
                "lossless": rule.lossless,
                "control": rule.control,
                "allowed": rule.lossless or settings.allow_lossy,
                "unit": rule.unit,
                "drafts": rule.speculates,
                "num_draft_tokens": _capped(default_length(rule), settings.limits.draft_tokens),
                "options": [option(rule, f) for f in option_fields(rule)],
            }
            for name, rule in REGISTRY.load_all()[0].items()
            if not getattr(rule, "refereed", False)  # a client has no referee
        ],
    }


def _capped(length: int | str, limit: int) -> int | str:
    return min(length, limit) if isinstance(length, int) else length


def examples(pair: Pair | None, seed: int) -> dict[str, Any]:
    """Questions that suit the model, whether it chats at all, and whether it takes one question only.

    A model of the pocket world, told by its chat template, knows that world's problems and was trained on one each."""
    template = None if pair is None else pair.tokenizer.chat_template
    if pair is not None and not template:
        about = "This model has no chat template: it goes on from your text."
        return {"chat": False, "examples": list(BEGINNINGS), "one_question": True, "about": about}
    if template != pocket.CHAT_TEMPLATE:
        return {"chat": True, "examples": list(GENERAL), "one_question": False, "about": ""}
    numbers = range(seed * len(POCKET_STEPS), (seed + 1) * len(POCKET_STEPS))
    return {
        "chat": True,
        "examples": [pocket.problem(i, n, "test").text for i, n in zip(numbers, POCKET_STEPS, strict=True)],
        "one_question": True,
        "about": "This pair knows word problems of one small world, in its names and wordings. Try one of these:",
    }
