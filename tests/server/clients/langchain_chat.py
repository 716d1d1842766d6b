"""LangChain: chats, streams, tool calls with their results, structured output and embeddings."""

import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL = sys.argv[1]


class Person(BaseModel):
    """Someone with a name and an age."""

    name: str
    age: int


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sun in {city}"


openai = {"model": "tiny", "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
models = [ChatOpenAI(**openai), ChatOpenAI(**openai, use_responses_api=True),
          ChatAnthropic(model="tiny", base_url=URL, api_key="none", max_retries=0, max_tokens=200)]
for model in models:
    assert model.invoke("Hello").text == "It is sunny."
    assert "".join(chunk.text for chunk in model.stream("Hello")) == "It is sunny."
    assert [answer.text for answer in model.batch(["a", "b"])] == ["It is sunny."] * 2
    able = model.bind_tools([weather])
    talk = [HumanMessage("How is the weather?")]
    answer = able.invoke(talk)
    chunks = list(able.stream(talk))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    for said in (answer, joined):
        assert [call["args"] for call in said.tool_calls] == [{"city": "Köln"}], said
        results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in said.tool_calls]
        assert able.invoke([*talk, said, *results]).text == "It is sunny."
    methods = ("function_calling",) if isinstance(model, ChatAnthropic) else ("json_schema", "function_calling")
    for method in methods:
        assert model.with_structured_output(Person, method=method).invoke("Who?") == Person(name="Ada", age=36)

vectors = OpenAIEmbeddings(**openai, check_embedding_ctx_length=False).embed_documents(["a", "b"])
assert len(vectors) == 2 and len(vectors[0]) > 8
