"""From a padded batch to prompts, and from prompts to a filled cache and the first logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .cache import KVCache
from .conversation import ConversationCache, image_digest, image_spans, num_images
from .lean_forward import LeanForward
from .model_inputs import image_token_counts, positions
from .patterns import causal
from .vision.images import pad_pixels

if TYPE_CHECKING:
    from .model import TriModeVLM
    from .serving_caches import FeatureCache

# Slots that a new cache has beyond its prompt at most; longer answers grow it (KVCache.reserve).
FIRST_ROOM = 1024


@dataclass
class Prompt:
    """One row without its padding. `images` are pixels [3, height, width] in order; `counts` their tokens."""

    token_ids: list[int]
    images: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @cached_property
    def digests(self) -> list[str]:
        """Fingerprints of the images, by which a conversation's cache knows them again."""
        return [image_digest(pixels) for pixels in self.images]


def read_prompts(
    model: TriModeVLM,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    pixel_values: Tensor | None = None,
    image_sizes: Tensor | None = None,
) -> list[Prompt]:
    """Take a batch apart, and give each row the images that its image tokens stand for.

    Raises:
        ValueError: input_ids is not [rows, T] or has an empty row; image tokens and images do not match.
    """
    if pixel_values is not None and model.config.vision_config is None:
        raise ValueError("this model is text only (its config has no vision_config): it takes no images")
    if input_ids.dim() != 2 or not len(input_ids):
        raise ValueError(f"input_ids must have the shape [rows, tokens], got {tuple(input_ids.shape)}")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} must have the shape of input_ids {tuple(input_ids.shape)}"
        )
    if input_ids.numel() and not 0 <= int(input_ids.min()) <= int(input_ids.max()) < model.config.vocab_size:
        raise ValueError(f"input_ids holds ids outside the vocabulary of {model.config.vocab_size} tokens")
    keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prompts = [Prompt(ids[m.bool()].tolist()) for ids, m in zip(input_ids, keep, strict=True)]
    empty = [i for i, p in enumerate(prompts) if not p.token_ids]
    if empty:
        raise ValueError(f"row {empty[0]} of input_ids has no tokens")
    if pixel_values is None:
        found = sum(t == model.config.image_token_id for p in prompts for t in p.token_ids)
        if model.config.vision_config is not None and found:
            raise ValueError(f"found {found} image tokens in input_ids but no pixel_values")
        return prompts
    if pixel_values.dim() != 4:
        raise ValueError(
            f"pixel_values must have the shape [images, 3, height, width], got {tuple(pixel_values.shape)}"
        )
    if image_sizes is None:
        image_sizes = torch.tensor([pixel_values.shape[-2:]] * len(pixel_values))
    if len(image_sizes) != len(pixel_values):
        raise ValueError(f"found {len(image_sizes)} image_sizes for {len(pixel_values)} images")
    sizes = [(int(h), int(w)) for h, w in image_sizes.tolist()]
    counts = image_token_counts(model.config, sizes)
    _share_images(model, prompts, [pixel_values[i, :, :h, :w] for i, (h, w) in enumerate(sizes)], counts)
    return prompts


def _share_images(model: TriModeVLM, prompts: list[Prompt], images: list[Tensor], counts: list[int]) -> None:
    given = iter(zip(images, counts, strict=True))
    found = sum(t == model.config.image_token_id for p in prompts for t in p.token_ids)
    if found != sum(counts):
        raise ValueError(f"found {found} image tokens in input_ids but the {len(images)} images need {sum(counts)}")
    for number, prompt in enumerate(prompts):
        open_tokens = sum(t == model.config.image_token_id for t in prompt.token_ids)
        while open_tokens > 0:
            pixels, count = next(given)
            prompt.images.append(pixels)
            prompt.counts.append(count)
            open_tokens -= count
        if open_tokens < 0:
            raise ValueError(f"the image tokens of row {number} do not match its images")


def prefill(
    model: TriModeVLM,
    prompts: list[Prompt],
    earlier: ConversationCache | None,
    room: int,
    lean: LeanForward | None = None,
    features: Sequence[Tensor] | None = None,
) -> tuple[KVCache, Tensor]:
    """One causal forward of all prompts: the cache, and the logits [rows, V] behind each prompt's last token.

    With a conversation's cache (one row), only the tokens that it does not hold are computed. `room` is how many
    slots may follow; the cache starts with space for them up to FIRST_ROOM and grows beyond. `features`: of the
    images that the cache does not hold, in order; None: they are encoded here.
    """
    device, config = model.device, model.config
    longest = max(len(p.token_ids) for p in prompts)
    if earlier is None:
        cache = KVCache(config, len(prompts), longest + min(room, FIRST_ROOM), model.dtype, device)
        held = 0
    else:
        cache = earlier.kv
        held = _reuse(model, prompts[0], earlier)
    cache.most_slots = longest + room
    new_ids = [p.token_ids[held:] for p in prompts]
    lengths = torch.tensor([len(ids) for ids in new_ids], device=device)
    T = int(lengths.max())
    # Rows are padded on the right: what a padded slot writes lies behind its row's length and is never read.
    ids_BT = torch.zeros(len(prompts), T, dtype=torch.long, device=device)
    for row, ids in enumerate(new_ids):
        ids_BT[row, : len(ids)] = torch.tensor(ids, device=device)
    cache.reserve(held + T)
    embeds = model.encoder.embed_tokens(ids_BT)
    if features is None:
        first = 0 if earlier is None else len(earlier.image_digests)
        features = encode(model, [(p, i) for p in prompts for i in range(first, len(p.images))])
    if features:
        embeds = model.place(embeds, ids_BT, torch.cat(list(features)).to(embeds.dtype))
    position_ids = positions(len(prompts), T, held, None, device)
    hidden = model.hidden(embeds, position_ids, causal(len(prompts), T, device, held), cache, lean)
    cache.advance(lengths.tolist())
    last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
    return cache, model.diffusion_head(last)


def _reuse(model: TriModeVLM, prompt: Prompt, earlier: ConversationCache) -> int:
    spans = image_spans(prompt.token_ids, model.config.image_token_id, prompt.counts)
    held = earlier.shared_prefix(prompt.token_ids, prompt.digests, spans)
    earlier.hold(earlier.token_ids[:held], prompt.digests[: num_images(spans, held)])
    return held


def encode(model: TriModeVLM, images: list[tuple[Prompt, int]], known: FeatureCache | None = None) -> list[Tensor]:
    """Features [N, D] of each image, given as (prompt, number), in order; with `known`, what it does not hold once."""
    if known is None:
        return _features(model, [prompt.images[i] for prompt, i in images])
    digests = [prompt.digests[i] for prompt, i in images]
    new = {digest: prompt.images[i] for digest, (prompt, i) in zip(digests, images, strict=True)}
    found = {digest: features for digest in new if (features := known.get(digest)) is not None}
    missing = [digest for digest in new if digest not in found]
    for digest, features in zip(missing, _features(model, [new[d] for d in missing]), strict=True):
        found[digest] = features
        known.put(digest, features)
    return [found[digest] for digest in digests]


def _features(model: TriModeVLM, images: list[Tensor]) -> list[Tensor]:
    if not images:
        return []
    sizes = torch.tensor([pixels.shape[-2:] for pixels in images])
    return model.encode_images(pad_pixels(images).to(model.device), sizes)
