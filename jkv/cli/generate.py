"""`jkv generate` decodes one prompt or a file of them."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jkv.checks import counted
from jkv.cli.errors import discard_output
from jkv.cli.inputs import LOOKS, check_target, load_model, read_prompts, sampling_of
from jkv.cli.options import ENGINE, MAX_RUNNING, PARSE_SPECIAL, Option, add_options, read_settings
from jkv.errors import refused

OPTIONS = (
    Option("file", str, None, 'prompts: one a line; or in a .jsonl file objects with a "prompt" (text or token ids)', Path),
    Option("chat", bool, False, "the prompt is a user's message; the model's chat template is used"),
    PARSE_SPECIAL,
    *ENGINE,
    Option("n", int, 1, "samples of each prompt"),
    Option(
        "stop_strings", list, [], "a text that ends a completion; may be repeated", str, {"action": "append", "metavar": "TEXT"}
    ),
    dataclasses.replace(MAX_RUNNING, default=None, help="rows decoded together; default: up to 32"),
    Option("html", str, None, "write a picture of what the cache kept over time here", Path, {"metavar": "FILE"}),
    Option("out", str, None, "write JSON lines, one a sample, here; - is standard output", more={"metavar": "FILE"}),
)


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser("generate", help="complete prompts", description="Completes prompts.", **LOOKS)
    command.set_defaults(run=run)
    command.add_argument("prompt", nargs="?", help="the prompt; or use --file")
    add_options(command, OPTIONS)


def run(options: argparse.Namespace) -> int:
    """Generates, then prints texts or writes JSON lines."""
    prompts = read_prompts(options.prompt, options.file)
    if options.out not in (None, "-"):
        check_target(Path(options.out))
    if options.html:
        check_target(options.html, "--html")
        if options.out and Path(options.out).absolute() == options.html.absolute():
            raise refused(f"--html and --out must be two files; got {options.html} for both.", html="conflict")
    from jkv import viz
    from jkv.engine.drafters import drafter_named
    from jkv.engine.results import FAILED
    from jkv.generate import generate
    from jkv.policies import make
    from jkv.reports import json_lines, write_text

    policy = make(options.policy, read_settings(options.budget, options.set))
    model = load_model(options.model, vars(options))
    streams = options.out is None and len(prompts) * options.n == 1
    with shown_text(streams and model.tokenizer is not None) as show:
        out = generate(
            model,
            [[{"role": "user", "content": prompt}] for prompt in prompts] if options.chat else prompts,
            policy=policy,
            sampling=sampling_of(options, model.sampling),
            on_tokens=show,
            progress=False if streams else None,
            parse_special=options.parse_special,
            max_new_tokens=options.max_new_tokens,
            n=options.n,
            stop_strings=options.stop_strings,
            page_size=options.page_size,
            kv_dtype=options.kv_dtype,
            max_running=options.max_running,
            kernels=options.kernels,
            speculate=drafter_named(options.speculate, options.drafts),
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
    elif not streams or model.tokenizer is None:
        for i in range(len(out.lengths)):
            if len(out.lengths) > 1:
                print(f"--- {for_terminal(str(prompts[i // options.n]))}")
            print(for_terminal(out.text[i]) if out.text else out.tokens[i, : out.lengths[i]].tolist())
    print(summarise(policy, out), file=sys.stderr)
    if "cancelled" in out.finish_reason:
        return 130
    return 1 if any(reason in FAILED for reason in out.finish_reason) else 0


@contextlib.contextmanager
def shown_text(streams: bool = True) -> Iterator[Callable[[Any], None] | None]:
    """A callback that prints a sample's new text, or None. Until the first text, a terminal shows why there is none yet."""
    waits = streams and sys.stderr.isatty()

    def clear() -> None:
        nonlocal waits
        if waits:
            waits = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(event: Any) -> None:
        clear()
        show_text(event)

    if waits:
        print("jkv: prefill; the first run of a model compiles its programs ...", end="", file=sys.stderr, flush=True)
    try:
        yield show if streams else None
    finally:
        clear()


def show_text(event: Any) -> None:
    """Prints a sample's new text, and ends the line before anything else is said."""
    try:
        sys.stdout.write(for_terminal(event.text or "") + "\n" * bool(event.finish_reason))
        sys.stdout.flush()
    except BrokenPipeError:  # `jkv generate ... | head`
        discard_output()


def for_terminal(text: str) -> str:
    """A text for the standard output; a terminal gets none of the codes that would move its cursor or set its title."""
    from jkv.reports import visible

    return visible(text.replace("\t", "    ")) if sys.stdout.isatty() else text


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
    reasons = "/".join(sorted(set(out.finish_reason)))
    tokens = counted(out.stats.generated_tokens, "token")
    return f"[{policy.name}] {tokens}, finished by {reasons}; {out.stats.summary}"
