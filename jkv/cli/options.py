"""Options of commands, each declared once: a flag, a key of a config file, a default and a line of help."""

import argparse
import ast
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jkv.cache import DEFAULT_PAGE_SIZE
from jkv.checks import did_you_mean, shown, words
from jkv.errors import refused
from jkv.limits import check_numbers

OF_REQUESTS = ("presence_penalty", "frequency_penalty")  # which makers of models leave alone
BOOLEANS = {"true": "True", "false": "False", "none": "None"}


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command: `--max-running` at the terminal, `max_running` in a config file.

    Attributes:
      name: in a config file.
      kind: the type of its value there.
      default: None where the command decides.
      help: a line, which ends with the default unless it names one itself; empty for what has no flag.
      read: the value of a text of the command line; None is its kind's.
      more: what `argparse` takes beside these, such as a metavar.
    """

    name: str
    kind: type
    default: Any = None
    help: str = ""
    read: Callable[[str], Any] | None = None
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def line(self) -> str:
        """The help, with the default.

        >>> Option("budgets", list, ["10%", "25%"], "comma-separated").line
        'comma-separated; default: 10%,25%'
        """
        if self.default in (None, "", [], {}) or self.kind is bool or "default" in self.help:
            return self.help
        values = self.default if isinstance(self.default, list) else [self.default]
        return f"{self.help}; default: {','.join(f'{one:g}' if isinstance(one, float) else str(one) for one in values)}"

    def add(self, command: argparse.ArgumentParser, is_switch: bool = False) -> None:
        """Adds its flag, if it has one; a flag that is not given is None. A truth value that no file sets `is_switch`."""
        if not self.help:
            return
        flag = f"-{self.name}" if len(self.name) == 1 else f"--{self.name.replace('_', '-')}"
        kind: dict[str, Any] = {"type": self.read or self.kind}
        if self.kind is bool:
            kind = {"action": "store_true" if is_switch else argparse.BooleanOptionalAction}
        command.add_argument(flag, default=None, help=self.line.replace("%", "%%"), **kind, **self.more)

    def check(self, value: Any, file: Path) -> None:
        """Refuses a value of a config file that is of another type."""
        kinds = (int, float) if self.kind is float else self.kind
        if not isinstance(value, kinds) or isinstance(value, bool) > (self.kind is bool):
            rule = f"{file}: {self.name} must be of type {self.kind.__name__}; got {value!r}."
            raise refused(rule, **{self.name: "wrong_type"})


def add_options(command: argparse.ArgumentParser, declared: Iterable[Option]) -> None:
    """Adds the flags of a command that reads no config file; a flag that is not given has its default."""
    for option in (declared := list(declared)):
        option.add(command, is_switch=True)
    command.set_defaults(**defaults_of(option for option in declared if option.help))


def read_settings(budget: int | str | None, pairs: Iterable[str]) -> dict[str, Any]:
    """Policy settings from `--budget` and `--set name=value`."""
    settings: dict[str, Any] = {} if budget is None else {"budget": budget}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise refused(f"--set takes NAME=VALUE, such as interval=16; got {shown(pair)}.", set="invalid")
        try:
            settings[name.strip()] = ast.literal_eval(BOOLEANS.get(text.strip().lower(), text.strip()))
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last two where it is nested too deep
            settings[name.strip()] = text.strip()
    return settings


def counts(text: str) -> list[int]:
    """The numbers of a comma-separated list."""
    return [int(word) for word in words(text)]


def protected(text: str) -> dict[str, Any]:
    """What `sinks=4,recent=16` says."""
    return read_settings(None, words(text))


def number_or_text(text: str) -> int | str:
    """A budget or a size as a user types it; what reads it refuses a text that it does not know."""
    return int(text) if text.strip().lstrip("+-").isdecimal() else text


MODEL = Option("model", str, "tiny-reasoner", "a name of `jkv models`, a checkpoint folder, a GGUF file, or a hub name")
POLICY = Option("policy", str, "full", "how the cache stays small: a name of `jkv policies`, or module:name of your own")
BUDGET = Option(
    "budget", str, None, "slots kept in each layer and KV head; or bytes of a row over all, such as 64MB", number_or_text
)
SET = Option(  # `expand_flags` writes it for a policy's settings
    "set",
    list,
    [],
    "a setting of the policy; may be repeated. `--interval 16` is short for `--set interval=16`",
    str,
    {"action": "append", "metavar": "NAME=VALUE"},
)
SETTINGS = Option("settings", dict, {})
CONTRASTS = Option("contrasts", list, [])
PROTECTION = Option(
    "protection",
    dict,
    {},
    "what every policy that evicts keeps, as sinks=4,recent=16; a policy's own settings go before",
    protected,
)
SEEDS = Option("seeds", int, 1, "of policies that draw at random, whose rows are means")
TEMPERATURE = Option("temperature", float, 0.0, "0 is greedy")
SAMPLING = (
    TEMPERATURE,
    Option("top_p", float, 1.0, "1 keeps all tokens"),
    Option("top_k", int, 0, "0 keeps all tokens"),
    Option("min_p", float, 0.0, "0 keeps all tokens"),
    Option("repetition_penalty", float, 1.0, "above 1 makes tokens of prompt and completion less likely"),
    Option("presence_penalty", float, 0.0, "above 0 makes tokens of the completion less likely"),
    Option("frequency_penalty", float, 0.0, "above 0 makes tokens of the completion less likely each time"),
)
SEED = Option("seed", int, None, "of the random draws; default: fresh, and reported")
MAX_NEW_TOKENS = Option("max_new_tokens", int, None, "default: what the model's positions and the memory leave, up to 32768")
MAX_RUNNING = Option("max_running", int, 32, "rows decoded together")
PAGE_SIZE = Option("page_size", int, DEFAULT_PAGE_SIZE, "slots of a page")
DEVICE_PAGE_SIZE = Option("page_size", int, None, "slots of a page; default: 128 on a TPU, 16 elsewhere")
KV_DTYPE = Option(
    "kv_dtype", str, None, "int8 or fp8 keeps keys and values in 8 bits, int4 in 4, kvarn in 4 and 2; default: as the weights"
)
DTYPE = Option("dtype", str, None, "float32, bfloat16 or float16; default: float32 on a CPU and a GPU without bfloat16")
WEIGHT_DTYPE = Option(
    "weight_dtype", str, None, "int8 or fp8 keeps matrices in 8 bits, blocks keeps a GGUF file's own blocks; default: floats"
)
MAX_POSITIONS = Option(
    "max_positions",
    int,
    None,
    "fewer positions, with which LongRoPE may have its factors for short texts; default: all",
)
ONE_MESH = Option(
    "mesh", str, None, "splits the model and its cache over N devices; default: one device", more={"metavar": "tensor=N"}
)
MESH = dataclasses.replace(
    ONE_MESH,
    help="splits the model and its cache over N devices; data=M,tensor=N runs M replicas, each on N; default: one device",
)
SPECULATE = Option(
    "speculate",
    str,
    None,
    "guesses the next tokens: ngram from the text so far, siblings from all samples of the prompt, draft_pages by the model "
    "itself over some pages of its cache, auto as many as should pay; default: one token a step",
)
DRAFTS = Option("drafts", int, None, "guesses that a step checks, 1 to 7; default: 3", more={"metavar": "N"})
KERNELS = Option(
    "kernels", str, None, '"reference" computes everything by plain XLA; see docs/devices.md; default: the best for the device'
)
PARSE_SPECIAL = Option(
    "parse_special",
    bool,
    False,
    "let messages make control tokens by writing their text, such as <|im_end|>; default: only the template does",
)
VERBOSE = Option("verbose", bool, False, "say which device, kernels and pool are used")
LEARNT_FILE = Option("out", str, None, "the safetensors file to write", Path, {"required": True})


def sampling_options(own: str = "", **usual: float) -> list[Option]:
    """How tokens are drawn, where another default goes before the one that the help shows: `own`, or the `usual` number."""
    changed = []
    for option in SAMPLING:
        default = f"{'' if option.name in OF_REQUESTS else own}{usual.get(option.name, option.default):g}"
        changed.append(dataclasses.replace(option, default=None, help=f"{option.help}; default: {default}"))
    return changed


ENGINE = (  # a model, a policy and how it decodes
    MODEL,
    POLICY,
    BUDGET,
    SET,
    *sampling_options("what the model's makers say, else "),
    SEED,
    MAX_NEW_TOKENS,
    DEVICE_PAGE_SIZE,
    DTYPE,
    WEIGHT_DTYPE,
    MAX_POSITIONS,
    MESH,
    KV_DTYPE,
    SPECULATE,
    DRAFTS,
    KERNELS,
    VERBOSE,
)


def options_of(settings: type, names: Iterable[str]) -> list[Option]:
    """The options for fields of a dataclass, whose metadata have a line of help."""
    fields: dict[str, Any] = {field.name: field for field in dataclasses.fields(settings)}
    return [Option(name, fields[name].type, fields[name].default, fields[name].metadata["help"]) for name in names]


def defaults_of(declared: Iterable[Option]) -> dict[str, Any]:
    """The default of each option, by name."""
    return {option.name: option.default for option in declared}


def read_options(options: argparse.Namespace, declared: Iterable[Option]) -> dict[str, Any]:
    """The value of each option: from the command line, else from the file of `--config`, else its default.

    Raises:
      ValueError: a file with an unknown name, or a value of another type or beyond its limit.
    """
    defaults, file = defaults_of(declared := list(declared)), options.config
    written = {} if file is None else read_config(file)
    if unknown := sorted(set(written) - set(defaults)):
        known, near = ", ".join(sorted(defaults)), did_you_mean(unknown[0], defaults)
        raise refused(f"{file} may set {known}; got {', '.join(unknown)}.{near}", **{unknown[0]: "unknown_name"})
    for option in declared:
        if option.name in written:
            option.check(written[option.name], file)
    check_numbers(written)
    given = {name: getattr(options, name, None) for name in defaults}
    return defaults | written | {name: value for name, value in given.items() if value is not None}


def read_config(path: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A TOML file on top of the one that it `extends`, if any; tables of settings are joined name by name."""
    from jkv.text_files import read_toml

    own, chain = read_toml(path), (*chain, path.resolve())
    settings = own.setdefault("settings", {})
    if not isinstance(settings, dict) or not all(isinstance(table, dict) for table in settings.values()):
        message = f"{path}: settings are tables, one a policy, as [settings.r_kv]; got {settings!r}."
        raise refused(message, settings="wrong_type")
    for name, table in settings.items():
        if not isinstance(table.get("policy", ""), str):
            raise refused(f"{path}: the policy of [settings.{name}] is a name; got {table['policy']!r}.", policy="wrong_type")
    if "extends" not in own:
        return own
    other = own.pop("extends")
    if not isinstance(other, str) or (path.parent / other).resolve() in chain:
        rule = f"{path}: extends names another file, not this one or one that extends it; got {other!r}."
        raise refused(rule, extends="conflict")
    base = read_config(path.parent / other, chain)
    return base | own | {"settings": base["settings"] | settings}
