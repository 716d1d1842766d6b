"""The scheduler: decides which tokens of which requests the next step computes. No torch here."""
