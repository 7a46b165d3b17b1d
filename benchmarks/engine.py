"""The embedded engine against a plain batched transformers decode loop, side by side in one run.

    python benchmarks/engine.py [--model default] [--streams 1 8 16] [--tokens 32] [--rounds 2]

Both greedy, same model, float type and thread count; the engine runs as its own process and is asked
over HTTP, streams and all. Decode speed is counted while every stream is decoding; `whole` also holds
the prefill; `cpu` compares processor seconds a token, prefill and server included: the number to read
on a machine that is busy with other work. The two take turns and the best round of each counts, since
neighbours only ever slow one down. The last line is one JSON object; a ratio above 1 means the engine
is faster. With an adapter the plain loop is PEFT's unmerged model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from reef.model import resolve

PROMPT = 64


@dataclass(frozen=True, slots=True)
class Speed:
    decode: float
    """tokens a second while all streams decode"""
    whole: float
    """tokens a second from the first byte sent to the last received"""
    cpu: float
    """tokens a processor second, prefill and server included"""


def prompts(streams: int) -> list[list[int]]:
    """Different prompts each time, so that no cache helps."""
    return torch.randint(10, 40000, (streams, PROMPT)).tolist()


@torch.inference_mode()
def plain(model: Any, streams: int, tokens: int) -> Speed:
    ids = torch.tensor(prompts(streams))
    start, used = time.perf_counter(), time.process_time()
    out = model(ids, use_cache=True, logits_to_keep=1)
    newest = out.logits[:, -1:].argmax(-1)
    decoding = time.perf_counter()
    for _ in range(tokens - 1):
        out = model(newest, past_key_values=out.past_key_values, use_cache=True)
        newest = out.logits[:, -1:].argmax(-1)
    end = time.perf_counter()
    whole = streams * tokens
    return Speed(
        whole * (1 - 1 / tokens) / (end - decoding), whole / (end - start), whole / (time.process_time() - used)
    )


async def served(url: str, process: psutil.Process, model: str, streams: int, tokens: int) -> Speed:
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        start, used = time.perf_counter(), sum(process.cpu_times()[:2])
        arrivals = await asyncio.gather(*[_arrivals(client, model, p, tokens) for p in prompts(streams)])
        end, used = time.perf_counter(), sum(process.cpu_times()[:2]) - used
    # tokens given out while the last streams were still in prefill, or the first had ended, don't count
    began, ended = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    within = sum(began < at <= ended for times in arrivals for at in times)
    return Speed(within / (ended - began), streams * tokens / (end - start), streams * tokens / used)


async def _arrivals(client: httpx.AsyncClient, model: str, prompt: list[int], tokens: int) -> list[float]:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    times = []
    request = body | {"stream": True, "return_token_ids": True}
    async with client.stream("POST", "/v1/completions", json=request) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["token_ids"]:
                times.append(time.perf_counter())
    return times


def start_engine(model: Path, threads: int, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "reef.engine.embedded", "--model", str(model), "--name", "base", "--port", "0"]
    process = subprocess.Popen([*command, "--dtype", "float32", "--threads", str(threads), "--ready-file", str(ready)])
    while not ready.exists():
        if process.poll() is not None:
            sys.exit("the engine did not start")
        time.sleep(0.1)
    return process, json.loads(ready.read_text())["url"]


def measure(
    model: Any, url: str, process: psutil.Process, name: str, streams: int, tokens: int, rounds: int
) -> tuple[Speed, Speed]:
    loops, engines = [], []
    for _ in range(rounds):
        loops.append(plain(model, streams, tokens))
        engines.append(asyncio.run(served(url, process, name, streams, tokens)))
    return _best(loops), _best(engines)


def _best(speeds: list[Speed]) -> Speed:
    return Speed(max(s.decode for s in speeds), max(s.whole for s in speeds), max(s.cpu for s in speeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    path = resolve(options.model, progress=print)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ratios: dict[str, float] = {}
    header = (
        f"{'streams':>8} {'weights':>8} {'plain decode':>13} {'engine decode':>14} {'ratio':>6} {'whole':>6} {'cpu':>6}"
    )
    with tempfile.TemporaryDirectory() as folder:
        process, url = start_engine(path, options.threads, Path(folder))
        try:
            server = psutil.Process(process.pid)
            print(header + "   (tokens a second)")
            for weights in ("base", "adapter"):
                if weights == "adapter":
                    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
                    model = get_peft_model(model, config).eval()
                    model.save_pretrained(folder + "/adapter")
                    request = {"lora_name": "adapter", "lora_path": folder + "/adapter"}
                    httpx.post(url + "/v1/load_lora_adapter", json=request, timeout=60).raise_for_status()
                for streams in options.streams:
                    loop, engine = measure(model, url, server, weights, streams, options.tokens, options.rounds)
                    ratio, whole = engine.decode / loop.decode, engine.whole / loop.whole
                    cpu = engine.cpu / loop.cpu
                    ratios |= {f"{weights}_decode_{streams}": ratio, f"{weights}_whole_{streams}": whole}
                    ratios[f"{weights}_cpu_{streams}"] = cpu
                    print(
                        f"{streams:>8} {weights:>8} {loop.decode:>13.1f} {engine.decode:>14.1f} "
                        f"{ratio:>6.2f} {whole:>6.2f} {cpu:>6.2f}",
                        flush=True,
                    )
        finally:
            process.terminate()
            process.wait()
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


if __name__ == "__main__":
    main()
