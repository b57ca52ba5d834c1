"""Answers of /v1/messages, in Anthropic's shape."""

from __future__ import annotations

from typing import Any

from semspec.serve.answers import parsed
from semspec.serve.content_blocks import Block, BlockAnswer, Events
from semspec.serve.http_errors import HttpError
from semspec.serve.report import metrics_of, usage_of

REASONS = {"stop": "end_turn", "length": "max_tokens", "thinking": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
          "call": ("input_json_delta", "partial_json")}  # fmt: skip


class MessagesAnswer(BlockAnswer):
    prefix = "msg"

    def opening(self) -> Events:
        usage = _usage(self.prompt_tokens, self.cached_tokens, 0)
        return [{"type": "message_start", "message": self._message([], usage)}]

    def opened(self, block: Block) -> Events:
        return [{"type": "content_block_start", "index": block.index, "content_block": _block(block, empty=True)}]

    def grew(self, block: Block, text: str) -> Events:
        kind, key = DELTAS[block.kind]
        return [{"type": "content_block_delta", "index": block.index, "delta": {"type": kind, key: text}}]

    def ended(self, block: Block) -> Events:
        return [{"type": "content_block_stop", "index": block.index}]

    def closing(self) -> Events:
        return [{"type": "message_delta", "delta": self._ending(), "usage": self._used()}, {"type": "message_stop"}]

    def failure(self, error: HttpError) -> Events:
        return [error.body_at("/v1/messages")]

    def whole(self) -> dict[str, Any]:
        message = self._message([_block(block) for block in self.blocks], self._used())
        return message | self._ending() | {"metrics": metrics_of(self.finished, self.detailed)}

    def _ending(self) -> dict[str, Any]:
        finish, by = self.choice.finish or "stop", self.choice.stopped_by
        reason = "stop_sequence" if by and finish == "stop" else REASONS.get(finish, "end_turn")
        return {"stop_reason": reason, "stop_sequence": by}

    def _used(self) -> dict[str, int]:
        counts = usage_of(self.finished, self.n)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return _usage(counts["prompt_tokens"], cached, counts["completion_tokens"])

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip


def _usage(prompt: int, cached: int, written: int) -> dict[str, int]:
    """Input tokens are those that were read; to write them into a cache costs nothing here."""
    return {
        "input_tokens": prompt - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
        "output_tokens": written,
    }  # fmt: skip


def _block(block: Block, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else block.text
    if block.kind == "content":
        return {"type": "text", "text": text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": parsed(text)}
