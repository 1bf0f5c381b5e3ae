"""Tier 2: raw ids become keys, buckets and histories."""
