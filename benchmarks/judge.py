"""How good the embedded judge is, and what a verdict costs: `python benchmarks/judge.py LABELLED.jsonl`.

The file's lines are turns with `verdict`, `target`, `kind` and `lang`; `--pairs` names a file of
{"pos": id, "neg": id} lines, near-identical messages with opposite verdicts. Prints tables, and as its last
line one JSON object. Baselines computed here: always -1, and a linear head on the frozen base model's hidden
states (five folds over the conversations of the file itself). The weights were trained on none of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as fn

from recipes.openclawrl.judge.body import Body, Padded
from recipes.openclawrl.judge.corpus import Row, groups, read_rows
from recipes.openclawrl.judge.embedded import BATCH, EmbeddedPrm
from recipes.openclawrl.judge.head import SHIPPED, Context, Head, pool, score
from recipes.openclawrl.judge.prompt import Reader
from recipes.openclawrl.judge.votes import VERDICTS
from recipes.openclawrl.recipe import Config, OpenClawRL
from reef.cli.judging import judged, print_agreement, read_turns
from reef.cli.output import print_table
from reef.model import resolve
from reef.observe.agreement import agreement, right
from reef.recipe import RecipeTools

FOLDS = 5
TOKENS = {"request": 60, "reply": 180, "next": 60}
"""of the turn whose cost is measured: 300 together"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Accuracy and cost of the embedded judge.")
    parser.add_argument("labelled", type=Path, help="turns with verdict, target, kind and lang (JSON lines)")
    parser.add_argument("--pairs", type=Path, help="pairs of ids with opposite verdicts (JSON lines)")
    parser.add_argument("--model", default="default", help="folder of the base model")
    parser.add_argument("--weights", type=Path, default=SHIPPED, help="folder of the judge's weights")
    parser.add_argument("--no-baseline", action="store_true", help="leave the linear head out (a minute)")
    given = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")
    torch.set_num_threads(1)
    model = resolve(given.model, progress=lambda _: None)
    rows = read_turns(given.labelled, labelled=True)
    answers = asyncio.run(answers_of(model, given.weights, rows))
    found = agreement(rows, answers)
    print_agreement(found)
    injected = [(r, a) for r, a in zip(rows, answers, strict=True) if r.get("kind") == "injection"]
    others = [(r, a) for r, a in zip(rows, answers, strict=True) if r.get("kind") != "injection"]
    result = {
        **{name: found[name] for name in ("rows", "judged", "accuracy", "reversed", "by_coverage", "targets")},
        "by_lang": {k: v["accuracy"] for k, v in found["by_lang"].items()},
        "by_kind": {k: v["accuracy"] for k, v in found["by_kind"].items()},
        "injection": {"rows": len(injected), "accuracy": accuracy(injected), "others": accuracy(others)},
        "accept_or_reject": sided(rows, answers),
        "charging": charging(rows, answers),
    }
    if given.pairs:
        result["pairs"] = pairs(given.pairs, rows, answers)
    labels = Counter(row["verdict"] for row in rows)
    result["baselines"] = {"always -1": round(labels[-1] / len(rows), 4)}
    body = Body(model, Head.depth_of(given.weights))
    if not given.no_baseline:
        result["baselines"]["linear head on frozen hidden states"] = linear_baseline(body, read_rows(given.labelled))
    result["cost"] = cost(body, Head.load(given.weights, body))
    result["judge"] = answers[0].get("judge") if answers else None
    print_table("beside", ("what", "value"), [(k, v) for k, v in flat(result) if not k.startswith("by_")])
    print(json.dumps(result))


