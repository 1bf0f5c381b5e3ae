"""Tier 3b: the BST reranker and the gateway in front of everything."""
