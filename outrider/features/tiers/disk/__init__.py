"""The disk cache: objects in files of one folder, which several processes share and a restart finds again.

`store.py` is what an engine uses; `writer.py` is its thread, the only one that changes the folder. `folder.py` knows
the layout and who may use it, `object_file.py` the form of one object. `records.py`, `index.py` and `shared_log.py`
are the list of all objects: a log that every process appends to under a lock and reads the end of. `archive.py` checks
a folder, and exports and imports models.

Files hold what prompts were computed to, so they are for the user alone (0600 in folders of 0700), and data only.
One file for each object: reading one takes about 5 us longer than reading a range of a large file, which for pages of
64 KiB and more is less than the checksum takes, and evicting an object is deleting a file.
"""

from outrider.features.tiers.disk.folder import CacheFolderError
from outrider.features.tiers.disk.stats import DiskStats
from outrider.features.tiers.disk.store import DiskStore

__all__ = ["CacheFolderError", "DiskStats", "DiskStore"]
