"""Tiers: places beyond the device where cached pages and recurrent states lie, so that they outlive its memory.

`medium.py` is the contract of one place. `host_store.py` keeps bytes in host memory, the folder `disk` in files.
`cache/eviction.py` is the order in which both evict. None of them knows of requests, groups or torch.
"""
