"""OpenAI's client: every kind of answer, sent back as it was dumped, with a null for every field that is empty."""

import sys

import openai
from pydantic import BaseModel

URL = sys.argv[1]


class Person(BaseModel):
    name: str
    age: int


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
          "additionalProperties": False}
tool = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": schema,
                                         "strict": True}}
ask = [{"role": "user", "content": "How is the weather?"}]
options = {"model": "tiny", "tools": [tool]}

answers = [client.chat.completions.create(messages=ask, **options),
           client.chat.completions.parse(messages=ask, **options)]
with client.chat.completions.stream(messages=ask, **options) as stream:
    answers.append(stream.get_final_completion())
for answer in answers:
    message = answer.choices[0].message
    assert message.content == "One moment." and len(message.tool_calls) == 1, message
    for dumped in (message, message.model_dump(), message.model_dump(mode="json"), message.to_dict(),
                   answer.model_dump()["choices"][0]["message"]):
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
        talk = [*ask, dumped, result]
        last = client.chat.completions.create(messages=talk, **options).choices[0].message
        assert last.content == "It is sunny." and not last.tool_calls, last
        assert client.chat.completions.create(messages=[*talk, last.model_dump(), *ask], **options).choices

parsed = client.chat.completions.parse(model="tiny", messages=ask, response_format=Person).choices[0].message
assert parsed.parsed == Person(name="Ada", age=36)
assert client.chat.completions.create(model="tiny", messages=[*ask, parsed.model_dump(), *ask]).choices

function = {"type": "function", "name": "weather", "description": "of a city", "parameters": schema, "strict": True}
options = {"model": "tiny", "tools": [function]}
answers = [client.responses.create(input=ask, **options), client.responses.parse(input=ask, **options),
           client.responses.create(input=ask, include=["reasoning.encrypted_content"], store=False, **options)]
with client.responses.stream(input=ask, **options) as stream:
    answers.append(stream.get_final_response())
answers.append(client.responses.retrieve(answers[0].id))
for answer in answers:
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"], answer.output
    for dumped in (answer.output, answer.model_dump()["output"], [item.to_dict() for item in answer.output]):
        result = {"type": "function_call_output", "call_id": answer.output[2].call_id, "output": "sun"}
        talk = [*ask, *dumped, result]
        last = client.responses.create(input=talk, **options)
        assert last.output_text == "It is sunny.", last.output
        assert client.responses.create(input=[*talk, *last.model_dump()["output"], *ask], **options).output
        assert client.responses.input_tokens.count(input=talk, **options).input_tokens > 10

parsed = client.responses.parse(model="tiny", input=ask, text_format=Person)
assert parsed.output_parsed == Person(name="Ada", age=36)
assert client.responses.create(model="tiny", input=[*ask, *parsed.model_dump()["output"], *ask]).output
items = client.responses.input_items.list(answers[0].id).model_dump()["data"]
assert client.responses.create(model="tiny", input=items).output_text
