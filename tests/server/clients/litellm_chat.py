"""litellm: chats, streams, tool calls with their results, structured output, embeddings and completions."""

import sys

import litellm
from pydantic import BaseModel

URL = sys.argv[1]


class Person(BaseModel):
    name: str
    age: int


tool = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}
ask = [{"role": "user", "content": "How is the weather?"}]
for model, address in (("openai/tiny", f"{URL}/v1"), ("hosted_vllm/tiny", f"{URL}/v1"), ("anthropic/tiny", URL)):
    options = {"model": model, "api_base": address, "api_key": "none", "max_retries": 0, "max_tokens": 200}
    assert litellm.completion(messages=ask, **options).choices[0].message.content == "It is sunny.", model
    parts = list(litellm.completion(messages=ask, stream=True, **options))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "It is sunny.", model
    whole = litellm.completion(messages=ask, tools=[tool], **options)
    parts = list(litellm.completion(messages=ask, tools=[tool], stream=True, **options))
    streamed = litellm.stream_chunk_builder(parts)
    for answer in (whole, streamed):
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "weather", message
        result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        for dumped in (message, message.model_dump()):
            last = litellm.completion(messages=[*ask, dumped, result], tools=[tool], **options)
            assert last.choices[0].message.content == "It is sunny.", last
    if model.startswith("openai"):
        form = litellm.completion(messages=ask, response_format=Person, **options).choices[0].message.content
        assert Person.model_validate_json(form) == Person(name="Ada", age=36)
        more = {name: value for name, value in options.items() if name != "max_tokens"}
        assert len(litellm.embedding(input=["a", "b"], **more).data) == 2
        assert litellm.text_completion(prompt="Hello", **options | {"max_tokens": 4}).choices[0].text
