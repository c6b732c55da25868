"""Options of commands, each declared once: a flag, a key of a config file, a default and a line of help."""

import argparse
import ast
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jkv.cache import DEFAULT_PAGE_SIZE
from jkv.checks import did_you_mean, shown, words
from jkv.limits import check_numbers

BOOLEANS = {"true": "True", "false": "False", "none": "None"}


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a command: `--max-running` at the terminal, `max_running` in a config file.

    Attributes:
      name: in a config file.
      kind: the type of its value there.
      default: None where the command decides.
      help: a line, which ends with the default unless it names one itself; empty for what only config files have.
      read: the value of a text of the command line; None is its kind's.
    """

    name: str
    kind: type
    default: Any = None
    help: str = ""
    read: Callable[[str], Any] | None = None

    @property
    def line(self) -> str:
        """The help, with the default.

        >>> Option("budgets", list, ["10%", "25%"], "comma-separated").line
        'comma-separated; default: 10%,25%'
        """
        if not self.default or "default" in self.help:
            return self.help
        default = ",".join(self.default) if isinstance(self.default, list) else self.default
        return f"{self.help}; default: {f'{default:g}' if self.kind is float else default}"

    def add(self, command: argparse.ArgumentParser) -> None:
        """Adds its flag, if the command line has one; a flag that is not given is None."""
        flag, line = f"--{self.name.replace('_', '-')}", self.line.replace("%", "%%")
        if self.kind is bool and self.help:
            command.add_argument(flag, action=argparse.BooleanOptionalAction, help=line)
        elif self.help:
            command.add_argument(flag, type=self.read or self.kind, help=line)

    def check(self, value: Any, file: Path) -> None:
        """Refuses a value of a config file that is of another type."""
        kinds = (int, float) if self.kind is float else self.kind
        if not isinstance(value, kinds) or isinstance(value, bool) > (self.kind is bool):
            raise ValueError(f"{file}: {self.name} must be of type {self.kind.__name__}; got {value!r}.")


def read_settings(budget: int | str | None, pairs: Iterable[str]) -> dict[str, Any]:
    """Policy settings from `--budget` and `--set name=value`."""
    settings: dict[str, Any] = {} if budget is None else {"budget": budget}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE, such as interval=16; got {shown(pair)}.")
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


MODEL = Option("model", str, "tiny-reasoner", "a shipped model, a checkpoint folder, a GGUF file, or a hub name")
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
MAX_RUNNING = Option("max_running", int, 32, "rows decoded together")
PAGE_SIZE = Option("page_size", int, DEFAULT_PAGE_SIZE, "slots of a page")
KV_DTYPE = Option(
    "kv_dtype", str, None, "int8 or fp8 keeps keys and values in 8 bits, int4 in 4, kvarn in 4 and 2; default: as the weights"
)
WEIGHT_DTYPE = Option("weight_dtype", str, None, "int8 or fp8 keeps the model's matrices in 8 bits; default: as they are")


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
        raise ValueError(f"{file} may set {known}; got {', '.join(unknown)}.{near}")
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
        raise ValueError(f"{path}: settings are tables, one a policy, as [settings.r_kv]; got {settings!r}.")
    for name, table in settings.items():
        if not isinstance(table.get("policy", ""), str):
            raise ValueError(f"{path}: the policy of [settings.{name}] is a name; got {table['policy']!r}.")
    if "extends" not in own:
        return own
    other = own.pop("extends")
    if not isinstance(other, str) or (path.parent / other).resolve() in chain:
        raise ValueError(f"{path}: extends names another file, not this one or one that extends it; got {other!r}.")
    base = read_config(path.parent / other, chain)
    return base | own | {"settings": base["settings"] | settings}
