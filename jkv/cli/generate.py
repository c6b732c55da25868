"""`jkv generate` decodes one prompt or a file of them."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jkv.cache import DEFAULT_PAGE_SIZE
from jkv.cli.inputs import LOOKS, check_target, read_prompts, read_settings


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser("generate", help="complete prompts", description="Completes prompts.", **LOOKS)
    command.set_defaults(run=run)
    command.add_argument("prompt", nargs="?", help="the prompt; or use --file")
    command.add_argument(
        "--file", type=Path, help='prompts: one a line; or in a .jsonl file objects with a "prompt" (text or token ids)'
    )
    command.add_argument(
        "--model",
        default="tiny-reasoner",
        help="a shipped model (default: tiny-reasoner), a checkpoint folder, a GGUF file, or a hub name",
    )
    command.add_argument("--policy", default="full", help="how the cache stays small (default: full); see `jkv policies`")
    command.add_argument("--budget", type=int, help="slots kept in each layer and KV head")
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any other setting of the policy; may be repeated"
    )
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    command.add_argument("--top-p", type=float, default=1.0, help="1 keeps all tokens (default)")
    command.add_argument("--top-k", type=int, default=0, help="0 keeps all tokens (default)")
    command.add_argument("--seed", type=int, help="of the random draws; default: fresh, and reported")
    command.add_argument("--max-new-tokens", type=int, help="default: 1024, or what the model's positions leave")
    command.add_argument("-n", type=int, default=1, help="samples of each prompt (default 1)")
    command.add_argument(
        "--stop-strings", action="append", default=[], metavar="TEXT", help="a text that ends a completion; may be repeated"
    )
    command.add_argument("--page-size", type=int, default=DEFAULT_PAGE_SIZE, help="slots of a page (default %(default)s)")
    command.add_argument("--max-running", type=int, help="rows decoded together; default: up to 32")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a picture of what the cache kept over time here")
    command.add_argument("--out", metavar="FILE", help="write JSON lines, one a sample, here; - is standard output")


def run(options: argparse.Namespace) -> int:
    """Generates, then prints texts or writes JSON lines."""
    prompts = read_prompts(options.prompt, options.file)
    if options.out not in (None, "-"):
        check_target(Path(options.out))
    if options.html:
        check_target(options.html, "--html")
        if options.out and Path(options.out).absolute() == options.html.absolute():
            raise ValueError(f"--html and --out must be two files; got {options.html} for both.")
    from jkv import viz
    from jkv.generate import generate
    from jkv.model import checkpoint
    from jkv.model.sampling import Sampling
    from jkv.policies import make
    from jkv.reports import json_lines, write_text

    policy = make(options.policy, read_settings(options.budget, options.set))
    sampling = Sampling(options.temperature, options.top_p, options.top_k, options.seed)
    model = checkpoint.load(options.model)
    out = generate(
        model,
        prompts,
        policy=policy,
        sampling=sampling,
        max_new_tokens=options.max_new_tokens,
        n=options.n,
        stop_strings=options.stop_strings,
        page_size=options.page_size,
        max_running=options.max_running,
        return_trace=options.html is not None,
    )
    if options.html:
        write_text(options.html, viz.kept(out, sample=None, title=f"Kept tokens, {options.policy}").html)
    if options.out:
        text = json_lines(make_records(prompts, options.n, out, model.tokenizer))
        if options.out == "-":
            sys.stdout.write(text)
        else:
            write_text(options.out, text)
    else:
        for i in range(len(out.lengths)):
            if len(out.lengths) > 1:
                print(f"--- {for_terminal(str(prompts[i // options.n]))}")
            print(for_terminal(out.text[i]) if out.text else out.tokens[i, : out.lengths[i]].tolist())
    print(summarise(policy, out), file=sys.stderr)
    return 130 if "cancelled" in out.finish_reason else 0


def for_terminal(text: str) -> str:
    """A text for the standard output; a terminal gets none of the codes that would move its cursor or set its title."""
    from jkv.reports import visible

    return visible(text.expandtabs()) if sys.stdout.isatty() else text


def make_records(prompts: Sequence[Any], n: int, out: Any, tokenizer: Any) -> Iterable[dict[str, Any]]:
    """One record a sample."""
    for i, length in enumerate(out.lengths.tolist()):
        yield {
            "prompt": prompts[i // n],
            "sample": i % n,
            "text": out.text[i] if tokenizer is not None else None,
            "tokens": out.tokens[i, :length].tolist(),
            "logprobs": [round(x, 6) for x in out.logprobs[i, :length].tolist()],
            "finish_reason": out.finish_reason[i],
            "seed": out.stats.seed,
        }


def summarise(policy: Any, out: Any) -> str:
    """One line of statistics."""
    s = out.stats
    saved = 1 - s.peak_kv_bytes / max(s.dense_kv_bytes, 1)
    share = f" ({saved:.0%} saved)" if saved > 0 else ""  # a short text fills its last pages in part
    return (
        f"[{policy.name}] {s.generated_tokens} tokens, finished by {'/'.join(sorted(set(out.finish_reason)))}; "
        f"peak KV {s.peak_kv_bytes / 1024:.0f} KiB of a full cache's {s.dense_kv_bytes / 1024:.0f}{share}; "
        f"{s.evicted:.0f} tokens evicted in {s.compactions} compactions; "
        + (f"{s.shared} tokens shared; " if s.sharing is not None else "")
        + f"{s.tokens_per_second:.0f} tokens/s; "
        f"compiled in {s.compile_seconds:.1f} s; seed {s.seed}"
    )
