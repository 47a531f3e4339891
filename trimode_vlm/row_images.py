"""The images of a row: what its columns hold, where relative paths lead, and the headers that tell a size."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from trimode_vlm.bad_samples import BadSample

URL_TIMEOUT_SEC = 30
MAX_URL_BYTES = 100 * 2**20


def column_images(images: Any, image: Any) -> list[Any]:
    """Return the images of the columns `images` and `image`: one or a list; None and "" are no image."""
    for value in (images, image):
        found = [item for item in (value if isinstance(value, (list, tuple)) else [value]) if not _is_nothing(item)]
        if found:
            return found
    return []


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (str, bytes)) and len(value) == 0)


class ImageFinder:
    """Resolves what a row calls an image to something that `vision.images.open_image` opens.

    folder: where the data lies. images: where relative paths start; None: `folder`, then `images` in it.
    """

    def __init__(self, folder: Path, images: str | None = None, *, allow_urls: bool = False) -> None:
        self.allow_urls = allow_urls
        self.folders = [Path(images)] if images else [folder, folder / "images"]

    def find(self, value: Any) -> Any:
        """Return `value` with paths made absolute or relative to the working folder.

        Raises:
            BadSample: the file is not there, nothing is given, or it is a URL and those are not allowed.
        """
        if isinstance(value, dict):  # an Image feature of `datasets`
            if value.get("bytes"):
                return value
            if _is_nothing(value.get("path")):
                raise BadSample("an image has neither bytes nor a path", "missing image")
            return self.find(value["path"])
        if not isinstance(value, (str, os.PathLike)):
            return value
        text = os.fspath(value)
        if text[:5].lower() in ("data:", "file:"):
            return text
        if text[:8].lower().startswith(("http://", "https://")):
            if not self.allow_urls:
                raise BadSample(f"{_short(text)}: URLs are not fetched unless allow_urls is true", "image URL")
            return text
        for folder in self.folders:
            if os.path.isfile(path := os.path.join(folder, text)):
                return path
        places = " or ".join(map(str, self.folders))
        raise BadSample(f"{_short(text)}: no such image file in {places}", "missing image")


def fetched(source: Any) -> Any:
    """Return the bytes behind a URL, and anything else as it is.

    Raises:
        BadSample: the URL cannot be read, or holds too much.
    """
    if not (isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))):
        return source
    try:
        with urllib.request.urlopen(source, timeout=URL_TIMEOUT_SEC) as answer:
            data = answer.read(MAX_URL_BYTES + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise BadSample(f"{_short(source)}: cannot be fetched ({error})", "image URL") from None
    if len(data) > MAX_URL_BYTES:
        raise BadSample(f"{_short(source)}: more than {MAX_URL_BYTES} bytes", "image URL")
    return data


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:100] + "..." + text[-17:]
