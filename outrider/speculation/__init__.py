"""How many drafts each request gets in the next step, learned from results and times, and drafts made on the host.

No torch here, and no drafter by name.
"""
