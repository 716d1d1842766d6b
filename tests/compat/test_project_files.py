"""Files around the code agree with it: make targets, workflows, the site's pages, the changelog, bounds of versions."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import outrider

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(re.sub(r"slugify: !!\S+ \{.*?\}\}", "slugify: x", path.read_text()))


@pytest.mark.parametrize("path", sorted(GITHUB.rglob("*.yml")), ids=lambda path: path.stem)
def test_forms_and_workflows_are_whole(path: Path) -> None:
    found = read_yaml(path)
    if path.parent.name == "workflows":
        assert found["jobs"] and all(job["steps"] and job["runs-on"] for job in found["jobs"].values())
    elif path.stem not in ("config", "dependabot"):
        assert found["name"] and found["description"] and all(part["type"] for part in found["body"])


def test_actions_are_pinned_by_digest() -> None:
    """A tag can be moved to other code, which would then run with the rights of the workflow."""
    for path in sorted((GITHUB / "workflows").glob("*.yml")):
        used = re.findall(r"uses: (.+)", path.read_text())
        assert used, path
        for one in used:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one), (path, one)


def test_release_tools_have_hashes_and_the_versions_of_the_tests() -> None:
    constraints = (ROOT / "constraints.txt").read_text().lower()
    known = dict(line.split("==") for line in constraints.splitlines() if "==" in line)
    text = (ROOT / "requirements/release.txt").read_text().replace("\\\n", "")
    tools = [line for line in text.splitlines() if not line.startswith("#")]
    pins = {re.split("[ =]", line)[0]: line for line in tools}
    assert {"build", "uv", "setuptools"} <= pins.keys()
    for name, line in pins.items():
        assert re.match(r"[\w-]+==[\w.]+ .*--hash=sha256:[0-9a-f]{64}", line), line
        version = known.get(name.replace("-", "_"), known.get(name))
        assert version is None or line.startswith(f"{name}=={version} "), line
    for wanted in re.findall(r"^\w.*==.*", (ROOT / "requirements/release.in").read_text(), re.M):
        assert any(line.startswith(wanted + " ") for line in tools), "make lock"


@pytest.mark.parametrize(("message", "is_taken"), [
    ("x" * 72, True), ("x" * 73, False), ("\n\n# a comment that git put there\n" + "x" * 73, False), ("é" * 72, True),
    ("short\n\n" + "a long body " * 20, True), ("Merge branch " + "x" * 80, True), ("# " + "x" * 80, True), ("", True)])
def test_the_hook_refuses_long_subjects(tmp_path: Path, message: str, is_taken: bool) -> None:
    (tmp_path / "message").write_text(message + "\n")
    ran = subprocess.run([ROOT / ".githooks/commit-msg", tmp_path / "message"], capture_output=True, text=True)
    assert (ran.returncode == 0) == is_taken and ("72 are shown" in ran.stderr) == (not is_taken)


def test_hooks_are_wired_in_a_clone_alone(tmp_path: Path) -> None:
    def run(*command: str | Path, status: int = 0) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "MAKE"))}
        ran = subprocess.run(command, cwd=inner, env=environment, capture_output=True, text=True)
        assert ran.returncode == status, ran.stderr
        return ran.stdout

    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "Makefile").write_text((ROOT / "Makefile").read_text())
    run("git", "init", "-q", str(tmp_path))  # an unpacked package inside another project's clone
    run("make", "hooks")
    run("git", "config", "--get", "core.hooksPath", status=1)
    run("git", "init", "-q", ".")
    run("make", "hooks")
    assert run("git", "config", "--get", "core.hooksPath") == ".githooks\n"
    run("git", "config", "core.hooksPath", "own")
    run("make", "hooks")
    assert run("git", "config", "--get", "core.hooksPath") == "own\n"


def test_make_targets_that_are_named_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    papers = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", ".ci/run", "mkdocs.yml")]
    for path in [*papers, *GITHUB.rglob("*.yml")]:
        named = re.findall(r"(?:^ {4}|`|run: |^|&& )make ((?:[a-z][\w-]* ?)+)", path.read_text(), re.M)
        assert {word for words in named for word in words.split()} <= targets, path


def test_files_of_the_quick_check_are_there() -> None:
    (listed,) = re.findall(r"^QUICK := (.*?)\n\n", (ROOT / "Makefile").read_text(), re.M | re.S)
    files = listed.replace("\\", "").split()
    assert len(files) > 5 and all((ROOT / name).is_file() for name in files)


def test_every_document_is_a_page_of_the_site() -> None:
    def pages(nav: list[Any]) -> list[str]:
        return [page for entry in nav for value in entry.values()
                for page in ([value] if isinstance(value, str) else pages(value))]

    listed = pages(read_yaml(ROOT / "mkdocs.yml")["nav"])
    made = {"index.md", "changelog.md", "contributing.md", "security.md", "examples.md", "commands.md"}
    assert sorted(listed) == sorted({path.name for path in (ROOT / "docs").glob("*.md")} | made)


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in text and f"## [{outrider.__version__}]" in text


def test_a_release_is_refused_unless_tag_version_and_changelog_agree() -> None:
    steps = read_yaml(GITHUB / "workflows/release.yml")["jobs"]["build"]["steps"]
    checks = [step["run"] for step in steps if "GITHUB_REF_NAME" in step.get("run", "")]
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "dist").mkdir()
        (Path(made) / "dist/outrider-1.2.0-py3-none-any.whl").touch()
        for tag, text, passed in [("v1.2.0", "## [1.2.0] - 2026-11-30", [True, True]),
                                  ("v1.2.0", "## [1.2.0]", [True, False]), ("v1.3.0", "## [1.2.0]", [False, False])]:
            (Path(made) / "CHANGELOG.md").write_text(f"# Changelog\n\n{text}\n")
            ran = [subprocess.run(["bash", "-c", check], cwd=made, env=os.environ | {"GITHUB_REF_NAME": tag},
                                  capture_output=True).returncode for check in checks]
            assert [code == 0 for code in ran] == passed, (tag, text)


def test_the_wheel_has_every_file_of_the_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    files = [path for path in (ROOT / "outrider").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    left = [path for path in files if path.suffix != ".py" and not any(path.match(pattern) for pattern in patterns)]
    assert not left, "pyproject.toml, package-data"


def test_every_dependency_has_an_upper_bound() -> None:
    users = ("server", "grammar", "otel", "plot", "events", "ray")  # extras of people who use it
    for wanted in PROJECT["dependencies"] + [one for name in users for one in PROJECT["optional-dependencies"][name]]:
        assert re.search(r"[<=]=?\d", wanted.split(";")[0]), wanted


def test_the_readme_names_the_versions_of_torch_that_are_allowed() -> None:
    (bounds,) = [one for one in PROJECT["dependencies"] if one.startswith("torch")]
    least, above = map(int, re.findall(r"2\.(\d+)", bounds))
    assert f"torch 2.{least} to 2.{above - 1}" in (ROOT / "README.md").read_text()


def test_sources_have_no_comments_for_a_formatter_and_few_exceptions() -> None:
    folders = ("outrider", "tests", "bench", "docs", "examples")
    sources = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    marked = [path for path in sources if re.search("# fmt" + ": ", path.read_text())]
    assert not marked, "there is no formatter: CONTRIBUTING.md says how code is laid out"
    exceptions = sum(len(re.findall("# noqa" + ": ", path.read_text())) for path in sources)
    assert exceptions < 15, "a rule that has many exceptions is turned off in pyproject.toml"
