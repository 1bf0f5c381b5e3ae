"""The operator's page: served whole, by itself, and closed to everything from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files

import pytest

from tests.gateway_stack import GatewayStack

PAGE = {name: files("reranker.console").joinpath(name).read_text() for name in ("index.html", "console.js")}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayStack]:
    running = GatewayStack(tmp_path_factory.mktemp("console"))
    try:
        yield running.start()
    finally:
        running.stop()


class Page(HTMLParser):
    """Ids, labels, controls and addresses of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.labelled: set[str] = set()
        self.inputs: set[str] = set()
        self.addresses: list[str] = []
        self.inline: list[str] = []
        self.feed(PAGE["index.html"])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if identity := given.get("id"):
            self.ids.append(identity)
        if tag == "label":
            self.labelled.add(given.get("for") or "")
        if tag == "input":
            self.inputs.add(given.get("id") or "")
        self.addresses += [given[name] or "" for name in ("href", "src") if name in given]
        self.inline += [name for name in given if name == "style" or name.startswith("on")]
        if tag in ("script", "style") and "src" not in given:
            self.inline.append(tag)


def test_the_page_and_what_it_loads_come_from_the_gateway_and_may_talk_to_it_alone(stack: GatewayStack) -> None:
    loaded = [address for address in Page().addresses if not address.startswith(("#", "data:"))]
    assert loaded
    for path in ("/console", *loaded):
        answer = stack.get(path)
        assert answer.status == 200
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "http://" not in answer.body
        assert "https://" not in answer.body
    assert stack.get("/console").headers["content-type"].startswith("text/html")
    assert stack.ask("POST", "/console", b"").status == 405


def test_nothing_on_the_page_needs_what_the_policy_forbids() -> None:
    assert Page().inline == []
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE["console.js"])


def test_the_token_is_kept_in_memory_only() -> None:
    assert not re.search(r"localStorage|sessionStorage|document\.cookie|indexedDB", PAGE["console.js"])


def test_every_element_the_script_names_is_there_and_every_field_has_a_label() -> None:
    page = Page()
    assert len(page.ids) == len(set(page.ids))
    named = set(re.findall(r'(?:at|say)\("([a-z-]+)"', PAGE["console.js"]))
    assert named <= set(page.ids)
    assert page.inputs <= page.labelled
