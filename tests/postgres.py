"""A private PostgreSQL server from installed binaries, for as long as a test session or a benchmark needs it.

It is found on PATH or where Debian puts it, runs on a free loopback port with a random password in a
scratch folder, and never as root, which it refuses.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

UNPRIVILEGED = ("postgres", "nobody")


def binaries() -> Path | None:
    """The folder with `initdb` and `postgres`, the newest version first."""
    found = shutil.which("initdb")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: -float(p.parent.parent.name))
    candidates = [Path(found).resolve().parent] if found else []
    return next((c for c in [*candidates, *(p.parent for p in debian)] if (c / "postgres").exists()), None)


class Server:
    """A running server; `url` names a database in it."""

    def __init__(self, folder: Path) -> None:
        found = binaries()
        if found is None:
            raise FileNotFoundError("no PostgreSQL server binaries (Debian: postgresql)")
        self._bin = found
        self._data = folder / "data"
        self._folder = folder
        self.password = secrets.token_hex(16)
        self._made = 0
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    def _as_user(self) -> list[str]:
        if os.geteuid() != 0:
            return []
        import pwd

        for name in UNPRIVILEGED:
            try:
                pwd.getpwnam(name)
            except KeyError:
                continue
            return ["runuser", "-u", name, "--"]
        raise PermissionError("PostgreSQL does not run as root and there is no other user")

    def initialise(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        password = self._folder / "password"
        password.write_text(self.password)
        user = self._as_user()
        if user:
            for parent in (self._folder, *self._folder.parents):  # pytest's folders are closed to others
                if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
                    parent.chmod(parent.stat().st_mode | 0o011)
            shutil.chown(self._folder, user[2])
            shutil.chown(password, user[2])
        command = [*user, str(self._bin / "initdb"), "-D", str(self._data), "-U", "reef", "-A", "scram-sha-256"]
        command += ["--pwfile", str(password), "-E", "UTF8", "--no-locale", "-N"]
        subprocess.run(command, check=True, capture_output=True, cwd="/")

    def start(self, **settings: str) -> None:
        options = {"port": str(self.port), "listen_addresses": "127.0.0.1", "unix_socket_directories": "", **settings}
        command = [*self._as_user(), str(self._bin / "postgres"), "-D", str(self._data)]
        command += [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", start_new_session=True)
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            try:
                self._sql("SELECT 1")
                return
            except Exception:
                if self._process.poll() is not None:
                    raise RuntimeError((self._folder / "server.log").read_text()[-2000:]) from None
                time.sleep(0.1)
        raise TimeoutError("PostgreSQL did not start")

    def database(self) -> str:
        """The URL of a new, empty database."""
        self._made += 1
        name = f"reef_{self._made}_{secrets.token_hex(3)}"
        self._sql(f"CREATE DATABASE {name}")
        return self.url(name)

    def url(self, name: str) -> str:
        return f"postgresql://reef:{self.password}@127.0.0.1:{self.port}/{name}"

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def postmaster(self) -> psutil.Process | None:
        """The server itself, below the command that changed the user. Never found by the number in its
        file, which may be another process's by now."""
        if not self.alive():
            return None
        assert self._process is not None
        started = psutil.Process(self._process.pid)
        if started.name() == "postgres":
            return started
        return next((child for child in started.children() if child.name() == "postgres"), None)

    def backends(self) -> list[psutil.Process]:
        """The server's own processes."""
        main = self.postmaster()
        return main.children() if main is not None else []

    def stop(self, how: int = signal.SIGINT) -> None:
        """Stop: SIGINT rolls back and checkpoints, SIGQUIT is a crash."""
        if self._process is None:
            return
        with suppress(psutil.Error):
            main = self.postmaster()
            if main is not None:
                main.send_signal(how)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process = None

    def _sql(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True, connect_timeout=5) as connection:
            connection.execute(statement.encode())


@contextmanager
def server(folder: Path, **settings: str) -> Iterator[Server]:
    """A server that lives as long as the block."""
    running = Server(folder)
    running.initialise()
    running.start(**settings)
    try:
        yield running
    finally:
        running.stop()
