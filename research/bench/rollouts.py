"""Rollouts a second beside tunix's own sampler: the same weights, prompts, groups, lengths and machine, in turns.

Both are driven as tunix drives a rollout engine: texts in, each repeated for its group; tokens, texts and log-probabilities
out. Lengths are the same on both sides: a model that counts down (`research.bench.countdown`) ends every text where it should,
and tiny-reasoner, greedy, answers problems of its own. tunix decodes until the longest of a call is done, over a dense cache of
prompt and limit; each side takes the number of rows at a time that a trial in the same run found fastest.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jkv.bench.fixtures import usual_page_size
from jkv.bench.rounds import GREEDY, in_turns, median_and_spread, timer
from jkv.checkpoints import loading as checkpoint
from jkv.checks import install
from jkv.engine.engine import Engine
from jkv.engine.memory import most_pages_of, num_row_pages
from jkv.evaluation.held_out import held_out
from jkv.eviction import Policy
from jkv.model.params import ModelConfig, Params
from jkv.policies import full, r_kv
from jkv.reports import Report, digits, footnote, markdown
from jkv.rollout import Rollout
from research.bench.countdown import Numbers, countdown, prompts_for, skewed

NARROW = {"width": 256, "num_layers": 4, "num_query_heads": 4, "num_kv_heads": 2, "head_size": 64, "mlp_width": 512}
WIDE = {"width": 512, "num_layers": 8, "num_query_heads": 8, "num_kv_heads": 4, "head_size": 64, "mlp_width": 2048}
SHAPES: dict[str, dict[str, Any]] = {"narrow": NARROW, "wide": WIDE}


@dataclasses.dataclass(frozen=True)
class Load:
    """Texts to complete, each `samples` times, and how long what follows each is."""

    name: str
    prompts: list[str]
    lengths: list[int] | None  # with the end token; None where the model decides
    samples: int
    width: int  # tokens of the longest prompt
    limit: int  # tokens of the longest completion
    is_greedy: bool = False

    @property
    def texts(self) -> list[str]:
        """Each prompt as often as it is to be completed, as tunix hands them out."""
        return [prompt for prompt in self.prompts for _ in range(self.samples)]


@dataclasses.dataclass(frozen=True)
class Ran:
    """What one run of a load took."""

    seconds: float
    compile_seconds: float
    tokens: list[list[int]]  # without end tokens, which tunix drops
    kv_bytes: int  # at the peak


def check_installed() -> None:
    """Refuses to compare with what is not there."""
    if importlib.util.find_spec("tunix") is None:
        raise ValueError(f"tunix cannot take part: not installed. Run: {install('tunix')} (jax below 0.11).")


def tunix_model(params: Params) -> Any:
    """A tunix Qwen2 model that holds these very arrays, in its own layout."""
    from flax import nnx
    from tunix.models.qwen2 import model as qwen2

    from jkv.integrations.tunix.weights import PATHS

    config = params.config
    model = qwen2.Qwen2(
        qwen2.ModelConfig(
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            embed_dim=config.width,
            hidden_dim=config.mlp_width,
            num_heads=config.num_query_heads,
            head_dim=config.head_size,
            num_kv_heads=config.num_kv_heads,
            rope_theta=int(config.rope_theta),
            norm_eps=config.norm_epsilon,
            use_tied_embedding=config.tie_embeddings,
        ),
        rngs=nnx.Rngs(0),
    )
    held = {PATHS[name]: getattr(params, name) for name in ("embedding", "final_norm", "unembedding")}
    for i, layer in enumerate(params.layers):
        held |= {f"layers.{i}.{path}": getattr(layer, name) for name, path in PATHS.items() if hasattr(layer, name)}
    state = nnx.state(model, nnx.Param)
    for path, leaf in nnx.to_flat_state(state):
        leaf.set_value(held[".".join(map(str, path))].reshape(leaf.get_value().shape))
    nnx.update(model, state)
    return model


def settings_of(load: Load) -> Any:
    """Tunix's configuration of a load."""
    from tunix.rl.rollout.base_rollout import RolloutConfig

    return RolloutConfig(
        max_tokens_to_generate=load.limit,
        max_prompt_length=load.width,
        temperature=1.0,
        top_p=None if load.is_greedy else 1.0,
        kv_cache_size=load.width + load.limit,
        return_logprobs=True,
    )


def tunix_runner(model: Any, tokenizer: Any, load: Load, rows: int) -> Callable[[], Ran]:
    """Runs a load through tunix's own sampler, `rows` texts a call."""
    from tunix.rl.rollout.base_rollout import CacheConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    settings, config = settings_of(load), model.config
    cache = CacheConfig(settings.kv_cache_size, config.num_layers, config.num_kv_heads, config.head_dim)
    rollout, rows = VanillaRollout(model, tokenizer, cache), min(rows, len(load.texts))
    prompt = np.zeros((rows, load.width), np.int32)
    drawing = {"forbidden_token_ids": None, "temperature": 1.0, "top_p": 1.0, "top_k": None, "beam_size": None}
    state = rollout._sampler.init_sample_state(
        prompt, settings.kv_cache_size, include_logits=False, seed=jax.random.PRNGKey(0), **drawing
    )
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    del state
    return lambda: timed(rollout, load, rows, settings, tokenizer.eos_id(), lambda: held)


