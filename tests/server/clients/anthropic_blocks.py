"""Anthropic's client: every kind of answer, sent back as it was dumped, with a null for every field that is empty."""

import sys

import anthropic
from pydantic import BaseModel

URL = sys.argv[1]


class Person(BaseModel):
    name: str
    age: int


client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
tool = {"name": "weather", "description": "of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
ask = [{"role": "user", "content": "How is the weather?"}]
options = {"model": "tiny", "max_tokens": 200, "tools": [tool]}

answers = [client.messages.create(messages=ask, **options),
           client.messages.create(messages=ask, thinking={"type": "enabled", "budget_tokens": 1024}, **options),
           client.beta.messages.create(messages=ask, **options)]
with client.messages.stream(messages=ask, **options) as stream:
    answers.append(stream.get_final_message())
with client.beta.messages.stream(messages=ask, **options) as stream:
    answers.append(stream.get_final_message())

for answer in answers:
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"], answer.content
    assert answer.stop_reason == "tool_use"
    for dumped in (answer.model_dump()["content"], answer.model_dump(mode="json")["content"], answer.content,
                   [block.to_dict() for block in answer.content]):
        called = answer.content[2]
        result = {"type": "tool_result", "tool_use_id": called.id, "content": "sun"}
        talk = [*ask, {"role": answer.role, "content": dumped}, {"role": "user", "content": [result]}]
        last = client.messages.create(messages=talk, **options)
        assert last.content[-1].text == "It is sunny." and last.stop_reason == "end_turn", last
        more = [*talk, {"role": "assistant", "content": last.model_dump()["content"]}, *ask]
        assert client.messages.create(messages=more, **options).content
        assert client.messages.count_tokens(model="tiny", messages=more, tools=[tool]).input_tokens > 10

parsed = client.messages.parse(model="tiny", max_tokens=200, messages=ask, output_format=Person)
assert parsed.parsed_output == Person(name="Ada", age=36)
back = [*ask, {"role": "assistant", "content": parsed.model_dump()["content"]}, *ask]
assert client.messages.create(model="tiny", max_tokens=200, messages=back).content
