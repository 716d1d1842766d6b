"""Capacity by simulation: the real scheduler, cache and choice of drafts, on a device whose steps take the time of a
measured cost table. No torch."""
