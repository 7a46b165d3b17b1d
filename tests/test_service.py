"""The whole service as its real processes, on a tiny model: learn, swap, roll back, survive.

The recipe is the tests' own (explicit reports only), which shows that the service knows no method.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from reef.config import Config, load_config
from reef.errors import ConfigError, StoreError
from reef.releases.chain import FILES
from reef.service import Service
from reef.store.lock import acquire

ROOT = Path(__file__).parent.parent
ASK: list[Any] = [{"role": "user", "content": "Tom has 12 apples and gives 5 to Ann."}]


def config(tmp: Path, **settings: str) -> Config:
    pairs = [("store.dir", str(tmp / "data")), ("server.port", "0")]
    pairs += [("recipe.name", "tests.reports_recipe:ReportsOnly"), ("train.lr", "0.01")]
    # a random tiny model moves far at once and says nothing that ends
    pairs += [("gate.max_kl", "5"), ("gate.max_repeated", "1"), ("gate.max_unfinished", "1")]
    pairs += [("gate.max_length_ratio", "50")]
    return load_config(None, [*pairs, *((k.replace("__", "."), v) for k, v in settings.items())], {})


@pytest.fixture
def service(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the processes find the tests' recipe by its dotted name
    with Service(config(tmp_path), tiny_model_dir) as running:
        running.wait_ready(60)
        stop = threading.Event()
        watcher = threading.Thread(target=watch, args=(running, stop))
        watcher.start()
        yield running
        stop.set()
        watcher.join()


def watch(service: Service, stop: threading.Event) -> None:
    while not stop.wait(0.1):
        service.watch()


def until(what: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.time() + timeout_s
    while time.time() < deadline:
        if value := what():
            return value
        time.sleep(0.05)
    pytest.fail("it did not happen in time")


def client(service: Service) -> OpenAI:
    return OpenAI(base_url=f"{service.url}/v1", api_key="k", max_retries=0)


def ask(service: Service, **extra: Any) -> tuple[list[float], str, str]:
    """(log-probs, receipt, version) of a short reply."""
    raw = client(service).chat.completions.with_raw_response.create(
        model="m", messages=ASK, max_tokens=8, logprobs=True, **extra
    )
    content = raw.parse().choices[0].logprobs.content or []  # type: ignore[union-attr]
    return [t.logprob for t in content], raw.headers["x-reef-agent-record-id"], raw.headers["x-reef-version"]


def get(service: Service, path: str) -> Any:
    return httpx.get(f"{service.url}{path}").raise_for_status().json()


def teach(service: Service, *, expect: int) -> None:
    """Two replies, each reported bad, make one step."""
    for seed in range(2):
        _, receipt, _ = ask(service, temperature=1.0, seed=seed + 10 * expect)
        report = {"references": [receipt], "score": -1}
        httpx.post(f"{service.url}/reef/report", json=report).raise_for_status()
    until(lambda: ask(service, temperature=0)[2] == str(expect))


def test_reports_become_a_release_that_serves_and_can_be_rolled_back(service: Service) -> None:
    before, _, version = ask(service, temperature=0)
    assert version == "0"
    teach(service, expect=1)
    after, _, _ = ask(service, temperature=0)
    assert after != before
    (release,) = get(service, "/reef/releases")["releases"]
    assert (release["version"], release["status"], len(release["turns"])) == (1, "released", 2)
    httpx.post(f"{service.url}/reef/releases/0/serve").raise_for_status()
    assert ask(service, temperature=0)[::2] == (before, "0")  # bitwise
    httpx.post(f"{service.url}/reef/releases/1/serve").raise_for_status()
    assert ask(service, temperature=0)[::2] == (after, "1")
    assert httpx.post(f"{service.url}/reef/releases/7/serve").status_code == 404
    funnel = until(lambda: (f := get(service, "/reef/funnel")) and not f["unread"] and f)
    assert sum(funnel["fates"].values()) == funnel["exchanges"]
    assert funnel["fates"]["trained"] == 2


def test_full_weights_are_trained_served_and_rolled_back(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Service(config(tmp_path, train__method="full", train__lr="0.001"), tiny_model_dir) as service:
        service.wait_ready(60)
        before, _, _ = ask(service, temperature=0)
        teach(service, expect=1)
        after, _, _ = ask(service, temperature=0)
        assert after != before
        httpx.post(f"{service.url}/reef/releases/0/serve").raise_for_status()
        assert ask(service, temperature=0)[::2] == (before, "0")  # bitwise
        httpx.post(f"{service.url}/reef/releases/1/serve").raise_for_status()
        assert ask(service, temperature=0)[::2] == (after, "1")
    assert (tmp_path / "data" / "releases" / "default" / "v000001" / FILES["full"][1]).exists()


def test_a_swap_during_a_stream_lets_it_finish_on_the_version_it_began_with(service: Service) -> None:
    teach(service, expect=1)
    stream = client(service).chat.completions.with_raw_response.create(
        model="m", messages=ASK, max_tokens=400, temperature=1.0, stream=True, extra_body={"seed": 1}
    )
    assert stream.headers["x-reef-version"] == "1"
    chunks = iter(stream.parse())
    next(chunks)
    httpx.post(f"{service.url}/reef/releases/0/serve").raise_for_status()
    assert ask(service, temperature=0)[2] == "0"
    rest = list(chunks)
    assert rest[-1].choices[0].finish_reason in ("stop", "length")
    receipt = stream.headers["x-reef-agent-record-id"]
    assert get(service, f"/reef/turns/{receipt}")["sampled"]["version"] == 1


def test_every_process_may_be_killed_and_learning_goes_on(service: Service) -> None:
    before = service.pids()
    assert set(before) == {"engine", "gateway", "learner", "trainer"}
    teach(service, expect=1)
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    until(lambda: not set(service.pids().values()) & set(before.values()) and len(service.pids()) == 4)
    service.wait_ready(60)
    assert ask(service, temperature=0)[2] == "1"
    teach(service, expect=2)
    funnel = until(lambda: (f := get(service, "/reef/funnel")) and not f["unread"] and f)
    assert funnel["fates"]["trained"] == 4
    assert funnel["fates"].get("upstream_error", 0) == 0


def test_a_second_service_on_the_same_store_is_refused_with_the_holders_name(tmp_path: Path) -> None:
    with acquire(tmp_path / "serve.lock"), pytest.raises(StoreError, match=f"pid {os.getpid()}"):
        acquire(tmp_path / "serve.lock")


def test_a_port_in_use_is_a_clear_error(tmp_path: Path, tiny_model_dir: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{port}"):
            Service(config(tmp_path, server__port=str(port)), tiny_model_dir)


def reef(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "from reef.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("server: {prot: 1}", "did you mean 'server.port'"),
        ("sever: {port: 1}", "did you mean 'server'"),
        ("recipe: {batchsize: 2}", "did you mean 'batch_size'"),
        ("server: {port: banana}", "server.port"),
        ("server: [", "not valid YAML"),
        ("policy: {model: ./no-such-folder}", "no-such-folder"),
        ("server: {host: 0.0.0.0}", "server.keys"),
        ("recipe: {name: nothing}", "no recipe 'nothing'"),
    ],
)
def test_a_wrong_setting_is_one_clear_line_and_status_2(tmp_path: Path, yaml: str, message: str) -> None:
    (tmp_path / "serve.yaml").write_text(yaml)
    done = reef("serve", "-c", "serve.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_reading_a_store_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    done = reef("funnel", "--store", "nowhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "no store at" in done.stderr
    assert "Traceback" not in done.stderr
