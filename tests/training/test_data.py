"""Prompts, answers, vocabulary and batches: what a run is trained on is a function of its settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider import LLM
from outrider.commands.loading import load
from outrider.config import EngineConfig
from outrider.engine.text import Tokenizer
from outrider.training.answers import AnswerPlan, generate_texts, until_repeated
from outrider.training.batches import BatchPlan
from outrider.training.loss import HeldOutAcceptance, pass_weights
from outrider.training.prompts import OPENERS, SelfPrompts, read_prompts
from outrider.training.settings import TrainingSettings
from outrider.training.texts import TextStore, TrainingText, split_texts
from outrider.training.vocabulary import DraftVocabulary
from tests.engine.harness import CONFIGS, byte_tokenizer, save_folder

TEMPLATE = "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}<|begin|>assistant\n"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_folder(path, CONFIGS["llama"] | {"vocab_size": 260, "eos_token_id": 257})
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


def test_prompts_of_every_form(tmp_path: Path, chat_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(chat_model)
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    forms = ["Hi", {"prompt": "Hi"}, {"question": "Hi", "answer": "?"}, {"turns": ["Hi", "More"], "category": "chat"},
             {"messages": [{"role": "user", "content": "Hi"}]}]
    for form in forms:
        (tmp_path / "one.jsonl").write_text(json.dumps(form))
        assert read_prompts(tmp_path / "one.jsonl", tokenizer, vocab_size=260, max_tokens=64) == [chat], form
    (tmp_path / "all.json").write_text(json.dumps([*forms, {"prompt_token_ids": [5, 6]}]))
    assert read_prompts(tmp_path / "all.json", tokenizer, vocab_size=260, max_tokens=64) == [chat, [5, 6]]
    (tmp_path / "lines.txt").write_text("Hi\n\nHi\nHo\n")
    assert len(read_prompts(tmp_path / "lines.txt", tokenizer, vocab_size=260, max_tokens=64)) == 2


@pytest.mark.parametrize("has_template", [True, False])
def test_messages_that_cannot_be_read_are_named_by_their_line(tmp_path: Path, chat_model: Path,
                                                              has_template: bool) -> None:
    tokenizer = Tokenizer.from_folder(chat_model)
    if not has_template:
        tokenizer.chat_templates.clear()
    path = tmp_path / "prompts.jsonl"

    def read(*items: object) -> list[list[int]]:
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        return read_prompts(path, tokenizer, vocab_size=260, max_tokens=64)

    said = read("Hi")
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
    assert read(parts) == said
    assert read("Hi", "", " ", {"prompt": ""}, {"turns": [""]}, {"messages": [{"role": "user"}]}) == said
    picture = [{"role": "user", "content": [{"type": "image_url"}]}]
    for messages, words in ((["Hi"], "must be a list, each a dict"), ([{"content": "Hi"}], "needs a 'role'"),
                            (picture, "'image_url' in a message is not")):
        with pytest.raises(ValueError, match=f"line 2: .*{words}"):
            read("Hi", {"messages": messages})


def test_a_chat_model_is_asked_with_the_beginning_of_a_users_turn(chat_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(chat_model)
    own = SelfPrompts(tokenizer, 260)
    seed = own.seed_prompt(0)
    assert tokenizer.decode(seed, skip_special_tokens=False) == "<|begin|>user\n" and own.seed_prompt(5) == seed
    wanted = tokenizer.encode_chat([{"role": "user", "content": "Why?"}])
    assert own.prompt_from(0, [*tokenizer.encode(" Why?\n"), 257], (257,)) == wanted
    assert own.prompt_from(0, [257], (257,)) is None


def test_every_second_pair_of_prompts_begins_with_the_words_of_a_task(chat_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(chat_model)
    own = SelfPrompts(tokenizer, 260)
    shown = [tokenizer.decode(own.seed_prompt(index), skip_special_tokens=False) for index in range(8)]
    assert shown == [f"<|begin|>user\n{words}" for words in ("", "", *OPENERS[:1] * 2, "", "", *OPENERS[1:2] * 2)]
    wanted = tokenizer.encode_chat([{"role": "user", "content": f"{OPENERS[1]}The sea."}])
    assert own.prompt_from(6, tokenizer.encode("The sea."), ()) == wanted
    assert own.prompt_from(6, [257], (257,)) is None


def test_a_model_without_a_template_continues_single_tokens() -> None:
    own = SelfPrompts(None, 100)
    assert [own.seed_prompt(index) for index in (0, 7, 107)] == [[0], [7], [7]]
    assert own.prompt_from(7, [8, 9], ()) == [7, 8, 9]


def test_generated_texts_are_the_same_in_any_order_of_shards(tmp_path: Path, chat_model: Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Half greedy and half sampled, no prompt twice; a shard that is missing is made again as it was."""
    config = EngineConfig(str(chat_model), device="cpu", dtype="float64", num_pages=200, max_num_seqs=4)
    monkeypatch.setattr("outrider.training.answers.SELF_PROMPT_TOKENS", 24)
    monkeypatch.setattr("outrider.training.answers.PASSAGE_TOKENS", 24)
    settings = TrainingSettings(max_prompt_tokens=150, max_answer_tokens=8, shard_texts=5)
    target, lines = load(config), list[str]()
    own, plan = SelfPrompts(target.tokenizer, 260), AnswerPlan(settings, 12, [])
    stores = [TextStore(tmp_path), TextStore(tmp_path / "again")]
    (tmp_path / "again").mkdir()
    with target.llm(config) as llm:
        assert isinstance(llm, LLM)
        generate_texts(llm, plan, stores[0], own, report=lines.append)
        stores[1].write(0, list(stores[0].read(0)))
        generate_texts(llm, plan, stores[1], own, report=lines.append)
    texts = stores[0].read_all()
    assert texts == stores[1].read_all() and len(lines) == 1 + 3 + 1 + 2  # the plan, and a line for each shard
    assert "generating 12 of 12 texts" in lines[0] and "generating 7 of 12 texts" in lines[4]
    assert len({text.prompt for text in texts}) == len(texts) > 6
    assert 3 < sum(text.is_greedy for text in texts) < len(texts)
    assert all(1 <= len(text.answer) <= 8 for text in texts)


