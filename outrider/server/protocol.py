"""Bodies of requests, strictly typed: a field is served, ignored with a note to the client, or refused by name.

None means "not given" for every field, because clients send answers back with a null for every empty field.
SamplingParams checks the ranges of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider.core.fields import did_you_mean, shown
from outrider.core.params import SamplingParams
from outrider.core.structured import StructuredOutputsParams
from outrider.core.token_ids import bias_from_json
from outrider.server.body_errors import UNKNOWN
from outrider.server.errors import ApiError, bad_value
from outrider.server.guard import CACHE_SESSION
from outrider.server.ignored_fields import ignore
from outrider.server.known_fields import OF_BODIES, OF_PARTS, IgnoredField, KnownFields, RefusedField

MAX_TEXTS = {"stop": 64, "bad_words": 1024}
MAX_TOOLS = 1024
MAX_BIASES = 4096  # tokens of logit_bias
MAX_CHARACTERS = 1 << 14  # characters of all texts of one list together
# Fields of SamplingParams under other names or forms in these bodies, or not for a server.
OTHER_FORM = ("max_tokens", "logprobs", "logit_bias", "detokenize", "bad_words_token_ids", "structured_outputs",
              "output_kind", "guided_decoding", "extra_args")


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    known_elsewhere: ClassVar[KnownFields] = OF_PARTS

    @model_validator(mode="before")
    @classmethod
    def leave_out_unused(cls, data: Any) -> Any:
        """Remove nulls and fields without effect. Refuse other fields that are not served."""
        if not isinstance(data, dict):
            return data
        own = field_names(cls)
        given = {name: value for name, value in data.items() if value is not None}
        for name in [name for name in given if name not in own]:
            cls._check_other(name, given.pop(name))
        return given

    @classmethod
    def _check_other(cls, name: str, value: Any) -> None:
        """Record a field that has no effect here. Refuse a field that would change the answer, and a field that is
        unknown."""
        match cls.known_elsewhere.get(name):
            case IgnoredField(why):
                ignore(name, why)
            case RefusedField(why) as known if not known.allows(value):
                raise PydanticCustomError("refused", "{param} is not supported with the value {value}: {why}",
                                          {"param": name, "value": "..." if "image" in name else shown(value),
                                           "why": why})
            case None:
                hint = did_you_mean(name, [*field_names(cls), *cls.known_elsewhere])
                raise PydanticCustomError(UNKNOWN, "unknown field", {"name": name, "hint": hint})


class RequestBody(Body):
    """The whole body of a request."""

    known_elsewhere = OF_BODIES


@cache
def field_names(kind: type[BaseModel]) -> Mapping[str, None]:
    """Return the names of the fields that a body may have, in the order of their definition."""
    return {field.alias or name: None for name, field in kind.model_fields.items()}


def type_tag(value: Any) -> str:
    """Return the tag by which pydantic chooses a member of a union: the object's `type`, in brackets, because a type
    may also be the name of a field."""
    return f"<{value.get('type') or 'message'}>" if isinstance(value, dict) else f"<{getattr(value, 'type', '')}>"


class NaturalNumbers(list[int]):
    """A list of natural numbers. Its items need no check, because the numbers were read digit by digit."""


def _unless_read(value: Any, check: ValidatorFunctionWrapHandler) -> list[int]:
    return value if isinstance(value, NaturalNumbers) else check(value)


# Lists are read up to the first value of another type: to say of each of a million token ids that it is no text takes a
# second.
Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True)]
TokenIds: TypeAlias = Annotated[list[int], Field(fail_fast=True), WrapValidator(_unless_read)]
Prompts: TypeAlias = str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)]


Plain: TypeAlias = bool | int | float | str


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def check_texts(body: Body) -> None:
    """Refuse long lists of texts. Stop strings are searched for after every token and other texts are tokenized at the
    start, so long lists take too much time."""
    for name, most in MAX_TEXTS.items():
        given = getattr(body, name, None) or []
        if isinstance(given, list) and len(given) > most:
            raise ApiError(400, f"{name} has {len(given)} texts, and at most {most} are allowed: send "
                                "fewer", param=name)
        if sum(map(len, given)) > MAX_CHARACTERS:
            raise ApiError(400, f"{name} has more than {MAX_CHARACTERS} characters: send fewer", param=name)


class Scheduled(RequestBody):
    """The body fields that say when a request is scheduled, and which requests may share its cached pages."""

    priority: int | None = Field(default=None, description="requests of a lower number are served first")
    cache_salt: str | None = Field(default=None, description="prefix hits come only from requests with the same salt")
    cache_session: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        default=None, description="a conversation whose cached pages are kept first; or the header X-Cache-Session")
    timeout: float | None = Field(default=None, gt=0, description="seconds that the request may take, if the server's "
                                                                  "own limit is not less")

    @property
    def session_name(self) -> str | None:
        """The cache session that the body or a header names."""
        return self.cache_session or CACHE_SESSION.get()

    @property
    def model_name(self) -> str | None:
        """Return the name of the model or adapter that the body asks for."""
        return getattr(self, "model", None)


class Prompted(Scheduled):
    """The body fields of requests with prompts. Prompts are converted to token ids."""

    request_id: Annotated[str, Field(pattern="^[!-~]{1,128}$")] | None = Field(
        default=None, description="the answer's id ends with it")
    truncate_prompt_tokens: int | None = Field(
        default=None, description="a prompt of more tokens is cut to so many; -1: to those that fit")
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="where a prompt is cut; default left, and right for embeddings")


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    definition: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(default=None, description="the schema always holds")


class ResponseFormat(Body):
    """OpenAI's response format. `json_schema` without a schema means any JSON object, as `json_object` does."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = Field(default=None, description="of a structural tag, with triggers")
    triggers: list[str] | None = None
    format: dict[str, Any] | None = Field(default=None, description="of a structural tag, in its newer spelling")

    @model_validator(mode="after")
    def check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("schema", "json_schema and the type json_schema must be given together", {})
        if (self.type == "structural_tag") != ((self.structures is None) != (self.format is None)):
            raise PydanticCustomError("schema", "the type structural_tag and one of structures and format must be "
                                                "given together", {})
        return self

    def form(self) -> StructuredOutputsParams | None:
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            return StructuredOutputsParams(structural_tag=self.model_dump(exclude_none=True))
        if self.json_schema is None or self.json_schema.definition is None:
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=self.json_schema.definition)


