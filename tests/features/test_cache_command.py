"""`outrider cache` on a folder with two models."""

from __future__ import annotations

import json
import os
import stat
import tarfile
from pathlib import Path

import pytest

from outrider.cli import main
from tests.features.disk_cases import DOMAIN, get, key_of, object_files, opened, put

OTHER = bytes(32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with opened(tmp_path / "cache", about={"model": "smollm2", "dtype": "float32"}) as store:
        for number in range(12):
            put(store, key_of(number), boundary=number < 4)
    with opened(tmp_path / "cache", domain=OTHER, about={"model": "other"}) as store:
        for number in range(5):
            put(store, key_of(number))
    return tmp_path / "cache"


def said(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main(["cache", *map(str, words)]) == status
    output = capsys.readouterr()
    return output.out if status == 0 else output.out + output.err


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, *lines = said(capsys, "list", folder).splitlines()
    assert first.startswith(f"{folder}: 2 models, ") and len(lines) == 2
    assert any("000000000000  other  5 objects  " in line and line.endswith("seconds ago") for line in lines)
    listed = json.loads(said(capsys, "list", folder, "--json"))
    assert {entry["digest"]: (entry["objects"], entry["kept"]) for entry in listed} == {
        DOMAIN.hex(): (12, 4), OTHER.hex(): (5, 0)}
    assert len(said(capsys, "list", folder, "--model", "smollm2").splitlines()) == 2


def test_stats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "stats", folder)
    assert "objects:                   17\n" in text and "dtype:" in text and "float32" in text
    with opened(folder):
        found = json.loads(said(capsys, "stats", folder, "--json"))
    assert found["folder"]["processes that use it"] == 1 and len(found["models"]) == 2


def test_check_names_damaged_objects_and_removes_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "check", folder) == "17 objects whole, 0 damaged\n"
    bad = object_files(folder)[3]
    bad.write_bytes(bad.read_bytes()[:-1])
    text = said(capsys, "check", folder, status=1)
    assert f"{bad}: damaged (truncated)\n" in text and text.endswith("16 objects whole, 1 damaged\n") and bad.exists()
    assert "damaged (truncated), removed" in said(capsys, "check", folder, "--remove") and not bad.exists()
    assert said(capsys, "check", folder) == "16 objects whole, 0 damaged\n"
    assert json.loads(said(capsys, "stats", folder, "--json"))["folder"]["objects"] == 16


def test_export_and_import(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported = tmp_path / "smollm2.tar"
    said(capsys, "export", folder, "--model", DOMAIN.hex()[:6], "--file", exported)
    assert stat.S_IMODE(exported.stat().st_mode) == 0o600
    assert said(capsys, "import", tmp_path / "copy", "--file", exported).endswith(": 12 new objects\n")
    with opened(tmp_path / "copy") as store:
        assert all(get(store, key_of(number)) for number in range(12)) and len(store._log.index.order.kept) == 4
        assert store._folder.about(DOMAIN) == {"model": "smollm2", "dtype": "float32"}
    assert said(capsys, "import", tmp_path / "copy", "--file", exported).endswith(": 0 new objects\n")


def test_an_import_keeps_the_size_and_leaves_damaged_objects_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "smollm2.tar"
    said(capsys, "export", folder, "--model", "smollm2", "--file", exported)
    data = bytearray(exported.read_bytes())
    with tarfile.open(exported) as members:
        victim = members.getmembers()[3]
    data[victim.offset_data + 100] ^= 1
    exported.write_bytes(data)
    text = said(capsys, "import", tmp_path / "copy", "--file", exported, status=1)
    assert text.endswith(": 11 new objects, 1 damaged ones left out\n")
    exported.write_bytes(b"something else" * 1000)
    assert "is not a complete export of a cache" in said(capsys, "import", tmp_path / "c", "--file", exported, status=2)


def test_names_in_an_archive_lead_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        link = tarfile.TarInfo("../../link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        archive.add(__file__, "../../../escaped")
    text = said(capsys, "import", tmp_path / "c", "--file", tmp_path / "evil.tar", status=1)
    assert "0 new objects, 2 damaged" in text
    assert os.listdir(tmp_path) == ["evil.tar"]


def test_clear(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(folder) as store:
        assert said(capsys, "clear", folder, "--model", "other") == f"{folder}: 5 objects deleted\n"
        assert said(capsys, "clear", folder) == f"{folder}: 12 objects deleted\n"
        assert not object_files(folder) and store.flush() and not store.contains(key_of(0))
        put(store, key_of(0))
        assert store.flush() and get(store, key_of(0))
    said(capsys, "clear", folder)
    assert not (folder / DOMAIN.hex()).exists()
    assert said(capsys, "list", folder) == f"{folder}: 0 models, 0 B\n"
    with opened(folder) as store:
        assert put(store, key_of(0)) and store.flush() and get(store, key_of(0))


@pytest.mark.parametrize(("words", "message"), [
    (("list", "NOWHERE"), "there is no folder"),
    (("list", "EMPTY"), "is not a disk cache, because it is empty"),
    (("clear", "HOME"), "is not a disk cache and not empty"),
    (("export", "CACHE", "--file", "x.tar"), "say which model with --model"),
    (("export", "CACHE", "--model", "third", "--file", "x.tar"), "holds no model 'third'; it holds: "),
    (("export", "CACHE"), "export needs --file"),
    (("export", "CACHE", "--model", "other", "--file", "HOME"), "exists already: name a new file"),
    (("import", "CACHE", "--file", "x.tar"), "there is no file x.tar"),
    (("check", "CACHE", "--model", "other"), "--model has no effect on check"),
    (("list", "CACHE", "--remove"), "--remove has no effect on list"),
    (("count", "CACHE"), "count"),
])
def test_errors(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"CACHE": folder, "NOWHERE": tmp_path / "nowhere", "EMPTY": tmp_path / "empty", "HOME": tmp_path}
    text = said(capsys, *(names.get(word, word) for word in words), status=2)
    assert message in " ".join(text.split()), text
