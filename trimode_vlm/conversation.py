"""What a finished answer leaves behind, so that the next turn prefills only what is new."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from torch import Tensor

from .cache import KVCache


@dataclass
class ConversationCache:
    """The keys of one conversation with the tokens and images that they stand for.

    The next call gets the whole conversation again; what agrees with the cache from the start is not computed anew,
    and a changed history or another picture is noticed. There is one object for one set of buffers: a call that
    continues the conversation moves this object along, so what it says it holds is what the buffers hold.
    """

    kv: KVCache
    token_ids: list[int]
    image_digests: list[str] = field(default_factory=list)

    def hold(self, token_ids: list[int], image_digests: list[str]) -> None:
        """Note what the buffers hold now; their length follows."""
        self.token_ids, self.image_digests = token_ids, image_digests
        self.kv.truncate(len(token_ids))

    def shared_prefix(self, token_ids: list[int], digests: list[str], image_spans: list[tuple[int, int]]) -> int:
        """How many leading tokens of a new prompt the cache holds; at least one token is left to compute.

        Args:
            digests: of the new prompt's images in order; image_spans: first and past-the-end index of their tokens.
        """
        shared = common_start(self.token_ids, token_ids, len(token_ids) - 1)
        for i, (start, end) in enumerate(image_spans):
            same = i < len(self.image_digests) and self.image_digests[i] == digests[i]
            if start < shared and (not same or shared < end):
                return start
        return shared


def common_start(a: list[int], b: list[int], most: int) -> int:
    """How many leading ids two lists share, up to `most`; by halves, since lists compare fast."""
    low, high = 0, min(len(a), len(b), most)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def image_digest(pixels: Tensor) -> str:
    """A fingerprint of one image's size and pixel values."""
    digest = hashlib.sha256(repr(tuple(pixels.shape)).encode())
    digest.update(pixels.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def image_spans(token_ids: list[int], image_token_id: int | None, counts: list[int]) -> list[tuple[int, int]]:
    """Where each image's tokens stand: (index of its first, index behind its last), given their counts in order."""
    places = [i for i, token in enumerate(token_ids) if token == image_token_id]
    spans, done = [], 0
    for count in counts:
        spans.append((places[done], places[done + count - 1] + 1))
        done += count
    return spans


def num_images(spans: list[tuple[int, int]], length: int) -> int:
    """How many images lie in the first `length` tokens, which never end inside one."""
    return sum(start < length for start, _ in spans)
