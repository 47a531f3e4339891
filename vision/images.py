"""From anything that a user calls an image to an RGB picture, its size in the model, and its pixel tensor."""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
import re
import urllib.parse
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, UnidentifiedImageError

SIZE_RULES = ("nld", "pixtral")
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# Pillow's own warning bound: a quarter of a GiB of RGB.
DEFAULT_MAX_PIXELS = 89_478_485

_ORIENTATION_TAG = 0x0112
_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)


def open_image(
    source: Any,
    *,
    max_pixels: int | None = DEFAULT_MAX_PIXELS,
    name: str | None = None,
    formats: tuple[str, ...] | None = None,
    copy: bool = True,
) -> Image.Image:
    """Open `source` and return an upright, opaque 8-bit RGB image that carries no metadata.

    Args:
        source: path, `file://` or data URI, bytes, binary file object, PIL image, array or tensor ([h, w], [h, w, c]
            or [c, h, w]; c in 1, 2, 3, 4), or a data set's {"bytes": ..., "path": ...}. Files give their frame 0.
        max_pixels: refuse larger headers before decoding; None leaves only Pillow's own limit.
        name: what error messages call the image; by default its file name.
        formats: Pillow's names of the encodings to try; None is all, some of which run other programs.
        copy: False returns a PIL image that is all this already itself: for who only reads it.

    Raises:
        ValueError: missing, empty, truncated, too large or not an image. The message is one line and holds the name.
    """
    name = name or _describe(source)
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, (np.ndarray, torch.Tensor)):
        opened, owned = _from_array(source, name, max_pixels), True
    elif isinstance(source, Image.Image):
        opened, owned = source, False
    else:
        opened, owned = _open_encoded(source, name, formats), True
    try:
        _check_pixels(opened.size, max_pixels, name)
        return opened if not (copy or owned) and _is_clean(opened) else _to_rgb(opened, name)
    finally:
        if owned:
            opened.close()


def image_size(
    source: Any,
    *,
    max_pixels: int | None = DEFAULT_MAX_PIXELS,
    name: str | None = None,
    formats: tuple[str, ...] | None = None,
) -> tuple[int, int]:
    """Return the (height, width) that `open_image` would give, from the file's header alone.

    Raises:
        ValueError: as `open_image`, except for pixels that are missing or damaged: those are not read.
    """
    name = name or _describe(source)
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, (np.ndarray, torch.Tensor)):
        opened = open_image(source, max_pixels=max_pixels, name=name)
        return opened.height, opened.width
    image = source if isinstance(source, Image.Image) else _open_encoded(source, name, formats)
    try:
        _check_pixels(image.size, max_pixels, name)
        width, height = image.size
        # Pillow turns TIFFs itself, and gives the turned size from the start.
        return (width, height) if _orientation(image) in _SIDEWAYS and image.format != "TIFF" else (height, width)
    finally:
        if image is not source:
            image.close()


