"""Shared fixtures: real parts, made small."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import pytest


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
