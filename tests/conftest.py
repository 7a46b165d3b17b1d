"""Shared fixtures: real parts, made small."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.postgres import Server


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-layer random Llama folder with a byte-level BPE tokenizer and SmolLM2's chat format."""
    from tests.tiny import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tiny_engine(tiny_model_dir: Path) -> Iterator[str]:
    """The base URL of an embedded engine serving `tiny_model_dir` as model `tiny`."""
    from tests.tiny import serve_embedded

    with serve_embedded(tiny_model_dir) as url:
        yield url


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A private PostgreSQL server; skips where no server is installed."""
    from tests.postgres import binaries, server

    pytest.importorskip("psycopg")
    if binaries() is None:
        pytest.skip("no PostgreSQL server is installed")
    with server(tmp_path_factory.mktemp("postgres"), fsync="off", max_connections="200") as running:
        yield running


@pytest.fixture(params=["sqlite", "postgres"])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """URLs of an empty log and an empty learn database, on each kind of store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'data' / 'log.db'}", f"sqlite:///{tmp_path / 'data' / 'learn.db'}"
    url = request.getfixturevalue("postgres").database()
    return url, url
