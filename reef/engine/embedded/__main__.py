"""`python -m reef.engine.embedded`: the embedded engine as a process."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path

from reef.errors import ConfigError, ReefError


def main(argv: list[str] | None = None) -> int:
    """Serve until told to stop. Exit status 2 with one line on stderr when it can't start."""
    options = _options(argv)
    if options.threads > 1:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve the other processes
    try:
        with _listen(options.host, options.port) as sock:
            _serve(options, sock)
    except ReefError as error:
        print(f"reef engine: {error}", file=sys.stderr)
        return 2
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m reef.engine.embedded", description=__doc__)
    parser.add_argument("--model", required=True, help="default, a Hugging Face folder, or a hub id")
    parser.add_argument("--name", help="name the base model is served under (default: its folder's name)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8200, help="0 picks a free one")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-batch", type=int, default=16, help="requests decoded together")
    parser.add_argument("--max-context", type=int, default=2048, help="prompt plus reply, tokens")
    parser.add_argument("--prefix-cache-mb", type=int, default=256, help="memory for prompts seen before; 0: off")
    parser.add_argument("--ready-file", type=Path, help="written when requests are answered: url, port, pid as JSON")
    return parser.parse_args(argv)


def _listen(host: str, port: int) -> socket.socket:
    """Bind before the slow model load, so that a taken port is known at once."""
    try:
        return socket.create_server((host, port), backlog=256)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror or error}") from error


def _serve(options: argparse.Namespace, sock: socket.socket) -> None:
    from reef.model import resolve

    path = resolve(options.model)  # before the slow imports, so that a wrong name is known at once

    import uvicorn

    from reef.engine.embedded.app import create_app
    from reef.engine.embedded.engine import Engine

    engine = Engine.load(
        path,
        name=options.name,
        dtype=options.dtype,
        threads=options.threads,
        max_batch=options.max_batch,
        max_context=options.max_context,
        prefix_cache_mb=options.prefix_cache_mb,
    )
    port = sock.getsockname()[1]
    ready = {"url": f"http://{options.host}:{port}", "port": port, "pid": os.getpid()}

    def on_ready() -> None:
        if options.ready_file:
            partial = options.ready_file.with_name(options.ready_file.name + ".partial")
            partial.write_text(json.dumps(ready))
            partial.replace(options.ready_file)

    app = create_app(engine, on_ready)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[sock])


if __name__ == "__main__":
    sys.exit(main())
