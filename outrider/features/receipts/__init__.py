"""Receipts: signed records of everything that a sample's tokens depend on. `outrider replay` computes a sample again
from its receipt.

`in_engine.py` checks requests that ask for receipts. `request.py` notes a sample's tokens and weight versions while it
runs. `writer.py` adds the parameters and the engine's settings. `receipt.py` defines the JSON of a receipt and signs
it. `digests.py` hashes a model's files. `replay.py` and `asked_again.py` compute a receipt's tokens again, and
`comparison.py` says where they differ."""
