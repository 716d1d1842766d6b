"""CacheFolder: the layout of a disk cache's folder, and who may use it.

    FOLDER/outrider-cache.json    marks the folder as a disk cache
           index.log              the list of all objects (shared_log.py)
           lock                   held briefly while a process changes the list
           secret                 from which servers derive the salts of API keys
           writers/ID             locked by a process as long as it runs
           tmp/ID-N               a file that is being written
           DOMAIN/about.json      which model and settings the domain is for
           DOMAIN/ab/KEY          one object (object_file.py); ab: the first two digits of the key

Every object is written to `tmp` and then renamed, so a file with the name of a key was written completely. Checksums
detect later damage by the disk."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from outrider.features.tiers.disk.records import TAG_BYTES

MARKER = "outrider-cache.json"
ABOUT = "about.json"
SECRET, SECRET_BYTES = "secret", 32
DOMAIN_BYTES = 32
KEY_BYTES = 32


class CacheFolderError(ValueError):
    """Raised if the folder cannot be used as a disk cache. The message says what to do."""


class FolderBusy(OSError):
    """Raised if another process has held the folder's lock for too long."""


class CacheFolder:
    """A folder that this user owns and no other user can read."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        self.path = os.path.abspath(path)
        _refuse_links(self.path)
        try:
            if create:
                os.makedirs(self.path, mode=0o700, exist_ok=True)
            _require_own(self.path)
            self._mark(create)
            os.chmod(self.path, 0o700)
            for name in ("writers", "tmp"):
                _make_private(os.path.join(self.path, name))
            self._lock_file = _open_private(os.path.join(self.path, "lock"))
        except OSError as error:
            raise CacheFolderError(f"{self.path} cannot be a disk cache: {error.strerror}. Give another") from None
        self.log_path = os.path.join(self.path, "index.log")
        self._domains: dict[bytes, bytes] = {}  # by tag

    def close(self) -> None:
        os.close(self._lock_file)

    def _mark(self, create: bool) -> None:
        marker = os.path.join(self.path, MARKER)
        if os.path.lexists(marker):
            return
        if os.listdir(self.path):
            raise CacheFolderError(f"{self.path} is not a disk cache and not empty: give an empty or a new folder")
        if not create:
            raise CacheFolderError(f"{self.path} is not a disk cache, because it is empty: give another")
        with suppress(FileExistsError), os.fdopen(_open_private(marker, os.O_EXCL), "w") as file:
            file.write('{"what": "disk cache of outrider: cached prompts, private", "format": 1}\n')

    def secret(self) -> bytes:
        """Return the folder's secret, which the first call draws."""
        path, temporary = f"{self.path}/{SECRET}", f"{self.path}/tmp/secret-{secrets.token_hex(8)}"
        if not os.path.lexists(path):
            with os.fdopen(_open_private(temporary, os.O_EXCL), "wb") as file:
                file.write(secrets.token_bytes(SECRET_BYTES))
            with suppress(FileExistsError):  # another process has drawn one meanwhile
                os.link(temporary, path)
            os.unlink(temporary)
        with os.fdopen(_open_private(path), "rb") as file:
            found, owner = file.read(SECRET_BYTES + 1), os.fstat(file.fileno()).st_uid
        if len(found) != SECRET_BYTES or owner != os.geteuid():
            raise CacheFolderError(f"{path} is damaged or another user's: delete it, and a new one is drawn")
        return found

    # Domains and objects

    def object_path(self, domain: bytes, key: bytes) -> str:
        name = key.hex()
        return f"{self.path}/{domain.hex()}/{name[:2]}/{name}"

    def add_domain(self, domain: bytes, about: Mapping[str, Any]) -> None:
        """Make the sub-folder of a domain, with a description for people. Call with the lock held."""
        folder = os.path.join(self.path, domain.hex())
        _make_private(folder)
        self._domains[domain[:TAG_BYTES]] = domain
        path = os.path.join(folder, ABOUT)
        if not os.path.exists(path):
            temporary = f"{self.path}/tmp/about-{secrets.token_hex(8)}"
            with os.fdopen(_open_private(temporary, os.O_EXCL), "w", encoding="utf-8") as file:
                json.dump(dict(about), file, indent=1, sort_keys=True, default=str)
            os.rename(temporary, path)

    def about(self, domain: bytes) -> dict[str, Any]:
        """The description of a domain; empty if it is missing or damaged."""
        try:
            with open(os.path.join(self.path, domain.hex(), ABOUT), encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def domains(self) -> list[bytes]:
        """The digests of all domains that have a sub-folder."""
        found = [bytes.fromhex(entry.name) for entry in os.scandir(self.path)
                 if entry.is_dir(follow_symlinks=False) and _is_digest(entry.name, DOMAIN_BYTES)]
        self._domains = {domain[:TAG_BYTES]: domain for domain in found}
        return sorted(found)

    def path_of_name(self, name: bytes) -> str | None:
        """Return an object's path from its name in the index, or None if its domain has no sub-folder any more."""
        domain = self.domain_of(name)
        return self.object_path(domain, name[TAG_BYTES:]) if domain else None

    def domain_of(self, name: bytes) -> bytes:
        """Return the domain of a name in the index; empty if it has no sub-folder any more."""
        if name[:TAG_BYTES] not in self._domains:
            self.domains()
        return self._domains.get(name[:TAG_BYTES], b"")

    def object_keys(self, domain: bytes) -> Iterator[tuple[bytes, str]]:
        """Yield key and path of every object of a domain. Slow, because it lists the folder."""
        with os.scandir(os.path.join(self.path, domain.hex())) as parts:
            folders = [part.path for part in parts if part.is_dir(follow_symlinks=False)]
        for folder in folders:
            with os.scandir(folder) as files:
                for file in files:
                    if _is_digest(file.name, KEY_BYTES):
                        yield bytes.fromhex(file.name), file.path

    def publish(self, temporary: str, path: str) -> None:
        """Rename a completely written temporary file to its final name."""
        try:
            os.rename(temporary, path)
        except FileNotFoundError:
            part = os.path.dirname(path)
            _make_private(os.path.dirname(part))  # `outrider cache clear` may have removed it
            _make_private(part)
            os.rename(temporary, path)

    def remove(self, name: bytes) -> None:
        """Delete the file of an object, if it is there."""
        path = self.path_of_name(name)
        if path is not None:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def remove_domain(self, domain: bytes) -> None:
        """Remove the sub-folder of a domain if it has no objects. Call with the lock held, and no process running."""
        folder = os.path.join(self.path, domain.hex())
        with suppress(OSError):
            for entry in os.listdir(folder):
                if entry != ABOUT:
                    os.rmdir(os.path.join(folder, entry))
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, ABOUT))
            os.rmdir(folder)

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    # Processes

    @contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Hold the folder's lock. Raises FolderBusy if waiting takes too long, for example because its holder was
        stopped."""
        deadline = time.monotonic() + timeout
        pause = 0.0005
        while not _try_lock(self._lock_file):
            if time.monotonic() > deadline:
                raise FolderBusy(f"another process has held {self.path}/lock for {timeout:g} seconds: end it")
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        try:
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def add_writer(self) -> tuple[int, int]:
        """Return a number for a new writer, and an open file whose lock shows that the writer is alive. Call with the
        lock held."""
        number = secrets.randbits(63) | 1
        file = _open_private(self._writer_path(number), os.O_EXCL)
        fcntl.flock(file, fcntl.LOCK_EX)
        return number, file

    def remove_writer(self, number: int, file: int) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._writer_path(number))
        os.close(file)

    def live_writers(self) -> set[int]:
        """The numbers (`add_writer`) of the running processes that write to this folder. Removes the lock files of dead
        ones. Call with the folder's lock held."""
        alive = set()
        for entry in os.listdir(f"{self.path}/writers"):
            path = f"{self.path}/writers/{entry}"
            with suppress(FileNotFoundError, ValueError):
                file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if _try_lock(file):
                        os.unlink(path)
                    else:
                        alive.add(int(entry, 16))
                finally:
                    os.close(file)
        return alive

    def temporary_path(self, writer: int, number: int) -> str:
        return f"{self.path}/tmp/{writer:016x}-{number}"

    def remove_leftovers(self, alive: set[int]) -> int:
        """Delete half-written files of dead writers, and return how many there were."""
        names = [name for name in os.listdir(f"{self.path}/tmp")
                 if not any(name.startswith(f"{writer:016x}-") for writer in alive)]
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(f"{self.path}/tmp/{name}")
        return len(names)

    def _writer_path(self, number: int) -> str:
        return f"{self.path}/writers/{number:016x}"


def _is_digest(name: str, num_bytes: int) -> bool:
    return len(name) == 2 * num_bytes and not set(name) - set("0123456789abcdef")


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_private(path: str, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)


def _make_private(path: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    _require_own(path)


def _require_own(path: str) -> None:
    """Refuse a link, or a folder of another user, who could read prompts there or put false pages into it."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise CacheFolderError(f"{path} is a link: give the folder to which it leads")
    if not stat.S_ISDIR(found.st_mode):
        raise CacheFolderError(f"{path} is not a folder: give a folder")
    if found.st_uid != os.geteuid():
        raise CacheFolderError(f"{path} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}: "
                               "give a folder that this user owns")


def _refuse_links(path: str) -> None:
    real = os.path.realpath(path)
    if real != path:
        raise CacheFolderError(f"{path} is reached by a link, which can be changed: give {real}")
