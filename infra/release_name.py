"""What may name a release: what the release API takes, known before anything is trained."""

from __future__ import annotations

import re

from infra.errors import InvalidInput

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
NAME_LENGTH = 128


def check_name(name: str) -> str:
    """The name, fit to be named in a gray release. Raises InvalidInput."""
    if re.fullmatch(NAME_PATTERN, name) is None or len(name) > NAME_LENGTH:
        raise InvalidInput(
            "name",
            f"{name!r} cannot name a release: give up to {NAME_LENGTH} letters, digits, dots, dashes and underscores, "
            "a letter or digit first",
        )
    return name
