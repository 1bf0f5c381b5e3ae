"""The HTTP gateway: one request from parsing to reply."""
