"""Command-line agents as people install them, told of Reef by configuration alone.

`llm` runs always. The others are `slow`: pi and opencode need Node, and are looked for on the PATH and in
`node_modules/.bin` of the folder `REEF_NODE_AGENTS` names (`npm install @mariozechner/pi-coding-agent
opencode-ai`); hermes is looked for on the PATH and under `REEF_HERMES` (a virtual environment).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from reef.sessions.fate import Fate
from tests.clients.story import ASKS, REPLIES, script
from tests.scripted_engine import BASE, scripted_app
from tests.sockets import serving
from tests.stack import stack

Agent = Callable[[str, Path], list[str]]
"""(base URL, empty home folder) -> what it printed, turn by turn"""


def run(command: list[str], home: Path, env: Mapping[str, str] | None = None) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.endswith(("_API_KEY", "_BASE_URL"))}
    done = subprocess.run(
        command,
        cwd=home,
        env={**kept, "HOME": str(home), "PWD": str(home), "NO_COLOR": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,  # agents of this size start slowly on a busy machine
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def found(name: str, variable: str, folder: str) -> str:
    """The program, or the test is skipped."""
    given = os.environ.get(variable)
    program = shutil.which(name, path=f"{given}/{folder}") if given else shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed (see {variable})")
    return program


def llm(url: str, home: Path) -> list[str]:
    user = home / "llm"
    user.mkdir()
    model = f"- model_id: reef\n  model_name: {BASE}\n  api_base: {url}/v1\n  api_key_name: reef\n"
    (user / "extra-openai-models.yaml").write_text(model)
    env = {"LLM_USER_PATH": str(user), "LLM_LOAD_PLUGINS": ""}
    command = [sys.executable, "-m", "llm", "prompt", "-m", "reef", "--key", "k"]
    return [run([*command, *(["-c"] if n else []), ask], home, env) for n, ask in enumerate(ASKS)]


def pi(url: str, home: Path) -> list[str]:
    program = found("pi", "REEF_NODE_AGENTS", "node_modules/.bin")
    settings = home / ".pi" / "agent"
    settings.mkdir(parents=True)
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "k", "models": [{"id": BASE}]}
    (settings / "models.json").write_text(json.dumps({"providers": {"reef": provider}}))
    command = [program, "--provider", "reef", "--model", BASE, "-p"]
    env = {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"}
    return [run([*command, *(["-c"] if n else []), ask], home, env) for n, ask in enumerate(ASKS)]


def opencode(url: str, home: Path) -> list[str]:
    program = found("opencode", "REEF_NODE_AGENTS", "node_modules/.bin")
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "k"},
        "models": {BASE: {"name": BASE}},
    }
    settings = {"provider": {"reef": provider}, "model": f"reef/{BASE}", "autoupdate": False, "share": "disabled"}
    (home / "opencode.json").write_text(json.dumps(settings))
    env = {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("DATA", "CONFIG", "CACHE", "STATE")}
    env |= {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return [run([program, "run", *(["--continue"] if n else []), ask], home, env) for n, ask in enumerate(ASKS)]


def hermes(url: str, home: Path) -> list[str]:
    """One-shot queries; `--continue` resumes the newest session."""
    program = found("hermes", "REEF_HERMES", "bin")
    settings = home / ".hermes"
    settings.mkdir()
    (settings / "config.yaml").write_text(
        f"model:\n  default: {BASE}\n  provider: custom\n  base_url: {url}/v1\n  api_key: k\n  context_length: 131072\n"
    )
    env = {"HERMES_HOME": str(settings), "OPENAI_API_KEY": "k", "OPENAI_BASE_URL": f"{url}/v1"}
    command = [program, "chat", "--quiet", "--toolsets", "todo"]
    return [run([*command, *(["--continue"] if n else []), "-q", ask], home, env) for n, ask in enumerate(ASKS)]


@pytest.mark.parametrize(
    "agent",
    [llm, *(pytest.param(agent, marks=pytest.mark.slow) for agent in (pi, opencode, hermes))],
    ids=lambda agent: agent.__name__,
)
def test_an_agent_says_the_same_as_at_the_engine_and_its_turns_wait_for_the_judge(agent: Agent, tmp_path: Path) -> None:
    for part in ("direct", "through"):
        (tmp_path / part).mkdir()
    with serving(scripted_app(script())) as engine_url:
        direct = agent(engine_url, tmp_path / "direct")
    with stack(tmp_path / "reef") as reef:
        reef.script.reply = script().reply
        through = agent(reef.url, tmp_path / "through")
        reef.observer().step()
        assert all(reply in said for said, reply in zip(through, REPLIES, strict=True))
        assert [said.replace(str(tmp_path / "through"), "") for said in through] == [
            said.replace(str(tmp_path / "direct"), "") for said in direct
        ]
        views = reef.views
        reactions = [
            bound["next_state"]
            for exchange in reef.log.tail(0)
            for bound in views.turn(exchange.id)["next_states"]
            if (views.turn(exchange.id)["matching"] or {}).get("fate") == Fate.QUEUED
        ]
        for ask in ASKS[1:]:
            assert any(ask in reaction for reaction in reactions)
