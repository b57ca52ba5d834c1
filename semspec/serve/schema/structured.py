"""What an answer has to be: OpenAI's `response_format`, vLLM's `structured_outputs`, and its former `guided_*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from semspec.errors import BadRequest
from semspec.serve.schema.base import STRICT, Json, Lenient, Text, at_most
from semspec.text.structured import MAX_CHOICES, MAX_GRAMMAR, MAX_REGEX

Schema = Json | Annotated[str, Field(min_length=1)] | bool
Choice = Annotated[Text, Field(min_length=1)]
Choices = Annotated[list[Choice], Field(min_length=1, fail_fast=True), at_most(MAX_CHOICES)]
Regex = Annotated[Text, Field(min_length=1, max_length=MAX_REGEX)]
Grammar = Annotated[Text, Field(min_length=1, max_length=MAX_GRAMMAR)]


class JsonSchema(Lenient):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    name: Annotated[str, Field(max_length=200)] | None = None
    description: str | None = None
    of: Json = Field(alias="schema")
    strict: bool | None = Field(None, description="Taken; the schema is obeyed either way.")


class ResponseFormat(Lenient):
    model_config = STRICT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _agree(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema")
        return self

    @property
    def structured(self) -> dict[str, Any] | None:
        if self.json_schema is not None:
            return {"json": self.json_schema.of}
        return {"json_object": True} if self.type == "json_object" else None


class StructuredOutputs(Lenient):
    """One of these."""

    model_config = STRICT
    schema_: Schema | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    grammar: Grammar | None = Field(None, description="In Lark's notation.")


class StructuredFields(BaseModel):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Regex | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None

    def structured(self) -> dict[str, Any] | None:
        """As `Options` takes it."""
        found = [] if self.response_format is None else [self.response_format.structured]
        for kind in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{kind}")
            found.append(None if value is None else {kind: value})
        if self.structured_outputs is not None:
            found.append(self.structured_outputs.model_dump(by_alias=True, exclude_none=True))
        asked = [one for one in found if one is not None]
        if len(asked) > 1:
            raise BadRequest("give one of response_format, structured_outputs and guided_*; there are several")
        return asked[0] if asked else None
