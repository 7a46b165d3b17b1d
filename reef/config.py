"""serve.yaml: every setting of the service, with its default and its meaning.

Precedence, lowest first: defaults here, the YAML file, `REEF_SECTION__KEY` in the environment,
`--section.key value` on the command line. Unknown keys are refused with the nearest valid name.
The `recipe` section is checked by the recipe itself, since Reef knows no learning method.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reef.errors import ConfigError
from reef.releases.chain import SCENARIO_RULE, is_scenario
from reef.sessions.ladder import HEADERS

MOST_LOADED: Mapping[str, int] = {"lora": 32, "full": 3}
"""versions kept loaded unless engine.max_adapters says otherwise, by train.method"""


class Section(BaseModel):
    """A section of serve.yaml: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Key(Section):
    """One API key."""

    key: str = Field(description="the secret itself")
    name: str = Field(description="client name: scope of session matching")
    role: Literal["infer", "admin"] = Field(default="infer", description="admin may promote, roll back and forget")
    scenario: str | None = Field(default=None, description="the only scenario this key may use")


class ServerConfig(Section):
    host: str = Field(default="127.0.0.1", description="address to bind; without keys only loopback is allowed")
    port: int = Field(default=8800, ge=0, le=65535, description="port to bind; 0 picks a free one")
    keys: tuple[Key, ...] = Field(default=(), description="API keys; none means loopback without authentication")
    models: Literal["any", "strict"] = Field(
        default="any", description="any: every model name means the scenario's policy; strict: unknown names get a 404"
    )
    max_body_mb: float = Field(default=32.0, gt=0, description="largest request body, MiB; larger ones get a 413")
    max_header_kb: float = Field(default=64.0, gt=0, description="largest request headers, KiB; larger ones get a 431")
    connect_timeout_s: float = Field(default=10.0, gt=0, description="time to connect to the engine")
    first_byte_timeout_s: float = Field(default=300.0, gt=0, description="longest wait for a stream's first event")
    idle_timeout_s: float = Field(default=300.0, gt=0, description="longest silence of the engine within a stream")
    total_timeout_s: float = Field(default=3600.0, gt=0, description="longest answer, streamed or not")
    keepalive_s: float = Field(
        default=10.0, gt=0, description="silence after which a streaming client is told that its answer is coming"
    )
    drain_timeout_s: float = Field(default=20.0, ge=0, description="time for answers in flight to end at SIGTERM")


class StoreConfig(Section):
    dir: Path = Field(
        default=Path("reef-data"), description="folder of everything Reef keeps: databases, steps, releases"
    )
    log: str | None = Field(default=None, description="URL of the log database; default: sqlite in store.dir")
    learn: str | None = Field(default=None, description="URL of the learn database; default: sqlite in store.dir")
    durability: Literal["process", "power"] = Field(
        default="process", description="process: an answer survives any kill -9; power: fsync before the answer ends"
    )
    queue: int = Field(default=1024, gt=0, description="records waiting for the writer before new requests wait too")
    when_full: Literal["refuse", "serve"] = Field(
        default="refuse",
        description="while nothing can be recorded (disk full): refuse new requests with a 503, or serve them "
        "unrecorded",
    )
    keep_days: float | None = Field(
        default=None, gt=0, description="remove words and tokens of finished exchanges older than this; null keeps all"
    )
    keep_gb: float | None = Field(
        default=None, gt=0, description="remove those of the oldest finished exchanges above this size; null keeps all"
    )
    keep_releases: int | None = Field(
        default=None, ge=1, description="newest releases kept per scenario, besides those in use; null keeps all"
    )
    redact: tuple[Literal["keys", "emails", "cards"], ...] = Field(
        default=(), description="take these out of everything before it is stored; such an exchange trains nothing"
    )
    redact_patterns: dict[str, str] = Field(
        default_factory=dict, description="more to take out: name to regular expression"
    )

    @property
    def log_url(self) -> str:
        return self.log or f"sqlite:///{self.dir / 'log.db'}"

    @property
    def learn_url(self) -> str:
        return self.learn or f"sqlite:///{self.dir / 'learn.db'}"


class EngineConfig(Section):
    kind: Literal["embedded", "vllm", "sglang", "openai"] = Field(
        default="embedded",
        description="embedded: started by `reef serve` on this CPU; others: an engine that runs at engine.url",
    )
    url: str | None = Field(
        default=None, description="base URL of the engine, without /v1 (for embedded: picked by itself)"
    )
    key: str | None = Field(default=None, description="API key of the engine")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="embedded: auto takes bfloat16 only where the CPU multiplies it natively"
    )
    threads: int = Field(
        default=1, ge=1, description="embedded: torch threads; more than one hurts when others compute too"
    )
    max_batch: int = Field(default=16, ge=1, description="embedded: requests decoded together")
    max_adapters: int | None = Field(
        default=None,
        ge=1,
        description="versions kept loaded, over all scenarios; others are loaded when asked for. Default: 32 with "
        "train.method lora, 3 with full, where each is as large as the layers that are trained",
    )
    max_context: int = Field(default=2048, ge=64, description="embedded: longest prompt plus reply, tokens")
    top_logprobs: int = Field(default=16, ge=0, le=20, description="top-K recorded with every token")
    vision: bool = Field(
        default=True,
        description="false: requests with images, sound or files get a 400 naming the part (embedded: always)",
    )
    retries: int = Field(
        default=2,
        ge=0,
        description="attempts after the first when the engine can't be reached or answers 429, 500, 502, 503 or 529, "
        "as long as nothing was sent to the client",
    )


