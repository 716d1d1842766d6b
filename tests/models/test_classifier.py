"""Heads that classify, held against transformers: the scores of tiny random checkpoints, and what the fronts make of
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, PoolingParams, SamplingParams
from outrider.async_llm import AsyncLLM
from outrider.models.classifier import read_classes
from outrider.models.config import ConfigReader
from tests.engine.harness import byte_tokenizer
from tests.server.rig import serving

transformers = pytest.importorskip("transformers")
PROMPTS = [list(range(5, 40)), [7, 8, 9], list(range(90, 190))]
SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "head_dim": 16,
}
ENGINE: dict[str, Any] = {"max_model_len": 200, "max_num_seqs": 2, "num_pages": 64, "max_num_batched_tokens": 48,
                          "dtype": "float32", "device": "cpu"}


def saved(path: Path, family: str, num_labels: int, **more: Any) -> tuple[Path, Any]:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SIZES, num_labels=num_labels, **more)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    with torch.no_grad():
        model.score.weight.normal_(0, 0.3)
    model.save_pretrained(path)
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    return path, model


@torch.no_grad()
def reference(model: Any, prompt: list[int]) -> torch.Tensor:
    """Scores of every token: transformers gives those of the last one that is no padding."""
    hidden = model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
    whole = model.score(hidden)
    torch.testing.assert_close(whole[-1], model(input_ids=torch.tensor([prompt])).logits[0])
    return whole


@pytest.mark.parametrize(("family", "num_labels", "more"), [
    ("Llama", 2, {}), ("Qwen2", 5, {"problem_type": "multi_label_classification"}), ("Qwen3", 1, {}),
    ("Mistral", 3, {"problem_type": "regression", "sliding_window": 16, "tie_word_embeddings": True}),
])
def test_scores_are_those_of_transformers(tmp_path: Path, family: str, num_labels: int, more: dict[str, Any]) -> None:
    path, model = saved(tmp_path / "tiny", family, num_labels, **more)
    activate = {2: lambda x: x.softmax(-1), 5: torch.sigmoid, 1: torch.sigmoid, 3: lambda x: x}[num_labels]
    with LLM(str(path), **ENGINE, runner="pooling") as llm:
        outputs = llm.classify(PROMPTS)
        raw = llm.classify(PROMPTS, pooling_params=PoolingParams(use_activation=False))
        whole = llm.encode(PROMPTS, pooling_task="token_classify")
        (one,) = llm.encode(PROMPTS[:1], pooling_task="classify")
        for prompt, output, scores, every in zip(PROMPTS, outputs, raw, whole, strict=True):
            expected = reference(model, prompt)
            close = {"atol": 2e-5, "rtol": 1e-4}
            torch.testing.assert_close(torch.tensor(scores.outputs.probs), expected[-1], **close)
            torch.testing.assert_close(torch.tensor(output.outputs.probs), activate(expected[-1]), **close)
            torch.testing.assert_close(every.outputs.data, activate(expected), **close)
            assert output.outputs.num_classes == num_labels and output.prompt_token_ids == prompt
        assert isinstance(one.outputs.data, torch.Tensor) and one.outputs.data.tolist() == outputs[0].outputs.probs
        with pytest.raises(ValueError, match="classifies and generates no text: use LLM.classify"):
            llm.generate(PROMPTS, SamplingParams())
        if num_labels > 1:
            with pytest.raises(ValueError, match=f"has {num_labels} classes, and scores of pairs need a model"):
                llm.score("a", "b")


def test_a_head_with_one_class_scores_pairs(tmp_path: Path) -> None:
    path, model = saved(tmp_path / "tiny", "Qwen3", 1)
    query, documents = "what?", ["this", "that one"]
    expected = [float(reference(model, list((query + text).encode()))[-1].sigmoid()) for text in documents]
    with LLM(str(path), **ENGINE) as llm:
        scores = [output.outputs.score for output in llm.score(query, documents)]
        assert scores == pytest.approx(expected, rel=1e-4)
        template = "{{ messages[0].content }}|{{ messages[1].content }}"
        (joined,) = llm.score(query, "this", chat_template=template)
        assert bytes(joined.prompt_token_ids) == b"what?|this"
        with serving(lambda: AsyncLLM.around(llm.engine)) as served:
            answer = served.post("/score", text_1=query, text_2=documents).json()
            assert [entry["score"] for entry in answer["data"]] == pytest.approx(scores, rel=1e-4)
            ranked = served.post("/rerank", query=query, documents=documents).json()["results"]
            assert [entry["index"] for entry in ranked] == sorted(range(2), key=lambda i: -scores[i])
            answer = served.post("/classify", input=[query + text for text in documents]).json()
            assert [entry["probs"][0] for entry in answer["data"]] == pytest.approx(scores, rel=1e-4)
            assert answer["data"][0]["label"] == "LABEL_0" and answer["usage"]["prompt_tokens"] == 9 + 13
            pooled = served.post("/pooling", input=query, task="token_classify").json()["data"][0]["data"]
            by_default = served.post("/pooling", input=query).json()["data"][0]["data"]
            assert len(pooled) == len(query) and len(pooled[0]) == 1 and by_default == pytest.approx(pooled[-1])
            vectors = served.post("/pooling", input=query, pooling="mean").json()["data"]
            assert len(vectors[0]["data"]) == SIZES["hidden_size"]


@pytest.mark.parametrize("is_tied", [True, False])
def test_tokens_of_a_language_model_score_pairs(tmp_path: Path, is_tied: bool) -> None:
    """As rerankers are published: the score is the difference of the logits of two tokens."""
    torch.manual_seed(4)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=is_tied)).eval()
    model.save_pretrained(tmp_path)
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(b"a textanother")])).logits[0, -1]
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["n", "y"]}
    with LLM(str(tmp_path), **ENGINE, hf_overrides=overrides | {"is_original_qwen3_reranker": True}) as llm:
        (output,) = llm.score("a text", "another")
        assert output.outputs.score == pytest.approx(float((logits[ord("y")] - logits[ord("n")]).sigmoid()), rel=1e-4)
    with LLM(str(tmp_path), **ENGINE, hf_overrides=overrides | {"method": "no_post_processing"}) as llm:
        (both,) = llm.classify("a textanother")
        expected = logits[[ord("n"), ord("y")]].softmax(-1).tolist()
        assert both.outputs.probs == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="classifier_from_token: the tokenizer has no token 'maybe'"):
        LLM(str(tmp_path), **ENGINE, hf_overrides=overrides | {"classifier_from_token": ["maybe"]})


def test_a_model_without_a_head_says_so(tmp_path: Path) -> None:
    with serving() as served:
        assert "no head that classifies" in served.error("/classify", input="a")["message"]


@pytest.mark.parametrize(("config", "activation", "num_labels"), [
    ({}, "softmax", 2), ({"num_labels": 1}, "sigmoid", 1),
    ({"id2label": {"0": "a"}, "problem_type": None}, "sigmoid", 1),
    ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "softmax", 3),
    ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity", 1),
])
def test_a_config_tells_the_classes(config: dict[str, Any], activation: str, num_labels: int) -> None:
    classes = read_classes(ConfigReader(config, "config.json"))
    assert (classes.activation, classes.num_labels) == (activation, num_labels)
