"""Renders a conversation through the model's chat template and tokenizes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.engine.served_model import ServedModel
from outrider.feature_list import feature_object
from outrider.server.errors import ApiError, bad_value
from outrider.server.protocol import ROLES, ChatMessage, Tool
from outrider.server.settings import RESERVED
from outrider.server.templating import plain_text, template_messages, template_tools

Encode = Callable[[str, bool], list[int]]  # text, add_special_tokens


@dataclass(frozen=True)
class RenderedChat:
    text: str
    encode: Encode | None  # tokenizes the text, if it is not simply the tokenizer


@dataclass(frozen=True)
class ChatInput:
    """The fields of a body that become the prompt."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] | None = None
    variables: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None  # "none": the model should not reason

    def __post_init__(self) -> None:
        for name in (self.variables or {}).keys() & set(RESERVED):
            raise ApiError(400, f"chat_template_kwargs must not set {name}: set it as a field of the request",
                           param="chat_template_kwargs")

    def render(self, model: ServedModel, template: str | None, defaults: Mapping[str, Any] | None) -> RenderedChat:
        """Render the conversation. template: the server's; None is the model's own. defaults: variables of the template
        that the body may override. A template may take seconds."""
        try:
            return self._render(model, template, defaults)
        except ValueError as error:
            refused = bad_value(error, ("messages", "tools", "documents", "continue_final_message"))
            is_variable = str(error).startswith(tuple(f"{name} " for name in self.variables or {}))
            refused.param = refused.param or ("chat_template_kwargs" if is_variable else "messages")
            raise refused from None

    def _render(self, model: ServedModel, template: str | None, defaults: Mapping[str, Any] | None) -> RenderedChat:
        tokenizer = model.need_tokenizer()
        messages, tools, variables = template_messages(self.messages), template_tools(self.tools), self.variables or {}
        literal = None
        if model.takes_images:  # texts of users must not become tokens that stand for media
            literal = feature_object("images", "outrider.features.images.literal:LiteralTexts")(tokenizer)
            messages, tools, variables = literal.hide(messages), literal.hide(tools), literal.hide({**variables})
        text = tokenizer.render_chat(messages, tools=tools, add_generation_prompt=self.add_generation_prompt,
                                     continue_final_message=self.continue_final_message is True,
                                     chat_template=template, chat_template_kwargs=variables,
                                     keeps_parts=True,
                                     hints={**(defaults or {}), **_reasoning_hints(self.reasoning_effort)})
        plain = text if literal is None else literal.show(text)
        _check_roles(self.messages, plain)
        return RenderedChat(text, None if literal is None or plain == text else literal.encode)


def _check_roles(messages: Sequence[ChatMessage], text: str) -> None:
    """Refuse messages with unusual roles that the chat template left out. The search for each message begins after the
    previous one: searching the whole text for each of many thousands would take minutes."""
    end = 0
    for message in messages:
        if message.role not in ROLES:
            content = plain_text(message.content).strip()
            place = text.find(content, end)
            if place < 0:
                raise ValueError(f"messages: the model's chat template leaves out messages of the role {message.role}"
                                 "; use a role that it shows, such as user")
            end = place + len(content)


def _reasoning_hints(effort: str | None) -> dict[str, Any]:
    """Return the variables that tell chat templates how much to reason. Most templates read only one of them."""
    does_reason = effort != "none"
    return {} if effort is None else {
        "reasoning_effort": effort, "enable_thinking": does_reason, "thinking": does_reason}
