"""Receipts: signed accounts of everything that a sample's tokens depend on, which `outrider replay` computes again.

`receipt.py` is the form of a receipt, `digests.py` hashes the files of a model, `writer.py` writes the receipts of an
engine, `comparison.py` says where a second computation differs. Imported when the first request asks for a receipt.
"""
