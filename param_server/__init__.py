"""Tier 1: embeddings that follow the stream."""
