"""/v1/embeddings, as OpenAI's client asks for it and as others may."""

from __future__ import annotations

import numpy as np

from tests.server.rig import MODEL, Served, served_fixture

served = served_fixture(pooling="mean", max_prompts=4)


def test_openais_client_reads_both_encodings(served: Served) -> None:
    """The client asks for base64 unless it is told otherwise, and decodes it itself."""
    client, texts = served.client(), ["a text", "another text", "a text"]
    packed = client.embeddings.create(model=MODEL, input=texts)
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    assert [entry.index for entry in plain.data] == [0, 1, 2] and plain.usage.prompt_tokens == 24
    vectors = np.array([entry.embedding for entry in plain.data])
    np.testing.assert_allclose([entry.embedding for entry in packed.data], vectors, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-5)
    assert not np.allclose(vectors[0], vectors[1])


def test_dimensions_pooling_and_token_ids(served: Served) -> None:
    ids = served.post("/tokenize", prompt="a text").json()["tokens"]
    by_ids = served.post("/v1/embeddings", input=ids, normalize=False).json()["data"][0]["embedding"]
    short = served.post("/v1/embeddings", input="a text", dimensions=4, normalize=False)
    by_text = short.json()["data"][0]["embedding"]
    np.testing.assert_allclose(by_text, by_ids[:4], atol=1e-5)
    last = served.post("/v1/embeddings", input=[ids], pooling="last").json()["data"][0]["embedding"]
    assert not np.allclose(last, by_ids)


def test_a_conversation_is_one_prompt_through_the_chat_template(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "you"}]
    for fields, text in (({}, "[user]hi[assistant]you"),
                         ({"add_generation_prompt": True}, "[user]hi[assistant]you[assistant]")):
        for route in ("/v1/embeddings", "/pooling"):
            chat, plain = served.post(route, messages=messages, **fields), served.post(route, input=text)
            assert chat.status_code == 200 and chat.json()["usage"] == plain.json()["usage"]
            assert chat.json()["data"] == plain.json()["data"]
    assert served.error("/v1/embeddings", input="a", messages=messages)["param"] == "input"
    assert served.error("/v1/embeddings")["param"] == "input"
    assert served.error("/v1/embeddings", messages=[])["param"] == "messages"
    assert served.error("/v1/embeddings", input="a", add_generation_prompt=True)["param"] == "add_generation_prompt"
    plain = served.post("/v1/embeddings", messages=messages).json()["data"]
    unused = {"colour": "red"}  # by the template
    assert served.post("/v1/embeddings", messages=messages, chat_template_kwargs=unused).json()["data"] == plain


def test_what_is_wrong_is_said(served: Served) -> None:
    assert "dimensions=9999 exceeds" in served.error("/v1/embeddings", input="a", dimensions=9999)["message"]
    assert served.error("/v1/embeddings", input=[])["param"] == "input"
    assert "at most 4" in served.error("/v1/embeddings", input=["a"] * 5)["message"]
    assert "201 tokens" in served.error("/v1/embeddings", input=[1] * 201)["message"]
    assert served.error("/v1/embeddings", input="a", encoding_format="int8")["param"] == "encoding_format"
    assert served.error("/v1/embeddings", 404, input="a", model="other")["param"] == "model"
    served.assert_idle()