class Generated(Scheduled):
    """The body fields that all requests for text share, in every API."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    speculative: bool | int | None = Field(default=None, description="false: no drafts; a number: at most so many")
    stream: bool | None = None


class SamplingFields(Generated, Prompted):
    """The body fields that completions and chats share."""

    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_BIASES)
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_mode: Literal["raw", "processed"] | None = Field(
        default=None, description="processed: after temperature and filters")
    skip_special_tokens: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(default=None, description="log-probabilities name tokens as "
                                                                              "token_id:17")
    return_run_lengths: bool | None = Field(default=None, description="of a stream: tokens of each step, in which all "
                                                                      "but the last are accepted drafts")
    receipt: bool | None = Field(default=None, description="each choice says what its tokens depend on, for `outrider "
                                                           "replay`; it has log-probabilities then")
    return_sampling_mask: bool | None = Field(default=None, description="each choice has the ids that the filters "
                                                                        "kept at each place")
    use_beam_search: bool | None = Field(default=None, description="the n likeliest answers instead of n samples")
    length_penalty: float | None = Field(default=None, description="of a beam search: above 1 prefers longer answers")
    response_format: ResponseFormat | None = None
    vllm_xargs: dict[str, Plain | list[Plain]] | None = Field(
        default=None, description="values for the logits processors that the server was started with")
    structured_outputs: dict[str, Any] | None = Field(
        default=None, description="the form of the text: json, regex, choice, grammar, json_object or "
                                  "structural_tag")

    def form(self) -> StructuredOutputsParams | None:
        """Return the structured output that the request's body asks for, or None."""
        try:
            own = None if self.response_format is None else self.response_format.form()
        except ValueError as error:
            names = (("structured_outputs.json", "response_format.json_schema.schema"),
                     ("structured_outputs.structural_tag", "response_format"))
            raise bad_value(error, type(self).model_fields, names) from None
        if self.structured_outputs is None:
            return own
        if own is not None:
            raise ApiError(400, "response_format and structured_outputs both set the output's form: give one of them",
                           param="response_format")
        try:
            given = {name: value for name, value in self.structured_outputs.items() if value is not None}
            return StructuredOutputsParams.from_fields(given)
        except ValueError as error:
            raise bad_value(error, type(self).model_fields) from None

    def sampling(self, **more: Any) -> SamplingParams:
        """Return the sampling parameters. `more`: parameters whose fields have different names in completions and
        chats."""
        names = SamplingParams.__dataclass_fields__.keys() - set(OTHER_FORM)
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        given["structured_outputs"], given["extra_args"] = self.form(), self.vllm_xargs
        given |= more
        if self.logit_bias is not None:
            try:
                given["logit_bias"] = bias_from_json(self.logit_bias)
            except ValueError as error:
                raise ApiError(400, str(error), param="logit_bias") from None
        check_texts(self)
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(400, "prompt_logprobs cannot be streamed: leave out stream or "
                                "prompt_logprobs", param="prompt_logprobs")
        if self.length_penalty not in (None, 1):
            raise ApiError(400, "length_penalty needs use_beam_search=true: set it, or leave length_penalty "
                                "out", param="length_penalty")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream=true: set it, or leave stream_options "
                                "out", param="stream_options")
        try:
            return SamplingParams(**given)
        except ValueError as error:
            raise bad_value(error, type(self).model_fields) from None

    def implied_fields(self) -> dict[str, Any]:
        """Return values for fields that the body leaves empty but that its other fields imply."""
        if not self.receipt or self.use_beam_search or getattr(self, "logprobs", None) not in (None, False):
            return {}
        return {"logprobs": True if "top_logprobs" in type(self).model_fields else 0}

    @property
    def wants_usage(self) -> bool:
        options = self.stream_options
        if options is None:
            return False
        return bool(options.continuous_usage_stats if options.include_usage is None else options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats) and self.wants_usage


