"""The ways to decode. Each is a generator over rounds; a round is a Step for each running row, or for newcomers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from .ar import decode_ar
from .auto import decode_adaptive, decode_auto
from .diffusion import decode_diffusion
from .linear_spec import decode_linear_spec
from .quadratic_spec import decode_quadratic_spec
from .state import DecodeState, Settings, Step


def decode_linear_spec_any(state: DecodeState) -> Iterator[list[Step]]:
    """With block_length="auto" the policy sets the length of every draft, but always drafts."""
    return decode_adaptive(state, shortest=2) if state.settings.adaptive else decode_linear_spec(state)


Decoder = Callable[[DecodeState], Iterator[list[Step]]]


def _reporting(decode: Decoder, state: DecodeState) -> Iterator[list[Step]]:
    for steps in decode(state):
        yield state.report(steps)


_DECODERS: dict[str, Decoder] = {
    "ar": decode_ar,
    "diffusion": decode_diffusion,
    "linear_spec": decode_linear_spec_any,
    "quadratic_spec": decode_quadratic_spec,
    "auto": decode_auto,
}
DECODERS: dict[str, Decoder] = {mode: partial(_reporting, decode) for mode, decode in _DECODERS.items()}

# The decoding options that each mode uses beside those that all modes share.
MODE_OPTIONS: dict[str, frozenset[str]] = {
    "ar": frozenset(),
    "diffusion": frozenset({"block_length", "threshold", "commit_rule", "entropy_bound"}),
    "linear_spec": frozenset({"block_length", "verification"}),
    "quadratic_spec": frozenset({"block_length", "verifier_mix", "verification"}),
    "auto": frozenset({"block_length"}),
}

__all__ = ["DECODERS", "MODE_OPTIONS", "DecodeState", "Settings", "Step"]
