"""The operator's page and the API's: served whole, by themselves, and closed to everything from elsewhere."""

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

    def __init__(self, text: str = PAGE["index.html"]) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.labelled: set[str] = set()
        self.inputs: set[str] = set()
        self.addresses: list[str] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if identity := given.get("id"):
            self.ids.append(identity)
        if tag == "label":
            self.labelled.add(given.get("for") or "")
        if tag == "input":
            self.inputs.add(given.get("id") or "")
        if tag != "a":
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


def test_the_description_of_the_api_is_shown_with_nothing_from_another_host(stack: GatewayStack) -> None:
    answer = stack.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    page = Page(answer.body)
    loaded = [address for address in page.addresses if not address.startswith("data:")]
    assert len(loaded) == 3
    for path in ("/docs", *loaded):
        assert path.startswith("/docs")
        found = stack.get(path)
        assert found.status == 200
        # What a script asks for later is the browser's to refuse, by this.
        policy = dict(part.split(" ", 1) for part in found.headers["content-security-policy"].split("; "))
        assert policy.pop("img-src") == "data:"
        assert set(policy.values()) == {"'none'", "'self'"}
    assert page.inline == []
    script = stack.get("/docs/docs.js").body
    assert re.findall(r'(url|validatorUrl): ("[^"]*"|null)', script) == [
        ("url", '"/openapi.json"'),
        ("validatorUrl", "null"),
    ]
    assert stack.get("/openapi.json").body["openapi"].startswith("3.1")


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
