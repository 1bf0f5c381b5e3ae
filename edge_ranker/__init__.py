"""Tier 3a: the MLP that cuts hundreds of candidates to a hundred."""
