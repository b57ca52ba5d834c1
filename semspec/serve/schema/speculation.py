"""The `speculation` field: how drafts are made and verified."""

from __future__ import annotations

from typing import Annotated, get_type_hints

from pydantic import ConfigDict, Field, create_model

from semspec.options import Options
from semspec.serve.schema.base import Lenient

SHARED = (
    "drafter",
    "num_draft_tokens",
    "max_draft_tokens",
    "draft_min_p",
    "draft_max_entropy",
    "relax_span",
    "loop_repeats",
    "loop_period",
)
"""Fields of `Options` that a request may set in `speculation`."""


class SpeculationBase(Lenient):
    """How drafts are made and verified. The rule's own options (`theta`, `window`, ...) go beside these."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    verifier: Annotated[str, Field(max_length=500)] | None = None
    off: bool = False
    detailed: bool = Field(False, description="Report every round: per_step_drafted, per_step_accepted.")
    trace: bool = Field(False, description="Report where each piece of text came from, and why tokens were relaxed.")


_HINTS = get_type_hints(Options)
Speculation = create_model(
    "Speculation",
    __base__=SpeculationBase,
    __doc__=SpeculationBase.__doc__,
    **{name: (_HINTS[name] | None, None) for name in SHARED},  # type: ignore[call-overload]
)
