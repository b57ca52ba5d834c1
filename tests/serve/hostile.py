"""Bodies of every endpoint, with every part that they may have, and the same with something wrong at one place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1}, "b": {"$ref": "#/$defs/x"}},
    "$defs": {"x": {"type": "string", "pattern": "a+"}},
    "required": ["a"],
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER = {"role": "user", "content": "hello"}
CHAT: dict[str, Any] = {"model": "s", "max_tokens": 3, "messages": [USER]}
TEXT_BLOCK = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "bob"},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c", "content": "y"},
        ],
        "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}},
        "chat_template_kwargs": {"enable_thinking": False}, "logit_bias": {"1": 1}, "bad_words": ["a"],
        "stop": ["z"], "stop_token_ids": [5], "speculation": {"verifier": "exact", "num_draft_tokens": 2},
        "logprobs": True, "top_logprobs": 2, "seed": 1, "stream_options": None,
    }),
    ("/v1/chat/completions", CHAT | {"response_format": {
        "type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "a+"}, "guided_choice": None}),
    ("/v1/completions", {
        "model": "s", "prompt": ["hello", "x"], "max_tokens": 2, "echo": True, "logprobs": 1, "best_of": 2,
        "prompt_logprobs": 1, "min_tokens": 1}),
    ("/v1/completions", {"model": "s", "prompt": [[1, 2], [3]], "max_tokens": 2}),
    ("/v1/responses", {
        "model": "s", "max_output_tokens": 16, "instructions": "x", "reasoning": {"effort": "low"},
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "z"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "q"}]},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"}, "metadata": {"a": "b"}, "text": {"format": {"type": "text"}},
    }),
    ("/v1/messages", {
        "model": "s", "max_tokens": 5, "system": [TEXT_BLOCK],
        "messages": [
            {"role": "user", "content": [TEXT_BLOCK]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [TEXT_BLOCK]}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f"}, "stop_sequences": ["z"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }),
    ("/api/chat", {
        "model": "s", "stream": False, "think": False, "keep_alive": "5m",
        "messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}],
        "tools": [TOOL], "options": {"num_predict": 3, "stop": ["z"], "top_k": 3},
    }),
    ("/v1/messages/count_tokens", {
        "model": "s", "system": "x", "messages": [{"role": "user", "content": [TEXT_BLOCK]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"},
    }),
    ("/api/show", {"model": "s", "verbose": True, "options": {"num_ctx": 5}}),
    ("/api/generate", {
        "model": "s", "prompt": "hello", "system": "x", "stream": False, "format": "json",
        "options": {"num_predict": 3},
    }),
    ("/tokenize", {"messages": [USER], "tools": [TOOL], "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2]}),
]  # fmt: skip

WRONG: list[Any] = [
    None, True, -1, 1.5, 10**40, 1e308, "", "x" * 3000, "\ud800", "/etc/passwd", "{{7*7}}", "\0", [], {}, [[]], [None],
    {"__class__": 1}, [1, "a", {}], {"type": "nonsense"}, {"type": 3}, {"$ref": "file:///etc/passwd"}, float("nan"),
    {"type": "object", "more": 1}, [{"type": "nonsense"}], [{"role": "wizard", "content": {}}], ["x"] * 5000,
    {str(i): 1 for i in range(70)},
]  # fmt: skip


def places(part: Any, *before: Any) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a body."""
    items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for name, value in items:
        yield (*before, name)
        yield from places(value, *before, name)


def spoilt(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The body with another value there; a class says that the field is left out."""
    found = part = copy.deepcopy(body)
    for name in place[:-1]:
        part = part[name]
    if value is KeyError:
        del part[place[-1]]
    else:
        part[place[-1]] = value
    return found
