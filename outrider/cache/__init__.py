"""The cache's accounting: kinds, groups, pages, prefix hashes, checkpoints. No torch here."""
