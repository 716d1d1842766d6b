"""Receipts: signed accounts of everything that a sample's tokens depend on, which `outrider replay` computes again.

`in_engine.py` checks requests that ask for receipts, `request.py` notes what a sample's run tells, `writer.py` adds
what engine and request tell, `receipt.py` is the form of a receipt and seals it, `digests.py` hashes a model's files.
`replay.py` and `asked_again.py` compute a receipt's tokens again, and `comparison.py` says where they differ.
"""