class PolicyConfig(Section):
    model: str = Field(default="default", description="model folder or hub name; default is SmolLM2-135M-Instruct")
    scenario: str = Field(default="default", description="scenario of requests that name none")
    sampling: Literal["client", "train"] = Field(
        default="client",
        description="client: as the client asks; train: Reef imposes policy.temperature and no truncation",
    )
    temperature: float = Field(
        default=0.7, gt=0, description="temperature where the client names none, or always with train"
    )
    serve_memo: bool = Field(
        default=False,
        description="true: the rules of `reef memo` are put into each prompt, and its record lists them",
    )
    learning: Literal["separate", "joint"] = Field(
        default="separate",
        description="separate: each scenario has its own chain of versions; joint: all share policy.scenario's",
    )


class SessionsConfig(Section):
    side_models: tuple[str, ...] = Field(default=(), description="model names whose calls are side calls")
    id_headers: tuple[str, ...] = Field(
        default=HEADERS, description="headers that name a conversation, best first, below x-reef-tag-session"
    )
    tentative_s: float = Field(
        default=60.0, ge=0, description="how long a reaction that may be a side branch waits for what follows"
    )
    live_s: float = Field(
        default=900.0, gt=0, description="age up to which a conversation is preferred to older ones like it"
    )
    memory: int = Field(default=100_000, ge=100, description="exchanges kept in memory; older ones are looked up")
    horizon_days: float = Field(
        default=30.0, gt=0, description="age up to which an exchange can still be found by a late reaction"
    )


class PrmConfig(Section):
    backend: Literal["embedded", "openai", "vllm", "sglang"] = Field(
        default="embedded",
        description="embedded: on this CPU; openai: any OpenAI-compatible endpoint at prm.url; vllm, sglang: their raw"
        " generation there, for reasoning models whose chat route is not enough",
    )
    url: str | None = Field(default=None, description="base URL of the judge, with /v1")
    model: str | None = Field(default=None, description="model name to ask for")
    key: str | None = Field(default=None, description="its API key")
    template: str | None = Field(
        default=None, description="vllm, sglang: the text around $prompt; default: a ChatML user turn"
    )


class TrainConfig(Section):
    enabled: bool = Field(default=True, description="false: record, match and judge, but never change weights")
    method: Literal["lora", "full"] = Field(
        default="lora",
        description="lora: an adapter; full: the weights of the linear layers themselves (engine.kind embedded only)",
    )
    lr: float = Field(
        default=6e-4, gt=0, description="AdamW learning rate; made for lora, full weights usually take 1e-5"
    )
    epochs: int = Field(default=2, ge=1, description="passes over a batch with old policy and teacher fixed")
    rank: int = Field(default=16, ge=1, description="LoRA rank")
    alpha: int = Field(default=32, ge=1, description="LoRA alpha")
    layers: float = Field(
        default=1.0, gt=0, le=1, description="share of the layers that are trained, the last ones; fewer is faster"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the frozen base; what is trained and its optimizer are always float32"
    )
    device: str = Field(default="cpu", description="where the trainer computes: cpu, cuda, cuda:1, ...")
    seed: int = Field(default=0, description="seed of the adapter's initial values")
    threads: int = Field(default=1, ge=1, description="torch threads of the trainer")
    idle_s: float = Field(
        default=120.0, ge=0, description="train fewer turns than a batch once none was added for this long; 0: never"
    )
    min_batch: int = Field(default=2, ge=1, description="turns such a smaller batch has at least")
    max_attempts: int = Field(default=3, ge=1, description="times a failing step is tried before its turns are let go")


class GateConfig(Section):
    enabled: bool = Field(default=True, description="false: serve every candidate (for experiments)")
    max_kl: float = Field(default=0.1, gt=0, description="KL to the base on replayed prompts, nat/token")
    max_length_ratio: float = Field(
        default=2.0, ge=1, description="mean length of replies to generic prompts against the current version's"
    )
    max_repeated: float = Field(
        default=0.2, ge=0, le=1, description="share of repeated 4-grams in them, beyond the base's own"
    )
    max_unfinished: float = Field(
        default=0.05, ge=0, le=1, description="share of them without an end, beyond the base's own"
    )
    max_held_out_drop: float = Field(
        default=0.1, ge=0, description="nat/token that accepted, never rehearsed replies may become less likely"
    )
    canary_s: float = Field(
        default=300.0, ge=0, description="how often the served version is looked at again; 0: it is not"
    )


