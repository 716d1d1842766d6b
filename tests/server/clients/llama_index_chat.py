"""LlamaIndex: chats, streams, tool calls with their results, structured output and embeddings."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL = sys.argv[1]


class Person(BaseModel):
    """Someone with a name and an age."""

    name: str
    age: int


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sun in {city}"


options = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
llm = OpenAILike(model="tiny", is_chat_model=True, is_function_calling_model=True, context_window=4096, **options)
assert llm.complete("Hello").text == "It is sunny."
assert "".join(part.delta or "" for part in llm.stream_complete("Hello")) == "It is sunny."
tool = FunctionTool.from_defaults(weather)
talk = [ChatMessage(role="user", content="How is the weather?")]
whole = llm.chat_with_tools([tool], chat_history=talk)
*_, streamed = llm.stream_chat_with_tools([tool], chat_history=talk)
for answer in (whole, streamed):
    calls = llm.get_tool_calls_from_response(answer)
    assert [call.tool_kwargs for call in calls] == [{"city": "Köln"}], answer
    results = [ChatMessage(role="tool", content="sun", additional_kwargs={"tool_call_id": call.tool_id})
               for call in calls]
    last = llm.chat_with_tools([tool], chat_history=[*talk, answer.message, *results])
    assert last.message.content == "It is sunny.", last
assert llm.as_structured_llm(Person).complete("Who?").raw == Person(name="Ada", age=36)
plain = OpenAILike(model="tiny", is_chat_model=False, context_window=4096, max_tokens=5, **options)
assert plain.complete("Hello").text
embedding = OpenAILikeEmbedding(model_name="tiny", **options)
assert len(embedding.get_text_embedding_batch(["a", "b"])) == 2
