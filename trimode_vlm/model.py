"""The tri-mode vision-language model: encode images, place their features, run the backbone, apply the one head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PixtralVisionConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .backbone import TextBackbone
from .cache import KVCache
from .config import TimmVisionConfig, TriModeConfig, TriModeTextConfig
from .draft_adapter import Deltas, DraftAdapter
from .generate import TriModeGenerationMixin
from .generation_config import TriModeGenerationConfig
from .lean_forward import LeanForward
from .learned_sampler import LearnedSampler
from .model_inputs import positions
from .patterns import Pattern, causal
from .vision.encoder import PixtralEncoder
from .vision.projector import MultiModalProjector
from .vision.timm_encoder import TimmEncoder


class TriModeVLM(PreTrainedModel, TriModeGenerationMixin):
    """One backbone and one head for autoregressive, diffusion and self-speculative decoding.

    Text only when the config has no `vision_config`. Weights bear the released names: `encoder.*`,
    `encoder.vision_tower.*`, `encoder.multi_modal_projector.*`, `diffusion_head.weight`.
    """

    config_class = TriModeConfig
    config: TriModeConfig
    base_model_prefix = "encoder"
    main_input_name = "input_ids"
    input_modalities = ["image", "text"]
    generation_config_class = TriModeGenerationConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["DecoderLayer", "VisionLayer"]
    _tied_weights_keys = {"diffusion_head.weight": "encoder.embed_tokens.weight"}
    _supports_sdpa = True
    _supports_flex_attn = True
    # What drafts of self-speculation use; `load` attaches it. None: drafts by the bare weights.
    draft_adapter: DraftAdapter | None = None
    # What diffusion asks with commit_rule="learned"; `load` attaches it.
    learned_sampler: LearnedSampler | None = None
    # In which bits `load` put the text layers (quantize.py).
    quantized: str | None = None

    def __init__(self, config: TriModeConfig) -> None:
        super().__init__(config)
        self.encoder = TextBackbone(config)
        if config.vision_config is not None:
            tower = make_vision_tower(config)
            self.encoder.vision_tower = tower
            self.encoder.multi_modal_projector = MultiModalProjector(config, tower.output_size)
        self.diffusion_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers does it.

        Raises:
            ValueError: the weights are quantised, which no layout that `load` reads can hold.
        """
        if self.quantized:
            raise ValueError(
                f"{self.quantized} weights cannot be saved: load the model without quantize= and save that"
            )
        super().save_pretrained(save_directory, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.embed_tokens = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        return self.diffusion_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.diffusion_head = new_embeddings  # type: ignore[assignment]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        pattern: Pattern | None = None,
        cache: KVCache | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        objective: Callable[[Tensor, nn.Module], Any] | None = None,
        tower_calls: int = 0,
        adapter: Deltas | None = None,
        **kwargs: Any,
    ) -> Any:
        """The plain causal forward, unless another `pattern` is given.

        Args:
            input_ids: [B, T]; attention_mask: [B, T], 0 at padding on the left or right.
            pixel_values, image_sizes: as `encode_images` takes them, in order of appearance over the batch.
            cache: keys of earlier tokens; new ones are written behind its lengths, which do not move.
            labels: [B, T], -100 where there is none; logit i is scored against label i + 1.
            logits_to_keep: only the last so many positions (0: all), or the indices of positions.
            objective: takes the hidden states [B, T, D] and the head in place of the logits, so that training computes
                its loss in chunks inside the forward, where DDP and ZeRO need it; what it returns is returned.
            adapter: as `DraftAdapter.deltas` gives it; active in this forward alone.

        Returns:
            `.logits` [B, T, V] and, with labels, `.loss`.
        """
        if inputs_embeds is None:
            if input_ids is None:
                raise ValueError("forward needs input_ids or inputs_embeds")
            inputs_embeds = self.embed(input_ids, pixel_values, image_sizes, tower_calls)
        B, T, _ = inputs_embeds.shape
        valid = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        if valid is not None and cache is not None:
            raise ValueError("a cache holds rows without padding: pass cache= without an attention_mask that has zeros")
        offset = cache.offset if cache is not None else 0
        if position_ids is None:
            position_ids = positions(B, T, offset, valid, inputs_embeds.device)
        if pattern is None:
            pattern = causal(B, T, inputs_embeds.device, offset, valid)
        hidden = self.encoder(inputs_embeds, position_ids, pattern, cache, adapter=adapter)
        if objective is not None:
            return objective(hidden, self.diffusion_head)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.diffusion_head(hidden[:, keep])
        loss = None
        if labels is not None:
            shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten().to(logits.device))
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def hidden(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        pattern: Pattern,
        cache: KVCache | None = None,
        lean: LeanForward | None = None,
        adapter: Deltas | None = None,
    ) -> Tensor:
        """The backbone alone: [B, T, D] -> [B, T, D]; apply `diffusion_head` to the positions that need logits."""
        return self.encoder(inputs_embeds, position_ids, pattern, cache, lean, adapter)

    def embed(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_sizes: Tensor | None = None,
        tower_calls: int = 0,
    ) -> Tensor:
        """Token embeddings [B, T, D], with image features in place of the image tokens.

        tower_calls: run the tower at least so often (it runs once for each size of image), on a blank where there is
        no image; the result does not change.

        Raises:
            ValueError: the number of image tokens differs from the number of image features.
        """
        embeds = self.encoder.embed_tokens(input_ids)
        if pixel_values is not None:
            tower_calls -= num_sizes(pixel_values, image_sizes)
        if tower_calls > 0:
            embeds = embeds + self._idle_tower(tower_calls)
        if pixel_values is None:
            return embeds
        features = torch.cat(self.encode_images(pixel_values, image_sizes)).to(embeds.dtype)
        return self.place(embeds, input_ids, features)

    def _idle_tower(self, times: int) -> Tensor:
        """Zero, by way of the tower, so that a batch without images takes part in what others do with theirs."""
        cell = self.config.vision_config.patch_size * self.config.spatial_merge_size
        blank = torch.zeros(1, 3, cell, cell, device=self.device)
        return 0.0 * torch.stack([self.encode_images(blank)[0].sum() for _ in range(times)]).sum()

    def place(self, embeds: Tensor, input_ids: Tensor, features: Tensor) -> Tensor:
        """Put image features [sum of N, D], in order, where `input_ids` has image tokens."""
        is_image = torch.eq(input_ids, -1 if self.config.image_token_id is None else self.config.image_token_id)
        if int(is_image.sum()) != features.shape[0]:
            raise ValueError(
                f"found {int(is_image.sum())} image tokens in input_ids "
                f"but the images give {features.shape[0]} features"
            )
        return embeds.masked_scatter(is_image[..., None], features)

    def encode_images(self, pixel_values: Tensor, image_sizes: Tensor | None = None) -> list[Tensor]:
        """Images to features in text width, one [N_i, D] per image, in order.

        Args:
            pixel_values: [n, 3, Hmax, Wmax], padded right and bottom; image_sizes: [n, 2], height and width in pixels
                (None: all fill the tensor). Images of equal size run as one batch.
        """
        if self.config.vision_config is None:
            raise ValueError("this model is text only (its config has no vision_config): it takes no images")
        sizes = sizes_of(pixel_values, image_sizes)
        stride = self.config.vision_config.patch_size
        features: list[Tensor | None] = [None] * len(sizes)
        for height, width in dict.fromkeys(sizes):
            rows = [i for i, size in enumerate(sizes) if size == (height, width)]
            images = pixel_values if len(rows) == len(sizes) else pixel_values[rows]  # picking copies
            patches = self.encoder.vision_tower(images[..., :height, :width])
            merged = self.encoder.multi_modal_projector(patches, height // stride, width // stride)
            for row, feature in zip(rows, merged, strict=True):
                features[row] = feature
        return features  # type: ignore[return-value]


def sizes_of(pixel_values: Tensor, image_sizes: Tensor | None) -> list[tuple[int, int]]:
    """(height, width) of each image in pixels; without image_sizes all fill the tensor."""
    if image_sizes is None:
        return [(pixel_values.shape[-2], pixel_values.shape[-1])] * len(pixel_values)
    return [(int(height), int(width)) for height, width in image_sizes.tolist()]


def num_sizes(pixel_values: Tensor | None, image_sizes: Tensor | None) -> int:
    """How many sizes the images have, which is how often the tower runs for them."""
    return 0 if pixel_values is None else len(set(sizes_of(pixel_values, image_sizes)))


def make_vision_tower(config: TriModeConfig) -> PixtralEncoder | TimmEncoder:
    """The tower that `vision_config` names."""
    vision = config.vision_config
    if isinstance(vision, TimmVisionConfig):
        return TimmEncoder(vision)
    assert isinstance(vision, PixtralVisionConfig)
    return PixtralEncoder(vision, config.vision_feature_layer)


class TriModeTextLM(TriModeVLM):
    """The same model under the text-only config class, for transformers' Auto classes."""

    config_class = TriModeTextConfig


AutoModelForImageTextToText.register(TriModeConfig, TriModeVLM)
AutoModelForCausalLM.register(TriModeConfig, TriModeVLM)
AutoModelForCausalLM.register(TriModeTextConfig, TriModeTextLM)
