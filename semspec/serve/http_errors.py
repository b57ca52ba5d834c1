"""How a request fails: one exception with a status, and an answer in the shape of the API that was asked."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from semspec.errors import BadRequest, RemoteError, SemspecError, did_you_mean
from semspec.serve.schema.speculation import Speculation

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    502: "engine_error",
    503: "unavailable_error",
    504: "deadline_error",
}
MAX_MESSAGE = 2000  # characters; an error may quote what a client sent
MAX_LOCATION = 100
BODY = "model_attributes_type"  # also what is wrong with a body that was not said to be JSON
TRIED = ("int", "str", "float", "bool")
MESSAGES = {  # where pydantic's own message would describe the validator rather than the field
    "json_invalid": "is not valid JSON",
    "missing": "is required",
    "too_short": "is empty",
    "model_type": "has to be a JSON object",
    "dict_type": "has to be a JSON object",
    "list_type": "has to be a list",
    "string_type": "has to be a text",
    "string_too_short": "is empty",
    "string_pattern_mismatch": "has characters that it cannot have, or too many",
    "int_type": "has to be a whole number",
    "int_parsing": "has to be a whole number",
    "int_from_float": "has to be a whole number",
    "int_parsing_size": "has too many digits",
    "float_type": "has to be a number",
    "float_parsing": "has to be a number",
    "bool_type": "has to be true or false",
    "bool_parsing": "has to be true or false",
    "none_required": "has to be null",
    "string_unicode": "has half a character in it; send whole ones",
    "finite_number": "has to be a finite number",
    BODY: "has to be a JSON object",
    "union_tag_invalid": "is of a type that is not known here",
    "union_tag_not_found": "has no type that is known here",
}
UNREADABLE = "the body cannot be read as JSON; send UTF-8, nested less deeply and with shorter numbers"
NO_EMBEDDINGS = "this server's model writes text and makes no embeddings; ask a server of an embedding model"
NOT_MANAGED = "this server has the one model that it was started with; start another to have another"
MISSING = dict.fromkeys(("/api/embed", "/api/embeddings", "/v1/embeddings"), NO_EMBEDDINGS) | dict.fromkeys(
    ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"), NOT_MANAGED
)
"""What clients of these APIs may ask for, and cannot be had."""
SUBJECT = re.compile(r"^(?:Input|String|List|Dictionary|Value|Data|Unable) (?:should|to)")
PROMPT = "has to be a text, a list of texts, a list of token ids, or a list of such lists"


class HttpError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, code: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after = status, message, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        # It may quote lone surrogates, which cannot be sent.
        message = self.message[:MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
        return {"error": {"message": message, "type": kind, "param": None, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:  # lets a browser ask for the key; programs send it as a bearer token
            headers["WWW-Authenticate"] = 'Basic realm="semspec: the API key is the password"'
        if self.status == 504:  # OpenAI's clients would ask again, and wait as long again
            headers["x-should-retry"] = "false"
        return headers

    def body_at(self, path: str) -> dict[str, Any]:
        """As the API of this path has errors: Ollama's as a text, Anthropic's with a kind of body, else OpenAI's."""
        if path.startswith("/api/"):
            return {"error": self.body["error"]["message"]}
        return ({"type": "error"} if f"{path}/".startswith("/v1/messages/") else {}) | self.body

    def response_at(self, path: str) -> JSONResponse:
        return JSONResponse(self.body_at(path), self.status, self.headers)


def gave_way() -> HttpError:
    return HttpError(429, "others with fewer requests are waiting too; try again later", "busy", 1)


def too_late() -> HttpError:
    return HttpError(504, "the answer was not complete at the request's deadline", "deadline")


def as_http_error(error: Exception) -> HttpError:
    """Any failure of a request."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, BadRequest):
        return HttpError(400, str(error))
    if isinstance(error, RemoteError):
        return HttpError(502, str(error), "engine")
    if isinstance(error, SemspecError):
        return HttpError(500, str(error))
    return HttpError(500, "this request failed inside the server, which goes on; the server's log says how", "crash")


def explain(error: RequestValidationError) -> str:
    """What is wrong with a body, in one line; values are not repeated, they may be anybody's text."""
    # Of alternatives, the one that fitted best; our own checks say more than that a list is no text.
    first = max(error.errors(), key=lambda found: (len(found["loc"]), found["type"] in ("value_error", "too_short")))
    # Between field names and indices pydantic puts what it tried: "function-after[..., str]", "int", a class's name.
    own = [p for p in first["loc"][1:] if isinstance(p, int) or (p.isidentifier() and p.islower() and p not in TRIED)]
    parts = [str(p) for p in own]
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])[:MAX_LOCATION]
        if name in Speculation.model_fields:
            return f'{name!r} goes inside "speculation": {{...}}'
        return f"there is no field {name!r} here, or it is not supported; leave it out"
    if first["type"] == "json_invalid":
        parts = []
    where = ".".join(parts)[:MAX_LOCATION] or "the body"
    if where == "prompt" and first["type"].startswith("union_tag"):
        return f"{where} {PROMPT}"
    if first["type"] == "value_error":
        return f"{where}: {first['msg'].removeprefix('Value error, ')}"
    if first["type"] in MESSAGES:
        sent = ", sent with the header Content-Type: application/json" if first["type"] == BODY and not parts else ""
        return f"{where} {MESSAGES[first['type']]}{sent}"
    if first["type"] in ("too_long", "string_too_long"):
        return f"{where} is too long; send at most {first['ctx']['max_length']} of what it consists of"
    return f"{where} {SUBJECT.sub('has to', first['msg'])}"


def no_path(path: str, app: FastAPI) -> str:
    """For a path that is not there; most of them lack /v1 or have it twice."""
    known = (getattr(route, "path", "") for route in app.routes)
    near = did_you_mean(path[:MAX_LOCATION], (p for p in known if "{" not in p))
    return f"there is nothing at this path; {near or 'GET /openapi.json lists what there is'}"


def install(app: FastAPI) -> None:
    @app.exception_handler(HttpError)
    async def _(request: Request, error: HttpError) -> JSONResponse:
        return error.response_at(request.url.path)

    @app.exception_handler(SemspecError)
    async def _(request: Request, error: SemspecError) -> JSONResponse:
        return as_http_error(error).response_at(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        return HttpError(400, explain(error)).response_at(request.url.path)

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        detail = MISSING.get(path) or no_path(path, app) if error.status_code == 404 else str(error.detail)
        if error.status_code == 400:  # FastAPI's, where a body breaks in other ways than in its syntax
            detail = UNREADABLE
        if error.status_code == 405:
            detail = f"{request.method} is not what this path is for; GET /openapi.json tells what is"
        response = HttpError(error.status_code, detail).response_at(path)
        response.headers.update(error.headers or {})  # the methods that a path is for
        return response