def resized_size(
    height: int, width: int, *, rule: str = "nld", longest_edge: int = 1400, cell: int = 28
) -> tuple[int, int]:
    """Return the (height, width) in pixels at which the model sees an image: the only place that decides it.

    The longest side is capped at `longest_edge`, then each side goes up to a multiple of `cell` (patch size times
    merge), at least one. Rule "nld" rounds the capped side as Python does (the released model), "pixtral" floors it
    (transformers' PixtralImageProcessor).

    Raises:
        ValueError: a side is below 1 or the rule is unknown.
    """
    if rule not in SIZE_RULES:
        raise ValueError(f"unknown resize rule {rule!r}; known: {', '.join(SIZE_RULES)}")
    if height < 1 or width < 1:
        raise ValueError(f"an image needs at least 1x1 pixels, got {width}x{height}")
    ratio = max(height / longest_edge, width / longest_edge)
    if ratio > 1:
        shorten = round if rule == "nld" else math.floor
        height, width = int(shorten(height / ratio)), int(shorten(width / ratio))
    # transformers gives no token at all to a side that the cap shrinks to 0; the model needs one.
    return max(1, -(-height // cell)) * cell, max(1, -(-width // cell)) * cell


def token_grid(height: int, width: int, *, cell: int = 28) -> tuple[int, int]:
    """Return (rows, columns) of image tokens of an image that already has its model size in pixels.

    Raises:
        ValueError: a side is not a positive multiple of `cell`.
    """
    if height < cell or width < cell or height % cell or width % cell:
        raise ValueError(f"image size {width}x{height} is not a positive multiple of {cell} pixels")
    return height // cell, width // cell


def to_pixels(
    image: Image.Image,
    size: tuple[int, int] | None = None,
    *,
    rule: str = "nld",
    rescale_factor: float | None = 1 / 255,
    mean: tuple[float, ...] | list[float] | None = CLIP_MEAN,
    std: tuple[float, ...] | list[float] | None = CLIP_STD,
) -> torch.Tensor:
    """Return `image` (RGB) as a float32 tensor [3, height, width] of the given model size (height, width).

    Rule "nld" resizes by bicubic interpolation without antialiasing, in floats on 0..255 (overshoot is kept);
    "pixtral" with antialiasing in 8 bits, as transformers does. An unchanged size is not resampled.
    `rescale_factor`, `mean` and `std` may be None to leave that step out.
    """
    # np.array copies: a PIL buffer is read-only, which torch warns about.
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1)[None]
    if size is not None and tuple(size) != tuple(pixels.shape[-2:]):
        if rule == "nld":
            pixels = F.interpolate(pixels.float(), size=tuple(size), mode="bicubic", antialias=False)
        else:
            pixels = F.interpolate(pixels.contiguous(), size=tuple(size), mode="bicubic", antialias=True)
    pixels = pixels[0].float()
    if rescale_factor is not None:
        pixels = pixels * rescale_factor
    if mean is not None and std is not None:
        pixels = (pixels - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    return pixels.contiguous()


def pad_pixels(pixels: list[torch.Tensor]) -> torch.Tensor:
    """Stack tensors [3, h_i, w_i] to [n, 3, max h, max w], zeros on the right and at the bottom."""
    height, width = max(p.shape[1] for p in pixels), max(p.shape[2] for p in pixels)
    return torch.stack([F.pad(p, (0, width - p.shape[2], 0, height - p.shape[1])) for p in pixels])


def _describe(source: Any) -> str:
    if isinstance(source, dict):
        return str(source.get("path") or "image bytes")
    if isinstance(source, (str, os.PathLike)):
        text = os.fspath(source)
        return "data URI" if str(text)[:5].lower() == "data:" else str(text)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return "image bytes"
    return str(getattr(source, "filename", None) or getattr(source, "name", None) or type(source).__name__)


def _check_pixels(size: tuple[int, int], max_pixels: int | None, name: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"{name}: the image has no pixels ({width}x{height})")
    if max_pixels is not None and width * height > max_pixels:
        raise ValueError(f"{name}: {width}x{height} = {width * height} pixels, more than max_pixels = {max_pixels}")


def _open_encoded(source: Any, name: str, formats: tuple[str, ...] | None = None) -> Image.Image:
    """Read the header of an encoded image; Pillow decodes later, at load()."""
    data = _read_bytes_or_path(source, name)
    if data == b"":
        raise ValueError(f"{name}: the image is empty (0 bytes)")
    try:
        return Image.open(
            io.BytesIO(data) if isinstance(data, bytes) else data, formats=None if formats is None else tuple(formats)
        )
    except FileNotFoundError:
        raise ValueError(f"{name}: no such image file") from None
    except UnidentifiedImageError:
        if isinstance(data, str) and os.path.getsize(data) == 0:
            raise ValueError(f"{name}: the image is empty (0 bytes)") from None
        raise ValueError(f"{name}: not an image in a known format") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"{name}: too many pixels for max_pixels and PIL.Image.MAX_IMAGE_PIXELS ({error})") from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError) as error:  # what Pillow's parsers raise
        raise ValueError(f"{name}: cannot read the image ({error})") from error


def _read_bytes_or_path(source: Any, name: str) -> bytes | str:
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source)
    if hasattr(source, "read"):
        return source.read()
    if isinstance(source, (str, os.PathLike)):
        text = os.fspath(source)
        text = os.fsdecode(text) if isinstance(text, bytes) else text
        scheme = text[:8].lower()
        if scheme.startswith("data:"):
            return _data_uri_bytes(text, name)
        if scheme.startswith(("http://", "https://")):
            raise ValueError(f"{name}: URLs are not fetched; download the image and pass a path, bytes or a data URI")
        if scheme.startswith("file://"):
            return urllib.parse.unquote(urllib.parse.urlsplit(text).path)
        return text
    raise ValueError(f"{name}: cannot open a {type(source).__name__} as an image")


