"""Tiers: storage outside the device (host memory, a disk folder) for cached pages and recurrent states that do not fit
into the device's memory.

`medium.py` is the interface of one storage. `host_store.py` keeps bytes in host memory, the folder `disk` in files.
`eviction.py` decides the order in which both evict. None of these uses torch or depends on requests or page groups."""
