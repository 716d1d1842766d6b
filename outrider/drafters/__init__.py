"""Drafters: each guesses the next tokens of a batch's requests. No drafter can change the text."""
