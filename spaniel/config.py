"""Recipes: YAML -> frozen dataclasses that live beside their components, composed here.

An unknown key is an error that names the nearest known one. Paths of inputs are relative to the recipe's
folder; those given on the command line, and `out`, to the current folder.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from spaniel.errors import BadInput, nearest
from spaniel.recipe import RLRecipe, SFTRecipe, choices
from spaniel.recipe_reward import RewardRecipe
from spaniel.types import InputPath

T = TypeVar("T")
Recipe = RLRecipe | SFTRecipe | RewardRecipe
KINDS: dict[str, type] = {"rl": RLRecipe, "sft": SFTRecipe, "reward": RewardRecipe}


@dataclass(frozen=True)
class _Origin:
    """Where values come from: for messages, and for the folder that relative paths start in."""

    name: str
    folder: Path
    overridden: frozenset[str] = field(default_factory=frozenset)

    def resolve(self, key: str, value: str) -> str:
        given_here = any(key == k or key.startswith((f"{k}.", f"{k}[")) for k in self.overridden)
        base = Path.cwd() if given_here else self.folder
        return str((base / Path(value).expanduser()).resolve())


def find_recipe(name: str) -> Path:
    """A recipe by path, or by NAME as recipes/NAME.yaml or recipes/NAME/recipe.yaml (here, or beside the package)."""
    direct = Path(name)
    if direct.suffix in {".yaml", ".yml"} or direct.is_file():
        if not direct.is_file():
            raise BadInput(f"recipe {name}: file not found")
        return direct
    if (direct / "recipe.yaml").is_file():
        return direct / "recipe.yaml"
    roots = [Path("recipes"), Path(__file__).resolve().parent.parent / "recipes"]
    for root in roots:
        for path in (root / f"{name}.yaml", root / name / "recipe.yaml"):
            if path.is_file():
                return path
    raise BadInput(f"recipe {name}: neither a file nor in {roots[0]}/{nearest(name, known_recipes(roots))}")


def known_recipes(roots: Sequence[Path]) -> list[str]:
    """Names of the recipes in these folders."""
    names = [path.stem for root in roots for path in root.glob("*.yaml")]
    return names + [path.parent.name for root in roots for path in root.glob("*/recipe.yaml")]


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `key=value` overrides (dotted keys, values as in YAML)."""
    path = find_recipe(name)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise BadInput(f"recipe {path}: cannot be read as YAML: {error}") from error
    if not isinstance(raw, dict):
        raise BadInput(f"recipe {path}: is {type(raw).__name__}; expected a mapping of keys to values")
    overridden = frozenset(_apply_override(raw, text) for text in overrides)
    kind = raw.pop("kind", "rl")
    if kind not in KINDS:
        raise BadInput(f"recipe {path}: kind: {kind!r}; expected one of {sorted(KINDS)}{nearest(str(kind), KINDS)}")
    return parse(KINDS[kind], raw, _Origin(f"recipe {path}", path.resolve().parent, overridden))


def _apply_override(raw: dict[str, Any], text: str) -> str:
    key, found, value = text.partition("=")
    if not found or not key:
        raise BadInput(f"override {text!r}: expected key=value, for example steps=10 or algorithm.clip_low=0.1")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise BadInput(f"override {text!r}: the value is not YAML: {error}") from error
    *sections, last = key.split(".")
    at = raw
    for name in sections:
        inner = at.get(name)
        if inner is None or isinstance(inner, str):  # `reward: exact_match` is short for its name
            inner = at[name] = {} if inner is None else {"name": inner}
        if not isinstance(inner, dict):
            raise BadInput(f"override {text!r}: {name} is {type(inner).__name__}, not a section")
        at = inner
    at[last] = parsed
    return key


def parse(cls: type[T], raw: Mapping[str, Any], origin: _Origin, prefix: str = "") -> T:
    """A dataclass from a mapping; every message names the recipe, the key, the value and what was expected."""
    hints = get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in raw:
        if key not in fields:
            where = prefix.rstrip(".") or "the recipe"
            raise BadInput(f"{origin.name}: unknown key {prefix}{key}{nearest(str(key), fields)}; {where} "
                           f"has {', '.join(sorted(fields))}")  # fmt: skip
    values = {}
    for name, spec in fields.items():
        if name in raw:
            values[name] = _value(hints[name], raw[name], f"{prefix}{name}", origin)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise BadInput(f"{origin.name}: key {prefix}{name} is missing; expected {describe(hints[name])}")
    try:
        return cls(**values)
    except BadInput as error:
        raise BadInput(f"{origin.name}: {error}") if origin.name not in str(error) else error from None


