"""Cut the power of a running Reef under client load, again and again, and see what is left.

The stack of `benchmarks/crash.py` keeps its store on an ext4 file system of its own (a file on a loop
device). A cut is ext4's own test hook (`EXT4_IOC_SHUTDOWN` without a flush): from that moment nothing more
reaches the device, so every write since the last fsync that the kernel had not written back by itself is
gone, as are renames and directory entries that were not committed. Then all processes are killed, the file
system is mounted again, its journal recovers it, and the stack goes on. The file system commits its
metadata every 5 minutes rather than every 5 seconds, so that little survives that nobody synced.

The processes outlive the cut by some milliseconds, and an fsync that the cut finds under way may report
success then (measured on Linux 6.18: 15 of some 360 fsyncs in flight at 60 cuts, none that had ended before). So
an answer counts only if it had arrived before the cut.

What it proves: no answer that `store.durability: power` promised is lost, the store opens, learning goes
on exactly once. What it does not: a disk that lies about its cache, or tears a sector.

    python benchmarks/power.py --cuts 20 --durability power      (needs root on Linux)
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402

from benchmarks.crash import BATCH, Client, Stack, load, settle, wait_ready  # noqa: E402
from benchmarks.crash_check import Findings, check  # noqa: E402

EXT4_IOC_SHUTDOWN = 0x8004587D
NO_FLUSH = 2
SIZE_MB = 256
ENOUGH = 20


def impossible() -> str | None:
    """Why there can be no power cut here, if so."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a power cut needs root on Linux"
    for tool in ("mkfs.ext4", "mount", "umount"):
        if shutil.which(tool) is None:
            return f"a power cut needs {tool}"
    if not Path("/dev/loop-control").exists():
        return "a power cut needs loop devices"
    return None


class Disk:
    """A file system that can lose its power."""

    def __init__(self, folder: Path) -> None:
        self.image = folder / "disk.img"
        self.at = folder / "disk"
        if not self.image.exists():
            with self.image.open("wb") as file:
                file.truncate(SIZE_MB * 2**20)
            subprocess.run(["mkfs.ext4", "-q", "-F", str(self.image)], check=True)
        self.at.mkdir(exist_ok=True)

    def mount(self) -> None:
        options = "loop,commit=300,noatime"
        subprocess.run(["mount", "-o", options, str(self.image), str(self.at)], check=True)

    def cut(self) -> None:
        handle = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_FLUSH))
        finally:
            os.close(handle)

    def unmount(self) -> None:
        for _ in range(50):
            if subprocess.run(["umount", str(self.at)], capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        subprocess.run(["umount", "-l", str(self.at)], check=True)


def kill_all(stack: Stack) -> None:
    """Every process of the stack at once, as a power cut does."""
    family = []
    for process in (stack.service, stack.engine):
        if process is not None and process.poll() is None:  # else its number may be somebody else's by now
            family += [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=30)
    for process in (stack.service, stack.engine):
        if process is not None:
            process.wait()


@contextmanager
def mounted(folder: Path) -> Iterator[Disk]:
    disk = Disk(folder)
    disk.mount()
    try:
        yield disk
    finally:
        disk.unmount()


def wait_for_answers(people: Sequence[Client], seconds: float) -> None:
    """The load's time, and as much more as a busy machine needs for some answers."""
    started = time.monotonic()
    while time.monotonic() - started < seconds or (
        sum(p.answered for p in people) < ENOUGH and time.monotonic() - started < 60
    ):
        time.sleep(0.05)


def run(out: Path, cuts: int, *, durability: str, clients: int, pause_s: float, seconds: float) -> Findings:
    """Cut the power `cuts` times after about `seconds` of load each, then let everything settle."""
    from tests.tiny import write_tiny_model

    out.mkdir(parents=True, exist_ok=True)
    model = out / "model"
    if not (model / "config.json").exists():
        write_tiny_model(model)
    stack = Stack(out, "sqlite", model)
    failed = 0
    with mounted(out) as disk:
        stack.write_config(durability=durability, dir=str(disk.at / "data"))
        try:
            for _ in range(cuts):
                wait_ready(stack)
                with load(stack, clients, pause_s) as people:
                    wait_for_answers(people, seconds)
                    for person in people:
                        person.over.set()
                    disk.cut()
                    kill_all(stack)
                failed += sum(p.failed for p in people)
                disk.unmount()
                disk.mount()
            wait_ready(stack)
            settled = settle(stack, 400)
            stack.stop()
            return check(out, stack.urls(), BATCH, cuts=cuts, durability=durability, settled=settled)
        finally:
            kill_all(stack)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--durability", choices=("power", "process"), default="power")
    parser.add_argument("--seconds", type=float, default=5.0, help="of load before each cut")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/power"))
    args = parser.parse_args()
    if (reason := impossible()) is not None:
        print(reason, file=sys.stderr)
        return 2
    found = run(
        args.out.resolve(), args.cuts, durability=args.durability, clients=args.clients, pause_s=0.05,
        seconds=args.seconds,
    )  # fmt: skip
    found.show()
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
