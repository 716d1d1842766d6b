"""Latent attention, over the whole context or over positions that an indexer chooses."""