def _value(hint: Any, value: Any, key: str, origin: _Origin) -> Any:
    known = choices(key)
    if known is not None:
        return None if value is None and type(None) in get_args(hint) else _choice(known, value, key, origin)
    if dataclasses.is_dataclass(hint):
        if value is not None and not isinstance(value, Mapping):
            raise BadInput(f"{origin.name}: {key}: {value!r}; expected a section of keys and values")
        return parse(hint, value or {}, origin, f"{key}.")  # type: ignore[arg-type]
    inner = _optional(hint)
    if inner is not None:
        return None if value is None else _value(inner, value, key, origin)
    if hint == InputPath:
        return origin.resolve(key, _leaf(str, value, key, origin))
    if get_origin(hint) is tuple and get_args(hint)[0] == InputPath:
        listed = [value] if isinstance(value, str) else _leaf(list[str], value, key, origin)
        return tuple(origin.resolve(key, item) for item in listed)
    if get_origin(hint) is Mapping:
        return _named(get_args(hint)[1], value, key, origin)
    return _leaf(hint, value, key, origin)


def _named(hint: Any, value: Any, key: str, origin: _Origin) -> dict[str, Any]:
    """A mapping of names that the user chooses."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise BadInput(f"{origin.name}: {key}: {value!r}; expected names, each with {describe(hint)}")
    return {name: _value(hint, inner, f"{key}.{name}", origin) for name, inner in value.items()}


def _choice(known: Mapping[str, type], value: Any, key: str, origin: _Origin) -> Any:
    """A section whose `name` says which dataclass it is; a bare name stands for all defaults."""
    section = {"name": value} if isinstance(value, str) else value
    if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
        raise BadInput(f"{origin.name}: {key}: {value!r}; expected a name or a section with the key name, "
                       f"one of {', '.join(sorted(known))}")  # fmt: skip
    name = section["name"]
    if name not in known:
        raise BadInput(f"{origin.name}: {key}.name: {name!r}; expected one of "
                       f"{', '.join(sorted(known))}{nearest(name, known)}")  # fmt: skip
    return parse(known[name], {k: v for k, v in section.items() if k != "name"}, origin, f"{key}.")


def _optional(hint: Any) -> Any:
    """The X of `X | None`, else None."""
    if get_origin(hint) not in (Union, types.UnionType):
        return None
    inner = [a for a in get_args(hint) if a is not type(None)]
    return inner[0] if len(inner) == 1 and len(get_args(hint)) == 2 else None


def _leaf(hint: Any, value: Any, key: str, origin: _Origin) -> Any:
    if isinstance(value, bool) and hint in (int, float):  # pydantic would take true for 1
        raise BadInput(f"{origin.name}: {key}: {value!r}; expected {describe(hint)}")
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise BadInput(f"{origin.name}: {key}: {value!r}; expected {describe(hint)} ({reason})") from None


def describe(hint: Any) -> str:
    """A type as a user reads it."""
    plain = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        InputPath: "a path",
        list[str]: "a path or a list of paths",
    }
    return plain.get(hint) or str(hint).replace("typing.", "")


def dump(recipe: Recipe) -> str:
    """The recipe as resolved, in YAML that `load_recipe` reads back to the same."""
    kind = next(name for name, cls in KINDS.items() if isinstance(recipe, cls))
    return yaml.safe_dump({"kind": kind, **_plain(recipe, "")}, sort_keys=False, allow_unicode=True)


def _plain(value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(value):
        inside = {
            f.name: _plain(getattr(value, f.name), f"{key}.{f.name}" if key else f.name)
            for f in dataclasses.fields(value)
            if f.init
        }
        names = [name for name, cls in (choices(key) or {}).items() if type(value) is cls]
        return ({"name": names[0]} | inside) if names else inside
    if isinstance(value, tuple | list):
        return [_plain(item, key) for item in value]
    if isinstance(value, Mapping):
        return {k: _plain(v, f"{key}.{k}") for k, v in value.items()}
    return value
