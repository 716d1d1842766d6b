"""Reads every import of the package and holds the layering: a layer imports only from its left.

Imports are read from the source, also those inside functions, names that packages export late
(`outrider.core.lazy_exports`) and the tables of registries; what runs at import time is followed through
the package to see which parts would pull in torch.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from outrider.core.lazy_exports import exported_names
from outrider.feature_list import FEATURES

PACKAGE = Path(__file__).parents[2] / "outrider"

# Left to right. Neighbours in one column may use each other, but only in one direction.
COLUMNS = [
    {"core", "config", "feature_list", "logits_processors", "lora_request", "pooling_outputs",
     "pooling_params"},
    {"kernels"},
    {"cache"},
    {"formats"},
    {"mixers"},
    {"layers"},
    {"models", "sample"},
    {"drafters"},
    {"trainable"},
    {"runner"},
    {"fitting"},
    {"engine", "sched", "speculation"},
    {"simulation"},
    {"features"},
    {"adapters", "adapter_loading", "compat", "front", "llm", "llm_engine", "async_llm", "beam_search", "server",
     "receipts", "replicas", "token_scores", "commands", "benchmarks", "training", "ray", "cli", "weight_group", "verl",
     "__main__"},
]
COLUMN_OF = {part: i for i, parts in enumerate(COLUMNS) for part in parts}
TORCH_FREE = ("core", "config", "feature_list", "logits_processors", "lora_request", "pooling_outputs",
              "pooling_params", "adapter_loading", "cache",
              "sched", "speculation", "engine", "simulation", "compat", "front", "llm", "llm_engine", "async_llm",
              "server", "replicas", "cli")
MAY_USE_TORCH: tuple[str, ...] = ()
PLACE = re.compile(r"outrider(\.\w+)+:\w+")  # an entry of a registry
MOST_IMPORTS = 20  # modules of the package that one of its modules may import


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def import_nodes(body: list[ast.stmt], at_import_time: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports, or only those that run when the module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        elif at_import_time and isinstance(node, ast.If) and is_type_checking(node.test):
            yield from import_nodes(node.orelse, at_import_time)
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from import_nodes(getattr(node, name, []), at_import_time)
            for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
                yield from import_nodes(part.body, at_import_time)


@cache
def source(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


@cache
def lazy_names(package: str) -> dict[str, str]:
    """What a package exports and imports late: name -> its module."""
    if package not in modules() or not any(isinstance(node, ast.Name) and node.id == "lazy_exports"
                                           for node in ast.walk(source(package))):
        return {}
    return {alias.asname or alias.name: str(node.module) for block in source(package).body
            if isinstance(block, ast.If) and is_type_checking(block.test)
            for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def nodes_run(module: str, at_import_time: bool) -> Iterator[ast.AST]:
    """All nodes of a module, or only those that run when it is imported."""
    left: list[ast.AST] = [source(module)]
    while left:
        node = left.pop()
        yield node
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            left += [*getattr(node, "decorator_list", []), *node.args.defaults]
        elif at_import_time and isinstance(node, ast.If) and is_type_checking(node.test):
            left += node.orelse
        elif at_import_time and isinstance(node, ast.AnnAssign):
            left += [] if node.value is None else [node.value]
        else:
            left += ast.iter_child_nodes(node)


@cache
def written_imports(module: str, at_import_time: bool) -> dict[str, frozenset[str]]:
    """Full names of the modules and packages that a module's imports name, and what it takes from each.
    `from outrider.cache import pool` counts as `outrider.cache.pool`."""
    names: dict[str, frozenset[str]] = {}
    for node in import_nodes(source(module).body, at_import_time):
        if isinstance(node, ast.Import):
            names |= {alias.name: names.get(alias.name, frozenset()) for alias in node.names}
            continue
        base = node.module or ""
        if node.level:
            package = module.split(".") if modules()[module].name == "__init__.py" else module.split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
        taken = {alias.name for alias in node.names if f"{base}.{alias.name}" not in modules()}
        names |= {f"{base}.{alias.name}": frozenset() for alias in node.names if alias.name not in taken}
        if taken:
            names[base] = names.get(base, frozenset()) | taken
    return names


@cache
def imports(module: str, at_import_time: bool) -> frozenset[str]:
    """Full names of what a module imports. A name that a package exports late counts as the module that has it, where
    the name is used: `from outrider.layers import MoE`, or `layers.MoE` after `from outrider import layers`."""
    written = written_imports(module, at_import_time)
    homes = {lazy_names(name)[used] for name, taken in written.items() for used in taken & lazy_names(name).keys()}
    packages = {name.rpartition(".")[2]: name for name in written_imports(module, False) if lazy_names(name)}
    for node in nodes_run(module, at_import_time) if packages else ():
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            late = lazy_names(packages[node.value.id])
            homes |= {late[node.attr]} if node.attr in late else set()
    return frozenset(written.keys() | homes)


@cache
def registered(module: str) -> frozenset[str]:
    """What a module's registries name: every string "outrider.module:attribute". The list of features names what lies
    above it; only its functions for workers and engines reach there."""
    if module == "outrider.feature_list":
        return frozenset()
    return frozenset(node.value for node in ast.walk(source(module)) if isinstance(node, ast.Constant)
                     and isinstance(node.value, str) and PLACE.fullmatch(node.value))


def dependencies(module: str) -> frozenset[str]:
    """What a module imports at any time, by itself or through its registries."""
    return imports(module, at_import_time=False) | {place.split(":")[0] for place in registered(module)}


def part_of(module: str) -> str | None:
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "outrider" and len(pieces) > 1 else None


def pulled_in(module: str) -> set[str]:
    """Everything that importing a module imports, through the package: top-level names for foreign modules."""
    seen: set[str] = set()
    queue = [module]
    while queue:
        name = queue.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in modules():
            queue += imports(name, at_import_time=True)
        pieces = name.split(".")
        queue += [".".join(pieces[:i]) for i in range(1, len(pieces))]  # parent packages are imported too
    return seen


def test_every_part_has_a_column() -> None:
    unknown = {part for m in modules() if (part := part_of(m)) is not None} - COLUMN_OF.keys()
    assert not unknown, f"give {sorted(unknown)} a place in COLUMNS"


def test_a_layer_imports_only_from_its_left() -> None:
    wrong = []
    for module in modules():
        own = part_of(module)
        for name in dependencies(module):
            target = part_of(name)
            if own is None or target is None or target == own:
                continue
            if COLUMN_OF.get(target, 99) > COLUMN_OF[own]:
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_neighbours_use_each_other_in_one_direction_only() -> None:
    edges = {
        (part_of(module), part_of(name))
        for module in modules()
        for name in dependencies(module)
        if part_of(module) is not None and part_of(name) is not None
    }
    both = {edge for edge in edges if edge[0] != edge[1] and edge[::-1] in edges}
    assert not both
    assert not edges & {("sched", "engine"), ("speculation", "engine"), ("speculation", "sched"),
                        ("sched", "speculation")}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also not inside functions. Whoever imports none of the rest, or is imported by none, is in no circle. What a
    registry names does not count: kernels may call other operations of their table."""
    left = {module: {name for name in imports(module, at_import_time=False) if name in modules() and name != module}
            for module in modules()}
    before = 0
    while len(left) != before:
        before, named = len(left), {name for names in left.values() for name in names}
        left = {module: rest for module, names in left.items() if (rest := names & left.keys()) and module in named}
    assert not left, "\n".join(f"{module} imports {', '.join(sorted(names))}" for module, names in left.items())


