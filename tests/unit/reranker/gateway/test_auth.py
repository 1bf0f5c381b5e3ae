from __future__ import annotations

import pytest

from reranker.gateway.auth import holds_token


@pytest.mark.parametrize("shown", [b"Bearer secret", b"bearer secret", b"Bearer  secret "])
def test_whoever_shows_the_token_holds_it(shown: bytes) -> None:
    assert holds_token(shown, "secret")


@pytest.mark.parametrize("shown", [b"", b"Bearer", b"Bearer secre", b"Basic secret", b"secret", b"Bearer \xff"])
def test_nobody_else_does(shown: bytes) -> None:
    assert not holds_token(shown, "secret")


@pytest.mark.parametrize("token", [None, ""])
def test_without_a_token_nobody_may(token: str | None) -> None:
    assert not holds_token(b"Bearer ", token)
