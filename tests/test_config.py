"""serve.yaml: precedence, refusals with the nearest valid key, and that every key is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from recipes.openclawrl.recipe import Config as RecipeConfig
from reef.config import Config, Key, load_config
from reef.errors import ConfigError, RecipeError
from reef.recipe import load
from reef.sessions.fate import Fate


def test_command_line_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("server: {port: 1}\ntrain: {lr: 0.1, epochs: 5}\n")
    environ = {"REEF_SERVER__PORT": "2", "REEF_TRAIN__LR": "0.2", "REEF_CACHE": "/elsewhere"}
    config = load_config(file, [("server.port", "3")], environ)
    assert (config.server.port, config.train.lr, config.train.epochs, config.gate.max_kl) == (3, 0.2, 5, 0.1)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("server: {prot: 1}", "unknown key 'server.prot'; did you mean 'server.port'"),
        ("zzz: 1", "unknown key 'zzz'; valid keys:"),
        ("- 1", "expected sections"),
        ("train: {lr: -1}", "train.lr: Input should be greater than 0"),
        ("server: {host: 10.0.0.1}", "set server.keys"),
    ],
)
def test_what_is_wrong_is_said_with_the_key(tmp_path: Path, yaml: str, message: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError) as error:
        load_config(file, environ={})
    assert message in str(error.value)


def test_other_hosts_are_allowed_with_keys() -> None:
    config = load_config(None, [("server.host", "0.0.0.0"), ("server.keys", "[{key: k, name: n}]")], {})
    assert config.server.keys[0].role == "infer"


def sections(model: type[BaseModel], at: str = "") -> Iterator[tuple[str, str | None]]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from sections(inner, f"{at}{name}.")
        else:
            yield f"{at}{name}", field.description


@pytest.mark.parametrize("model", [Config, RecipeConfig])
def test_every_key_is_documented(model: type[BaseModel]) -> None:
    assert [name for name, description in sections(model) if not description] == []


def test_every_recipe_key_is_in_its_page() -> None:
    page = (Path(__file__).parent.parent / "docs/user-guide/recipes/openclawrl.rst").read_text()
    assert [name for name in RecipeConfig.model_fields if name not in page] == []


def test_the_settings_page_names_every_key_and_no_other() -> None:
    page = (Path(__file__).parent.parent / "docs/user-guide/settings.rst").read_text()
    keys = [name for name, _ in sections(Config) if name != "recipe"]
    keys += [f"recipe.{name}" for name in ("name", *RecipeConfig.model_fields)]
    assert sorted(re.findall(r"^``([a-z_]+\.[a-z_0-9]+)``", page, re.MULTILINE)) == sorted(keys)
    table = page.split("Each of ``server.keys``:")[1].split("\nstore\n")[0]
    assert re.findall(r"^``([a-z_]+)``", table, re.MULTILINE) == list(Key.model_fields)


def test_every_fate_is_in_its_page_with_what_to_do() -> None:
    page = (Path(__file__).parent.parent / "docs/user-guide/sessions.rst").read_text()
    table = page.split("\nFates\n-----\n")[1].split("\nSettings\n")[0]
    named = re.findall(r"^``([a-z_]+)``", table, re.MULTILINE)
    assert sorted(named) == sorted(fate.value for fate in Fate)


def test_published_defaults() -> None:
    c = RecipeConfig()
    assert (c.batch_size, c.session_ttl_s, c.max_staleness) == (16, 900, 8)
    assert (c.prm_m, c.prm_hint_on, c.prm_temperature, c.prm_max_tokens) == (3, "both", 0.6, 8192)
    assert (c.prm_timeout_s, c.prm_concurrency, c.prm_max_hint_candidates, c.w_rl, c.w_opd) == (120, 8, 3, 1, 1)


def test_recipes_are_found_by_entry_point_and_by_dotted_name() -> None:
    assert load("openclawrl").name == "openclawrl"
    assert load("tests.reports_recipe:ReportsOnly").name == "reports-only"
    for wrong in ("nothing", "no.such.module:X", "tests.reports_recipe:Config"):
        with pytest.raises(RecipeError):
            load(wrong)
