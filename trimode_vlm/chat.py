"""One conversation on its way to ids: checked, shielded, rendered by the template, its answers located."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trimode_vlm.chat_messages import Message, adapt_content, check_messages, text_of
from trimode_vlm.control_tokens import ControlEncoder, Shield, Span
from trimode_vlm.image_tokens import ImageLayout

_EMPTY_THINK = re.compile(r"<think>\s*</think>\s*$")


class Chat:
    """A conversation, rendered.

    Args:
        messages: as users write them, see `check_messages`.
        template: the chat template.
        encoder: of the tokenizer.
        layout: the image tokens; None for a text-only model.
        options: variables of the template (`enable_thinking`, tools, ...).
        add_generation_prompt, continue_final_message: as in transformers.

    Attributes:
        text: the rendered chat as a user would read it.
        sources: what the image parts name, in order; None where a part names nothing.

    Raises:
        ValueError: bad messages, the template refuses them, or it does not render one placeholder per image.
    """

    def __init__(
        self,
        messages: Any,
        template: ChatTemplate,
        encoder: ControlEncoder,
        layout: ImageLayout | None,
        options: dict[str, Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
    ) -> None:
        checked, self.sources = check_messages(messages)
        self._template, self._encoder, self._layout = template, encoder, layout
        self._shield = Shield(encoder)
        covered = self._shield.cover({"messages": checked, "options": options or {}})
        image_token = layout.image_token if layout else None
        self._options = covered["options"]
        self._messages = adapt_content(covered["messages"], template.takes, image_token)
        self._rendered = template.render(self._messages, self._options, add_generation_prompt, continue_final_message)
        self.text = self._shield.uncover(self._rendered)
        self._check_placeholders(image_token)

    def encode(self) -> list[int]:
        """Return the ids, with one placeholder per image."""
        return self._encoder.encode(self._rendered, self._shield.restore)[0]

    def encode_with_answers(self) -> tuple[list[int], list[range]]:
        """Return the ids and the token range of each trained answer with the token that ends it.

        Raises:
            ValueError: an answer cannot be located in the rendered chat.
        """
        rendered, spans = self._answer_spans()
        return self._encoder.encode(rendered, self._shield.restore, spans)

    def _check_placeholders(self, image_token: str | None) -> None:
        count = self._rendered.count(image_token) if image_token else 0
        if count == len(self.sources):
            return
        if image_token is None:
            raise ValueError(f"the messages hold {len(self.sources)} images, but this checkpoint reads text only")
        raise ValueError(
            f"the messages hold {len(self.sources)} images but the chat template rendered {count} image placeholders "
            f"({image_token})"
        )

    def _answer_spans(self) -> tuple[str, list[Span]]:
        """Return the rendered chat and the spans of its trained answers, from prefix renderings of the template.

        An answer starts where the prompt for it ends and stops after the first token that can end it. Where the prompt
        ends in an empty thinking block that the template leaves out of the history, the block is put before the
        answer, as at inference. A message with `train: False` gives no span.
        """
        full, spans, insertions = self._rendered, [], []
        ends = self._encoder.end_pattern(self._layout.strings if self._layout else [])
        for index, message in enumerate(self._messages):
            if message["role"] != "assistant" or message.get("train") is False:
                continue
            start, block = self._answer_start(index)
            end = ends.search(full, start)
            if end is None:
                raise ValueError(f"message {index}: the chat template does not close an answer with an end token")
            if end.start() == start and text_of(message).strip():
                raise ValueError(
                    f"message {index}: the chat template renders {end.group()!r} where the answer should start; "
                    "does it support add_generation_prompt?"
                )
            if block:
                insertions.append((start, block))
            spans.append(Span(start, end.end()))
        return _insert(full, spans, insertions)

    def _answer_start(self, index: int) -> tuple[int, str]:
        """Return where the answer in message `index` starts, and the thinking block that is to stand before it."""
        prompt = self._template.render(self._messages[:index], self._options, True)
        if self._rendered.startswith(prompt):
            return len(prompt), ""
        think = _EMPTY_THINK.search(prompt)
        if think is None or not self._rendered.startswith(prompt[: think.start()]):
            raise ValueError(
                f"message {index}: the prompt that the chat template renders for this answer is not a prefix of the "
                "rendered chat, so the answer cannot be located"
            )
        own_thinking = self._rendered[think.start() :].lstrip().startswith("<think>")
        return think.start(), "" if own_thinking else think.group()


class _GenerationBlock(Extension):
    """transformers' `{% generation %} ... {% endgeneration %}`, as far as it must be known to read a template."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_template(source: Any) -> None:
    """Raise ValueError for a chat template that is no valid Jinja; nothing is rendered."""
    if not isinstance(source, str):
        raise ValueError(f"the chat template must be text, found {type(source).__name__}")
    try:
        # Without the optimizer, which would evaluate constant expressions of a stranger's template.
        extensions = [_GenerationBlock, "jinja2.ext.loopcontrols"]
        ImmutableSandboxedEnvironment(extensions=extensions, optimized=False).compile(source)
    except TemplateSyntaxError as error:
        reason = " ".join(str(error.message).split())
        raise ValueError(f"the chat template is no valid Jinja, line {error.lineno}: {reason}") from error


class ChatTemplate:
    """A chat template and the tokenizer that renders it.

    Attributes:
        takes: whether it reads message content as a list of parts, and whether it reads content as text.

    Raises:
        ValueError: the template is no valid Jinja.
    """

    def __init__(self, source: str, tokenizer: Any) -> None:
        check_template(source)
        self.source = source
        self._tokenizer = tokenizer
        self.takes = self._reads([{"type": "text", "text": "PROBE"}]), self._reads("PROBE")

    def __deepcopy__(self, memo: Any) -> ChatTemplate:
        return self  # saving a processor deep-copies its attributes; this one is a cache

    def names(self, variable: str) -> bool:
        """Return whether the template mentions a variable."""
        return re.search(rf"\b{re.escape(variable)}\b", self.source) is not None

    def render(
        self,
        messages: list[Message],
        options: dict[str, Any],
        add_generation_prompt: bool,
        continue_final_message: bool | str = False,
    ) -> str:
        """Return the text that the template makes of checked messages; it does not think unless told to.

        Raises:
            ValueError: the template refuses them.
        """
        if self.names("enable_thinking"):
            options = {"enable_thinking": False, **options}
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                chat_template=self.source,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **options,
            )
        except (TemplateError, TypeError, KeyError, IndexError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def _reads(self, content: Any) -> bool:
        try:
            text = self.render([{"role": "user", "content": content}], {}, False)
        except ValueError:
            return False
        return "PROBE" in text and "'type'" not in text and '"type"' not in text


def _insert(full: str, spans: list[Span], insertions: list[tuple[int, str]]) -> tuple[str, list[Span]]:
    def shift(position: int) -> int:
        return position + sum(len(block) for at, block in insertions if at <= position)

    for at, block in sorted(insertions, reverse=True):
        full = full[:at] + block + full[at:]
    return full, [Span(shift(span.start), shift(span.stop)) for span in spans]
