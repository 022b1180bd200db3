"""Writing TOML: the few kinds of values that a schema holds; `tomllib` reads it back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["dumps", "key"]


def dumps(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Return nested mappings as TOML: plain values first, then one section per mapping."""
    plain = {k: v for k, v in values.items() if not isinstance(v, Mapping)}
    nested = {k: v for k, v in values.items() if isinstance(v, Mapping)}
    lines = [f"{key(name)} = {_value(value)}\n" for name, value in plain.items()]
    if path and (plain or not nested):
        lines.insert(0, f"\n[{'.'.join(map(key, path))}]\n")
    return "".join(lines) + "".join(dumps(v, (*path, name)) for name, v in nested.items())


def key(name: str) -> str:
    """Return a key, quoted where it has to be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        whole = math.isfinite(value) and value == int(value) and abs(value) < 1e15
        return str(int(value)) if whole else repr(value)
    return "[" + ", ".join(map(_value, value)) + "]"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