def test_a_feature_imports_no_other_feature() -> None:
    def folder(name: str) -> str | None:
        pieces = name.split(".")
        return pieces[2] if len(pieces) > 2 and pieces[:2] == ["outrider", "features"] else None

    for module in modules():
        others = {folder(name) for name in imports(module, at_import_time=False)} - {None, folder(module)}
        assert not others or folder(module) is None, f"{module} imports another feature"


def test_the_halves_of_every_feature_are_there() -> None:
    for entry in FEATURES:
        halves = [half for half in (entry.worker, entry.engine, entry.request, entry.reader) if half is not None]
        assert halves
        for half in halves:
            assert isinstance(half, str)
            module, _, name = half.partition(":")
            assert re.search(rf"^class {name}[(:]", modules()[module].read_text(), re.MULTILINE), half


@pytest.mark.parametrize("part", TORCH_FREE)
def test_torch_free_parts_do_not_import_torch(part: str) -> None:
    for module in modules():
        if part_of(module) != part or module in MAY_USE_TORCH:
            continue
        named = {name.split(".")[0] for name in dependencies(module)}
        assert "torch" not in named, f"{module} imports torch"
        assert "torch" not in pulled_in(module), f"importing {module} pulls in torch"


def test_the_server_does_not_import_the_runner() -> None:
    for module in modules():
        if part_of(module) == "server":
            assert not any(part_of(name) == "runner" for name in dependencies(module)), module
            behind = {name for name in pulled_in(module) if part_of(name) == "runner"}
            # To the engine: interfaces and commands, which are plain data.
            known = {"outrider.runner", "outrider.runner.interface", "outrider.runner.commands",
                     "outrider.runner.profiling"}
            assert behind <= known, module