def _data_uri_bytes(uri: str, name: str) -> bytes:
    head, comma, body = uri[5:].partition(",")
    if not comma:
        raise ValueError(f"{name}: malformed, it has no comma before its data")
    body = urllib.parse.unquote(body) if "%" in body else body
    try:
        if not head.lower().endswith(";base64"):
            return urllib.parse.unquote_to_bytes(uri.partition(",")[2])
        body = re.sub(r"\s+", "", body)
        return base64.b64decode(body + "=" * (-len(body) % 4), validate=True)
    except (binascii.Error, ValueError):  # UnicodeEncodeError too: JSON can spell half a character
        raise ValueError(f"{name}: its data is malformed") from None


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    """Decode, turn upright, make opaque, and reduce to 8-bit RGB without metadata; `image` itself stays as it is."""
    try:
        image.load()
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ...: all mean a broken file
        raise ValueError(f"{name}: the image is truncated or damaged ({error})") from error
    orientation = _orientation(image)
    try:
        clean = _flatten(image)
    except ValueError as error:
        raise ValueError(f"{name}: cannot convert mode {image.mode} to RGB ({error})") from error
    if orientation in _ORIENTATIONS:
        clean = clean.transpose(_ORIENTATIONS[orientation])
    # Metadata left here would turn the image again when it is opened a second time.
    clean.info = {}
    return clean


def _is_clean(image: Image.Image) -> bool:
    """Whether `_to_rgb` would only copy it. A file's image is none: it may not be loaded yet, and holds more."""
    return type(image) is Image.Image and image.mode == "RGB" and not image.info and _orientation(image) == 1


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # a damaged EXIF block raises nearly anything, and no request may fail for it
        return 1


def _flatten(image: Image.Image) -> Image.Image:
    """Composite transparency on white and rescale deep pixels to 8 bits; always a new image."""
    if image.mode.startswith("I") or image.mode == "F":
        array = np.asarray(image)
        key = image.info.get("transparency")
        gray = Image.fromarray(_to_uint8(array), "L")
        if isinstance(key, int):
            gray.paste(255, mask=Image.fromarray(np.where(array == key, 255, 0).astype(np.uint8), "L"))
        return gray.convert("RGB")
    if image.has_transparency_data or image.mode in ("La", "RGBa"):
        if image.mode in ("La", "RGBa"):
            image = image.convert("LA" if image.mode == "La" else "RGBA")
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _to_uint8(array: np.ndarray) -> np.ndarray:
    """Rescale any numeric array to 0..255 by the range it evidently uses; nothing is clipped to white.

    Unsigned 16 bits: 0..65535. Other types: [0, 1] for floats, [0, 255], [0, 65535], else their own minimum..maximum.
    """
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * 255
    values = array.astype(np.float64)
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    values = np.nan_to_num(values, nan=low, posinf=high, neginf=low)
    if low < 0 or high > 65535:
        offset, top = low, high
    elif array.dtype.kind == "f" and high <= 1:
        offset, top = 0.0, 1.0
    elif array.dtype != np.uint16 and high <= 255:
        offset, top = 0.0, 255.0
    else:
        offset, top = 0.0, 65535.0
    return np.rint((values - offset) * (255.0 / max(top - offset, 1e-12))).astype(np.uint8)


def _from_array(source: np.ndarray | torch.Tensor, name: str, max_pixels: int | None) -> Image.Image:
    array = source.detach().cpu().numpy() if isinstance(source, torch.Tensor) else source
    channels = (1, 2, 3, 4)
    if array.ndim == 3 and array.shape[2] not in channels and array.shape[0] in channels:
        array = array.transpose(1, 2, 0)
    is_picture = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in channels)
    if not is_picture or array.dtype.kind not in "buif":
        raise ValueError(f"{name}: an array of shape {tuple(source.shape)} and type {array.dtype} is not an image")
    _check_pixels((array.shape[1], array.shape[0]), max_pixels, name)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(_to_uint8(array)))
