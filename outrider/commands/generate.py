"""`outrider generate`: prompts from flags, a file or standard input; text or JSON out; streams on a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from outrider.commands.conversation import user_message
from outrider.commands.image_files import image_url
from outrider.commands.loading import fitted, load_or_find
from outrider.commands.parser import UsageError, engine_config, named_adapter, sampling_params
from outrider.commands.run_prompts import Ask, PromptResults, chat_ids, raise_failed, run_prompts
from outrider.commands.serve_files import chat_template, check_template_name
from outrider.commands.word_wrap import WordWrap, wrapped
from outrider.core import RequestOutput, SamplingParams
from outrider.core.fields import shown
from outrider.core.status_line import is_terminal, say
from outrider.llm import LLM


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    prompts = read_prompts(args)
    adapter = named_adapter(args)
    config, template = fitted(engine_config(args)), chat_template(args.chat_template)
    loaded = load_or_find(config)
    tokenizer = loaded.need_tokenizer()
    check_template_name(template, tokenizer)
    encode = partial(chat_ids, tokenizer, system=args.system, template=template) if args.chat else tokenizer.encode
    images = [image_url(path) for path in args.image or ()]
    streams = is_terminal(sys.stdout) and len(prompts) == 1 and params.n == 1 and not args.json
    show = _Stream() if streams else _InOrder(args.json, len(prompts) > 1)
    with loaded.llm(config) as llm, closing(show):
        asks = [_ask_about(llm, text, images, params, args.system, template) if images else
                Ask(encode(text), params, text) for text in prompts]
        ran = run_prompts(llm, asks, on_output=show, priority=args.priority, adapter=adapter,
                          label=None if streams else f"{len(asks)} prompts", may_fail=True)
    if args.stats:
        say(wrapped(stats_line(ran), sys.stderr))
    raise_failed(ran.outputs)  # after the outputs that succeeded are shown
    return 0


def _ask_about(llm: LLM, text: str, images: Sequence[str], params: SamplingParams, system: str | None,
               template: str | None) -> Ask:
    """Make a user's message with images."""
    messages = [{"role": "system", "content": system}] if system else []
    prompt = llm.chat_prompt([*messages, user_message(text, images)], chat_template=template)
    assert isinstance(prompt, dict)
    return Ask(prompt["prompt_token_ids"], params, text, inputs=prompt)


def read_prompts(args: argparse.Namespace) -> list[str]:
    given = args.prompt or []
    if given and args.prompts_file:
        raise UsageError("--prompt and --prompts-file cannot be given together: leave one out")
    for flag, value in (("--system", args.system), ("--chat-template", args.chat_template), ("--image", args.image)):
        if value and not args.chat:
            raise UsageError(f"{flag} needs --chat: add --chat, or leave {flag} out")
    if args.prompts_file:
        return _from_file(Path(args.prompts_file))
    if given:
        return given
    if sys.stdin is None or is_terminal(sys.stdin):
        raise UsageError("no prompt: give --prompt TEXT, --prompts-file FILE, or text on standard input")
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise UsageError("standard input is empty: give --prompt TEXT, --prompts-file FILE, or text there")
    return [text]


def _from_file(path: Path) -> list[str]:
    if not path.is_file():
        raise UsageError(f"there is no file {path}: correct --prompts-file")
    try:
        text = path.read_text(encoding="utf-8-sig")  # with or without the mark that some editors put first
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from None
    # Not splitlines: a line separator of Unicode may stand in a prompt.
    lines = [(f"{path}, line {i}", line) for i, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if path.suffix == ".json":
        prompts = [_prompt_of(f"{path}, item {i}", item) for i, item in enumerate(_json_list(path, text), start=1)]
    elif path.suffix == ".jsonl":
        prompts = [_prompt_of(place, _json_value(place, line)) for place, line in lines]
    else:
        prompts = [line for _, line in lines]
    if not prompts:
        raise UsageError(f"{path} holds no prompt: write at least one into it")
    return prompts


def _json_list(path: Path, text: str) -> list[Any]:
    value = _json_value(str(path), text)
    if not isinstance(value, list):
        raise UsageError(f"{path} must hold a list of texts, or of objects with a \"prompt\"")
    return value


def _json_value(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{place} is not valid JSON ({error}): correct it") from None


def _prompt_of(place: str, item: Any) -> str:
    text = item.get("prompt") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise UsageError(f"{place} must be a text or an object with a text as \"prompt\", got {shown(item)}")
    return text


class _Stream:
    """Prints a growing text on a terminal as it grows."""

    def __init__(self) -> None:
        self._shown, self._wrap = 0, WordWrap()

    def __call__(self, output: RequestOutput) -> None:
        text = output.outputs[0].text
        sys.stdout.write(self._wrap.write(text[self._shown :]))
        sys.stdout.flush()
        self._shown = len(text)

    def close(self) -> None:
        print()


class _InOrder:
    """Prints answers in the order of the prompts, each as soon as it and all before it are finished. At the end, or
    after an interrupt, it prints all finished answers."""

    def __init__(self, as_json: bool, with_prompt: bool) -> None:
        self._as_json, self._with_prompt = as_json, with_prompt
        self._waiting: dict[int, str] = {}
        self._num_printed = 0

    def __call__(self, output: RequestOutput) -> None:
        if not output.finished:
            return
        text = json.dumps(as_json(output)) if self._as_json else _as_text(output, self._with_prompt)
        self._waiting[int(output.request_id)] = text  # ids are given in the order of the prompts
        while self._num_printed in self._waiting:
            self._print(self._waiting.pop(self._num_printed))
            self._num_printed += 1

    def close(self) -> None:
        for _, text in sorted(self._waiting.items()):
            self._print(text)

    def _print(self, text: str) -> None:
        tqdm.write(text)  # above the bar
        sys.stdout.flush()


def _as_text(output: RequestOutput, with_prompt: bool) -> str:
    texts = [sample.text if sample.error is None else f"(failed: {sample.error})" for sample in output.outputs]
    body = "\n---\n".join(texts)
    return f">>> {output.prompt}\n{body}\n" if with_prompt else body


def as_json(output: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "seed": output.seed,
        "outputs": [asdict(sample) for sample in output.outputs],
        **({} if output.prompt_logprobs is None else {"prompt_logprobs": [
            entry and {token: asdict(value) for token, value in entry.items()} for entry in output.prompt_logprobs
        ]}),
        "metrics": asdict(output.metrics) | {"mean_run_length": output.metrics.mean_run_length},
    }


def stats_line(ran: PromptResults) -> str:
    hits = sum(output.metrics.num_cached_tokens for output in ran.outputs)
    prompt = sum(len(output.prompt_token_ids) for output in ran.outputs)
    line = f"[{ran.num_tokens} tokens in {ran.seconds:.2f} s, {ran.tokens_per_second:.1f} tokens/s; "
    line += f"prompt {prompt} tokens" + (f", {hits} of them from the cache" if hits else "")
    drafted = sum(output.metrics.num_draft_tokens for output in ran.outputs)
    accepted = sum(output.metrics.num_accepted_tokens for output in ran.outputs)
    if drafted:
        line += f"; {ran.mean_run_length:.2f} tokens a step, {accepted} of {drafted} drafts accepted"
    return line + "]"
