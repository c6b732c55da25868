"""Policies of your own by name, wherever a command, a config file or a function takes the name of a policy.

`module:name`, or `folder/mine.py:name`, names a `Policy`, or a function that returns one and whose parameters are its settings.
Modules are imported as Python imports them, so only a name that the user of this process has typed may come here.
"""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jkv.checks import did_you_mean, shown
from jkv.errors import InputError, refused
from jkv.eviction.byte_budget import ByteBudget, in_bytes
from jkv.eviction.policy import Policy, noted, shown_as
from jkv.resuming import digest_of_files

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def is_own(name: object) -> bool:
    """Whether a policy's name is a module's or file's, such as `mine:my_policy`."""
    return isinstance(name, str) and ":" in name


def own_recipe(name: str) -> Callable[..., Policy]:
    """The recipe that `module:name` or `file.py:name` names; its policies have this name.

    Raises:
      ValueError: no such module, file or name; a module that fails when it is imported; or what is neither a policy nor a
        function whose parameters have names.
    """
    place, _, attribute = name.rpartition(":")
    module = module_of(name, place)
    if not hasattr(module, attribute):
        near = did_you_mean(attribute, [own for own, value in vars(module).items() if callable(value)])
        rule = f"policy={shown(name)} names {attribute!r} of {module.__file__ or place}, which has no such name.{near}"
        raise refused(rule, policy="unknown_name")
    source = digest_of_files([Path(module.__file__)]) if module.__file__ else ""
    return recipe_from(getattr(module, attribute), name, f"{Path(place).stem}.{attribute}", source)


def recipe_from(found: Any, name: str, expression: str, source: str = "") -> Callable[..., Policy]:
    """A recipe from a policy, or a function that makes policies.

    Args:
      found: either.
      name: of the policies.
      expression: what it is in Python, without a call.
      source: a digest of its code.

    Raises:
      ValueError: something else, or a function that takes settings without names.
    """
    if isinstance(found, Policy | ByteBudget):

        def given() -> Any:
            return found

        recipe: Callable[..., Any] = given
    elif callable(found) and has_named_fields(found):
        recipe = found
    else:
        rule = f"A policy's name must be of a jkv.Policy, or of a function of named settings that returns one; {name} is"
        raise refused(f"{rule} {shown(found)}.", policy="wrong_type")

    @functools.wraps(recipe)
    def build(**settings: Any) -> Any:
        if isinstance(settings.get("budget"), str):
            return in_bytes(expression, build, settings)
        try:
            made = recipe(**settings)
        except ValueError:
            raise
        except Exception as error:
            raise refused(f"{name} failed with the settings {settings}: {described(error)}.", policy="invalid") from error
        if isinstance(made, ByteBudget):
            return made
        if not isinstance(made, Policy):
            rule = f"{name} must return a jkv.Policy, such as jkv.evict_by(score, budget=48); got {shown(made)}."
            raise refused(rule, policy="wrong_type")
        own = dataclasses.replace(made, name=name, source=source)
        return noted(own, expression, (), settings) if recipe is found else shown_as(own, expression)

    return build


def has_named_fields(function: Callable[..., Any]) -> bool:
    """Whether all parameters without a default can be given by name."""
    try:
        fields = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some built-in functions
        return False
    return all(field.kind != field.POSITIONAL_ONLY for field in fields)


def fields_of(recipe: Callable[..., Policy]) -> Mapping[str, inspect.Parameter]:
    """The settings of a recipe by name."""
    return {name: field for name, field in inspect.signature(recipe).parameters.items() if field.kind in NAMED}


def takes_any(recipe: Callable[..., Policy]) -> bool:
    """Whether a recipe takes settings of any name, as `**settings`."""
    return any(field.kind == field.VAR_KEYWORD for field in inspect.signature(recipe).parameters.values())


def module_of(name: str, place: str, field: str = "policy") -> ModuleType:
    """The module of a name that the user gave as `field`.

    Raises:
      ValueError: there is none, or it fails.
    """
    path = Path(place)
    if path.suffix == ".py" or len(path.parts) > 1:
        if not path.is_file():
            raise refused(f"{field}={shown(name)} names the file {place}, and there is none.", **{field: "not_found"})
        return module_from(name, path, field)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):  # one that the module itself imports
            raise broken(name, place, error, field) from error
        file = f"path/to/{place.rpartition('.')[2]}.py:{name.rpartition(':')[2]}"
        remedy = "Separate names by commas." if " " in place else f"Run from its folder, install it, or name the file: {file}."
        rule = f"{field}={shown(name)} names the module {place!r}, which is not on Python's path. {remedy}"
        raise refused(rule, **{field: "not_found"}) from None
    except (Exception, SystemExit) as error:
        raise broken(name, place, error, field) from error


def module_from(name: str, path: Path, field: str) -> ModuleType:
    """The module of a file, imported once for each content."""
    own = f"{path.stem}_{digest_of_files([path])}"
    if own in sys.modules:
        return sys.modules[own]
    spec: Any = importlib.util.spec_from_file_location(own, path.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[own]
        raise broken(name, str(path), error, field) from error
    return module


def broken(name: str, place: str, error: BaseException, field: str) -> InputError:
    """The error of a module that fails when it is imported."""
    return refused(f"{field}={shown(name)}: {place} cannot be imported: {described(error)}. Correct it.", **{field: "invalid"})


def described(error: BaseException) -> str:
    """An error in a line: its type, message and innermost place."""
    if isinstance(error, InputError):
        return str(error).rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}".rstrip(".")
