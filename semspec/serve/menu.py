"""What a client can choose: every rule with its options in words, and questions to begin with."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from semspec import pocket, verify
from semspec.draft.kinds import Dflash, Eagle
from semspec.options import AUTO, DRAFTERS, REPEATABLE
from semspec.pair import Pair
from semspec.serve.limits import Settings
from semspec.verify import REGISTRY, Rule
from semspec.verify.checked import option_fields

SHOWN = ("label", "main", "choices", "unset")  # of an option's metadata
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
        # A draft head needs a path, which a client may not give.
        "drafters": [name for name in DRAFTERS if name == own or name not in (Dflash.name, Eagle.name)],
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
                "num_draft_tokens": AUTO if rule.same_text else min(rule.draft_tokens, settings.limits.draft_tokens),
                "options": [option(rule, f) for f in option_fields(rule)],
            }
            for name, rule in REGISTRY.items()
            if not getattr(rule, "refereed", False)  # a client has no referee
        ],
    }


def option(rule: type[Rule], field: dataclasses.Field[Any]) -> dict[str, Any]:
    """A field in words, also where a class that overrides it gives a new default only."""
    words: dict[str, Any] = {}
    for kind in reversed(rule.__mro__):
        own = getattr(kind, "__dataclass_fields__", {}).get(field.name)
        words |= {key: own.metadata[key] for key in SHOWN if own is not None and key in own.metadata}
    plain = {"name": field.name, "type": type(field.default).__name__, "default": field.default}
    return plain | {"label": field.name.replace("_", " "), "main": False} | words


def about(rule: type[Rule]) -> str:
    """The first sentence of a rule's description: of its class, or of our file if that is about one rule."""
    own = rule.__dict__.get("__doc__") or ""
    if own and not own.startswith(f"{rule.__name__}("):  # what a dataclass writes for itself
        return " ".join(own.split()).partition(". ")[0].rstrip(".")
    module = inspect.getmodule(rule)
    text = " ".join((module.__doc__ or "").split()) if module and module.__name__.startswith("semspec.") else ""
    return text.partition(": ")[2].partition(". ")[0] or text


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
