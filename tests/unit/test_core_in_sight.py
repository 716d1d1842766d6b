"""The core stays small enough to be read alone. Counts of its source, each with a limit at what it was when it was set.

Lower a limit when the count has fallen. Before you raise one, see "A feature" in docs/extending.md: what only one
feature needs is a part of that feature. What a request loads is counted in `tests/engine/test_loaded_code.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "outrider"
ENGINE_ROOM = ("core", "sched", "speculation", "cache", "runner", "engine", "sample", "mixers", "layers", "models")
BATCH_FIELDS = 13
ENGINE_PARAMETERS, ENGINE_ATTRIBUTES = 7, 15
# Tests for None, by file: a part that may be missing is a part that does nothing, an empty tuple or a type of its own.
NONE_TESTS = {
    "engine/engine.py": 2, "engine/live_requests.py": 1, "engine/worker_line.py": 3, "sched/scheduler.py": 1,
    "runner/step.py": 1, "runner/worker.py": 2, "cache/manager.py": 1,
}
# Feature -> what names it, and the files of the engine room that do.
NAMED = {
    "adapters": (r"adapter|lora", 9),
    "cache events": (r"kv_?event", 5),
    "prompt embeddings": (r"prompt_?embeds|stand_?in", 3),
    "spans": (r"\bspans?\b", 2),
    "learning": (r"adapt_drafter|adaptation|\blearner", 3),
    "grammars": (r"grammar|structured", 2),
    "pooling": (r"pooling(?!_kernel_size)", 1),  # a key of vision configs
    "processors": (r"processors?\b", 3),
    "receipts": (r"receipt", 1),
    "tiers": (r"\btiers?\b|disk_cache|host_cache", 0),
}
NAMING_RECEIPTS = {  # the parameter, the setting, the list of features, and what users call
    "core/params.py", "config.py", "feature_list.py", "receipts.py", "server/protocol.py", "commands/replay.py",
}


def class_of(path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def own_attributes(node: ast.AST) -> Iterator[str]:
    """Names that are assigned to `self`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            if isinstance(part.value, ast.Name) and part.value.id == "self":
                yield part.attr


def num_none_tests(tree: ast.AST) -> int:
    return sum(isinstance(operator, ast.Is | ast.IsNot) and isinstance(right, ast.Constant) and right.value is None
               for node in ast.walk(tree) if isinstance(node, ast.Compare)
               for operator, right in zip(node.ops, node.comparators, strict=True))


def test_a_batch_has_few_fields() -> None:
    fields = [node for node in class_of("core/step_messages.py", "ScheduledBatch").body
              if isinstance(node, ast.AnnAssign)]
    assert len(fields) <= BATCH_FIELDS, "put what one feature needs into a BatchPart, and orders into their group"


def test_an_engine_is_made_of_few_things() -> None:
    engine = class_of("engine/engine.py", "Engine")
    (init,) = (node for node in engine.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    parameters = [*init.args.args[1:], *init.args.kwonlyargs]
    attributes = set(own_attributes(engine))
    assert len(parameters) <= ENGINE_PARAMETERS, "what the model serves is in ServedModel, what watches a StepWatcher"
    assert len(attributes) <= ENGINE_ATTRIBUTES, f"find the part that should own the new one: {sorted(attributes)}"


@pytest.mark.parametrize("path", NONE_TESTS)
def test_parts_of_the_core_are_there_or_do_nothing(path: str) -> None:
    found = num_none_tests(ast.parse((PACKAGE / path).read_text(encoding="utf-8")))
    assert found <= NONE_TESTS[path], f"{path} has {found} tests for None: give it a part that does nothing instead"


@pytest.mark.parametrize("feature", NAMED)
def test_few_files_of_the_core_name_a_feature(feature: str) -> None:
    pattern, limit = NAMED[feature]
    room = [path for folder in ENGINE_ROOM for path in sorted((PACKAGE / folder).rglob("*.py"))]
    named = [str(path.relative_to(PACKAGE)) for path in room
             if re.search(pattern, path.read_text(encoding="utf-8"), re.IGNORECASE)
             and not re.search(pattern, path.parent.name)]  # a feature's own folder
    assert len(named) <= limit, f"{len(named)} files name {feature}: let the feature do through a contract what it " \
                                f"needs there ({', '.join(named)})"


def test_receipts_are_named_where_users_ask_for_them_alone() -> None:
    files = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")
             if re.search("receipt", path.read_text(encoding="utf-8"), re.IGNORECASE)}
    assert {path.as_posix() for path in files if path.parts[0] != "features"} == NAMING_RECEIPTS


def test_tests_for_none_are_counted() -> None:
    assert num_none_tests(ast.parse("a is None and (b is not None or c is d) and e == None")) == 2
