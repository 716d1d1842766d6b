"""/score, /rerank and /pooling: similarities by embeddings, in the bodies of vLLM, Jina and Cohere."""

from __future__ import annotations

import base64
import json
import threading
from typing import Any

import numpy as np
import pytest

from outrider.server import embeddings, pooled
from outrider.server.service import Service
from tests.server.rig import MODEL, Served, served_fixture

TEXTS = ["a text", "quite another", "b text"]

served = served_fixture(pooling="mean", max_prompts=6)


def cosines(served: Served, one: str, others: list[str]) -> np.ndarray[Any, Any]:
    data = served.post("/v1/embeddings", input=[one, *others]).json()["data"]
    vectors = np.array([entry["embedding"] for entry in data])
    return vectors[1:] @ vectors[0]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "items"), ("queries", "documents"),
                                   ("data_1", "data_2")])
def test_a_score_is_the_cosine_of_two_embeddings(served: Served, path: str, names: tuple[str, str]) -> None:
    answer = served.post(path, **{names[0]: "my text", names[1]: TEXTS}, model=MODEL, request_id="mine").json()
    assert answer["object"] == "list" and answer["model"] == MODEL and answer["id"] == "score-mine"
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(i, "score") for i in range(3)]
    scores = [entry["score"] for entry in answer["data"]]
    np.testing.assert_allclose(scores, cosines(served, "my text", TEXTS), atol=1e-5)
    num_bytes = len("my text") + sum(map(len, TEXTS))
    assert answer["usage"] == {"prompt_tokens": num_bytes, "total_tokens": num_bytes, "completion_tokens": 0}


def test_pairs_and_token_ids(served: Served) -> None:
    pairs = served.post("/score", text_1=TEXTS, text_2=TEXTS[::-1]).json()["data"]
    assert pairs[1]["score"] == pytest.approx(1, abs=1e-5) and pairs[0]["score"] == pytest.approx(pairs[2]["score"])
    ids = [list(text.encode()) for text in TEXTS]
    assert served.post("/score", text_1=ids[0], text_2=ids).json()["data"][0]["score"] == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_back_by_relevance(served: Served, path: str) -> None:
    scores = cosines(served, "my text", TEXTS)
    answer = served.post(path, query="my text", documents=TEXTS, model=MODEL).json()
    assert [result["index"] for result in answer["results"]] == list(np.argsort(-scores))
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-5)
        assert result["document"] == {"text": TEXTS[result["index"]]}
    assert answer["id"].startswith("rerank-") and answer["usage"]["total_tokens"] == 7 + sum(map(len, TEXTS))
    ask = {"query": "my text", "documents": [{"text": text} for text in TEXTS], "return_documents": False}
    best = served.post(path, **ask, top_n=2).json()["results"]
    assert [result.keys() for result in best] == [{"index", "relevance_score"}] * 2
    assert len(served.post(path, **ask, top_n=0).json()["results"]) == 3
    cut = served.post(path, **ask, max_tokens_per_doc=4).json()
    assert cut["usage"]["prompt_tokens"] == 7 + 12 and cut["results"][0]["index"] in range(3)


def test_pooling_gives_one_vector_or_one_for_each_token(served: Served) -> None:
    ask = {"input": TEXTS, "normalize": False, "pooling": "last"}
    answer = served.post("/pooling", **ask).json()
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(i, "pooling") for i in range(3)]
    last = served.post("/v1/embeddings", **ask).json()["data"]
    np.testing.assert_allclose(answer["data"][1]["data"], last[1]["embedding"], atol=1e-5)
    ask = {"input": TEXTS, "normalize": False, "task": "token_embed", "dimensions": 4}
    whole = served.post("/pooling", **ask).json()["data"]
    for text, entry, own in zip(TEXTS, whole, last, strict=True):
        assert np.array(entry["data"]).shape == (len(text), 4)
        np.testing.assert_allclose(entry["data"][-1], own["embedding"][:4], atol=1e-5)
    packed = served.post("/pooling", **ask, encoding_format="base64").json()["data"][0]["data"]
    numbers = np.frombuffer(base64.b64decode(packed), "<f4").reshape(-1, 4)
    np.testing.assert_allclose(numbers, whole[0]["data"], atol=1e-6)


