"""Bookkeeping of the KV cache: which pages requests hold, which prefixes can be found, which recurrent states are
saved. No torch here."""
