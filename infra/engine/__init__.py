"""Executable forms of the models."""
