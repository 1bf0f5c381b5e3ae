"""Measurements of the running stack beside two fair peers: `python -m tests.bench --release DIR`."""
