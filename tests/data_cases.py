"""Small rows and pictures in the forms that users' data comes in."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image

from trimode_vlm.training.datasets import DataSettings


def picture(width: int = 60, height: int = 40, color: Any = (200, 30, 60)) -> Image.Image:
    return Image.new("RGB", (width, height), color)


def png(width: int = 60, height: int = 40, color: Any = (200, 30, 60), **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture(width, height, color).save(buffer, "PNG", **options)
    return buffer.getvalue()


def chat_row(number: int, images: Any = None, answer: str | None = None) -> dict[str, Any]:
    """A LLaVA row of one turn; with images it asks about them."""
    count = 0 if images is None else len(images) if isinstance(images, list) else 1
    question = "<image>\n" * count + f"Question {number}?"
    turns = [("human", question), ("gpt", f"Answer {number}." if answer is None else answer)]
    row: dict[str, Any] = {"id": f"r{number}", "conversations": [{"from": f, "value": v} for f, v in turns]}
    return row if images is None else {**row, "images": images}


def write_jsonl(path: Path, rows: list[Any]) -> DataSettings:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return DataSettings(path=str(path))
