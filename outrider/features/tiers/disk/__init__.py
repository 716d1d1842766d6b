"""The disk cache: pages stored in files of one folder. Several processes can share it, and it survives restarts.

An engine uses `store.py`; only the thread in `writer.py` changes the folder. `folder.py` defines its layout and checks
its owner, `object_file.py` defines the file of one object. `records.py`, `index.py` and `shared_log.py` are the list of
all objects: a log that every process appends to under a lock and reads the end of. `archive.py` checks a folder, and
exports and imports models.

Files reveal prompts, so only the user may read them (0600 in folders of 0700). Every object has a file of its own.
Reading it takes about 5 us longer than reading a range of a large file, which for pages of 64 KiB and more is less than
the checksum takes, and evicting an object is deleting a file."""

from outrider.features.tiers.disk.folder import CacheFolderError
from outrider.features.tiers.disk.stats import DiskStats
from outrider.features.tiers.disk.store import DiskStore

__all__ = ["CacheFolderError", "DiskStats", "DiskStore"]
