"""`jkv chat` talks with a model over several turns."""

import argparse
import dataclasses
import sys
from typing import Any

from jkv.checks import described
from jkv.cli import remote_chat
from jkv.cli.inputs import LOOKS, load_model, read_line, sampling_of
from jkv.cli.options import ENGINE, MODEL, ONE_MESH, PARSE_SPECIAL, POLICY, Option, add_options, read_settings
from jkv.errors import refused

BOUNDED_CONTEXT, OPEN_CONTEXT = 8_192, 32_768  # slots

OWN = {  # in place of every engine's options; a server has its own model and policy
    "model": dataclasses.replace(MODEL, default=None, help=MODEL.line),
    "policy": dataclasses.replace(POLICY, default=None, help=POLICY.line),
    "mesh": ONE_MESH,
}
OPTIONS = (
    *(OWN.get(option.name, option) for option in ENGINE),
    Option(
        "url",
        str,
        None,
        "of a server to talk with, such as that of `jkv serve`; its key is in JKV_API_KEY, and --model is by default the first "
        "that it lists",
    ),
    Option("system", str, None, "the system's message", more={"metavar": "TEXT"}),
    PARSE_SPECIAL,
    Option(
        "context",
        int,
        None,
        f"slots of the cache in each layer and KV head, which the conversation must fit; default: {BOUNDED_CONTEXT} with a "
        f"fixed budget, else {OPEN_CONTEXT}, or the model's positions if fewer",
    ),
)


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "chat",
        help="talk with a model",
        description="Talks with a chat model over several turns. An empty line is ignored, /new begins a new conversation, and "
        "/exit, Ctrl-D or Ctrl-C at the prompt ends it. Ctrl-C during an answer ends the answer.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    add_options(command, OPTIONS)


def run(options: argparse.Namespace) -> int:
    """Reads messages and prints answers until the input ends."""
    if options.url is not None:
        return remote_chat.run(options)
    from jkv.checkpoints.chat_template import has_chat_template
    from jkv.cli.generate import shown_text, summarise
    from jkv.engine.drafters import drafter_named
    from jkv.engine.engine import Engine
    from jkv.generate import log_programs
    from jkv.policies import make

    policy = make(options.policy or POLICY.default, read_settings(options.budget, options.set))
    name = options.model or MODEL.default
    model = load_model(name, vars(options), replicas=False)
    if not has_chat_template(model.tokenizer):
        raise refused(
            f"chat needs a model with a chat template; {name} has none. Name "
            "one, such as --model smollm2-135m (`jkv models` lists them), or use jkv generate.",
            model="unsupported",
        )
    context = options.context or (BOUNDED_CONTEXT if policy.is_bounded else OPEN_CONTEXT)
    engine = Engine(
        model,
        max_running=1,
        max_slots=min(context, model.config.max_positions),
        page_size=options.page_size,
        kv_dtype=options.kv_dtype,
        policies=[policy],
        kernels=options.kernels,
        speculate=drafter_named(options.speculate, options.drafts),
    )
    sampling = sampling_of(options, model.sampling)
    begin = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = list(begin)
    print(f"{model.name}, policy {policy.name}" + (f", budget {policy.budget}" if policy.budget else ""), file=sys.stderr)
    while (line := read_line()) is not None:
        if line == "/new":
            messages = list(begin)
        elif line:
            messages.append({"role": "user", "content": line})
            engine.reset_stats()
            asked = {"max_new_tokens": options.max_new_tokens, "parse_special": options.parse_special}
            refusal = None
            with shown_text() as show:
                try:
                    ticket = engine.submit(messages, policy, sampling, on_tokens=show, **asked)
                except ValueError as error:  # a conversation that is too long, or that the template refuses
                    refusal = error
                else:
                    engine.run()
            if refusal is not None:
                messages.pop()
                print(f"jkv: {refusal} /new begins a new conversation.", file=sys.stderr)
                continue
            out = engine.result(ticket)
            log_programs(engine.stats)
            assert out.text is not None
            if (error := out.samples[0].error) is not None:
                messages.pop()
                print(f"jkv: this answer failed: {described(error)}. It is left out of the conversation.", file=sys.stderr)
                continue
            messages.append({"role": "assistant", "content": out.text[0]})
            print(summarise(policy, out), file=sys.stderr)
    return 0
