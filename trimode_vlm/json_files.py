"""JSON files of a model folder, read so that a damaged one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: no JSON, or no object; one line with the file's path.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: damaged or incomplete, this is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object, found a {type(content).__name__}")
    return content
