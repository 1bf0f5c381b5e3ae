"""What is mended in kafka-python."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from infra.kafka_client import kafka

PROTOCOL: Any = kafka.protocol


@pytest.mark.parametrize("answer", [PROTOCOL.consumer.fetch.FetchResponse, PROTOCOL.metadata.metadata.MetadataResponse])
def test_an_answer_is_read_although_two_threads_made_its_class_and_one_was_thrown_away(answer: Any) -> None:
    kept = answer[3]
    del answer._VERSIONS[3]
    thrown_away = answer[3]
    assert thrown_away is not kept
    answer._VERSIONS[3] = kept
    del thrown_away
    gc.collect()
    header = PROTOCOL.api_header.RequestHeader(
        request_api_key=answer.API_KEY, request_api_version=3, correlation_id=1, client_id="a"
    )
    assert header.get_response_class() is kept
