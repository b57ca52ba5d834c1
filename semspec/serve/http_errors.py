"""How a request fails: one exception with a status, and one shape of answer, which is OpenAI's."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from semspec.errors import BadRequest, SemspecError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "deadline_error",
}


class HttpError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, code: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after = status, message, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = self.message.encode("utf-8", "backslashreplace").decode()  # it may quote what is no text
        return {"error": {"message": message, "type": kind, "param": None, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:  # lets a browser ask for the key; programs send it as a bearer token
            headers["WWW-Authenticate"] = 'Basic realm="semspec: the API key is the password"'
        return JSONResponse(self.body, self.status, headers)


def refused(error: Exception) -> HttpError:
    """Any failure of a request as a refusal."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, BadRequest):
        return HttpError(400, str(error))
    if isinstance(error, SemspecError):
        return HttpError(500, str(error))
    return HttpError(500, "this request failed inside the server, which goes on; the server's log says how", "crash")


def explained(error: RequestValidationError) -> str:
    """What is wrong with a body, in one line; values are not repeated, they may be anybody's text."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "extra_forbidden":
        return f"there is no field {where!r} here, or it is not supported; leave it out"
    if first["type"] == "json_invalid":
        return "the body is not valid JSON"
    return f"{where or 'the body'}: {first['msg'].removeprefix('Value error, ')}"


def install(app: FastAPI) -> None:
    @app.exception_handler(HttpError)
    async def _(request: Request, error: HttpError) -> JSONResponse:
        return error.response

    @app.exception_handler(SemspecError)
    async def _(request: Request, error: SemspecError) -> JSONResponse:
        return refused(error).response

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        return HttpError(400, explained(error)).response

    @app.exception_handler(HTTPException)
    async def _(request: Request, error: HTTPException) -> JSONResponse:
        return HttpError(error.status_code, str(error.detail)).response
