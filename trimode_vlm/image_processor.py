"""TriModeImageProcessor: images to the pixel tensor of the model, with the settings that a checkpoint saves."""

from __future__ import annotations

from typing import Any

from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature
from transformers.processing_utils import ImagesKwargs

from trimode_vlm.vision.images import (
    CLIP_MEAN,
    CLIP_STD,
    DEFAULT_MAX_PIXELS,
    SIZE_RULES,
    open_image,
    pad_pixels,
    resized_size,
    to_pixels,
    token_grid,
)


class TriModeImageKwargs(ImagesKwargs, total=False):
    """Settings beyond transformers' own: the resize rule, the cell that one image token covers, the pixel limit."""

    patch_size: int
    spatial_merge_size: int
    resize_rule: str
    max_pixels: int | None


class TriModeImageProcessor(BaseImageProcessor):
    """Opens, resizes, normalises and pads images; saved as preprocessor_config.json.

    Args:
        size: {"longest_edge": pixels}, the cap on the longest side.
        patch_size, spatial_merge_size: one image token covers patch_size * spatial_merge_size pixels per side.
        resize_rule: "nld" or "pixtral", see `trimode_vlm.vision.images.resized_size`.
        max_pixels: larger images are refused before they are decoded.
    """

    model_input_names = ["pixel_values", "image_sizes"]
    valid_kwargs = TriModeImageKwargs

    def __init__(
        self,
        size: dict[str, int] | None = None,
        patch_size: int | dict[str, int] = 14,
        spatial_merge_size: int = 2,
        resize_rule: str = "nld",
        rescale_factor: float = 1 / 255,
        image_mean: list[float] | None = None,
        image_std: list[float] | None = None,
        do_resize: bool = True,
        do_rescale: bool = True,
        do_normalize: bool = True,
        max_pixels: int | None = DEFAULT_MAX_PIXELS,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if resize_rule not in SIZE_RULES:
            raise ValueError(f"unknown resize_rule {resize_rule!r}; known: {', '.join(SIZE_RULES)}")
        self.size = {"longest_edge": int((size or {}).get("longest_edge", 1400))}
        self.patch_size = int(patch_size["height"] if isinstance(patch_size, dict) else patch_size)
        self.spatial_merge_size = int(spatial_merge_size)
        self.resize_rule = resize_rule
        self.rescale_factor = rescale_factor
        self.image_mean = list(CLIP_MEAN if image_mean is None else image_mean)
        self.image_std = list(CLIP_STD if image_std is None else image_std)
        self.do_resize, self.do_rescale, self.do_normalize = do_resize, do_rescale, do_normalize
        self.max_pixels = max_pixels

    @property
    def cell(self) -> int:
        """Pixels per side that one image token covers."""
        return self.patch_size * self.spatial_merge_size

    def open(self, source: Any, name: str | None = None, copy: bool = True) -> Image.Image:
        """Return `source` as an upright RGB image, within this processor's pixel limit; see `open_image`."""
        return open_image(source, max_pixels=self.max_pixels, name=name, copy=copy)

    def fetch_images(self, images: Any) -> Any:
        """Open one source or nested lists of them."""
        if isinstance(images, (list, tuple)):  # transformers' hook, called on what users pass
            return [self.fetch_images(image) for image in images]
        return self.open(images)

    def model_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) in pixels at which the model sees an image of the given size."""
        if not self.do_resize:
            token_grid(height, width, cell=self.cell)
            return height, width
        return resized_size(
            height, width, rule=self.resize_rule, longest_edge=self.size["longest_edge"], cell=self.cell
        )

    def token_grid(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns) of image tokens for an image of any size."""
        return token_grid(*self.model_size(height, width), cell=self.cell)

    def configured(self, **options: Any) -> TriModeImageProcessor:
        """Return an image processor with some settings replaced; itself without any.

        Raises:
            ValueError: a setting is unknown.
        """
        unknown = sorted(set(options) - set(self.valid_kwargs.__annotations__))
        if unknown:
            raise ValueError(f"unknown image options: {', '.join(unknown)}")
        return type(self)(**{**self.to_dict(), **options}) if options else self

    def preprocess(self, images: Any, return_tensors: str | None = "pt", **kwargs: Any) -> BatchFeature:
        """Return pixel_values [n, 3, max height, max width] and image_sizes [n, 2] (height, width), in order.

        Args:
            images: one image or (nested) lists of them, anything that `open_image` takes.
            **kwargs: settings of this class, for this call only.
        """
        if kwargs:
            return self.configured(**kwargs).preprocess(images, return_tensors)
        opened = [self.open(image, copy=False) for image in flatten_images(images)]
        if not opened:
            raise ValueError("no images were given to the image processor")
        sizes = [self.model_size(image.height, image.width) for image in opened]
        pixels = [
            to_pixels(
                image,
                size,
                rule=self.resize_rule,
                rescale_factor=self.rescale_factor if self.do_rescale else None,
                mean=self.image_mean if self.do_normalize else None,
                std=self.image_std if self.do_normalize else None,
            )
            for image, size in zip(opened, sizes, strict=True)
        ]
        data = {"pixel_values": pad_pixels(pixels), "image_sizes": [list(size) for size in sizes]}
        return BatchFeature(data, tensor_type=return_tensors)


def flatten_images(images: Any) -> list[Any]:
    """Return a flat list of image sources from one source or nested lists; None counts as no image."""
    if images is None:
        return []
    if getattr(images, "ndim", 0) == 4:  # a batch as one array or tensor
        images = list(images)
    if isinstance(images, (list, tuple)):
        return [source for nested in images for source in flatten_images(nested)]
    return [images]
