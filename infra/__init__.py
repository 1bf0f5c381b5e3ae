"""Shared plumbing: knows no users, items or embeddings."""
