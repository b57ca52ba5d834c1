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
        return [{"type": "message_start", "message": self._message([], self.prompt_tokens, 0)}]

    def opened(self, block: Block) -> Events:
        return [{"type": "content_block_start", "index": block.index, "content_block": _block(block, empty=True)}]

    def grew(self, block: Block, text: str) -> Events:
        kind, key = DELTAS[block.kind]
        return [{"type": "content_block_delta", "index": block.index, "delta": {"type": kind, key: text}}]

    def ended(self, block: Block) -> Events:
        return [{"type": "content_block_stop", "index": block.index}]

    def closing(self) -> Events:
        usage = {"output_tokens": usage_of(self.finished, self.n)["completion_tokens"]}
        return [{"type": "message_delta", "delta": self._ending(), "usage": usage}, {"type": "message_stop"}]

    def failure(self, error: HttpError) -> Events:
        return [error.body_at("/v1/messages")]

    def whole(self) -> dict[str, Any]:
        counts = usage_of(self.finished, self.n)
        content = [_block(block) for block in self.blocks]
        message = self._message(content, counts["prompt_tokens"], counts["completion_tokens"])
        return message | self._ending() | {"metrics": metrics_of(self.finished, self.detailed)}

    def _ending(self) -> dict[str, Any]:
        finish, by = self.choice.finish or "stop", self.choice.stopped_by
        reason = "stop_sequence" if by and finish == "stop" else REASONS.get(finish, "end_turn")
        return {"stop_reason": reason, "stop_sequence": by}

    def _message(self, content: list[dict[str, Any]], read: int, written: int) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": read, "output_tokens": written},
        }  # fmt: skip


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
