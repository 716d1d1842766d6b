"""Which tokens of which requests the next step computes. No torch here."""
