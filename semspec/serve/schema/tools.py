"""Tools that a model may call, and whether it has to."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from semspec.serve.schema.base import STRICT, Json, Lenient, Text, at_most, shallow

MAX_TOOLS = 128
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Lenient):
    model_config = STRICT
    name: Name
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Lenient):
    model_config = STRICT
    type: Literal["function"]
    function: Function

    @property
    def arguments(self) -> dict[str, Any]:
        return self.function.parameters or NO_PARAMETERS

    def plain(self) -> dict[str, Any]:
        """As chat templates know it."""
        function = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": "function", "function": {"description": "", "parameters": NO_PARAMETERS} | function}


NO_PARAMETERS = {"type": "object", "properties": {}}
Tools = Annotated[list[Tool], Field(fail_fast=True), at_most(MAX_TOOLS)]


class Named(Lenient):
    model_config = STRICT
    name: Name


class NamedChoice(Lenient):
    model_config = STRICT
    type: Literal["function"]
    function: Named


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


class CalledFunction(Lenient):
    model_config = STRICT
    name: Name
    arguments: Text = "{}"


class ToolCall(Lenient):
    """A call that an earlier answer made."""

    model_config = STRICT
    id: Annotated[str, Field(max_length=200)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    @model_validator(mode="after")
    def _is_an_object(self) -> ToolCall:
        self.arguments()
        return self

    def arguments(self) -> dict[str, Any]:
        """Chat templates write the object; a text would be quoted by them."""
        try:
            found = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError("the arguments of a call have to be a JSON object, written as a text")
        return dict(shallow(found))

    def plain(self) -> dict[str, Any]:
        named = {} if self.id is None else {"id": self.id}
        return named | {"type": "function", "function": {"name": self.function.name, "arguments": self.arguments()}}
