"""One embedding table on one device."""