@pytest.mark.parametrize("has_template", [True, False])
def test_prompts_that_the_target_writes_end_at_the_longest_prompt(chat_model: Path, has_template: bool) -> None:
    """A model that does not end its turn would otherwise write prompts that are too long, and all would be dropped."""
    tokenizer = Tokenizer.from_folder(chat_model) if has_template else None
    own, settings = SelfPrompts(tokenizer, 260), TrainingSettings(max_prompt_tokens=120, max_answer_tokens=8)
    for index in (0, 2, 6):
        most = AnswerPlan(settings, 12, []).prompt_params(index, own).max_tokens
        assert most is not None
        prompt = own.prompt_from(index, [65] * most, ())
        assert prompt is not None and len(prompt) == 120
    with pytest.raises(ValueError, match="there is no room for one: raise --max-prompt-tokens"):
        AnswerPlan(replace(settings, max_prompt_tokens=1), 12, []).prompt_params(0, own)


def test_a_prompt_of_a_file_that_comes_again_is_answered_the_other_way() -> None:
    for count in (3, 4):
        plan = AnswerPlan(TrainingSettings(), 12, [[token] for token in range(count)])
        given = [plan.prompt_of(index) for index in range(12)]
        assert given == [*plan.prompts, *plan.prompts, *[None] * (12 - 2 * count)]  # the target writes the rest
        ways = [plan.is_greedy(index) for index in range(12)]
        assert [not way for way in ways[:count]] == ways[count : 2 * count] and sum(ways) == 6
        assert len({plan.seed_of(index, is_prompt) for index in range(12) for is_prompt in (True, False)}) == 24


def test_answers_to_one_prompt_are_all_held_out_or_none() -> None:
    texts = [TrainingText((index // 2, 5, 6), 1, index % 2 == 0) for index in range(200)]
    split = split_texts(texts, 0.1)
    assert len(split.held_out) == 10 and all(text.is_greedy for text in split.held_out)
    assert len(split.training) == 180
    assert not {text.prompt for text in split.held_out} & {text.prompt for text in split.training}
    assert split_texts(texts[::-1], 0.1).held_out == split.held_out[::-1]


def test_the_vocabulary_is_the_most_frequent_tokens() -> None:
    vocabulary = DraftVocabulary.from_counts(torch.tensor([0, 5, 1, 9, 0, 5, 1]), 4)
    assert vocabulary.ids.tolist() == [1, 2, 3, 5] and vocabulary.coverage == 20 / 21
    assert vocabulary.offsets.tolist() == [1, 1, 1, 2]
    assert vocabulary.is_known.tolist() == [False, True, True, True, False, True, False]
    assert DraftVocabulary.from_counts(torch.tensor([1, 2]), 8).ids.tolist() == [0, 1]


def test_every_epoch_has_each_text_once_in_its_own_order() -> None:
    lengths = tuple(5 + index % 40 for index in range(300))
    plan = BatchPlan(lengths, batch_tokens=500, micro_tokens=120, epochs=2, seed=3)
    orders = [[index for step in range(start, start + plan.steps_per_epoch) for index in plan.texts_of(step)]
              for start in (0, plan.steps_per_epoch)]
    assert all(sorted(order) == list(range(300)) for order in orders) and orders[0] != orders[1]
    for step in range(plan.num_steps):
        groups = plan.micro_batches(step)
        assert sorted(index for group in groups for index in group) == sorted(plan.texts_of(step))
        assert all(len(group) * max(lengths[index] for index in group) <= 120 for group in groups)
        assert sum(lengths[index] for index in plan.texts_of(step)) < 700
    assert BatchPlan(lengths, 500, 120, 2, seed=4).texts_of(0) != plan.texts_of(0)


def test_weights_of_passes_and_mean_runs() -> None:
    assert pass_weights(3, 0.5) == [4 / 7, 2 / 7, 1 / 7]
    both = HeldOutAcceptance(10, (8, 4)) + HeldOutAcceptance(10, (4, 0))
    assert both.by_position == [0.6, 0.2] and both.mean_run == 1.8


def test_answers_end_where_they_begin_to_loop() -> None:
    told = list(range(100, 150))
    loop = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert until_repeated(told) == told
    assert until_repeated([*told, *loop, 60, *loop]) == [*told, *loop, 60, *loop]  # twice is no loop
    assert until_repeated([*told, *loop * 9]) == [*told, *loop, *loop, *loop[:8]]
    assert until_repeated([100, *[7] * 40]) == [100, *[7] * 10]
    assert until_repeated([]) == [] and until_repeated([7]) == [7]