def jkv_runner(model: Any, tokenizer: Any, load: Load, rows: int, policy: Policy) -> Callable[[], Ran]:
    """Runs a load through `JkvRollout`, `rows` of it at a time."""
    from tunix.generate.tokenizer_adapter import TokenizerAdapter

    from jkv.integrations.tunix import JkvRollout

    settings = settings_of(load)
    sizes: dict[str, Any] = {"max_running": rows, "page_size": usual_page_size(), "n": load.samples}
    rollout = JkvRollout(model, TokenizerAdapter(tokenizer), None, settings, policy=policy, **sizes)

    def held() -> int:
        assert rollout.last is not None
        return rollout.last.stats.peak_kv_bytes

    return lambda: timed(rollout, load, len(load.texts), settings, tokenizer.eos_id(), held)


def timed(rollout: Any, load: Load, rows: int, settings: Any, end: int, held: Callable[[], int]) -> Ran:
    """All texts of a load, `rows` a call; checks that each ended where it should."""
    texts, outputs = load.texts, []
    with timer() as seconds:
        for start in range(0, len(texts), rows):
            outputs += rollout.generate(texts[start : start + rows], settings).tokens
    tokens = [[token for token in row.tolist() if token != end] for row in outputs]
    if load.lengths is not None:
        wanted = [length - 1 for length in load.lengths for _ in range(load.samples)]
        assert [len(row) for row in tokens] == wanted, "a text did not end where it should"
    return Ran(seconds.running, seconds.compiling, tokens, held())


def largest_group(params: Params, load: Load, policy: Policy, num_bytes: int) -> int:
    """The most samples of one prompt that run at once, to the limit, in a memory, by the arrays of real pools; at least 1."""
    page_size = usual_page_size()
    row = most_pages_of(params.config, policy, load.width, load.limit, page_size)
    prompt = num_row_pages(params, load.width, page_size)
    limits: dict[str, Any] = {"max_prompt_tokens": load.width, "max_new_tokens": load.limit}

    def pool_bytes(n: int) -> int:
        rollout = Rollout(params, policy, **limits, n=n, max_running=n, page_size=page_size, num_pages=prompt + n * row)
        engine = rollout.engine
        assert isinstance(engine, Engine)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.state.cache))
        rollout.sleep()
        return size

    low, high = 1, 2  # `high` does not fit
    while pool_bytes(high) <= num_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pool_bytes(middle) <= num_bytes else (low, middle)
    return low


def fastest(runners: Mapping[int, Callable[[], Callable[[], Ran]]]) -> tuple[int, Callable[[], Ran], dict[int, float], float]:
    """The number of rows that takes least, its runner, what each took, and the seconds that the chosen one compiled."""
    taken, ready, compiled = {}, {}, {}
    for rows, make in runners.items():
        run = make()
        compiled[rows] = run().compile_seconds
        taken[rows], ready[rows] = run().seconds, run
    best = min(taken, key=lambda rows: taken[rows])
    return best, ready[best], taken, compiled[best]


def measure(
    shapes: Mapping[str, Mapping[str, Any]],
    prompts: int,
    samples: int,
    width: int,
    mean: int,
    limit: int,
    budget: int,
    interval: int,
    rows: Sequence[int],
    problems: int,
    rounds: int,
    report: Report = print,
) -> dict[str, Any]:
    """Every shape with lengths that are skewed and with equal ones, and tiny-reasoner on `problems` of its own.

    Raises:
      ValueError: tunix is not installed.
    """
    check_installed()
    policies = {"full": full(), "r_kv": r_kv(budget=budget, interval=interval)}
    records: list[dict[str, Any]] = []
    for name, sizes in shapes.items():
        config = ModelConfig("qwen2", limit + 64, max_positions=4 * limit, qkv_bias=True, **sizes)
        mixes = {"skewed": skewed(prompts, mean, limit), "equal": [mean] * prompts}
        for mix, lengths in mixes.items():
            texts = prompts_for(lengths, width, config.vocab_size)
            load = Load(mix, texts, lengths, samples, width, max(lengths))
            records += compare(name, countdown(config), Numbers(), load, policies, rows, rounds, report)
    if problems:
        records += compare(*reasoner(problems, samples, policies["full"]), policies, rows, rounds, report)
    given = {"prompts": prompts, "samples": samples, "width": width, "mean": mean, "limit": limit, "problems": problems}
    return given | {"budget": budget, "interval": interval, "rounds": rounds, "shapes": dict(shapes), "records": records}


