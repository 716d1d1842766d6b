"""`outrider chat`: a conversation on the terminal. Every turn sends the whole conversation again; prefix hits make that
cheap."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from outrider.commands.conversation import Conversation
from outrider.commands.flag_names import with_flags
from outrider.commands.image_files import image_url
from outrider.commands.line_input import LineInput
from outrider.commands.loading import fitted, load_or_find
from outrider.commands.parser import engine_config, named_adapter, sampling_params
from outrider.commands.remote_chat import connect
from outrider.commands.run_prompts import Interrupted, interruptible, num_known_tokens, raise_failed
from outrider.commands.serve_files import chat_template, check_template_name
from outrider.commands.word_wrap import WordWrap, wrapped
from outrider.core import RequestOutput, SamplingParams
from outrider.core.fields import did_you_mean
from outrider.core.status_line import CLEAR, is_terminal, say, write_stderr
from outrider.engine.stats import EngineStats
from outrider.llm import LLM
from outrider.lora_request import LoRARequest
from outrider.models.sources import DEFAULT_MODEL

COMMANDS = ("/exit", "/help", "/image", "/quit", "/reset")
COMMAND = re.compile(r"(/[a-z?]*)\s*")
IMAGE = re.compile(r"/image\s+(\S.*)")
HELP = ("/reset forgets the conversation, /image PATH shows an image with the next question, /help lists the commands, "
        "/exit or Ctrl-D ends, Ctrl-C stops an answer")


class PromptProgress:
    """A line on the terminal that shows how much of a prompt has been computed, until the answer begins."""

    def __init__(self, stats: EngineStats, prompt_len: int) -> None:
        self._stats, self._before, self._prompt_len = stats, stats.num_step_tokens + stats.num_hit_tokens, prompt_len
        self._is_shown, self._has_ended = False, not is_terminal(sys.stderr)

    def show(self) -> None:
        """Show how much of the prompt is computed, if a step has computed a part of it. Called before each step."""
        done = self._stats.num_step_tokens + self._stats.num_hit_tokens - self._before
        if not self._has_ended and 0 < done < self._prompt_len:
            self._is_shown = True
            write_stderr(f"{CLEAR}reading the prompt: {done:,} of {self._prompt_len:,} tokens")

    def end(self) -> None:
        self._has_ended = True
        if self._is_shown:
            self._is_shown = False
            write_stderr(CLEAR)

    def __enter__(self) -> PromptProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


class LocalConversation(Conversation):
    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, template: str | None = None,
                 adapter: LoRARequest | None = None) -> None:
        super().__init__(system)
        self._llm, self._params, self._template, self._adapter = llm, params, template, adapter

    def _ask(self, messages: list[dict[str, Any]], show: Callable[[str], None], priority: int) -> RequestOutput:
        output = RequestOutput("0", None, [], [])  # if it is interrupted before the first token
        said = ""
        with interruptible() as interrupt, suppress(Interrupted):
            prompt = self._llm.chat_prompt(messages, chat_template=self._template)
            with PromptProgress(self._llm.engine.stats, num_known_tokens(prompt)) as progress:

                def before_step() -> None:
                    interrupt.check()
                    progress.show()

                for output in self._llm.follow([prompt], self._params, priority=priority, before_step=before_step,
                                               lora_request=self._adapter):
                    progress.end()
                    show(output.outputs[0].text[len(said) :])
                    said = output.outputs[0].text
        raise_failed([output])
        return output


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    if args.url is not None:
        return _talk(connect(args, DEFAULT_MODEL), args)
    adapter = named_adapter(args)
    config, template = fitted(engine_config(args)), chat_template(args.chat_template)
    loaded = load_or_find(config)
    check_template_name(template, loaded.need_tokenizer())
    loaded.need_tokenizer().encode_chat([{"role": "user", "content": "?"}], chat_template=template)  # refused now
    with loaded.llm(config) as llm:
        return _talk(LocalConversation(llm, params, args.system, template, adapter), args)


def _talk(conversation: Conversation, args: argparse.Namespace) -> int:
    lines = LineInput("> ")
    if lines.on_terminal:
        _say(f"{args.url or args.model}: {HELP}")
    if args.stats is None:
        args.stats = lines.on_terminal
    was_interrupted = False
    while True:
        try:
            text = lines.read()
        except KeyboardInterrupt:
            print()
            if was_interrupted or not lines.on_terminal:
                return 0
            print("(Ctrl-C once more, Ctrl-D or /exit ends the chat)")
            was_interrupted = True
            continue
        except EOFError:
            if lines.on_terminal:
                print()
            return 0
        was_interrupted = False
        command, image = COMMAND.fullmatch(text), IMAGE.fullmatch(text.strip())
        if image is not None:
            _add_image(conversation, image[1])
        elif command is None:
            _turn(conversation, text.strip(), args)
        elif _obey(command[1], conversation):
            return 0


def _obey(command: str, conversation: Conversation) -> bool:
    """Carry out a command that the user typed. Returns whether it ends the chat."""
    match command:
        case "/exit" | "/quit":
            return True
        case "/reset":
            conversation.reset()
            print("(forgotten)")
        case "/help" | "/?":
            _say(HELP)
        case "/image":
            _say("/image needs the path of an image, as /image photo.jpg")
        case _:
            _say(f"there is no command {command}{did_you_mean(command, COMMANDS)} (/help lists them; a text that "
                 "begins with a space is sent as it is)")
    return False


def _add_image(conversation: Conversation, path: str) -> None:
    try:
        conversation.add_image(image_url(path))
    except ValueError as error:
        _say(str(error))
        return
    _say(f"(the model sees {path} with your next question)")


def _turn(conversation: Conversation, text: str, args: argparse.Namespace) -> None:
    if not text:
        return
    start = time.perf_counter()
    try:
        output = conversation.answer(text, _shower(), args.priority)
    except (ValueError, RuntimeError) as error:  # too long a conversation, mostly
        error_text = f"outrider: error: {with_flags(str(error), args.parser)} (/reset starts over)"
        say(wrapped(error_text, sys.stderr))
        return
    print()
    if args.stats:
        write_stderr(f"{_stats(output, time.perf_counter() - start)}\n")


def _say(text: str) -> None:
    """Print a message of the chat command itself, not of the model."""
    print(wrapped(text, sys.stdout))


def _shower() -> Callable[[str], None]:
    wrap = WordWrap().write if is_terminal(sys.stdout) else str

    def show(text: str) -> None:
        sys.stdout.write(wrap(text))
        sys.stdout.flush()

    return show


def _stats(output: RequestOutput, seconds: float) -> str:
    tokens = sum(len(sample.token_ids) for sample in output.outputs)
    metrics = output.metrics
    line = (f"[{tokens} tokens, {tokens / seconds:.1f} tokens/s; prompt {len(output.prompt_token_ids)} tokens, "
            f"{metrics.num_cached_tokens} of them from the cache")
    if metrics.num_draft_tokens:
        line += (f"; {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} drafts accepted, "
                 f"{metrics.mean_run_length:.2f} tokens a step")
    line = wrapped(line + "]", sys.stderr)
    return f"\x1b[2m{line}\x1b[0m" if is_terminal(sys.stderr) else line
