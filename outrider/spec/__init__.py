"""Drafters: each guesses the next tokens of a batch's requests; none can change what comes out."""
