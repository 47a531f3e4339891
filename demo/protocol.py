"""Requests of the OpenAI API as this server reads them, with the tri-mode options as extra fields of the body.

A field that the API has and this server cannot honour is refused, with a value that asks for nothing let through;
a field that neither has is refused by name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, field_validator, model_validator

from trimode_vlm.decoders import DECODERS
from trimode_vlm.generation_config import COMMIT_RULES, VERIFICATIONS

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
# generate()'s names, which its refusals use, as a client of the API knows them.
WORDS = {
    "do_sample=True": "a temperature above 0",
    "do_sample=False": "temperature 0",
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "output_logprobs": "logprobs",
}
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Count = Annotated[StrictInt, Field(ge=1)]


def in_words_of_the_api(message: str) -> str:
    """A refusal of generate()'s with the names of fields here."""
    return re.sub("|".join(WORDS), lambda match: WORDS[match.group()], message)


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False
    include_obfuscation: StrictBool | None = None


class DecodingRequest(BaseModel):
    """What chat and text completions share."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: StrictStr | None = None
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[StrictStr, Number] | None = None
    # Asked for by clients, of no effect on an answer here.
    user: StrictStr | None = None
    metadata: dict[StrictStr, Any] | None = None
    store: StrictBool | None = None
    service_tier: StrictStr | None = None
    # Taken only with the value that asks for nothing.
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    # Beyond OpenAI's.
    mode: Annotated[StrictStr, Field(json_schema_extra={"enum": list(DECODERS)})] | None = None
    block_length: Count | Literal["auto"] | None = None
    threshold: Number | None = None
    commit_rule: Annotated[StrictStr, Field(json_schema_extra={"enum": list(COMMIT_RULES)})] | None = None
    entropy_bound: Number | None = None
    verifier_mix: Number | None = None
    verification: Annotated[StrictStr, Field(json_schema_extra={"enum": list(VERIFICATIONS)})] | None = None
    top_k: Annotated[StrictInt, Field(ge=0)] | None = None
    min_tokens: Annotated[StrictInt, Field(ge=0)] | None = None
    repetition_penalty: Number | None = None
    thinking_budget: Annotated[StrictInt, Field(ge=0)] | None = None

    @field_validator("presence_penalty", "frequency_penalty")
    @classmethod
    def _only_zero(cls, value: float | None) -> float | None:
        if value:
            raise ValueError("is not supported; use repetition_penalty")
        return value

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        strings = [value] if isinstance(value, str) else value or []
        if len(strings) > MAX_STOPS or "" in strings:
            raise ValueError(f"takes up to {MAX_STOPS} strings, none of them empty")
        return value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> DecodingRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    def options(self) -> dict[str, Any]:
        """The request as generate()'s options; what was not given is left to the model's generation config."""
        options: dict[str, Any] = {
            "max_new_tokens": self.max_tokens,
            "num_return_sequences": self.n if self.n != 1 else None,
            "stop_strings": [self.stop] if isinstance(self.stop, str) else self.stop or None,
            "seed": None if self.seed is None else self.seed % 2**63,
            "logit_bias": {int(k) if k.isdecimal() else k: v for k, v in self.logit_bias.items()}
            if self.logit_bias
            else None,
            "mode": self.mode,
            "block_length": self.block_length,
            "threshold": self.threshold,
            "commit_rule": self.commit_rule,
            "entropy_bound": self.entropy_bound,
            "verifier_mix": self.verifier_mix,
            "verification": self.verification,
            "min_new_tokens": self.min_tokens or None,
            "repetition_penalty": self.repetition_penalty,
            "thinking_budget": self.thinking_budget,
        }
        if self.temperature is not None:
            options["do_sample"] = self.temperature > 0
        if self.temperature != 0:
            # At temperature 0 there is one answer, whatever top_p and top_k say.
            options |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in options.items() if value is not None}


class ChatRequest(DecodingRequest):
    """The body of POST /v1/chat/completions; messages are checked in `server`, with their images."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[StrictStr] | None = None
    parallel_tool_calls: StrictBool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None

    @field_validator("response_format")
    @classmethod
    def _only_text(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value != {"type": "text"}:
            raise ValueError('is not supported beyond {"type": "text"}')
        return value

    @field_validator("modalities")
    @classmethod
    def _only_text_out(cls, value: list[str] | None) -> list[str] | None:
        if value not in (None, ["text"]):
            raise ValueError('is not supported beyond ["text"]')
        return value

    @model_validator(mode="after")
    def _no_tools(self) -> ChatRequest:
        if self.tools or self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tools are not supported")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self

    def options(self) -> dict[str, Any]:
        options = super().options()
        if self.max_completion_tokens is not None:
            options["max_new_tokens"] = self.max_completion_tokens
        if self.logprobs:
            options["output_logprobs"] = True
        if self.top_logprobs:
            options["top_logprobs"] = self.top_logprobs
        return options


class CompletionRequest(DecodingRequest):
    """The body of POST /v1/completions: text that the model goes on with, without a chat template."""

    prompt: StrictStr | list[StrictStr] | list[StrictInt] | list[list[StrictInt]]
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: StrictBool | None = None
    suffix: StrictStr | None = None
    best_of: Count | None = None

    @field_validator("echo", "suffix")
    @classmethod
    def _not_asked_for(cls, value: Any) -> Any:
        if value:
            raise ValueError("is not supported")
        return value

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not supported beyond n")
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt of the request; ids or text.

        Raises:
            ValueError: there is none, or one is empty.
        """
        given: Any = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given or not all(given):
            raise ValueError("prompt: must not be empty")
        return given

    def options(self) -> dict[str, Any]:
        options = super().options()
        if self.logprobs is not None:
            options["output_logprobs"] = True
        if self.logprobs:
            options["top_logprobs"] = self.logprobs
        return options
