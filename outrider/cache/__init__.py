"""The cache's accounting: specs, groups, pages, prefix hashes. No torch here but in `pool`."""
