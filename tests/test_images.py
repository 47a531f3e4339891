"""Opening, sizing and resampling of images: everything that users send, and what must be refused."""

from __future__ import annotations

import base64
import io
import random
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, ImageOps, features
from transformers.models.pixtral.image_processing_pixtral import PixtralImageProcessor, get_resize_output_image_size

from trimode_vlm.image_processor import TriModeImageProcessor
from trimode_vlm.vision import images
from trimode_vlm.vision.images import open_image, resized_size, to_pixels, token_grid


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def smooth(height: int, width: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / 7 + c) * 60 + np.cos(y / 11 - c) * 60 + 127 for c in range(3)]
    return Image.fromarray(np.stack(waves, -1).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_with_header(width: int, height: int) -> bytes:
    def chunk(tag: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + tag + data + struct.pack(">I", zlib.crc32(tag + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


# --- copies -------------------------------------------------------------------------------------------------------


def test_what_is_opened_already_is_not_copied_and_nobody_elses_picture_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = encoded(smooth(20, 33))
    once = open_image(given)
    assert open_image(once, copy=False) is once and open_image(once) is not once
    large = Image.new("RGB", (3000, 2000))
    before = np.array(large).tobytes()
    monkeypatch.setattr(images, "_to_rgb", lambda *_: pytest.fail("copied"))
    TriModeImageProcessor(size={"longest_edge": 28})(large)
    monkeypatch.undo()
    assert np.array(large).tobytes() == before
    for changed in (once.copy(), once.convert("RGBA"), Image.open(io.BytesIO(given)), once.rotate(0)):
        if changed.mode == "RGB":
            changed.info["note"] = "kept"
        before = changed.mode, dict(changed.info), np.array(changed).tobytes()
        again = open_image(changed, copy=False)
        assert again is not changed and not again.info
        again.paste("red", (0, 0, 33, 20))
        again.close()
        assert (changed.mode, dict(changed.info), np.array(changed).tobytes()) == before
    array = np.array(once)
    open_image(array, copy=False).paste("red", (0, 0, 33, 20))
    assert (array == np.array(once)).all()


# --- orientation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_exif_orientation_is_applied_once(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(smooth(20, 33), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    image = open_image(data)
    assert image.size == expected.size == ((33, 20) if orientation < 5 else (20, 33))
    assert np.array_equal(np.asarray(image), np.asarray(expected))
    assert np.array_equal(np.asarray(open_image(image)), np.asarray(image)), "a second opening must not turn it again"
    assert np.array_equal(np.asarray(open_image(Image.open(io.BytesIO(data)))), np.asarray(image))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"", b"Exif\0\0II*\0\xff\xff\xff\xff", b"\xff" * 40])
def test_broken_exif_never_fails(exif: bytes) -> None:
    assert open_image(encoded(smooth(8, 9), "JPEG", exif=exif)).size == (9, 8)


def test_the_image_processor_measures_the_upright_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    out = TriModeImageProcessor().preprocess(encoded(smooth(28, 84), "PNG", exif=exif))
    assert out["image_sizes"].tolist() == [[84, 28]]


# --- modes --------------------------------------------------------------------------------------------------------


def transparent_pictures() -> dict[str, Image.Image | bytes]:
    rgba = Image.new("RGBA", (4, 2), (0, 0, 0, 0))
    rgba.putpixel((0, 0), (10, 20, 30, 255))
    rgba.putpixel((1, 0), (0, 0, 0, 128))
    palette = Image.new("P", (4, 2), 0)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.putpixel((0, 0), 1)
    palette_alpha = palette.convert("PA")
    palette_alpha.putalpha(Image.fromarray(np.array([[255, 0, 0, 0], [0, 0, 0, 0]], dtype=np.uint8)))
    key = Image.new("RGB", (4, 2), (1, 2, 3))
    key.putpixel((0, 0), (10, 20, 30))
    gray16 = Image.fromarray(np.zeros((2, 4), dtype=np.uint16))
    return {
        "RGBA": rgba,
        "LA": rgba.convert("LA"),
        "RGBa": rgba.convert("RGBa"),
        "PA": palette_alpha,
        "P with tRNS": encoded(palette, transparency=0),
        "RGB with tRNS": encoded(key, transparency=(1, 2, 3)),
        "16 bit with tRNS": encoded(gray16, transparency=0),
    }


@pytest.mark.parametrize("name", list(transparent_pictures()))
def test_transparency_becomes_white(name: str) -> None:
    image = open_image(transparent_pictures()[name])
    assert image.mode == "RGB" and image.getpixel((3, 1)) == (255, 255, 255)
    if name in ("RGBA", "P with tRNS", "RGB with tRNS", "PA"):
        assert image.getpixel((0, 0)) == (10, 20, 30)
    if name == "RGBA":
        assert image.getpixel((1, 0)) == (127, 127, 127)


def gradients() -> dict[str, Image.Image | np.ndarray | bytes]:
    ramp = np.linspace(0, 1, 64)[None].repeat(3, 0)
    return {
        "L": Image.fromarray((ramp * 255).astype(np.uint8)),
        "P": Image.fromarray((ramp * 255).astype(np.uint8)).convert("P"),
        "I;16": Image.fromarray((ramp * 65535).astype(np.uint16)),
        "16 bit PNG": encoded(Image.fromarray((ramp * 65535).astype(np.uint16))),
        "16 bit TIFF": encoded(Image.fromarray((ramp * 65535).astype(np.uint16)), "TIFF"),
        "I": Image.fromarray((ramp * 65535).astype(np.int32)),
        "I, deep": Image.fromarray((ramp * 2_000_000).astype(np.int32)),
        "I, negative": Image.fromarray((ramp * 1000 - 500).astype(np.int32)),
        "F, unit": Image.fromarray(ramp.astype(np.float32)),
        "F, 8 bit": Image.fromarray((ramp * 255).astype(np.float32)),
        "F, deep": Image.fromarray((ramp * 1e9).astype(np.float32)),
        "float TIFF": encoded(Image.fromarray(ramp.astype(np.float32)), "TIFF"),
        "float array": np.stack([ramp] * 3, -1),
        "uint16 array": (np.stack([ramp] * 3, -1) * 65535).astype(np.uint16),
        "CMYK": Image.fromarray((ramp * 255).astype(np.uint8)).convert("RGB").convert("CMYK"),
    }


@pytest.mark.parametrize("name", list(gradients()))
def test_deep_images_are_rescaled_not_clipped(name: str) -> None:
    image = open_image(gradients()[name])
    assert image.mode == "RGB"
    expected = np.linspace(0, 255, 64)
    assert np.abs(np.asarray(image)[0, :, 0] - expected).max() <= (3 if name in ("P", "CMYK") else 1.01)


def test_floats_that_are_not_numbers() -> None:
    array = np.array([[0.0, np.nan, np.inf, -np.inf, 1.0]], dtype=np.float32)
    assert np.asarray(open_image(Image.fromarray(array)))[0, :, 0].tolist() == [0, 0, 255, 0, 255]


def test_one_bit() -> None:
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    assert np.asarray(open_image(image))[0, :, 0].tolist() == [0, 255]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_give_frame_0(kind: str) -> None:
    if kind == "WEBP" and not features.check("webp"):
        pytest.skip("no WebP")
    frames = [Image.new("RGB", (6, 5), color) for color in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert open_image(data).getpixel((2, 2)) == (250, 0, 0)


# --- refusals -----------------------------------------------------------------------------------------------------


def test_broken_files_name_the_file(tmp_path: Path) -> None:
    good = encoded(Image.fromarray(noise(64, 64)))
    for name, data, reason in [
        ("truncated.png", good[: len(good) // 2], "truncated"),
        ("truncated.jpg", encoded(Image.fromarray(noise(64, 64)), "JPEG")[:900], "truncated"),
        ("empty.png", b"", "empty"),
        ("text.png", b"this is text", "not an image"),
        ("header.png", good[:20], "."),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=reason) as caught:
            open_image(tmp_path / name)
        assert name in str(caught.value) and "\n" not in str(caught.value)
        with pytest.raises(ValueError, match="row 17"):
            open_image(data, name="row 17")
    with pytest.raises(ValueError, match="no such image file"):
        open_image(tmp_path / "missing.png")
    with pytest.raises(ValueError, match=tmp_path.name):
        open_image(tmp_path)
    with pytest.raises(ValueError, match="int"):
        open_image(3)
    with pytest.raises(ValueError, match="shape"):
        open_image(np.zeros((5, 5, 7)))


@pytest.mark.parametrize("url", ["http://example.org/a.png", "HTTPS://example.org/a.png"])
def test_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="URLs are not fetched"):
        open_image(url)


@pytest.mark.parametrize("side", [11_000, 30_000])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_header_bombs_are_refused_before_decoding(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = png_with_header(side, side)
    open_image(encoded(smooth(4, 4)))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    tracemalloc.start()
    with pytest.raises(ValueError, match="pixels"):
        open_image(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_pixel_limit_is_configurable() -> None:
    image = smooth(20, 30)
    assert open_image(image, max_pixels=600).size == (30, 20)
    for source in (image, encoded(image), np.asarray(image)):
        with pytest.raises(ValueError, match="600 pixels, more than max_pixels = 599"):
            open_image(source, max_pixels=599)
    with pytest.raises(ValueError, match="max_pixels = 599"):
        TriModeImageProcessor(max_pixels=599)(image)


# --- sources ------------------------------------------------------------------------------------------------------


def test_every_source_gives_the_same_image(tmp_path: Path) -> None:
    array = noise(5, 9)
    data = encoded(Image.fromarray(array))
    path = tmp_path / "ein Bild é.png"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    sources: list[Any] = [
        path, str(path), path.as_uri(), data, bytearray(data), memoryview(data), io.BytesIO(data),
        Image.fromarray(array), Image.open(path), array, array.transpose(2, 0, 1), torch.from_numpy(array),
        torch.from_numpy(array).permute(2, 0, 1).float() / 255, array.astype(np.int64),
        f"data:image/png;base64,{text}", f"data:;base64,{text.rstrip('=')}", f"DATA:image/png;base64,\n{text}\n",
        f"data:image/png;base64,{text.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
        "data:image/png," + "".join(f"%{byte:02X}" for byte in data),
        {"bytes": data, "path": None}, {"bytes": None, "path": str(path)},
    ]  # fmt: skip
    for source in sources:
        assert np.array_equal(np.asarray(open_image(source)), array), type(source)
    with path.open("rb") as file:
        assert np.array_equal(np.asarray(open_image(file)), array)
    for uri in ("data:image/png;base64", "data:image/png;base64,@@@@"):
        with pytest.raises(ValueError, match="data URI"):
            open_image(uri)


def test_the_users_image_stays_as_it_is() -> None:
    image = Image.new("RGBA", (3, 2), (0, 0, 0, 0))
    image.info["note"] = "kept"
    result = open_image(image)
    result.putpixel((0, 0), (1, 2, 3))
    assert image.mode == "RGBA" and image.info == {"note": "kept"} and image.getpixel((0, 0)) == (0, 0, 0, 0)
    plain = Image.new("RGB", (3, 2))
    open_image(plain).putpixel((0, 0), (9, 9, 9))
    assert plain.getpixel((0, 0)) == (0, 0, 0)


# --- geometry -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch,longest", [(14, 1540), (16, 1024), (28, 1400), (28, 1540), (32, 1000)])
def test_pixtral_rule_equals_transformers(patch: int, longest: int) -> None:
    rng = random.Random(patch)
    sizes = [(rng.randint(1, limit), rng.randint(1, limit)) for limit in (60, 2000, 9000) for _ in range(700)]
    edges = [patch - 1, patch, patch + 1, longest - 1, longest, longest + 1]
    for height, width in sizes + [(a, b) for a in edges for b in edges]:
        picture = np.broadcast_to(np.uint8(0), (3, height, width))
        theirs = get_resize_output_image_size(picture, size=longest, patch_size=patch)
        ours = resized_size(height, width, rule="pixtral", longest_edge=longest, cell=patch)
        assert ours == tuple(max(side, patch) for side in theirs), (height, width)


@pytest.mark.parametrize(
    "height,width,expected",
    [
        (28, 28, (28, 28)),
        (29, 28, (56, 28)),
        (1400, 1400, (1400, 1400)),
        (1401, 700, (1400, 700)),  # 700 / (1401 / 1400) = 699.5 -> round 700
        (4000, 3000, (1400, 1064)),  # 1050 -> 38 cells
        (2800, 1961, (1400, 980)),  # 980.5: Python rounds half to even, to 980
        (2800, 1963, (1400, 1008)),  # 981.5 -> 982 -> 36 cells
        (1, 1, (28, 28)),
        (1, 5000, (28, 1400)),
        (5000, 1, (1400, 28)),
    ],
)
def test_nld_rule(height: int, width: int, expected: tuple[int, int]) -> None:
    assert resized_size(height, width) == expected


@pytest.mark.parametrize("rule", ["nld", "pixtral"])
def test_every_size_gives_at_least_one_token_and_whole_cells(rule: str) -> None:
    rng = random.Random(0)
    for _ in range(2000):
        height, width = rng.randint(1, 6000), rng.randint(1, rng.choice([2, 40, 6000]))
        rows, columns = token_grid(*resized_size(height, width, rule=rule))
        assert 1 <= rows <= 50 and 1 <= columns <= 50
    assert resized_size(1400, 56, rule=rule, longest_edge=700) == (700, 28)


def test_geometry_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="known: nld, pixtral"):
        resized_size(3, 3, rule="other")
    with pytest.raises(ValueError, match="1x1"):
        resized_size(0, 3)
    with pytest.raises(ValueError, match="multiple of 28"):
        token_grid(28, 30)


# --- pixels -------------------------------------------------------------------------------------------------------


def test_nld_resamples_in_floats_without_antialiasing() -> None:
    image = Image.fromarray(noise(90, 70))
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float(), size=(56, 84), mode="bicubic", antialias=False
    )[0]
    raw = to_pixels(image, (56, 84), rescale_factor=None, mean=None, std=None)
    assert torch.equal(raw, expected)
    assert raw.min() < 0 and raw.max() > 255, "bicubic overshoot is part of the released preprocessing"
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    normal = (expected / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(to_pixels(image, (56, 84)), normal)


def test_an_unchanged_size_is_not_resampled() -> None:
    array = noise(28, 56)
    for rule in ("nld", "pixtral"):
        raw = to_pixels(Image.fromarray(array), (28, 56), rule=rule, rescale_factor=None, mean=None, std=None)
        assert torch.equal(raw, torch.from_numpy(array).permute(2, 0, 1).float())


def test_pixtral_pixels_equal_transformers() -> None:
    images = [Image.fromarray(noise(100, 333)), smooth(400, 90), smooth(56, 28)]
    ours = TriModeImageProcessor(size={"longest_edge": 224}, resize_rule="pixtral")(images)
    theirs = PixtralImageProcessor(patch_size={"height": 28, "width": 28}, size={"longest_edge": 224})(
        images, return_tensors="pt"
    )
    assert ours["image_sizes"].tolist() == [list(map(int, size)) for size in theirs["image_sizes"]]
    torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"], atol=1e-5, rtol=0)


def test_batches_are_padded_right_and_below() -> None:
    processor = TriModeImageProcessor()
    images = [smooth(30, 90), smooth(100, 20)]
    out = processor(images)
    assert out["pixel_values"].shape == (2, 3, 112, 112) and out["pixel_values"].dtype == torch.float32
    assert out["image_sizes"].tolist() == [[56, 112], [112, 28]]
    for row, image in enumerate(images):
        height, width = out["image_sizes"][row].tolist()
        alone = processor(image)["pixel_values"][0]
        assert torch.equal(out["pixel_values"][row, :, :height, :width], alone)
        assert not out["pixel_values"][row, :, height:].any() and not out["pixel_values"][row, :, :, width:].any()


def test_settings_are_saved_and_can_be_replaced_for_one_call(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(size={"longest_edge": 140}, image_mean=[0.5] * 3, patch_size=7)
    settings["resize_rule"] = "pixtral"
    processor = TriModeImageProcessor(**settings)
    processor.save_pretrained(tmp_path)
    assert (tmp_path / "preprocessor_config.json").is_file()
    loaded = TriModeImageProcessor.from_pretrained(tmp_path)
    assert loaded.to_dict() == processor.to_dict() and loaded.cell == 14
    out = loaded(smooth(300, 300), size={"longest_edge": 28}, do_normalize=False)
    assert out["image_sizes"].tolist() == [[28, 28]] and out["pixel_values"].min() >= 0
    assert loaded.size == {"longest_edge": 140}
    with pytest.raises(ValueError, match="longest_side"):
        loaded.preprocess(smooth(3, 3), longest_side=3)
    with pytest.raises(ValueError, match="known: nld, pixtral"):
        TriModeImageProcessor(resize_rule="ndl")
    with pytest.raises(ValueError, match="no images"):
        loaded([])