class ObserveConfig(Section):
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="level of the service's log"
    )


class Config(Section):
    """The whole of serve.yaml."""

    server: ServerConfig = ServerConfig()
    store: StoreConfig = StoreConfig()
    engine: EngineConfig = EngineConfig()
    policy: PolicyConfig = PolicyConfig()
    sessions: SessionsConfig = SessionsConfig()
    prm: PrmConfig = PrmConfig()
    recipe: dict[str, Any] = Field(
        default_factory=dict,
        description="name: entry point or module:Class of the method (default openclawrl); the rest is its settings",
    )
    train: TrainConfig = TrainConfig()
    gate: GateConfig = GateConfig()
    observe: ObserveConfig = ObserveConfig()

    @property
    def max_adapters(self) -> int:
        """Versions the engine keeps loaded."""
        return self.engine.max_adapters or MOST_LOADED[self.train.method]

    @property
    def joint_chain(self) -> str | None:
        """The chain all scenarios share; None when each has its own."""
        return self.policy.scenario if self.policy.learning == "joint" else None

    @property
    def recipe_name(self) -> str:
        return str(self.recipe.get("name", "openclawrl"))

    @property
    def recipe_settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.recipe.items() if key != "name"}


def load_config(
    path: Path | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Read serve.yaml and lay environment and command line over it. Raises ConfigError."""
    return _checked(_read(path) if path else {}, str(path) if path else "configuration", overrides, environ)


def load_run(file: Path, environ: Mapping[str, str] = os.environ) -> Config:
    """What a `reef serve` wrote to `store.dir/run/config.json`, its model's folder as policy.model, and the environment
    over it. Raises ConfigError."""
    data = _read(file)
    if (model_dir := data.pop("model_dir", None)) is not None:
        _put(data, ("policy", "model"), model_dir)
    return _checked(data, str(file), (), environ)


def _checked(
    data: dict[str, Any], where: str, overrides: Sequence[tuple[str, str]], environ: Mapping[str, str]
) -> Config:
    for name, value in sorted(environ.items()):
        if name.startswith("REEF_") and "__" in name:
            _put(data, name.removeprefix("REEF_").lower().split("__"), value)
    for dotted, value in overrides:
        _put(data, dotted.split("."), value)
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain(error, Config, where)) from None
    _check_loopback(config.server)
    _check_method(config)
    _check_scenarios(config)
    return config


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """A validation error as lines a person can act on, unknown keys with the nearest valid name."""
    lines = []
    for item in error.errors():
        key = ".".join(str(p) for p in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key '{key}'{_nearest(item['loc'], model)}")
        else:
            lines.append(f"{where}: {key}: {item['msg']}")
    return "\n".join(lines)


def _nearest(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    current: Any = model
    for part in loc[:-1]:
        annotation = current.model_fields[part].annotation if part in current.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return ""
        current = annotation
    fields = list(current.model_fields)
    match = difflib.get_close_matches(str(loc[-1]), fields, n=1, cutoff=0.5)
    prefix = ".".join(str(p) for p in loc[:-1])
    if match:
        return f"; did you mean '{prefix + '.' if prefix else ''}{match[0]}'?"
    return f"; valid keys: {', '.join(sorted(fields))}"


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected sections, found {type(data).__name__}")
    return data


def _put(data: dict[str, Any], keys: Sequence[str], value: str) -> None:
    node = data
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"'{'.'.join(keys)}': '{key}' is not a section")
        node = child
    try:
        node[keys[-1]] = yaml.safe_load(value)
    except yaml.YAMLError:
        node[keys[-1]] = value


def _check_loopback(server: ServerConfig) -> None:
    if not server.keys and server.host not in ("127.0.0.1", "localhost", "::1"):
        raise ConfigError(
            f"server.host {server.host} is reachable from other machines: set server.keys, or bind 127.0.0.1"
        )


def _check_method(config: Config) -> None:
    if config.train.method == "full" and config.engine.kind != "embedded":
        raise ConfigError(
            f"train.method full needs engine.kind embedded: engines of kind {config.engine.kind} load LoRA adapters "
            "only. Set train.method: lora, or engine.kind: embedded"
        )


def _check_scenarios(config: Config) -> None:
    named = [("policy.scenario", config.policy.scenario)]
    named += [(f"server.keys: {key.name}: scenario", key.scenario) for key in config.server.keys if key.scenario]
    for where, name in named:
        if not is_scenario(name):
            raise ConfigError(f"{where} {name!r}: {SCENARIO_RULE}")
