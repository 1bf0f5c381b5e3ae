"""Who may change the gray release or choose his arm: whoever shows the control token. Without one, nobody may."""

from __future__ import annotations

import hmac


def holds_token(authorization: bytes, token: str | None) -> bool:
    """Whether an Authorization header shows the token; compared in constant time."""
    scheme, _, shown = authorization.partition(b" ")
    return bool(token) and scheme.lower() == b"bearer" and hmac.compare_digest(shown.strip(), str(token).encode())