def test_importing_the_package_is_quick_and_leaves_torch_alone() -> None:
    program = (
        "import sys, time; start = time.process_time(); import outrider; spent = time.process_time() - start; "
        "print(spent, 'torch' in sys.modules)"
    )
    # The processor's time and the best of three: other test processes share the machine.
    command = [sys.executable, "-c", program]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(3)]
    assert all(has_torch == "False" for _, has_torch in runs)
    assert min(float(spent) for spent, _ in runs) < 1.0


def test_the_reader_sees_imports_of_every_form() -> None:
    source = (
        "from typing import TYPE_CHECKING\nimport a.b\nif TYPE_CHECKING:\n    import c\nelse:\n    import d\n"
        "try:\n    import e\nexcept ImportError:\n    import f\ndef g():\n    import h\nclass I:\n    import j\n"
    )
    body = ast.parse(source).body

    def names(at_import_time: bool) -> set[str]:
        nodes = import_nodes(body, at_import_time)
        return {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}

    assert names(at_import_time=True) == {"a.b", "d", "e", "f", "j"}
    assert names(at_import_time=False) == {"a.b", "c", "d", "e", "f", "h", "j"}


def test_no_module_knows_too_many_others() -> None:
    """A package does not count beside a module of it: `import outrider.kernels, outrider.kernels.ops` is one. Nor does
    what a registry names, or a package exports late: they are there to name many."""
    found = {}
    for module in (name for name in modules() if not lazy_names(name)):
        own = {name for name in written_imports(module, at_import_time=False) if part_of(name) is not None}
        found[module] = len([name for name in own if not any(other.startswith(name + ".") for other in own)])
    assert {module: count for module, count in found.items() if count > MOST_IMPORTS} == {}


def test_a_class_name_is_one_thing_in_the_whole_package() -> None:
    """Files of one folder may each have a private sense of a name (`Plan` of the attention backends)."""
    homes: dict[str, set[str]] = {}
    for module in modules():
        for node in source(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(module.split(".")[1])
    assert not {name: sorted(rooms) for name, rooms in homes.items() if len(rooms) > 1}


def test_every_entry_of_a_registry_exists() -> None:
    missing = []
    for module in modules():
        for place in registered(module):
            home, _, name = place.partition(":")
            if home not in modules() or name not in names_defined_in(home) | lazy_names(home).keys():
                missing.append(f"{module}: {place}")
    assert not missing, "\n".join(missing)


def test_a_late_module_is_the_one_that_a_type_checker_sees() -> None:
    for module in modules():
        seen = {alias.asname or alias.name: f"{node.module}.{alias.name}" for block in source(module).body
                if isinstance(block, ast.If) and is_type_checking(block.test)
                for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
        late = {str(node.targets[0].id): node.value.args[0].value for node in ast.walk(source(module))
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
                and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name)
                and node.value.func.id == "LateModule" and isinstance(node.value.args[0], ast.Constant)}
        assert {name: seen.get(name) for name in late} == late, module
        assert set(late.values()) <= modules().keys(), module


def test_packages_export_late_what_they_list() -> None:
    """A late name is not a module's: once that module is imported, it would hide the name."""
    packages = [name for name in modules() if lazy_names(name)]
    assert "outrider.layers" in packages
    for name in packages:
        package, late = import_module(name), lazy_names(name)
        assert exported_names(name) == {alias: (home, exported_names(name)[alias][1]) for alias, home in late.items()}
        assert set(late) <= set(package.__all__) and not any(f"{name}.{alias}" in modules() for alias in late)
        assert all(hasattr(package, alias) for alias in package.__all__)
        with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
            _ = package.nothing


@cache
def names_defined_in(module: str) -> frozenset[str]:
    names = set()
    for node in ast.walk(source(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return frozenset(names)


@pytest.mark.parametrize("folder", ["outrider", "tests", "bench", "docs"])
def test_every_name_that_is_imported_from_the_package_exists(folder: str) -> None:
    """A leftover folder of a renamed package hides a wrong import on the machine of its writer, and benchmarks are
    imported by no test."""
    missing = []
    for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.ImportFrom) and node.module and part_of(node.module + ".")):
                continue
            for alias in node.names:
                known = f"{node.module}.{alias.name}" in modules() or (
                    node.module in modules() and alias.name in names_defined_in(node.module))
                if not known and alias.name != "*":
                    missing.append(f"{path.relative_to(PACKAGE.parent)}:{node.lineno}: {node.module}.{alias.name}")
    assert not missing, "\n".join(missing)
