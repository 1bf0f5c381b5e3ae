"""Ports for servers: free ones, and none that an outgoing connection could take."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from infra import ports
from infra.ports import HOST, free_port, is_free


def test_a_port_is_free_and_is_not_given_to_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given_away = tmp_path / "range"
    given_away.write_text("20500\t60999\n")
    monkeypatch.setattr(ports, "_GIVEN_AWAY", given_away)
    for _ in range(50):
        port = free_port()
        assert 20_000 <= port < 20_500
        assert is_free(port)


@pytest.mark.parametrize("text", ["1024 60999", "nonsense", None])
def test_a_system_that_gives_all_ports_away_or_does_not_say_which_still_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    given_away = tmp_path / "range"
    if text is not None:
        given_away.write_text(text)
    monkeypatch.setattr(ports, "_GIVEN_AWAY", given_away)
    assert is_free(free_port())


def test_a_port_that_is_taken_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        taken = free_port()
        server.bind((HOST, taken))
        server.listen()
        assert not is_free(taken)
        given_away = tmp_path / "range"
        given_away.write_text(f"{taken + 1} 60999")
        monkeypatch.setattr(ports, "_GIVEN_AWAY", given_away)
        monkeypatch.setattr(ports, "_FIRST", taken)
        assert free_port() != taken
