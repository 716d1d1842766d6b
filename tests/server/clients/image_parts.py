"""OpenAI's, Anthropic's and LangChain's clients send an image by each route, in the forms that their documents show."""

import sys

import anthropic
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

URL = sys.argv[1]
DATA = sys.argv[2]  # of a PNG file, in base64
DATA_URL = f"data:image/png;base64,{DATA}"

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
assert "image" in client.models.list().data[0].model_extra["modalities"]
messages = [{"role": "user", "content": [{"type": "text", "text": "What?"},
                                         {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}}]}]
plain = [{"role": "user", "content": "What?"}]
counts = [client.chat.completions.create(model="tiny", max_tokens=2, messages=each).usage.prompt_tokens
          for each in (messages, plain)]
assert counts[0] == counts[1] + 5, counts
given = [{"role": "user", "content": [{"type": "input_text", "text": "What?"},
                                      {"type": "input_image", "image_url": DATA_URL, "detail": "auto"}]}]
response = client.responses.create(model="tiny", max_output_tokens=2, input=given)
assert response.usage.input_tokens == counts[0]
*_, last = client.responses.create(model="tiny", max_output_tokens=2, input=given, stream=True)
assert last.response.usage.input_tokens == counts[0]
again = client.responses.create(model="tiny", max_output_tokens=2, input="And?", previous_response_id=response.id)
assert again.usage.input_tokens > counts[0]
for wrong in ("data:image/png;base64,AAAA", "https://example.org/a.png"):
    try:
        client.chat.completions.create(model="tiny", max_tokens=2, messages=[{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": wrong}}]}])
        raise AssertionError(wrong)
    except openai.BadRequestError as error:
        assert error.param == "messages", error

claude = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
asked = [{"role": "user", "content": [{"type": "text", "text": "What?"}, block]}]
message = claude.messages.create(model="tiny", max_tokens=2, messages=asked)
counted = claude.messages.count_tokens(model="tiny", messages=asked).input_tokens
assert counted == counts[0] == message.usage.input_tokens + message.usage.cache_read_input_tokens
with claude.messages.stream(model="tiny", max_tokens=2, messages=asked) as stream:
    assert stream.get_final_message().usage.output_tokens == 2
used = [{"role": "user", "content": "Look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [block]}]}]
without = [*used[:2], {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}]
sizes = [claude.messages.count_tokens(model="tiny", messages=each).input_tokens for each in (used, without)]
assert sizes[0] == sizes[1] - len("x") + len("[user]") + 5, sizes

standard = {"type": "image", "base64": DATA, "mime_type": "image/png"}  # LangChain's own form
human = HumanMessage([{"type": "text", "text": "What?"}, standard])
common = {"model": "tiny", "max_tokens": 2, "max_retries": 0}
for model in (ChatOpenAI(base_url=f"{URL}/v1", api_key="none", **common),
              ChatOpenAI(base_url=f"{URL}/v1", api_key="none", use_responses_api=True, **common),
              ChatAnthropic(base_url=URL, api_key="none", **common)):
    assert model.invoke([human]).usage_metadata["input_tokens"] == counts[0]
    call = {"name": "look", "args": {}, "id": "a", "type": "tool_call"}
    talk = [HumanMessage("Look"), AIMessage("", tool_calls=[call]), ToolMessage("seen", tool_call_id="a"), human]
    assert model.invoke(talk).usage_metadata["input_tokens"] > counts[0]
