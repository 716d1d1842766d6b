"""Bodies of /v1/responses: the types of input items and of a request, and their conversion to chat messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from outrider.server.errors import ApiError
from outrider.server.protocol import (
    MAX_BIASES,
    MAX_TOOLS,
    Body,
    ChatMessage,
    ContentPart,
    Detail,
    Function,
    FunctionCall,
    Generated,
    ImagePart,
    Plain,
    RequestBody,
    Said,
    TextPart,
    TokenIds,
    Tool,
    ToolCall,
    type_tag,
)

Json = dict[str, Any]


class InputText(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    logprobs: list[Any] | None = None


class InputImage(Body):
    type: Literal["input_image"]
    image_url: str = Field(description="a data URL with base64, or a URL that the server was allowed to read")
    detail: Detail | None = Field(default=None, description="how finely the model looks at the image")

    @model_validator(mode="before")
    @classmethod
    def refuse_files(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("file_id") is not None:
            raise PydanticCustomError("refused", "file_id is not supported: this server stores no files; give a data "
                                      "URL as image_url", {"param": "input"})
        return data


InputContent: TypeAlias = Annotated[list[Annotated[
    Annotated[InputText, Tag("<input_text>")] | Annotated[InputText, Tag("<output_text>")]
    | Annotated[InputText, Tag("<text>")] | Annotated[InputImage, Tag("<input_image>")],
    Discriminator(type_tag, custom_error_type="type",
                  custom_error_message="the type must be input_text, output_text, text or input_image")]],
    Field(fail_fast=True)]


class InputItem(Body):
    """An item of the input. Some of its fields only repeat those of an earlier answer, and have no effect."""

    id: str | None = None
    status: str | None = None


class InputMessage(Said, InputItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | InputContent


class InputCall(FunctionCall, InputItem):
    type: Literal["function_call"]
    call_id: str


class InputCallOutput(InputItem):
    type: Literal["function_call_output"]
    call_id: str
    output: str | InputContent


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(InputItem):
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    summary: list[Any] | None = None
    encrypted_content: None = None


Item: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("<message>")] | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")] | Annotated[InputReasoning, Tag("<reasoning>")],
    Discriminator(type_tag, custom_error_type="type",
                  custom_error_message="the type must be message, function_call, function_call_output or reasoning")]


class ResponseTool(Function):
    type: Literal["function"]


class TextFormat(Body):
    """A response format whose schema fields are beside its type, not nested below it as in a chat."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    definition: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def to_chat(self) -> Json:
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.definition}}


class ResponseText(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: str | None = None


# As at OpenAI: the answer of a stream has it three times.
Metadata: TypeAlias = Annotated[dict[Annotated[str, Field(max_length=64)],
                                     bool | int | float | Annotated[str, Field(max_length=512)]], Field(max_length=16)]
LOGPROBS = "message.output_text.logprobs"


class ResponsesPrompt(RequestBody):
    """The fields of a /v1/responses body that determine the prompt. A few of them only shape the answer and add no
    tokens to the prompt."""

    model: str | None = None
    input: str | Annotated[list[Item], Field(fail_fast=True)] | None = None
    previous_response_id: str | None = Field(default=None, description="a stored response whose conversation goes on")
    instructions: str | None = Field(default=None, description="the system message; that of an earlier response does "
                                                               "not stay")
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: Json | None = None

    @property
    def reasoning_effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def input_items(self) -> list[Item]:
        """Return the input as a list of items. If the input is a string, it becomes one item: a user's message."""
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return self.input or []

    @property
    def chat_tools(self) -> list[Tool]:
        return [Tool(type="function", function=Function(name=tool.name, description=tool.description,
                                                        parameters=tool.parameters)) for tool in self.tools or []]


class ResponsesRequest(ResponsesPrompt, Generated):
    max_output_tokens: int | None = None
    store: bool | None = Field(default=None, description="false: the response cannot be retrieved or continued")
    metadata: Metadata | None = Field(default=None, description="is in the answer, too")
    include: list[str] | None = Field(default=None, description=f"{LOGPROBS}: log-probabilities of the text's tokens; "
                                                                "others are accepted and not used")
    top_logprobs: int | None = Field(default=None, description="for log-probabilities that include asks for: so many "
                                                               "of the likeliest tokens, too")
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_BIASES)
    vllm_xargs: dict[str, Plain | list[Plain]] | None = Field(default=None, description="as in a chat")
    structured_outputs: Json | None = Field(default=None, description="as in a chat")

    @property
    def text_format(self) -> TextFormat:
        asked = None if self.text is None else self.text.format
        return TextFormat(type="text") if asked is None else asked

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or [])


def forget_item_images(item: Item) -> None:
    """Drop the data of an item's images after its message has got them."""
    content = item.output if isinstance(item, InputCallOutput) else getattr(item, "content", None)
    for part in content if isinstance(content, list) else ():
        if isinstance(part, InputImage):
            part.image_url = ""


def _content(given: str | list[InputText | InputImage]) -> str | list[ContentPart]:
    return given if isinstance(given, str) else [
        TextPart(type="text", text=part.text) if isinstance(part, InputText)
        else ImagePart.from_url(part.image_url, part.detail) for part in given]


def chat_messages(instructions: str | None, items: list[Item]) -> list[ChatMessage]:
    """Convert items to messages. Calls and reasoning become part of the assistant's message."""
    messages = [ChatMessage(role="system", content=instructions)] if instructions else []
    for item in items:
        match item:
            case InputMessage():
                content = _content(item.content)
                last = messages[-1] if messages else None
                if item.role == "assistant" and last and last.role == "assistant" and last.content is None:
                    last.content = content
                else:
                    messages.append(ChatMessage(role=item.role, content=content))
            case InputReasoning():
                text = "".join(part.text for part in item.content or [])
                messages.append(ChatMessage(role="assistant", reasoning=text))
            case InputCall():
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage(role="assistant"))
                if messages[-1].tool_calls is None:
                    messages[-1].tool_calls = []
                messages[-1].tool_calls.append(
                    ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments)))
            case InputCallOutput():
                messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=_content(item.output)))
    if not messages:
        raise ApiError(400, "input is missing or empty: give a text, or a list with at least one item", param="input")
    return messages
