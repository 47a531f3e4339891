"""TriModeProcessor: chat messages and images to the tensors of the model, and the spans that training needs."""

from __future__ import annotations

import os
from typing import Any

from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.feature_extraction_utils import BatchFeature
from transformers.processing_utils import ProcessorMixin

from trimode_vlm.call_options import TEXT_OPTIONS, split_options
from trimode_vlm.chat import Chat, ChatTemplate
from trimode_vlm.config import TriModeConfig, TriModeTextConfig
from trimode_vlm.control_tokens import ControlEncoder
from trimode_vlm.detokenizer import IncrementalDetokenizer
from trimode_vlm.image_processor import TriModeImageProcessor, flatten_images
from trimode_vlm.image_tokens import IMAGE_LAYOUTS, ImageLayout, expand_images, pad_rows, truncate
from trimode_vlm.vision.images import token_grid

__all__ = ["IMAGE_LAYOUTS", "IncrementalDetokenizer", "TriModeImageProcessor", "TriModeProcessor"]


class TriModeProcessor(ProcessorMixin):
    """Joins tokenizer and image processor; knows how an image lies among the tokens and what a user may not type.

    Args:
        image_processor: by default one with the released model's settings.
        tokenizer: a fast tokenizer.
        chat_template: by default the tokenizer's.
        image_token: the token that stands for image features and, once per image, in the chat template's output.
        image_start_token, image_break_token, image_end_token: put before an image, between its rows, after it; or None.
        break_after_last: whether the last row is closed by a break as well, before the end token.
        mask_token: the diffusion mask, if it is no special token of the tokenizer.

    With `image_token` None the tokenizer is searched for the tokens of a known layout (`IMAGE_LAYOUTS`); where it has
    none, or where `image_token` is "", the processor takes text only.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        image_token: str | None = None,
        image_start_token: str | None = None,
        image_break_token: str | None = None,
        image_end_token: str | None = None,
        break_after_last: bool = False,
        mask_token: str | None = None,
    ) -> None:
        template = chat_template or getattr(tokenizer, "chat_template", None)
        super().__init__(image_processor or TriModeImageProcessor(), tokenizer, chat_template=template)
        if image_token is None:
            vocabulary = set(tokenizer.added_tokens_encoder)
            for layout in IMAGE_LAYOUTS.values():
                if vocabulary.issuperset(token for token in layout.values() if token):
                    image_token, image_start_token, image_break_token, image_end_token = layout.values()
                    break
        self.image_token = image_token
        self.image_start_token = image_start_token
        self.image_break_token = image_break_token
        self.image_end_token = image_end_token
        self.break_after_last = break_after_last
        self.mask_token = mask_token
        self.layout = ImageLayout.from_tokens(
            tokenizer, image_token or None, image_start_token, image_break_token, image_end_token, break_after_last
        )
        self.image_token_id = self.layout.image if self.layout else None
        self._encoder: tuple[int, ControlEncoder] | None = None
        self._templates: dict[str, ChatTemplate] = {}

    @property
    def model_input_names(self) -> list[str]:
        """Names of the tensors that this processor can return."""
        return ["input_ids", "attention_mask", "pixel_values", "image_sizes"]

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> list[str]:
        """Save processor_config.json, tokenizer, chat template, and preprocessor_config.json for older tools."""
        files = super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        return [*files, *self.image_processor.save_pretrained(save_directory)]

    @classmethod
    def _get_arguments_from_pretrained(
        cls, pretrained_model_name_or_path: Any, processor_dict: Any = None, **kwargs: Any
    ) -> list[Any]:
        # A text-only checkpoint has no image processor, and a released one may name a class that is not installed.
        try:
            image_processor = TriModeImageProcessor.from_pretrained(pretrained_model_name_or_path, **kwargs)
        except OSError:
            image_processor = TriModeImageProcessor()
        return [image_processor, AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)]

    # --- text and images to tensors -------------------------------------------------------------------------------

    def __call__(self, images: Any = None, text: str | list[str] | None = None, **kwargs: Any) -> BatchFeature:
        """Return input_ids and attention_mask of prompts, and pixel_values and image_sizes of their images.

        Args:
            images: anything that `open_image` takes, or (nested) lists of it, in order of the placeholders in `text`.
            text: one prompt or several, already rendered: here special tokens are special. For messages that users
                wrote, use `apply_chat_template`.
            **kwargs: padding, padding_side ("left" by default), truncation, max_length, add_special_tokens,
                return_tensors ("pt" by default), images_kwargs={...}.

        Raises:
            ValueError: placeholders and images differ in number, or an option is unknown.
        """
        options, image_options = split_options(kwargs, self.image_processor)
        if text is None:
            if images is None:
                raise ValueError("the processor needs text, images or both")
            return self.image_processor(images, return_tensors=options.get("return_tensors", "pt"), **image_options)
        texts = [text] if isinstance(text, str) else list(text)
        special = options.get("add_special_tokens", True)
        bos = self.tokenizer.bos_token
        rows = [  # a rendered chat brings its own BOS
            self.tokenizer(prompt, add_special_tokens=special and not (bos and prompt.startswith(bos)))["input_ids"]
            for prompt in texts
        ]
        return self._finish(rows, flatten_images(images), options, image_options)

    def apply_chat_template(  # type: ignore[override]
        self,
        conversation: Any,
        chat_template: str | None = None,
        tools: list[Any] | None = None,
        documents: list[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        return_assistant_tokens_mask: bool = False,
        tokenize: bool = False,
        return_tensors: str | None = "auto",
        return_dict: bool = False,
        processor_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Render messages and, with `tokenize`, return the model's inputs; signature and results as in transformers.

        Special tokens that a message's text spells out become plain text. `enable_thinking` is False unless given.
        Several conversations give a batch, padded on the left. Other keyword arguments go to the template if it
        names them, else they are options of `__call__`.

        Raises:
            ValueError: bad messages (see `check_messages`), the template refuses them, images missing or too many, or
                truncation at the right would cut the end that the model is to go on from.
        """
        first = conversation[0] if isinstance(conversation, (list, tuple)) and conversation else None
        batched = isinstance(first, (list, tuple)) or hasattr(first, "messages")
        template = self._template(chat_template)
        kwargs.pop("sanitize_control_tokens", None)  # transformers' name for what is always done here
        for_call = {k: v for k, v in kwargs.items() if k in TEXT_OPTIONS or not template.names(k)}
        variables = {k: v for k, v in kwargs.items() if k not in for_call} | {"tools": tools, "documents": documents}
        for_call |= processor_kwargs or {}
        given = flatten_images(for_call.pop("images", None))
        options, image_options = split_options(for_call, self.image_processor)
        if return_tensors != "auto":
            options["return_tensors"] = return_tensors
        chats = [
            Chat(
                messages, template, self._control_encoder(), self.layout, variables, add_generation_prompt,
                continue_final_message,
            )
            for messages in (conversation if batched else [conversation])
        ]  # fmt: skip
        if not tokenize:
            return [chat.text for chat in chats] if batched else chats[0].text
        sources = _fill([source for chat in chats for source in chat.sources], given)
        keep_end = add_generation_prompt or bool(continue_final_message)
        if not return_assistant_tokens_mask:
            out = self._finish([chat.encode() for chat in chats], sources, options, image_options, keep_end=keep_end)
        else:
            encoded = [chat.encode_with_answers() for chat in chats]
            masks = [_mask_of(len(ids), answers) for ids, answers in encoded]
            out = self._finish([ids for ids, _ in encoded], sources, options, image_options, masks, keep_end)
        return out if return_dict else out["input_ids"]

    def encode_chat(
        self, messages: Any, add_generation_prompt: bool = False, **template_options: Any
    ) -> dict[str, Any]:
        """Return one chat as training sees it; the template's spans decide what is an answer.

        Returns:
            input_ids: list[int], image placeholders already expanded.
            loss_mask: list[bool], True exactly on the assistants' texts and the token that ends each
                (`train: False` in a message leaves it out).
            images: list of RGB PIL images, in order of the turns; image_sizes: their (height, width) in the model.
            image_spans, response_spans: list[tuple[int, int]], token ranges of whole images and of trained answers.

        Raises:
            ValueError: as `apply_chat_template`, or an answer cannot be located in the rendered chat.
        """
        chat = Chat(
            messages, self._template(), self._control_encoder(), self.layout, template_options, add_generation_prompt
        )
        ids, answers = chat.encode_with_answers()
        images = [self.image_processor.open(source) for source in _fill(chat.sources, [])]
        sizes = [self.image_processor.model_size(image.height, image.width) for image in images]
        grids = [self.image_processor.token_grid(image.height, image.width) for image in images]
        ids, image_spans, (mask,) = expand_images(ids, grids, self.layout, [_mask_of(len(ids), answers)])
        return {
            "input_ids": ids,
            "loss_mask": mask,
            "images": images,
            "image_sizes": sizes,
            "image_spans": image_spans,
            "response_spans": _runs(mask),
        }

    def truncate_chat(self, encoded: dict[str, Any], max_length: int) -> dict[str, Any]:
        """Cut an `encode_chat` result to `max_length` tokens at the right; an image is kept whole or dropped whole.

        Raises:
            ValueError: no trained token is left.
        """
        start, stop = truncate(len(encoded["input_ids"]), max_length, encoded["image_spans"], side="right")
        num_images = sum(last <= stop for _, last in encoded["image_spans"])
        mask = encoded["loss_mask"][start:stop]
        if not any(mask):
            raise ValueError(
                f"{len(encoded['input_ids'])} tokens cut to {max_length} leave no trained token; raise max_length"
            )
        return {
            "input_ids": encoded["input_ids"][start:stop],
            "loss_mask": mask,
            "images": encoded["images"][:num_images],
            "image_sizes": encoded["image_sizes"][:num_images],
            "image_spans": encoded["image_spans"][:num_images],
            "response_spans": _runs(mask),
        }

    # --- details --------------------------------------------------------------------------------------------------

    def _finish(
        self, rows: list[list[int]], sources: list[Any], options: dict[str, Any], image_options: dict[str, Any],
        masks: list[list[bool]] | None = None, keep_end: bool = False,
    ) -> BatchFeature:  # fmt: skip
        """Expand placeholders, truncate between images (never the end if `keep_end`), pad, add the images' tensors."""
        needed = [sum(i == self.image_token_id for i in row) if self.layout else 0 for row in rows]
        if sum(needed) != len(sources):
            if not self.layout:
                raise ValueError(f"received {len(sources)} images, but this checkpoint reads text only")
            raise ValueError(f"found {sum(needed)} image placeholders but received {len(sources)} images")
        data: dict[str, Any] = {}
        image_processor = self.image_processor.configured(**image_options)
        if sources:
            data = dict(image_processor(sources, return_tensors=None))
        grids = [token_grid(*size, cell=image_processor.cell) for size in data.get("image_sizes", [])]
        parallel = masks or [[False] * len(row) for row in rows]
        limit = options.get("max_length") if options.get("truncation") else None
        side = options.get("truncation_side", self.tokenizer.truncation_side)
        out_rows, out_masks, used = [], [], 0
        for row, mask, count in zip(rows, parallel, needed, strict=True):
            row, spans, (mask,) = expand_images(row, grids[used : used + count], self.layout, [mask])
            used += count
            start, stop = truncate(len(row), limit, spans, side)
            if keep_end and stop < len(row):
                raise ValueError(
                    f"max_length = {limit} would cut the end of a prompt of {len(row)} tokens, and with it the header "
                    "of the answer: raise max_length, shorten the messages or pass truncation_side='left'"
                )
            if any(first < start or last > stop for first, last in spans):
                raise ValueError(
                    f"max_length = {limit} cuts into the images of a prompt of {len(row)} tokens; "
                    "raise max_length or send smaller images"
                )
            out_rows.append(row[start:stop])
            out_masks.append(mask[start:stop])
        text = pad_rows(out_rows, out_masks if masks is not None else None, self.tokenizer, options)
        return BatchFeature({**text, **data}, tensor_type=options.get("return_tensors", "pt"))

    def _template(self, chat_template: str | None = None) -> ChatTemplate:
        known = self.chat_template if isinstance(self.chat_template, dict) else {"default": self.chat_template}
        source = known.get(chat_template or "default", chat_template)
        if source is None:
            raise ValueError("this processor has no chat template; pass chat_template=")
        if source not in self._templates:
            self._templates[source] = ChatTemplate(source, self.tokenizer)
        return self._templates[source]

    def _control_encoder(self) -> ControlEncoder:
        """Return the encoder of the tokenizer as it is now, built once."""
        if self._encoder is None or self._encoder[0] != len(self.tokenizer):
            extra = [*(self.layout.strings if self.layout else ()), *([self.mask_token] if self.mask_token else ())]
            self._encoder = len(self.tokenizer), ControlEncoder(self.tokenizer, extra)
        return self._encoder[1]


def _fill(sources: list[Any], given: list[Any]) -> list[Any]:
    """Return the image sources of messages, those that a part left open taken from `given`, in order."""
    missing = sum(source is None for source in sources)
    if missing != len(given):
        if given:
            raise ValueError(f"found {missing} image parts without an image but received {len(given)} images")
        raise ValueError(f"{missing} of {len(sources)} image parts name no image (image, url, path or base64)")
    rest = iter(given)
    return [next(rest) if source is None else source for source in sources]


def _mask_of(length: int, spans: list[range]) -> list[bool]:
    mask = [False] * length
    for span in spans:
        mask[span.start : span.stop] = [True] * len(span)
    return mask


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    edges = [i for i, (a, b) in enumerate(zip([False, *mask], [*mask, False], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


AutoImageProcessor.register(
    TriModeConfig,
    image_processor_classes={"torchvision": TriModeImageProcessor, "pil": TriModeImageProcessor},
    exist_ok=True,
)
for _config_class in (TriModeConfig, TriModeTextConfig):
    AutoProcessor.register(_config_class, TriModeProcessor, exist_ok=True)