class CompletionRequest(SamplingFields):
    prompt: Prompts | None = Field(default=None, description="one or several; or give prompt_embeds")
    prompt_embeds: str | Texts | None = Field(default=None, description="base64 of a safetensors file with one tensor, "
                                                                        "[tokens, hidden size]; or several")
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = Field(default=None, description="the answer begins with the prompt")
    add_special_tokens: bool | None = Field(default=None, description="those that the tokenizer puts around a text; "
                                                                      "default true")


class TextPart(Body):
    type: Literal["text"]
    text: str


Detail: TypeAlias = Literal["auto", "low", "high"]


class ImageUrl(Body):
    url: str = Field(description="a data URL with base64, or a URL that the server was allowed to read")
    detail: Detail | None = Field(default=None, description="how finely the model looks at the image")


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl

    @field_validator("image_url", mode="before")
    @classmethod
    def read_text(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @classmethod
    def from_url(cls, url: str, detail: Detail | None = None) -> ImagePart:
        return cls(type="image_url", image_url=ImageUrl(url=url, detail=detail))


ContentPart: TypeAlias = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")],
    Discriminator(type_tag, custom_error_type="type", custom_error_message="the type must be text or image_url")]
OTHER_MEDIA = ("audio", "video", "file", "document")  # in the types of parts


class Said(Body):
    """The base of chat messages whose content may be a list of parts."""

    @model_validator(mode="before")
    @classmethod
    def refuse_other_media(cls, data: Any) -> Any:
        parts = data.get("content") if isinstance(data, dict) else None
        for part in parts if isinstance(parts, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and any(medium in kind for medium in OTHER_MEDIA):
                raise PydanticCustomError("refused", "content of the type {value} is not supported: texts and images "
                                          "are the only media", {"param": "content", "value": shown(kind)})
        return data


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatMessage(Said):
    role: Annotated[str, Field(pattern=r"^[\w-]{1,64}$")] = Field(
        description="system, developer, user, assistant, tool, or another one that the chat template writes")
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None

    @field_validator("role")
    @classmethod
    def refuse_misspelt_role(cls, role: str) -> str:
        hint = "" if role in ROLES else did_you_mean(role, ROLES)
        if hint:
            raise PydanticCustomError("role", "the role {role} is not supported{hint}", {"role": role, "hint": hint})
        return role


ToolName: TypeAlias = Annotated[str, Field(min_length=1)]


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="arguments of forced calls always have the schema's form")


class Tool(Body):
    type: Literal["function"]
    function: Function


Tools: TypeAlias = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class ChatRequest(SamplingFields):
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = Field(default=None, description="the answer begins with the last message, if the assistant "
                                                        "said it")
    documents: list[dict[str, Any]] | None = Field(default=None, description="for chat templates that read them")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = Field(default=None, description="also those that the tokenizer puts around a "
                                                                      "text; default false")
    reasoning_effort: str | None = Field(default=None, description="for chat templates that read it; none: those with "
                                                                   "a switch for reasoning turn it off")
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        return (self.chat_template_kwargs or {}) | ({} if not self.documents else {"documents": self.documents})


class TokenizeRequest(RequestBody):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: TokenIds
