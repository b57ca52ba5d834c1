"""How a pocket problem becomes a conversation: special tokens and the chat template.

A space follows `<|user|>`, so that a name is the same token at the start of a question as inside it. The assistant's
own first token is `<think>`, as with reasoning models whose template leaves the thinking to them.
"""

from __future__ import annotations

import re

from .lexicon import PEOPLE

USER, ASSISTANT, END, PAD = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
THINK, END_THINK = "<think>", "</think>"
SPECIAL_TOKENS: tuple[str, ...] = (PAD, END, USER, ASSISTANT)
"""Never part of a text; removed by `skip_special_tokens`. PAD has id 0, END (end of sequence) id 1."""
MARKER_TOKENS: tuple[str, ...] = (THINK, END_THINK)
"""Single tokens that stay in the decoded text, since scorers need to see where the thoughts end."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{%- else -%}"
    "{{ '<|user|> ' + message['content'] + '<|end|>' }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def prompt(question: str) -> str:
    """What the chat template gives for one question with a generation prompt."""
    return f"{USER} {question}{END}{ASSISTANT}"


def outside(template: object, text: str) -> str:
    """What to say of a text that a model of this world, told by its chat template, cannot understand: every problem is
    about somebody. Empty of other models and other texts."""
    if template != CHAT_TEMPLATE or any(word in PEOPLE for word in re.findall(r"\w+", text)):
        return ""
    return (
        "pocket knows word problems of one small world only, about people such as Laura, Mia and Tom; "
        "semspec demo shows some"
    )
