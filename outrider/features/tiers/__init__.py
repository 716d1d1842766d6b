"""Tiers: storage outside the device (host memory, a disk folder) for cached pages and recurrent states that do not fit
into the device's memory.

`medium.py` is the contract of one place. `host_store.py` keeps bytes in host memory, the folder `disk` in files.
`cache/eviction.py` is the order in which both evict. None of them knows of requests, groups or torch.
"""
