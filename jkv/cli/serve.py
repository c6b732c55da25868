"""`jkv serve` answers OpenAI's HTTP requests with a model whose cache stays small."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jkv.checks import install, shown, words
from jkv.cli.inputs import LOOKS, load_model
from jkv.cli.options import (
    BUDGET,
    DEVICE_PAGE_SIZE,
    DRAFTS,
    DTYPE,
    KERNELS,
    KV_DTYPE,
    MAX_POSITIONS,
    MAX_RUNNING,
    ONE_MESH,
    PARSE_SPECIAL,
    SET,
    SPECULATE,
    VERBOSE,
    WEIGHT_DTYPE,
    Option,
    add_options,
    number_or_text,
    options_of,
    read_settings,
)
from jkv.errors import refused
from jkv.serving.options import ServerOptions

OPEN_CONTEXT = 32_768  # slots
KEY, TRAINER_KEY = "JKV_API_KEY", "JKV_TRAINER_KEY"  # the environment variables
LOCAL = ("127.0.0.1", "::1", "localhost")
MOST_STOP_IDS = 32  # of a request
PREFIX_PIECE = 64  # tokens: agents begin their prompts alike with a few hundred
RANK = 16  # of adapters that are loaded later
SERVER = (
    "name",
    "policy",
    "tool_form",
    "abort_reason",
    "max_waiting",
    "max_conversations",
    "conversation_seconds",
    "time_limit",
    "ping_seconds",
)  # fields of its options

OPTIONS = (
    *options_of(ServerOptions, SERVER),
    BUDGET,
    SET,
    Option(
        "policies",
        list,
        [],
        "more policies that requests may name: those that need more than the last 8 queries, such as h2o,quest, and your own, "
        "as module:name",
        words,
        {"metavar": "NAMES"},
    ),
    Option(
        "adapter",
        list,
        [],
        "a low-rank adapter of peft, which requests choose by its name as their model; may be repeated",
        str,
        {"action": "append", "metavar": "NAME=FOLDER"},
    ),
    Option("max_adapters", int, None, "places for adapters, which a trainer may load; default: one for each --adapter"),
    Option("adapter_rank", int, None, f"the highest rank of an adapter; default: the highest of --adapter, or {RANK}"),
    Option("allow_policies", list, [], "only these may be named; default: all", words, {"metavar": "NAMES"}),
    Option("host", str, "127.0.0.1", "where to listen; default: 127.0.0.1, this machine alone"),
    Option("port", int, 8000, "0 takes a free one"),
    Option("api_key", str, None, f"that clients must send; default: the variable {KEY}, or none", more={"metavar": "KEY"}),
    Option("key_file", str, None, "a file of more keys: lines of a name, for the log, and a key", Path, {"metavar": "FILE"}),
    Option(
        "hosts",
        list,
        [],
        "names under which clients may call the server, * for all; default: all, and at an address of this machine alone its "
        "own names, beside which those given come",
        words,
        {"metavar": "NAMES"},
    ),
    Option(
        "origins", list, [], "sites whose pages may call the server, such as https://example.com", words, {"metavar": "SITES"}
    ),
    Option(
        "priorities",
        list,
        [],
        "names of keys whose requests may set `priority`, * for all requests; default: none, and the field is ignored",
        words,
        {"metavar": "NAMES"},
    ),
    PARSE_SPECIAL,
    dataclasses.replace(MAX_RUNNING, default=None, help="rows decoded together; default: 8"),
    Option("drain", float, 30.0, "seconds for open requests after Ctrl-C"),
    Option("context", int, None, f"slots that a request may fill; default: the model's positions, up to {OPEN_CONTEXT}"),
    Option("kv_memory", str, None, 'bytes of the pool, or "auto" for the free memory; default: full rows', number_or_text),
    Option("chunk", int, 16, "decode steps between two events of a stream"),
    Option("first_chunk", int, 2, "decode steps until the first event of a stream; more cost a busy server less"),
    Option(
        "largest_prefill",
        int,
        None,
        "tokens of the largest prefill program: 16, 64 or 128 on a CPU, 16, 64, 256 or 1024 where kernels run; default: the "
        "most",
        more={"metavar": "TOKENS"},
    ),
    DEVICE_PAGE_SIZE,
    DTYPE,
    WEIGHT_DTYPE,
    MAX_POSITIONS,
    ONE_MESH,
    KV_DTYPE,
    SPECULATE,
    DRAFTS,
    Option(
        "no_prefix_cache",
        bool,
        False,
        "keep no prompt after its request; by default prompts stay in pages that nothing else needs",
    ),
    Option(
        "prefix_piece",
        int,
        PREFIX_PIECE,
        f"tokens of the pieces in which prompts are kept; default: {PREFIX_PIECE}. With as many as the largest prefill program "
        "has, answers are the same bit for bit whether a prompt was kept or not",
        more={"metavar": "TOKENS"},
    ),
    Option("trainer", bool, False, "answer a trainer too: /generate, /update_weights, /load_lora_adapter, /sleep and others"),
    Option(
        "trainer_key",
        str,
        None,
        f"of these endpoints, which other keys do not open; default: the variable {TRAINER_KEY}",
        more={"metavar": "KEY"},
    ),
    Option(
        "weights_root",
        str,
        None,
        "the folder of the checkpoints and adapters that a trainer may load",
        Path,
        {"metavar": "DIR"},
    ),
    Option(
        "warm_up",
        str,
        "most",
        "compile before the first client what requests of the policy need; the first programs alone; or also what is for "
        "penalties, several samples and conversations",
        more={"choices": ("most", "first", "all")},
    ),
    KERNELS,
    VERBOSE,
)


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "serve",
        help="answer HTTP requests of OpenAI's clients",
        description="Serves a model at /v1/chat/completions and /v1/completions, until Ctrl-C or SIGTERM. A request may name a "
        "policy and a budget of its own.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    command.add_argument("model", help="a name of `jkv models`, a checkpoint folder, a GGUF file, or a hub name")
    add_options(command, OPTIONS)


def run(options: argparse.Namespace) -> int:
    """Serves until it is interrupted."""
    try:
        from jkv.serving.access import read_keys
        from jkv.serving.run import address_of, listen
        from jkv.serving.run import run as run_server
        from jkv.serving.trainer import TrainerOptions
    except ImportError as error:
        raise ValueError(f"serve needs starlette, uvicorn and prometheus-client; {error}. Run: {install('serve')}") from None
    import logging

    from jkv.checkpoints.adapters import highest_rank
    from jkv.engine.drafters import drafter_named
    from jkv.engine.engine import Engine
    from jkv.policies import has_budget, make, r_kv
    from jkv.policies.own import is_own
    from pallas_kernels.sealed import SEALED

    settings = read_settings(options.budget, options.set)
    more = [make(name, {"budget": options.budget or 1024} if has_budget(name) else {}) for name in options.policies]
    key = options.api_key or os.environ.get(KEY) or None
    keys = {} if options.key_file is None else read_keys(options.key_file)
    trainer_key = options.trainer_key or os.environ.get(TRAINER_KEY) or None
    check_trainer(options, trainer_key, has_keys=bool(key or keys))
    trainer = TrainerOptions(options.weights_root) if options.trainer else None
    server_options = ServerOptions(
        settings=settings,
        own=tuple(filter(is_own, options.policies)),
        allowed=tuple(options.allow_policies),
        parse_special=options.parse_special,
        api_key=key,
        api_keys=keys,
        trainer_key=trainer_key,
        hosts=tuple(options.hosts),
        origins=tuple(options.origins),
        priorities=tuple(options.priorities),
        **{name: getattr(options, name) for name in SERVER},
    )
    policy = make(server_options.policy, settings)
    adapters = read_adapters(options.adapter)
    place = listen(options.host, options.port)
    model = load_model(options.model, vars(options), replicas=False)
    if (own := server_options.name or model.name) in adapters:
        rule = f"--adapter must have another name than the model; got {own} for both. Rename either."
        raise refused(rule, adapter="conflict")
    highest = max((highest_rank(folder, model.params) for folder in adapters.values()), default=RANK)
    positions, is_sealed = model.config.max_positions, options.kv_dtype in SEALED
    engine = Engine(
        model,
        max_running=options.max_running,
        max_slots=min(options.context or OPEN_CONTEXT, positions),
        kv_memory=options.kv_memory,
        chunk=options.chunk,
        first_chunk=min(options.first_chunk, options.chunk),
        largest_prefill=options.largest_prefill,
        page_size=options.page_size,
        kv_dtype=options.kv_dtype,
        policies=[*([] if is_sealed else [r_kv(budget=OPEN_CONTEXT)]), policy, *more],  # requests may name what needs no more
        max_stop_ids=MOST_STOP_IDS,
        kernels=options.kernels,
        speculate=drafter_named(options.speculate, options.drafts),
        prefix_cache=not (options.no_prefix_cache or model.config.unpaged_layers or is_sealed),
        prefix_piece=options.prefix_piece,
        max_adapters=len(adapters) if options.max_adapters is None else options.max_adapters,
        adapter_rank=highest if options.adapter_rank is None else options.adapter_rank,
    )
    del model  # whose weights a trainer may let go
    for name, folder in adapters.items():
        engine.add_adapter(name, folder)
    if options.host not in LOCAL and not server_options.keys:
        print(f"jkv: warning: any machine that reaches {options.host} may use the model. Give --api-key.", file=sys.stderr)
    if "*" in options.origins and not server_options.keys:
        print("jkv: warning: any page in a browser of this machine may use the model. Give --api-key.", file=sys.stderr)
    show_log(logging.getLogger("jkv.serving"))
    print(f"jkv: serving {own}, policy {policy}, at {address_of(place)}", file=sys.stderr, flush=True)
    run_server(engine, server_options, place, options.drain, options.warm_up, trainer)
    return 0


def read_adapters(pairs: Iterable[str]) -> dict[str, Path]:
    """The folder of each adapter, by its name.

    Raises:
      ValueError: a text that is no pair, or a name that comes twice.
    """
    folders: dict[str, Path] = {}
    for pair in pairs:
        name, equals, folder = pair.partition("=")
        if not (equals and name.strip() and folder.strip()) or name.strip() in folders:
            rule = f"--adapter takes NAME=FOLDER, each name once; got {shown(pair)}. Write --adapter mine=path/to/folder."
            raise refused(rule, adapter="invalid")
        folders[name.strip()] = Path(folder.strip())
    return folders


def check_trainer(options: argparse.Namespace, key: str | None, has_keys: bool) -> None:
    """Refuses a trainer's endpoints where any machine could replace the weights, and their options without them."""
    if options.weights_root is not None and not options.trainer:
        rule = f"--weights-root is for --trainer; got {options.weights_root} alone. Add --trainer, or leave it out."
        raise refused(rule, weights_root="conflict")
    if options.trainer and key is None and (has_keys or options.host not in LOCAL):
        got = "keys of clients" if has_keys else f"--host {options.host}"
        raise refused(
            f"--trainer needs a key of its own, or no keys and a host of this machine alone ({', '.join(LOCAL)}), as it lets "
            f"clients replace the weights; got {got} without one. Give --trainer-key.",
            trainer="missing",
        )


def show_log(logger: Any) -> None:
    """Writes a line for each request to the standard error."""
    import logging

    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
