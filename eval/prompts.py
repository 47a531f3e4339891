"""Chats as the tensors that `generate` takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def inputs_of(processor: Any, conversations: Sequence[Sequence[dict[str, Any]]]) -> Any:
    """The processor's tensors of chats that wait for an answer, padded on the left; one alone comes without padding."""
    one = len(conversations) == 1
    return processor.apply_chat_template(
        list(conversations[0] if one else conversations),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        **({} if one else {"padding": True}),
    )