async def answers_of(model: Path, weights: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Verdicts by the recipe itself, as a service would ask for them."""
    tools = RecipeTools(tokenizer=None, model_dir=str(model), prm=SimpleNamespace(backend="embedded"))  # type: ignore[arg-type]
    recipe = OpenClawRL(Config(), tools)
    recipe._prm = EmbeddedPrm(model, weights=weights)
    return await judged(recipe, rows)


def pairs(file: Path, rows: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How often both of a pair are right, and how often both get the same verdict."""
    by_id = {row["id"]: (row, answer) for row, answer in zip(rows, answers, strict=True)}
    listed = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    held = [(by_id[p["pos"]], by_id[p["neg"]]) for p in listed if p["pos"] in by_id and p["neg"] in by_id]
    both = sum(right(*a) and right(*b) for a, b in held)
    same = sum(a[1]["verdict"] == b[1]["verdict"] for a, b in held)
    return {"pairs": len(held), "both_right": both, "share": round(both / max(len(held), 1), 4), "same_verdict": same}


def charging(rows: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The verdicts that training hears of: how many there are, how many of them are right, how many reversed."""
    heard = [(row, answer) for row, answer in zip(rows, answers, strict=True) if answer["charges"]]
    reversed = sum(row["verdict"] == -answer["verdict"] for row, answer in heard)
    share = {"share": len(heard) / max(len(rows), 1), "reversed": reversed / max(len(heard), 1)}
    return {**{name: round(value, 4) for name, value in share.items()}, "right": accuracy(heard)}


def accuracy(some: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> float:
    return round(sum(right(row, answer) for row, answer in some) / max(len(some), 1), 4)


def sided(rows: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> float:
    """Of rows that accept or reject, the share where the right side is the more probable."""
    hits = []
    for row, answer in zip(rows, answers, strict=True):
        if row["verdict"]:
            p = answer["votes"][0]["probabilities"]
            hits.append((p["1"] > p["-1"]) == (row["verdict"] > 0))
    return round(sum(hits) / max(len(hits), 1), 4)


@torch.inference_mode()
def frozen(body: Body, rows: Sequence[Row]) -> torch.Tensor:
    """Pooled hidden states [N, 2 D] of the base without adapter."""
    reader = Reader(body.tokenizer)
    out = []
    for at in range(0, len(rows), BATCH):
        readings = [reader.read(row.history, row.next) for row in rows[at : at + BATCH]]
        context, suffix = Padded.of([r.context for r in readings]), Padded.of([r.suffix for r in readings])
        h = body.suffix(suffix, body.context(context, {}), context.lengths, {})
        out.append(pool(h, suffix.lengths))
    return torch.cat(out)


def linear_baseline(body: Body, rows: Sequence[Row]) -> float:
    """Accuracy of a linear head on frozen hidden states, over folds of whole conversations."""
    x = frozen(body, rows)
    y = torch.tensor([VERDICTS.index(row.verdict) for row in rows])
    names = sorted(set(groups(rows)))
    fold = torch.tensor([names.index(g) % FOLDS for g in groups(rows)])
    hits = 0
    for k in range(FOLDS):
        train, test = fold != k, fold == k
        mean, std = x[train].mean(0), x[train].std(0) + 1e-6
        head = torch.nn.Linear(x.shape[1], len(VERDICTS))
        optimiser = torch.optim.LBFGS(head.parameters(), max_iter=60, line_search_fn="strong_wolfe")

        def loss(head: torch.nn.Linear = head, at: torch.Tensor = train, m: torch.Tensor = mean, s: torch.Tensor = std):
            head.zero_grad()
            value = fn.cross_entropy(head((x[at] - m) / s), y[at]) + 0.02 * head.weight.square().sum()
            value.backward()
            return value

        optimiser.step(loss)
        with torch.no_grad():
            hits += int((head((x[test] - mean) / std).argmax(-1) == y[test]).sum())
    return round(hits / len(rows), 4)


def cost(body: Body, head: Head, repeats: int = 3) -> dict[str, float]:
    """Milliseconds of one core for a verdict on a turn of 300 tokens, in a full batch and alone."""
    reader = Reader(body.tokenizer)
    word = " garden"  # one token
    texts = {name: (word * n).strip() for name, n in TOKENS.items()}
    history = [{"role": "user", "content": texts["request"]}, {"role": "assistant", "content": texts["reply"]}]
    said = {"role": "user", "content": texts["next"]}
    reading = reader.read(history, said)
    out: dict[str, float] = {"turn_tokens": sum(TOKENS.values()), "tokens_read": reading.tokens}
    for name, n in (("batched", BATCH), ("alone", 1)):
        score(body, head, [reading] * n, [(history, said)] * n, Context.of(body, head, [reading] * n))
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            score(body, head, [reading] * n, [(history, said)] * n, Context.of(body, head, [reading] * n))
        out[f"{name}_ms"] = round((time.perf_counter() - wall) / repeats / n * 1000, 1)
        out[f"{name}_cpu_ms"] = round((time.process_time() - cpu) / repeats / n * 1000, 1)
    return out


def flat(result: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for name, value in result.items():
        out += flat(value, f"{prefix}{name}: ") if isinstance(value, Mapping) else [(prefix + name, value)]
    return out


if __name__ == "__main__":
    main()
