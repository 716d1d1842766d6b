"""instructor: models of pydantic by tools and by JSON, from OpenAI's and Anthropic's clients."""

import sys

import anthropic
import instructor
import openai
from pydantic import BaseModel

URL = sys.argv[1]


class Person(BaseModel):
    name: str
    age: int


chat = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "response_model": Person, "max_retries": 0}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA, instructor.Mode.MD_JSON):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)
    for person in (client.chat.completions.create(**chat), *list(client.chat.completions.create_partial(**chat))[-1:]):
        assert (person.name, person.age) == ("Ada", 36), mode
for mode in (instructor.Mode.ANTHROPIC_TOOLS, instructor.Mode.ANTHROPIC_JSON):
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0), mode=mode)
    person = client.chat.completions.create(**chat, max_tokens=200)
    assert (person.name, person.age) == ("Ada", 36), mode