@pytest.mark.parametrize(("path", "body", "param", "words"), [
    ("/score", {"text_1": "a"}, "text_1", "give the texts"), ("/score", {}, "text_1", "text_1 and text_2"),
    ("/score", {"text_1": "a", "items": "b"}, "text_1", "queries and items"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1", "2 texts and text_2 has 3"),
    ("/score", {"text_1": ["a"] * 3, "text_2": ["a"] * 4}, "text_1", "3 texts"),
    ("/score", {"text_1": ["a"] * 4, "text_2": ["a"] * 4}, "text_2", "at most 6"),
    ("/score", {"text_1": "a", "text_2": ["a", "b" * 201]}, "text_2", "201 tokens"),
    ("/score", {"text_1": "a", "text_2": [""]}, "text_2", "text_2"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2", "empty list"),
    ("/score", {"text_1": "a", "text_2": {"content": []}}, "text_2", ""),
    ("/rerank", {"query": "a", "documents": []}, "documents", "empty list"),
    ("/rerank", {"query": "a", "documents": ["a"] * 6}, "documents", "at most 6"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", ""),
    ("/rerank", {"query": "a", "documents": [{"txt": "a"}]}, "documents", "texts, or objects"),
    ("/rerank", {"query": "a", "documents": [{"text": "a", "id": 1}]}, "documents", "one text each"),
    ("/rerank", {"query": "a", "documents": ["a", 1]}, "documents", ""),
    ("/rerank", {"query": "a" * 300, "documents": ["a"]}, "query", "query"),
    ("/rerank", {"documents": ["a"]}, "query", ""),
    ("/pooling", {"input": "a", "task": "reward"}, "task", "token_embed"),
    ("/pooling", {"input": "a", "task": "token_embed", "pooling": "mean"}, "pooling", "token_embed"),
])
def test_what_is_wrong_is_named(served: Served, path: str, body: dict[str, Any], param: str, words: str) -> None:
    error = served.error(path, **body)
    assert error["param"] == param and words in error["message"]


def test_an_answer_with_states_of_all_tokens_is_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MAX_NUMBERS", 100)
    error = served.error("/pooling", input=["x" * 26], task="token_embed", dimensions=4)
    assert error["param"] == "input" and "at most 100 numbers" in error["message"]
    assert served.post("/pooling", input=["x" * 25], task="token_embed", dimensions=4).status_code == 200


def test_long_prompts_are_cut_at_their_ends(served: Served) -> None:
    kept, text = "the beginning", "the beginning" + "x" * 5000
    expected = served.post("/v1/embeddings", input=kept).json()["data"][0]["embedding"]
    for given in ([text], list(text.encode())):
        answer = served.post("/v1/embeddings", input=given, truncate_prompt_tokens=13).json()
        np.testing.assert_allclose(answer["data"][0]["embedding"], expected, atol=1e-5)
        assert answer["usage"]["prompt_tokens"] == 13
    whole = served.post("/v1/embeddings", input=text, truncate_prompt_tokens=-1, truncation_side="left").json()
    assert whole["usage"]["prompt_tokens"] == 200
    scored = served.post("/score", text_1=kept, text_2=[text], truncate_prompt_tokens=13).json()
    assert scored["data"][0]["score"] == pytest.approx(1, abs=1e-5)
    for wrong in (0, -2, 201):
        error = served.error("/v1/embeddings", input="a", truncate_prompt_tokens=wrong)
        assert error["param"] == "truncate_prompt_tokens" and "1 to 200" in error["message"]
    assert served.error("/v1/embeddings", input="a", truncation_side="left")["param"] == "truncation_side"


def test_much_work_leaves_the_event_loop(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short texts are as long as one long text, and vectors take long to write."""
    threads: dict[str, set[str]] = {"encode": set(), "write": set()}

    def encoded(self: Service, *given: Any) -> list[int]:
        threads["encode"].add(threading.current_thread().name)
        return encode(self, *given)

    def written(*given: Any) -> list[bytes]:
        threads["write"].add(threading.current_thread().name)
        return write(*given)

    encode, write = Service._encoded, pooled._texts
    monkeypatch.setattr(Service, "_encoded", encoded)
    monkeypatch.setattr(pooled, "_texts", written)
    assert served.post("/v1/embeddings", input=["x" * 6000] * 4, truncate_prompt_tokens=5).status_code == 200
    assert threads["encode"] and threads["write"]
    assert all(name.startswith("outrider-work") for name in threads["encode"] | threads["write"])


def test_answers_are_valid_json_of_the_announced_length(served: Served) -> None:
    for path in ("/v1/embeddings", "/pooling"):
        answer = served.http.post(path, json={"input": TEXTS})
        assert int(answer.headers["content-length"]) == len(answer.content) and json.loads(answer.content)["data"]
