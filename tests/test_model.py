"""Finding, fetching and checking the policy's model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from reef import model
from reef.errors import BadRequest, ModelError
from reef.model import MANIFEST, ModelTokenizer, chat_messages, fetch_default, resolve, verify
from reef.recipe import Tokenizer


@pytest.fixture
def cache(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache whose default model is made by copying the tiny one instead of converting for a minute."""
    monkeypatch.setattr(model, "_fetch_gguf", lambda scratch, progress: tiny_model_dir)
    monkeypatch.setattr(model, "_convert", lambda source, target: shutil.copytree(source, target))
    monkeypatch.setenv("REEF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_default_is_made_once_and_whole(cache: Path) -> None:
    told: list[str] = []
    path = fetch_default(progress=told.append)
    assert path == cache / "models" / model.DEFAULT
    assert len(told) == 1
    made = (path / "config.json").stat().st_mtime_ns
    assert resolve("default", progress=told.append) == resolve(model.DEFAULT) == path
    assert len(told) == 1 and (path / "config.json").stat().st_mtime_ns == made
    assert set(json.loads((path / MANIFEST).read_text())["files"]) == {f.name for f in path.iterdir()} - {MANIFEST}
    verify(path)


def test_a_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: Path, target: Path) -> None:
        target.mkdir()
        raise ModelError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(model, "_convert", broken)
        with pytest.raises(ModelError, match="disk full"):
            fetch_default()
    assert [p.name for p in (cache / "models").iterdir() if p.is_dir()] == []
    assert fetch_default().is_dir()


def test_a_truncated_file_is_noticed_at_once_and_a_changed_one_by_verify(cache: Path) -> None:
    path = fetch_default()
    weights = path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    fetch_default()
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        verify(path)
    weights.write_bytes(content[:-1])
    with pytest.raises(ModelError, match="incomplete"):
        fetch_default()


@pytest.mark.parametrize(
    ("missing", "message"),
    [("config.json", "no config"), ("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")],
)
def test_an_incomplete_folder_says_what_it_lacks(
    tiny_model_dir: Path, tmp_path: Path, missing: str, message: str
) -> None:
    assert resolve(str(tiny_model_dir)) == tiny_model_dir
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model_dir, copy)
    (copy / missing).unlink()
    with pytest.raises(ModelError, match=message):
        resolve(str(copy))


@pytest.mark.parametrize("name", ["nothing", "/no/such/folder", "./here", "a/b/c"])
def test_a_name_that_is_nothing_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolve(name)


def test_a_hub_that_gives_nothing_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> str:
        raise ConnectionError("offline\nwith details")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"org/name.*offline$"):
        resolve("org/name")


def test_tokenizer_renders_encodes_and_decodes(tiny_model_dir: Path) -> None:
    tokenizer: Tokenizer = ModelTokenizer(tiny_model_dir)
    ids = tokenizer.render([{"role": "user", "content": "hé 7"}])
    assert all(type(i) is int for i in ids)
    assert tokenizer.decode(ids).endswith("user\nhé 7\nassistant\n")
    assert tokenizer.decode(tokenizer.encode(" two  spaces 🦈 ")) == " two  spaces 🦈 "


def test_a_token_is_spelled_in_its_exact_bytes(tiny_model_dir: Path) -> None:
    tokenizer = ModelTokenizer(tiny_model_dir)
    text = "naïve 🦈"
    spelled = [byte for token in tokenizer.encode(text) for byte in tokenizer.spell(token)[1]]
    assert bytes(spelled).decode() == text


def test_messages_are_made_plain() -> None:
    given = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [1]},
    ]
    assert chat_messages(given) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [1]},
    ]
    for bad in ({"content": "x"}, {"role": "user", "content": 5}, {"role": "user", "content": [{"type": "image_url"}]}):
        with pytest.raises(BadRequest):
            chat_messages([bad])
