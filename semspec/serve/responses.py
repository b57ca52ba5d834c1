"""Answers of /v1/responses: items, and the events that they arrive in."""

from __future__ import annotations

from typing import Any

from semspec.serve.content_blocks import Block, BlockAnswer, Events
from semspec.serve.http_errors import HttpError
from semspec.serve.report import metrics_of, usage_of

IDS = {"content": "msg", "reasoning": "rs", "call": "fc"}


class ResponsesAnswer(BlockAnswer):
    prefix = "resp"

    def __init__(self, *given: Any, asked: dict[str, Any], **more: Any) -> None:
        """`asked`: what of the request is repeated in the response."""
        super().__init__(*given, **more)
        self.id = self.id.replace("-", "_", 1)
        self.asked, self._number = asked, -1

    def opening(self) -> Events:
        return [
            self._event(name, response=self._response("in_progress"))
            for name in ("response.created", "response.in_progress")
        ]

    def opened(self, block: Block) -> Events:
        events = [self._event("response.output_item.added", output_index=block.index, item=_item(block, empty=True))]
        if block.kind != "call":
            events.append(self._part_event("response.content_part.added", block, part=_part(block, "")))
        return events

    def grew(self, block: Block, text: str) -> Events:
        if block.kind == "call":
            return [self._item_event("response.function_call_arguments.delta", block, delta=text)]
        return [self._part_event(f"response.{_text_kind(block)}.delta", block, delta=text, **_logprobs(block))]

    def ended(self, block: Block) -> Events:
        if block.kind == "call":
            arguments = {"arguments": block.text, "name": block.name}
            events = [self._item_event("response.function_call_arguments.done", block, **arguments)]
        else:
            events = [
                self._part_event(f"response.{_text_kind(block)}.done", block, text=block.text, **_logprobs(block)),
                self._part_event("response.content_part.done", block, part=_part(block, block.text)),
            ]
        return [*events, self._event("response.output_item.done", output_index=block.index, item=_item(block))]

    def closing(self) -> Events:
        whole = self.whole()
        return [self._event(f"response.{whole['status']}", response=whole)]

    def failure(self, error: HttpError) -> Events:
        told = error.body["error"]
        failed = self._response("failed") | {
            "error": {"code": told["code"] or told["type"], "message": told["message"]}
        }
        return [self._event("response.failed", response=failed)]

    def whole(self) -> dict[str, Any]:
        cut = self.choice.finish in ("length", "thinking")
        return self._response("incomplete" if cut else "completed")

    def _response(self, status: str) -> dict[str, Any]:
        usage = None
        if self.finished:
            counts = usage_of(self.finished, self.n)
            usage = {
                "input_tokens": counts["prompt_tokens"], "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": counts["completion_tokens_details"],
                "total_tokens": counts["total_tokens"],
            }  # fmt: skip
        metrics = {"metrics": metrics_of(self.finished, self.detailed)} if self.finished else {}
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model, "output": [_item(block) for block in self.blocks], "previous_response_id": None,
            "store": False, "truncation": "disabled", "usage": usage, **self.asked, **metrics,
        }  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}

    def _item_event(self, kind: str, block: Block, **fields: Any) -> dict[str, Any]:
        return self._event(kind, item_id=_id(block), output_index=block.index, **fields)

    def _part_event(self, kind: str, block: Block, **fields: Any) -> dict[str, Any]:
        return self._item_event(kind, block, content_index=0, **fields)


def _id(block: Block) -> str:
    return f"{IDS[block.kind]}_{block.id}"


def _text_kind(block: Block) -> str:
    return "output_text" if block.kind == "content" else "reasoning_text"


def _part(block: Block, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if block.kind == "content" else {}
    return {"type": _text_kind(block), "text": text, **more, **_logprobs(block)}


def _logprobs(block: Block) -> dict[str, Any]:
    """There are none here; clients of texts expect the field."""
    return {"logprobs": []} if block.kind == "content" else {}


def _item(block: Block, empty: bool = False) -> dict[str, Any]:
    status = "completed" if block.closed else "in_progress"
    if block.kind == "call":
        called = {"call_id": block.call_id, "name": block.name, "arguments": "" if empty else block.text}
        return {"id": _id(block), "type": "function_call", "status": status, **called}
    content = [] if empty else [_part(block, block.text)]
    if block.kind == "reasoning":
        return {"id": _id(block), "type": "reasoning", "status": status, "summary": [], "content": content}
    return {"id": _id(block), "type": "message", "role": "assistant", "status": status, "content": content}
