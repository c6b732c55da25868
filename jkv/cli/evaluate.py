"""`jkv eval` compares policies on the same problems."""

import argparse
import contextlib
import functools
import sys
from pathlib import Path
from typing import Any

from jkv.checks import check_counts, words
from jkv.cli.inputs import LOOKS, can_draw, load_model, make_folder
from jkv.cli.options import (
    CONTRASTS,
    DTYPE,
    KV_DTYPE,
    MAX_POSITIONS,
    MAX_RUNNING,
    MESH,
    MODEL,
    PAGE_SIZE,
    PROTECTION,
    SAMPLING,
    SEEDS,
    SET,
    SETTINGS,
    WEIGHT_DTYPE,
    Option,
    add_options,
    counts,
    defaults_of,
    read_options,
    read_settings,
)
from jkv.errors import refused
from jkv.policies import POLICIES, accepts, needs_no_file

PROBLEMS = (
    Option("file", str, None, "the same as --dataset", Path),
    Option(
        "dataset",
        str,
        None,
        'a JSONL, parquet or CSV file, or a Hugging Face data set folder on this machine, with "prompt" and "answer" unless a '
        "preset or --question and --answer name other fields; default: unseen chains",
        Path,
    ),
    Option("preset", str, None, "aime, math-500, gsm8k or gpqa: the fields, prompt and grader of that set"),
    Option("split", str, None, "of the data set; default: the only one, or test"),
    Option("subset", str, None, "of the data set, such as gpqa_diamond; may be a pattern"),
    Option("question", str, None, "the field of the question"),
    Option("answer", str, None, "the field of the gold answer"),
    Option("template", str, None, "the prompt, with {question}; default: the preset's, or the question alone"),
    Option("chat_template", bool, None, "whether the prompt is a turn of the model's chat"),
    Option("shuffle_seed", int, 0, "of the order of a question's choices"),
    Option("grader", str, None, "boxed (equal text), math (math-verify) or choice (a letter); default: the preset's"),
    Option("skip_ungradable", bool, False, "leave out gold answers that the grader does not mark right"),
    Option("problems", int, None, "how many; default: all of a data set, 200 chains"),
)
OPTIONS = (
    MODEL,
    *PROBLEMS,
    Option(
        "policies", list, [*filter(needs_no_file, POLICIES)], "comma-separated; default: all but seal; full always runs", words
    ),
    SETTINGS,
    Option(
        "budgets",
        list,
        ["10%", "25%", "50%"],
        'slots, shares of the mean length ("25%") or of each problem\'s own ("25% each")',
        words,
    ),
    PROTECTION,
    CONTRASTS,
    SEEDS,
    Option("samples", int, 1, "of each problem"),
    Option("pass_at", list, None, "comma-separated k of pass@k; default: 1 and the number of samples", counts),
    *SAMPLING,
    Option("seed", int, 0, "of the draws, the same for every policy"),
    Option("max_new_tokens", int, None, "default: 1024, or what the model's positions leave"),
    MAX_RUNNING,
    PAGE_SIZE,
    Option("kv_memory", int, None, "bytes of the pool; default: what the rows need"),
    KV_DTYPE,
    DTYPE,
    WEIGHT_DTYPE,
    MAX_POSITIONS,
    MESH,
)
DEFAULTS = defaults_of(OPTIONS)
# What records of older versions leave out, and stood for then.
UNSAID = DEFAULTS | {"template": "{question}", "chat_template": False, "grader": "boxed"}
PROTECTED = ("sinks", "recent")
CHAINS = 200  # problems drawn where no data set is given


def add(commands: Any) -> None:
    """The command's options."""
    command = commands.add_parser(
        "eval",
        help="compare policies and budgets on the same problems",
        description="Accuracy (pass@k), lengths and memory of policies and budgets on the same problems, asked and graded "
        "in the same way: a table, JSON, a picture, and every completion. In the table, touched is the share of samples that "
        "lost a token, shared a page or left one unread; pages read is the share of their pages that decode steps read (AMSR, "
        "the average memory saving ratio, is the rest); affected is the share of all tokens that were evicted or shared.",
        **LOOKS,
    )
    command.set_defaults(run=run)
    command.add_argument("--config", type=Path, help="a TOML file with any of the options below and [settings.<policy>]")
    for option in OPTIONS:
        option.add(command)
    add_options(command, [SET])
    command.add_argument("--out", type=Path, help="a folder for the table, JSON, completions and, with matplotlib, the picture")
    command.add_argument("--resume", action="store_true", help="resume an interrupted run into --out")


def run(options: argparse.Namespace) -> int:
    """Compares policies as the only writer of --out."""
    with contextlib.ExitStack() as stack:
        return run_locked(options, stack)


