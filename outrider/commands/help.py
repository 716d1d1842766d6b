"""Help of commands: `--help` shows the flags that most people need, `--help=all` every flag, `--help=WORD` a group of
flags or those with a word in them. No torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from outrider.core.fields import did_you_mean

SHORT, ALL = "", "all"
# Flags of the groups engine, sampling and server that short help shows.
COMMON = frozenset({
    "dtype", "device", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization",
    "speculative_config", "exact", "fit",
    "temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "n",
    "host", "port", "api_key", "served_model_name", "tool_call_parser", "reasoning_parser",
})
GROUPS = ("engine", "sampling", "server")


class HelpAction(argparse.Action):
    """Prints help and ends the program. The flag may have one word as its value."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs="?", const=SHORT, default=argparse.SUPPRESS, metavar="WORD",
                         help="show help; --help=all shows every flag")

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: str | Sequence[Any] | None, option_string: str | None = None) -> None:
        print(help_text(parser, str(values)), end="")
        parser.exit()


def help_text(parser: argparse.ArgumentParser, word: str = SHORT) -> str:
    """Return the help of a command. A word that is neither a group nor part of a flag is a usage error."""
    groups = {str(group.title): group for group in parser._action_groups}
    if word in (SHORT, ALL) or not any(group in groups for group in GROUPS):
        shown = _text(parser, lambda group, action: group not in GROUPS or word == ALL or action.dest in COMMON)
        return f"{shown}\n{parser.epilog or ''}"
    if word in groups:
        return _text(parser, lambda group, action: group == word)
    wanted = word.lstrip("-").replace("_", "-")
    flags = [action for group in groups.values() for action in _shown(group)
             if any(wanted in flag for flag in action.option_strings)]
    if not flags:
        names = [title for title in groups if title in GROUPS]
        parser.error(f"--help={word}: no group and no flag has that name{did_you_mean(word, names)} (groups are "
                     f"{', '.join([ALL, *names])})")
    return _text(parser, lambda group, action: action in flags)


def _text(parser: argparse.ArgumentParser, is_wanted: Callable[[str, argparse.Action], bool]) -> str:
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    num_hidden = 0
    for group in parser._action_groups:
        shown = [action for action in _shown(group) if is_wanted(str(group.title), action)]
        num_hidden += len(list(_shown(group))) - len(shown)
        formatter.start_section(group.title)
        formatter.add_arguments(shown)
        formatter.end_section()
    if num_hidden:
        titles = [str(group.title) for group in parser._action_groups if group.title in GROUPS]
        words = ", ".join(f"--help={title}" for title in titles)
        formatter.add_text(f"{num_hidden} more flags: --help=all, {words}, or --help=WORD for flags with that word")
    return formatter.format_help()


def _shown(group: argparse._ArgumentGroup) -> Iterable[argparse.Action]:
    return (action for action in group._group_actions if action.help is not argparse.SUPPRESS)
