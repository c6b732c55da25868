"""Whether a model can judge eviction: `python -m research.tasks.gate --model tiny-reasoner --out results` records it.

A model is fit for comparing eviction policies if it solves its task, if a small cache can do for it, and if its attention has
the traits that published scores build on. Each criterion has a threshold that was set before any policy was run, and none
compares policies with each other:

  full        greedy answers with the full cache that are right
  oracle      greedy runs that stay the same, token for token, with 10 % of their own length kept for what will be read
  semantic    the same with the live set that the text itself gives (research.tasks.live_set): at least so many are right
  foreseen    recall of SnapKV's rule (window 8) over that of the oracle, with 25 % of the mean length
  sinks       by how much recall grows when the last tokens make room for the first 4, with 25 % of the mean length
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jkv.analysis.recall import POWERS, Text, attention_received, follows, keep_what_is_read, recall, trace_of
from jkv.checkpoints import loading as checkpoint
from jkv.evaluation.held_out import solve
from jkv.limits import parse
from jkv.model.params import Model
from jkv.policies import full, snap_kv, streaming_llm
from jkv.reports import about, markdown, write
from jkv.statistics import bootstrap, wilson
from research.tasks import live_set
from research.tasks.problems import GATE_SEED, problems_of

SHARE, RECALL_SHARE, INTERVAL, RECENT = 0.10, 0.25, 16, 1


@dataclasses.dataclass(frozen=True)
class Criterion:
    """One figure, its 95 % interval and the least that passes."""

    name: str
    value: float
    low: float
    high: float
    least: float

    @property
    def passed(self) -> bool:
        """Whether the figure reaches what was asked."""
        return self.value >= self.least


def share_criterion(name: str, right: np.ndarray, least: float) -> Criterion:
    """A criterion on a share of problems."""
    return Criterion(name, float(np.mean(right)), *wilson(int(np.sum(right)), len(right)), least)


def mean_criterion(name: str, values: np.ndarray, least: float) -> Criterion:
    """A criterion on a mean over texts."""
    return Criterion(name, float(values.mean()), *bootstrap(values), least)


def measure(model: Model, num_problems: int, num_texts: int, **settings: Any) -> tuple[list[Criterion], dict[str, Any]]:
    """Every criterion, and figures that explain them.

    `num_problems` are solved with the full cache; the runs of the first `num_texts` are the texts of the other criteria.
    """
    out, right = solve(model, problems_of(model.tokenizer, num_problems, GATE_SEED), full(), **settings)
    texts: list[Text] = [
        (out.prompts[i].tolist(), out.tokens[i, : out.lengths[i]].tolist()) for i in range(min(num_texts, num_problems))
    ]
    tokens = [model.tokenizer.convert_ids_to_tokens([*prompt, *rest]) for prompt, rest in texts]
    shares = [live_set.live_share(names, len(prompt)) for names, (prompt, _) in zip(tokens, texts, strict=True)]
    same = {"oracle": follows_oracle(model, texts)}
    for name in ("first", "latest"):
        same[name] = follows_live_set(model, texts, tokens, is_latest=name == "latest")
    best, recalled = recalls(model, texts, **settings)
    criteria = [
        share_criterion("full", np.array(right), 0.97),
        share_criterion("oracle", same["oracle"], 0.95),
        share_criterion("semantic", same["first"], 0.90),
        mean_criterion("foreseen", recalled["snap_kv"] / best, 0.8),
        mean_criterion("sinks", recalled["sinks"] - recalled["recency"], 0.1),
    ]
    figures = {
        "texts": len(texts),
        "mean length": float(np.mean([len(prompt) + len(rest) for prompt, rest in texts])),
        "live share, mean": float(np.mean(shares)),
        "live share, largest": float(np.max(shares)),
        "semantic, latest statements": float(same["latest"].mean()),
        "recall of the oracle": float(best.mean()),
        **{f"recall, {name}": float(values.mean()) for name, values in recalled.items()},
    }
    return criteria, figures


def run_with(model: Model, texts: list[Text], drop: Callable[[int], np.ndarray]) -> np.ndarray:
    """Whether each text stays the same, token for token, if its tokens are dropped as `drop` has it: ends `[L, K, T]`."""
    return np.array(
        [follows(model.params, [*prompt, *rest], len(prompt), trace_of(drop(i))) for i, (prompt, rest) in enumerate(texts)]
    )


def follows_oracle(model: Model, texts: list[Text]) -> np.ndarray:
    """Which texts stay the same if each layer and KV head keeps what later queries read most (attention squared)."""

    def drop(i: int) -> np.ndarray:
        prompt, rest = texts[i]
        budget = round(SHARE * (len(prompt) + len(rest)))
        layers = attention_received(model.params, [*prompt, *rest])
        return np.stack([keep_what_is_read(layer[len(POWERS) - 1], len(prompt), budget, INTERVAL, RECENT) for layer in layers])

    return run_with(model, texts, drop)


def follows_live_set(model: Model, texts: list[Text], tokens: list[list[str]], is_latest: bool) -> np.ndarray:
    """Which texts stay the same if every layer and KV head keeps sinks, the live set and the last tokens."""
    config = model.config

    def drop(i: int) -> np.ndarray:
        live = live_set.live_slots(tokens[i], is_latest)
        end = live_set.keep_live(live, len(texts[i][0]), round(SHARE * len(tokens[i])), INTERVAL)
        return np.broadcast_to(end, (config.num_layers, config.num_kv_heads, len(end)))

    return run_with(model, texts, drop)


def recalls(model: Model, texts: list[Text], **settings: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The recall of the oracle on each text, and that of SnapKV's rule and of recency with 4 first tokens and without."""
    budget = round(RECALL_SHARE * float(np.mean([len(prompt) + len(rest) for prompt, rest in texts])))
    policies = [
        snap_kv(budget, interval=INTERVAL, window=8),
        streaming_llm(budget, interval=INTERVAL, sinks=0),
        streaming_llm(budget, interval=INTERVAL, sinks=4),
    ]
    best, *others = recall(model, texts, policies, interval=INTERVAL, recent=RECENT, **settings)
    return best.recall, {name: one.recall for name, one in zip(("snap_kv", "recency", "sinks"), others, strict=True)}


def table(criteria: list[Criterion]) -> str:
    """One line for each criterion."""
    rows = [
        (one.name, f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]", f"{one.least:.2f}", "pass" if one.passed else "fail")
        for one in criteria
    ]
    return markdown(("criterion", "figure", "least", "result"), rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a shipped model or a checkpoint folder")
    parser.add_argument("--problems", type=int, default=200, help="solved with the full cache (default %(default)s)")
    parser.add_argument("--texts", type=int, default=60, help="runs for the other criteria (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for the table and the JSON")
    options = parse(parser)
    criteria, figures = measure(checkpoint.load(options.model), options.problems, options.texts)
    lines = "\n".join([table(criteria), "", *(f"{name}: {value:.4g}" for name, value in figures.items())])
    print(lines)
    if options.out:
        each = [dataclasses.asdict(one) | {"passed": one.passed} for one in criteria]
        record = {"about": about("python -m research.tasks.gate"), "criteria": each, "figures": figures}
        write(f"gate-{Path(options.model).name}", json.loads(json.dumps(record)), lines, options.out)


if __name__ == "__main__":
    main()
