"""pydantic-ai: agents with a tool, with typed results, and with a history, over three APIs."""

import sys
from collections.abc import AsyncIterable

from anthropic import AsyncAnthropic
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]


class Person(BaseModel):
    name: str
    age: int


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sun in {city}"


async def read_all(context: object, events: AsyncIterable[object]) -> None:
    """With a reader of its events an agent asks for streams."""
    async for _ in events:
        pass


openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key="none", max_retries=0))
models = [OpenAIChatModel("tiny", provider=openai), OpenAIResponsesModel("tiny", provider=openai),
          AnthropicModel("tiny", provider=anthropic)]
for model in models:
    agent = Agent(model, tools=[weather])
    first = agent.run_sync("How is the weather?")
    assert first.output == "It is sunny.", first.output
    calls = [part for message in first.all_messages() for part in message.parts if part.part_kind == "tool-call"]
    assert [call.args_as_dict() for call in calls] == [{"city": "Köln"}]
    assert agent.run_sync("And now?", message_history=first.all_messages()).output == "It is sunny."
    assert agent.run_sync("How is the weather?", event_stream_handler=read_all).output == "It is sunny."
    assert Agent(model).run_stream_sync("Hello").get_output() == "It is sunny."
    assert Agent(model, output_type=ToolOutput(Person)).run_sync("Who?").output == Person(name="Ada", age=36)
for model in models[:2]:
    assert Agent(model, output_type=NativeOutput(Person)).run_sync("Who?").output == Person(name="Ada", age=36)
