"""What requests leave behind for others: finished conversations' keys, and image features; the least used go first."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from torch import Tensor

from .conversation import ConversationCache, image_spans, num_images

if TYPE_CHECKING:
    from .prefill import Prompt

# A shorter common start is cheaper to compute than to copy.
MIN_SHARED_TOKENS = 16
# Every request looks at all of them.
MAX_CONVERSATIONS = 512


class FeatureCache:
    """Image features [N, D] by the image's digest, up to a number of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.hits = self.misses = 0
        self._features: OrderedDict[str, Tensor] = OrderedDict()

    def get(self, digest: str) -> Tensor | None:
        features = self._features.get(digest)
        if features is None:
            self.misses += 1
            return None
        self.hits += 1
        self._features.move_to_end(digest)
        return features

    def put(self, digest: str, features: Tensor) -> None:
        num_bytes = features.nbytes
        if num_bytes > self.limit_bytes or digest in self._features:
            return
        # A view would keep the features of the whole batch alive.
        self._features[digest] = features.clone()
        self.held_bytes += num_bytes
        while self.held_bytes > self.limit_bytes:
            self.held_bytes -= self._features.popitem(last=False)[1].nbytes


class PrefixCache:
    """Conversations that were answered: up to MAX_CONVERSATIONS, and a number of bytes of keys and values."""

    def __init__(self, limit_bytes: int, image_token_id: int | None) -> None:
        self.limit_bytes, self.image_token_id = limit_bytes, image_token_id
        self.held_bytes = 0
        self.hit_tokens = self.miss_tokens = 0
        self._entries: list[ConversationCache] = []  # the least recently used first

    def takes(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether a conversation of that length would be kept."""
        return num_tokens >= MIN_SHARED_TOKENS and num_bytes <= self.limit_bytes

    def put(self, conversation: ConversationCache) -> None:
        """Keep a conversation; those that it continues are contained in it and go."""
        num_bytes = conversation.kv.kv.nbytes
        if not self.takes(len(conversation.token_ids), num_bytes):
            return
        for entry in [e for e in self._entries if _is_start_of(e, conversation)]:
            self._remove(entry)
        self._entries.append(conversation)
        self.held_bytes += num_bytes
        while self.held_bytes > self.limit_bytes or len(self._entries) > MAX_CONVERSATIONS:
            self._remove(self._entries[0])

    def find(self, prompt: Prompt) -> ConversationCache | None:
        """A copy of the longest start that some conversation shares with the prompt, or None."""
        spans = image_spans(prompt.token_ids, self.image_token_id, prompt.counts)
        best, shared = self._best(prompt, spans)
        if best is None:
            self.miss_tokens += len(prompt.token_ids)
            return None
        self.hit_tokens += shared
        self.miss_tokens += len(prompt.token_ids) - shared
        self._entries.remove(best)
        self._entries.append(best)
        held = num_images(spans, shared)
        return ConversationCache(best.kv.select([0], shared), best.token_ids[:shared], best.image_digests[:held])

    def num_images(self, prompt: Prompt) -> int:
        """How many of the prompt's images lie in what `find` would give now."""
        spans = image_spans(prompt.token_ids, self.image_token_id, prompt.counts)
        _, shared = self._best(prompt, spans)
        return num_images(spans, shared)

    def _best(self, prompt: Prompt, spans: list[tuple[int, int]]) -> tuple[ConversationCache | None, int]:
        """The conversation that shares the longest start with the prompt, and its tokens."""
        best, shared = None, MIN_SHARED_TOKENS - 1
        for entry in self._entries:
            count = entry.shared_prefix(prompt.token_ids, prompt.digests, spans)
            if count > shared:
                best, shared = entry, count
        return best, 0 if best is None else shared

    def _remove(self, entry: ConversationCache) -> None:
        self._entries.remove(entry)
        self.held_bytes -= entry.kv.kv.nbytes


def _is_start_of(entry: ConversationCache, other: ConversationCache) -> bool:
    ids, digests = entry.token_ids, entry.image_digests
    return ids == other.token_ids[: len(ids)] and digests == other.image_digests[: len(digests)]