def reasoner(problems: int, samples: int, policy: Policy) -> tuple[str, Params, Numbers, Load]:
    """tiny-reasoner on some of its problems; the limit is what its longest answer takes."""
    from jkv.engine.results import complete
    from jkv.generate import generate

    model = checkpoint.load("tiny-reasoner", joined=False)
    ids = [[int(token) for token in model.tokenizer.encode(problem.prompt)] for problem in held_out(problems)]
    lengths = complete(generate(model, ids, policy=policy, sampling=GREEDY, max_new_tokens=1024, progress=False)).lengths
    texts = [" ".join(map(str, prompt)) for prompt in ids]
    unused = max(set(range(model.config.vocab_size)) - {token for prompt in ids for token in prompt})
    tokenizer = Numbers(pad=unused, end=model.config.end_ids[0])
    load = Load("own answers", texts, None, samples, max(map(len, ids)), int(lengths.max()), is_greedy=True)
    return "tiny-reasoner", model.params, tokenizer, load


def compare(
    name: str,
    params: Params,
    tokenizer: Numbers,
    load: Load,
    policies: Mapping[str, Policy],
    rows: Sequence[int],
    rounds: int,
    report: Report,
) -> list[dict[str, Any]]:
    """Figures of tunix's sampler and of every policy on one load."""
    model, makers = tunix_model(params), {}
    makers["tunix"] = {
        count: lambda count=count: tunix_runner(model, tokenizer, load, count) for count in (*rows, len(load.texts))
    }
    for policy in policies:
        makers[policy] = {
            count: lambda count=count, policy=policies[policy]: jkv_runner(model, tokenizer, load, count, policy)
            for count in rows
        }
    chosen = {who: fastest(each) for who, each in makers.items()}
    results = in_turns({who: run for who, (_, run, *_) in chosen.items()}, rounds, warm_up=False)
    expected = results["tunix"][0].tokens
    memory = results["tunix"][0].kv_bytes
    base, records = 0.0, []
    for who, runs in results.items():
        best, _, taken, compiled = chosen[who]
        rate, spread = median_and_spread([len(load.texts) / run.seconds for run in runs])
        base = base or rate
        num_tokens = sum(len(row) + 1 for row in runs[0].tokens)
        fits = best if who == "tunix" else largest_group(params, load, policies[who], memory)
        records.append(
            {"model": name, "mix": load.name, "contender": who, "rows": best}
            | {"rollouts": len(load.texts), "tokens": num_tokens, "longest": max(len(row) + 1 for row in runs[0].tokens)}
            | {"rollouts_per_second": digits(rate), "spread": spread, "ratio": digits(rate / base)}
            | {"tokens_per_second": digits(rate * num_tokens / len(load.texts))}
            | {"peak_kv_bytes": max(run.kv_bytes for run in runs), "memory": memory, "largest_n": fits}
            | {"compile_seconds": digits(compiled), "trials": {str(count): digits(value) for count, value in taken.items()}}
            | {"same_tokens": digits(float(np.mean([a == b for a, b in zip(runs[0].tokens, expected, strict=True)])))}
        )
        report(records[-1])
    return records


COLUMNS = (
    "model",
    "lengths",
    "sampler",
    "rollouts/s",
    "against tunix",
    "tokens/s",
    "rows",
    "peak cache MB",
    "largest n in tunix's memory",
    "compiling s",
    "same tokens",
)


def table(record: dict[str, Any]) -> str:
    """Samplers by model and mix of lengths."""
    rows = [
        (
            one["model"],
            f"{one['mix']}, {one['tokens'] / one['rollouts']:.0f} mean, {one['longest']} longest",
            "tunix" if one["contender"] == "tunix" else f"jkv `{one['contender']}`",
            f"{one['rollouts_per_second']:.2f} ± {one['spread'] / 2:.0%}",
            f"{one['ratio']:.2f}",
            f"{one['tokens_per_second']:,.0f}",
            one["rows"],
            f"{one['peak_kv_bytes'] / 1e6:.1f}",
            f"{one['largest_n']:,}",
            f"{one['compile_seconds']:.0f}",
            f"{one['same_tokens']:.0%}",
        )
        for one in record["records"]
    ]
    shapes = "; ".join(
        f"{name}: {sizes['num_layers']} layers of width {sizes['width']}" for name, sizes in record["shapes"].items()
    )
    caption = (
        f"{record['prompts']} prompts of {record['width']} tokens, {record['samples']} samples of each ({shapes}; weights that "
        f"count down, so that lengths are the same everywhere), and tiny-reasoner's greedy answers to {record['problems']} "
        f"problems. `r_kv` keeps {record['budget']} slots, every {record['interval']} tokens. tunix's own sampler has a dense "
        "cache of prompt and longest completion for each row of a call; the largest n is of samples of one prompt at once in "
        "those bytes. Rows at a time are the fastest that each was tried with. Compiling is apart."
    )
    return f"{caption}\n\n{markdown(COLUMNS, rows)}\n\n{footnote(record)}"
