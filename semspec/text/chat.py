"""Chats through a model's chat template. What a request adds to it is data: it replaces nothing that is ours."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from semspec.errors import BadRequest, SemspecError

Messages = list[dict[str, Any]]
VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
RESERVED = frozenset(
    {"messages", "tools", "documents", "loop", "caller", "varargs", "kwargs", "raise_exception", "strftime_now"}
    | set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    | set(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES)
    | {"image_token", "audio_token", "video_token"}
    | set(Environment().globals)
)
"""Names that mean something to templates already."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a chat template is filled in, besides the messages."""

    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


PLAIN = ChatFormat()


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the chat templates that a tokenizer has."""
    found = tokenizer.chat_template or ""
    return "\n".join(found.values()) if isinstance(found, dict) else found


def knows(tokenizer: PreTrainedTokenizerBase, name: str) -> bool:
    """Whether the template speaks of such a variable."""
    return re.search(rf"\b{re.escape(name)}\b", template_of(tokenizer)) is not None


def check_variables(tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any]) -> list[str]:
    """Refuses names that are not a request's to set; returns those that the template does not use."""
    for name in variables:
        if not VARIABLE.fullmatch(name) or name in RESERVED:
            raise BadRequest(f"chat_template_kwargs may not set {name[:64]!r}")
    return [name for name in variables if not knows(tokenizer, name)]


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, form: ChatFormat = PLAIN) -> list[int]:
    if not messages:
        raise BadRequest("the chat has no messages; give at least one, with a role and a content")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise BadRequest(f"a chat message needs a role and a content, both text; this one is {message!r:.200}")
        whole_characters(message["role"] + message["content"])
    if not tokenizer.chat_template:
        raise BadRequest("this model has no chat template; give the prompt as text")
    if any(m["role"] == "tool" or m.get("tool_calls") for m in messages) and "tool" not in template_of(tokenizer):
        raise BadRequest(
            "this model's chat template does not take tools; leave out calls and messages of the role tool"
        )
    if not knows(tokenizer, "developer"):
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    more: dict[str, Any] = {"continue_final_message": True} if form.continue_final_message else {}
    if form.tools:
        more["tools"] = form.tools
    try:
        tokens = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=form.add_generation_prompt and not form.continue_final_message,
            tokenize=True,
            return_dict=False,
            **more,
            **form.variables,
        )
    except SemspecError:  # a tokenizer made of servers says what is wrong with them
        raise
    except Exception as error:
        if type(error) is TemplateError:  # the template's own words
            raise BadRequest(f"the model's chat template refuses these messages: {error}") from error
        if isinstance(error, TemplateSyntaxError):  # whatever is sent
            why = str(error.message).rstrip(".")
            raise BadRequest(
                f"the model's chat template is broken, line {error.lineno}: {why}. Repair it in the model's files, or "
                "send texts in place of messages (generate --raw, /v1/completions)"
            ) from error
        raise BadRequest("the model's chat template fails on these messages, tools or variables") from error
    return tokens if isinstance(tokens, list) else list(tokens)


def whole_characters(text: str) -> str:
    """The text, unless there is half a character in it, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise BadRequest(
            f"the prompt has half a character in it, the lone surrogate {half}; read it as UTF-8"
        ) from None
    return text