def run_locked(options: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    """Compares policies, printing each line of the table as it is known; the stack holds the lock of --out."""
    from jkv.engine.prompts import encode_prompts
    from jkv.evaluation import compare as bench
    from jkv.evaluation.contrasts import check_contrasts, find_contrasts, section
    from jkv.evaluation.generations import data_digest
    from jkv.evaluation.problems import put, tokens_of
    from jkv.model.sampling import SAMPLING_FIELDS, Sampling
    from jkv.reports import markdown_line, only_writer
    from jkv.statistics import check_ks

    chosen = read_options(options, OPTIONS)
    chosen["settings"] = with_protection(chosen["settings"], chosen["policies"], chosen["protection"])
    chosen["settings"] = with_settings(chosen["settings"], chosen["policies"], read_settings(None, options.set))
    check_policies(chosen)
    check_contrasts(chosen["contrasts"], chosen["policies"])
    load = functools.cache(lambda: load_model(str(chosen["model"]), chosen))
    questions = read_questions(chosen)
    sampling = Sampling(**{field: chosen[field] for field in SAMPLING_FIELDS})
    ks = check_ks(chosen["pass_at"], chosen["samples"])
    model_name = Path(str(chosen["model"])).name
    name = f"{options.config.stem}-{model_name}" if options.config else model_name
    draws = bool(options.out) and can_draw()
    if options.out:
        make_folder(options.out)
        stack.enter_context(only_writer(options.out))
    model = load()
    settle_chat(chosen, model.tokenizer)
    problems = put(model.tokenizer, questions, chosen["template"], chosen["chat_template"])
    about = {field: str(value) if isinstance(value, Path) else value for field, value in chosen.items()}
    prompts = encode_prompts(model, [tokens_of(model, problem) for problem in problems])
    about |= model.digests | {"data": data_digest(problems, prompts)}
    generations = options.out / f"{name}-generations" if options.out else None

    notes = [protection_note(chosen)] if chosen["protection"] else []

    def report(outcomes: list[bench.Outcome]) -> None:
        print(markdown_line(bench.cells_of(outcomes[-1])), flush=True)
        if options.out:  # after each, so that nothing is lost when the next is interrupted
            written = {one.key for one in outcomes}
            bench.write([*outcomes, *(one for one in known if one.key not in written)], options.out, name, about, draws, notes)

    known = start_or_resume(options, name, about)
    print(bench.table([], ks), flush=True)
    outcomes = bench.compare(
        model,
        problems,
        chosen["policies"],
        chosen["budgets"],
        chosen["settings"],
        report=report,
        known=known,
        generations=generations,
        pass_at=ks,
        grader=chosen["grader"],
        samples=chosen["samples"],
        seeds=chosen["seeds"],
        sampling=sampling,
        max_new_tokens=chosen["max_new_tokens"],
        max_running=chosen["max_running"],
        page_size=chosen["page_size"],
        kv_memory=chosen["kv_memory"],
        kv_dtype=chosen["kv_dtype"],
    )
    if chosen["contrasts"]:
        notes.append(section(find_contrasts(outcomes, chosen["contrasts"])))
        if options.out:
            bench.write(outcomes, options.out, name, about, draws, notes)
    print("".join(f"\n{note}\n" for note in notes), end="", flush=True)
    if options.out:
        files = f"{name}.md, .json, .csv and .png" if draws else f"{name}.md, .json and .csv"
        print(f"wrote {files}, and {name}-generations, to {options.out}", file=sys.stderr)
    return 0


def with_protection(
    settings: dict[str, dict[str, Any]], policies: list[str], protection: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """The settings of each policy on top of the `protection` that all have in common.

    Raises:
      ValueError: a protection of something else, or one that no policy of the comparison has.
    """
    if wrong := [field for field, value in protection.items() if field not in PROTECTED or type(value) is not int]:
        rule = f"protection has {' and '.join(PROTECTED)}, in slots; got {wrong[0]} = {protection[wrong[0]]!r}."
        raise refused(rule, protection="wrong_type")
    recipes = [settings.get(name, {}).get("policy", name) for name in policies]
    return settings | {name: own | settings.get(name, {}) for name, own in with_settings({}, recipes, protection).items()}


def check_policies(chosen: dict[str, Any]) -> None:
    """Refuses unknown policies and settings before a model is loaded."""
    from jkv.evaluation.budgets import LARGE
    from jkv.evaluation.oracles import ORACLE, settings_of_oracle
    from jkv.evaluation.variants import build

    for name in chosen["policies"]:
        if name == ORACLE:
            settings_of_oracle(chosen["settings"])
        else:
            build(name, LARGE, chosen["settings"])


def protection_note(chosen: dict[str, Any]) -> str:
    """What every policy that evicts protects, and which of them protect something else."""
    from jkv.evaluation.budgets import LARGE
    from jkv.evaluation.oracles import ORACLE
    from jkv.evaluation.variants import build

    evicts = {name: build(name, LARGE, chosen["settings"]).evict for name in chosen["policies"] if name != ORACLE}
    shared = chosen["protection"].items()
    others = [name for name, evict in evicts.items() if evict and any(getattr(evict, key) != value for key, value in shared)]
    rest = f" By rules of their own: {', '.join(others)}." if others else ""
    return f"Every policy that evicts protects {' and '.join(f'{value} {key}' for key, value in shared)} slots.{rest}"


def with_settings(settings: dict[str, dict[str, Any]], policies: list[str], given: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings of each policy, with those `given` on the command line for every policy that has them.

    Raises:
      ValueError: no policy of the comparison has a setting.
    """
    from jkv.evaluation.oracles import ORACLE
    from jkv.policies.oracle import oracle

    own: dict[str, dict[str, Any]] = {}
    for name in policies:
        recipe = settings.get(name, {}).get("policy", name)  # an unknown one is refused later
        has = functools.partial(accepts, oracle if recipe == ORACLE else recipe)
        own[name] = {field: value for field, value in given.items() if has(field)}
    for field in given:
        if not any(field in set_ for set_ in own.values()):
            rule = f"No policy of this comparison has the setting {field}; got {', '.join(policies)}. Leave it out."
            raise refused(rule, **{field: "unknown_name"})
    return settings | {name: settings.get(name, {}) | set_ for name, set_ in own.items() if set_}


def read_questions(chosen: dict[str, Any]) -> list[tuple[str, str]]:
    """The questions with their gold answers; fills in what `chosen` leaves to the preset and the data set.

    Without a data set, they are problems of tiny-reasoner's task.
    """
    from jkv.evaluation.graders import failing_gold, grader_of
    from jkv.evaluation.held_out import held_out
    from jkv.evaluation.problems import preset_of, read_questions

    count, source = chosen["problems"], chosen["dataset"] or chosen["file"]
    if chosen["dataset"] and chosen["file"]:
        rule = f"file and dataset are the same setting; got both, {chosen['file']} and {chosen['dataset']}."
        raise refused(rule, dataset="conflict")
    check_counts(problems=count)
    named = [name for name in ("preset", "split", "subset", "question", "answer") if chosen[name] is not None]
    if source is None and named:
        raise refused(f"{named[0]} selects from a data set; got none. Give --dataset.", **{named[0]: "conflict"})
    preset = preset_of(chosen["preset"], chosen["question"], chosen["answer"])
    if source is None:
        questions = [(problem.prompt, problem.answer) for problem in held_out(count or CHAINS)]
    else:
        questions = read_questions(Path(source), preset, chosen["split"], chosen["subset"], chosen["shuffle_seed"])[:count]
    chosen["problems"] = len(questions)
    chosen["template"] = chosen["template"] or preset.template
    chosen["grader"] = chosen["grader"] or preset.grader
    grader = grader_of(chosen["grader"])
    if not chosen["skip_ungradable"]:
        return questions
    failing = set(failing_gold([gold for _, gold in questions], grader))
    print(f"jkv: left out {len(failing)} of {len(questions)} problems, which the grader cannot grade", file=sys.stderr)
    return [question for i, question in enumerate(questions) if i not in failing]


def settle_chat(chosen: dict[str, Any], tokenizer: Any) -> None:
    """Whether prompts are turns of a chat: for a model that has chats and a data set, the caller must choose."""
    from jkv.checkpoints.chat_template import has_chat_template

    if chosen["chat_template"] is None and (chosen["dataset"] or chosen["file"]) and has_chat_template(tokenizer):
        raise refused(
            "chat_template must be set where the model has one; it was not. Add --chat-template or --no-chat-template, or "
            "chat_template = true or false to the file.",
            chat_template="missing",
        )
    chosen["chat_template"] = bool(chosen["chat_template"])


def start_or_resume(options: argparse.Namespace, name: str, about: dict[str, Any]) -> list[Any]:
    """What an interrupted comparison found, none for a new one, whose settings are written before it begins.

    Raises:
      ValueError: completions of an earlier run would be lost, or are of another comparison.
    """
    from jkv.evaluation import compare as bench

    if not options.out:
        if options.resume:
            raise refused("--resume goes on with what is in --out; got none. Name the folder.", resume="conflict")
        return []
    generations = options.out / f"{name}-generations"
    if options.resume:
        return bench.read(options.out / f"{name}.json", about, UNSAID)
    if any(generations.glob("*.jsonl")):
        rule = f"{generations} holds completions. Go on with --resume, give another --out, or remove the folder."
        raise refused(rule, out="conflict")
    bench.write_figures([], options.out, name, about)
    return []
