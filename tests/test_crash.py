"""Kill -9 and power cuts against the real stack: `benchmarks/crash.py` and `benchmarks/power.py`, short."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import crash, power
from tests.postgres import binaries


@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_twenty_kills_lose_nothing_and_train_nothing_twice(store: str, tmp_path: Path) -> None:
    if store == "postgres" and binaries() is None:
        pytest.skip("no PostgreSQL server is installed")
    found = crash.run(tmp_path, store, 20, clients=4, pause_s=0.1, mean_s=0.5, seed=0)
    assert found.problems == []
    assert found.numbers["trained"] >= 8, found.numbers
    assert found.numbers["answered"] > 20, found.numbers


@pytest.mark.parametrize("durability", ["power", "process"])
def test_a_power_cut_loses_no_answer_that_power_promised(durability: str, tmp_path: Path) -> None:
    if (reason := power.impossible()) is not None:
        pytest.skip(reason)
    cuts = 2 if durability == "power" else 1
    found = power.run(tmp_path, cuts, durability=durability, clients=4, pause_s=0.05, seconds=4.0)
    if durability == "power":
        assert found.problems == []
        assert found.numbers["answered"] > 20, found.numbers
    else:  # what is promised less costs less, and shows that the cut is one
        assert found.numbers["answered but not in the log"] > 0, found.numbers
