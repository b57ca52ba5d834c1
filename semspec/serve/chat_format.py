"""What a chat request asks of the model's chat template, checked against the template there is."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest
from semspec.serve.schema.requests import ChatRequest
from semspec.serve.tools.families import Style
from semspec.text.chat import ChatFormat, check_variables, knows

log = logging.getLogger("semspec.serve")


@dataclass(frozen=True)
class ChatPlan:
    """How a chat is put to the model, and how its answer is read."""

    form: ChatFormat
    style: Style
    names: frozenset[str] | None = None  # functions that may be called; None: no tools
    opening: str = ""  # how the answer has to begin
    grammar: str | None = None  # and how to go on
    single: bool = False  # one call only


def plan(tokenizer: PreTrainedTokenizerBase, style: Style, body: ChatRequest) -> ChatPlan:
    if body.uses_tools and not knows(tokenizer, "tools"):
        raise BadRequest("this model's chat template does not take tools; leave them out")
    form = ChatFormat(
        tools=[tool.plain() for tool in body.tools] if body.uses_tools else None,
        variables=_variables(tokenizer, body),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    forced = body.uses_tools and (body.tool_choice == "required" or body.named is not None)
    if forced and (body.continue_final_message or not body.add_generation_prompt):
        raise BadRequest("a call can be required only where an answer begins; leave continue_final_message out")
    return ChatPlan(
        form,
        style,
        frozenset(tool.function.name for tool in body.tools) if body.uses_tools else None,
        style.forced(body.named) if forced else "",
        style.grammar({t.function.name: t.arguments for t in body.tools}, body.named) if forced else None,
        single=not body.parallel_tool_calls,
    )


def _variables(tokenizer: PreTrainedTokenizerBase, body: ChatRequest) -> dict[str, Any]:
    """Those of the request that the template knows; others have no effect, which is refused."""
    given = dict(body.chat_template_kwargs)
    effort = body.reasoning_effort
    if effort is not None:
        if effort == "none" and not knows(tokenizer, "reasoning_effort") and knows(tokenizer, "enable_thinking"):
            given.setdefault("enable_thinking", False)
        else:
            given.setdefault("reasoning_effort", effort)
    unknown = check_variables(tokenizer, given)
    if unknown and not body.ignore_unknown:
        raise BadRequest(f"this model's chat template does not use {unknown[0][:64]!r}; leave it out")
    if unknown:
        log.info("ignored", extra={"fields": {"fields": sorted(unknown)}})
    return {k: v for k, v in given.items() if k not in unknown}
