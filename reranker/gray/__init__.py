"""Gray release: which release serves which user."""
