"""Requests nobody would write and streams chopped anywhere: no 5xx, no hang, and no record too few or too
many. `benchmarks/fuzz.py` does the same with 20,000 requests."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from reef.gateway.dialects import ROUTES
from reef.gateway.openapi import OPERATIONS
from tests.chopped_streams import PATHS, Chopped, chop, chopping
from tests.fuzz_cases import generated
from tests.fuzzing import Fuzzing, fuzzing

SEED = 1
CASES = 6
MUTANTS = 8
STREAMS = 20


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzing]:
    with fuzzing(tmp_path_factory.mktemp("fuzz"), SEED) as made:
        yield made


def test_no_request_fails_the_gateway_or_goes_unrecorded(fuzzed: Fuzzing) -> None:
    document = httpx.get(f"{fuzzed.reef.url}/openapi.json").json()
    cases = generated(document, CASES, SEED)
    assert {case.route for case in cases} == set(OPERATIONS)
    fuzzed.send_all(bent for case in cases for bent in (case, *fuzzed.mutator.mutants(case, MUTANTS)))
    fuzzed.check_records()
    fuzzed.check_learner()
    assert not fuzzed.failures
    answered = {route for route, status in fuzzed.statuses if status == 200}
    assert answered >= set(ROUTES) and fuzzed.requests > 500


def test_every_served_route_is_in_the_document(fuzzed: Fuzzing) -> None:
    paths = httpx.get(f"{fuzzed.reef.url}/openapi.json").json()["paths"]
    assert set(paths) == set(OPERATIONS) and set(ROUTES) < set(paths)
    assert "requestBody" in paths["/v1/responses"]["post"]


@pytest.fixture(scope="module")
def chopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chopped]:
    with chopping(tmp_path_factory.mktemp("chopped")) as made:
        yield made


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_chopped_anywhere_is_one_exact_record(chopped: Chopped, path: str) -> None:
    chop(chopped, path, STREAMS, SEED)
