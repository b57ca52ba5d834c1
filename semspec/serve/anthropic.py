"""Answers of /v1/messages, in Anthropic's shape."""

from __future__ import annotations

import json
from typing import Any

from semspec.serve.blocks import Block, BlockAnswer, Events
from semspec.serve.http_errors import HttpError
from semspec.serve.report import metrics_of, usage_of

REASONS = {"stop": "end_turn", "length": "max_tokens", "thinking": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
          "call": ("input_json_delta", "partial_json")}  # fmt: skip


class MessagesAnswer(BlockAnswer):
    prefix = "msg"

    def opening(self) -> Events:
        return [{"type": "message_start", "message": self._message([], None, self.prompt_tokens, 0)}]

    def opened(self, block: Block) -> Events:
        return [{"type": "content_block_start", "index": block.index, "content_block": _block(block, empty=True)}]

    def grew(self, block: Block, text: str) -> Events:
        kind, key = DELTAS[block.kind]
        return [{"type": "content_block_delta", "index": block.index, "delta": {"type": kind, key: text}}]

    def ended(self, block: Block) -> Events:
        return [{"type": "content_block_stop", "index": block.index}]

    def closing(self) -> Events:
        usage = {"output_tokens": usage_of(self.finished, self.n)["completion_tokens"]}
        ending = {"stop_reason": self._reason(), "stop_sequence": None}
        return [{"type": "message_delta", "delta": ending, "usage": usage}, {"type": "message_stop"}]

    def failure(self, error: HttpError) -> Events:
        return [error_body(error)]

    def whole(self) -> dict[str, Any]:
        counts = usage_of(self.finished, self.n)
        content = [_block(block) for block in self.blocks]
        message = self._message(content, self._reason(), counts["prompt_tokens"], counts["completion_tokens"])
        return message | {"metrics": metrics_of(self.finished, self.detailed)}

    def _reason(self) -> str:
        return REASONS.get(self.choice.finish or "stop", "end_turn")

    def _message(self, content: list[dict[str, Any]], reason: str | None, read: int, written: int) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": reason, "stop_sequence": None, "usage": {"input_tokens": read, "output_tokens": written},
        }  # fmt: skip


def error_body(error: HttpError) -> dict[str, Any]:
    told = error.body["error"]
    return {"type": "error", "error": {"type": told["type"], "message": told["message"]}}


def _block(block: Block, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else block.text
    if block.kind == "content":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    try:
        given = json.loads(text or "{}")
    except ValueError:  # the answer was cut inside them
        given = {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}
