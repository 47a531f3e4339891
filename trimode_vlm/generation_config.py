"""The decoding parameters of one request: defaults, overrides and what is refused."""

from __future__ import annotations

import copy
import difflib
import warnings
from typing import Any

from transformers import GenerationConfig

from .decoders import DECODERS, MODE_OPTIONS, Settings
from .sampling import SamplingParams

COMMIT_RULES = ("confidence", "entropy")
# Every cycle runs whole blocks, so a slip of the finger here would run for minutes.
MAX_BLOCK_LENGTH = 1024
# The modes that take block_length="auto".
ADAPTIVE_MODES = ("linear_spec", "auto")
# Below, logits over temperature leave the range of float32.
MIN_TEMPERATURE = 1e-3
OUR_DEFAULTS: dict[str, Any] = {
    "mode": "ar",
    "block_length": None,
    "threshold": 0.9,
    "commit_rule": "confidence",
    "entropy_bound": 0.1,
    "verifier_mix": 1.0,
    "seed": None,
}
SHARED_OPTIONS = frozenset(
    {
        "mode",
        "max_new_tokens",
        "max_length",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "stop_strings",
        "seed",
        "eos_token_id",
        "pad_token_id",
        "bos_token_id",
        "return_dict_in_generate",
    }
)
# Keys of GenerationConfig that ask for nothing, whatever they hold: bookkeeping of transformers.
_BOOKKEEPING = frozenset({"transformers_version", "use_cache", "low_memory"})
_NEUTRAL: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1.0, "length_penalty": 1.0}


class TriModeGenerationConfig(GenerationConfig):
    """A transformers GenerationConfig with the tri-mode options; lives in `generation_config.json`.

    Args:
        mode: "ar", "diffusion", "linear_spec", "quadratic_spec" or "auto" (ar or linear_spec, whichever is faster now).
        block_length: tokens per diffusion block or draft (None: the model's own); in mode "auto" the most that a draft
            may have. "auto" in linear_spec: what pays best now, up to the model's own.
        threshold: diffusion commits every masked position at or above this probability; None: one token per forward.
        commit_rule: "confidence" or "entropy"; entropy_bound: nats that the entropy rule may commit at once.
        verifier_mix: quadratic_spec accepts by verifier_mix * p_AR + (1 - verifier_mix) * p_diffusion. Below 1 (the
            default) it is not exact: the output is no longer that of ar.
        seed: of the request; row b draws from a stream of its own, seeded with seed + b.
    """

    mode: str
    block_length: int | str | None
    threshold: float | None
    commit_rule: str
    entropy_bound: float
    verifier_mix: float
    seed: int | None

    def __init__(self, **kwargs: Any) -> None:
        for name, default in OUR_DEFAULTS.items():
            setattr(self, name, kwargs.pop(name, default))
        super().__init__(**kwargs)

    @classmethod
    def from_model_config(cls, model_config: Any) -> TriModeGenerationConfig:
        """The defaults of a model that has no generation_config.json: its special tokens."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return cls(**{name: getattr(model_config, name, None) for name in names})

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> TriModeGenerationConfig:
        """From a generation_config.json of any library; what no decoder here takes is left out, with one warning."""
        known = SHARED_OPTIONS.union(*MODE_OPTIONS.values())
        ours = {name: value for name, value in settings.items() if name in known and value is not None}
        config = cls(**ours)
        ignored = [n for n, v in settings.items() if n not in known | _BOOKKEEPING and _asks_for_something(n, v)]
        if ignored:
            warnings.warn(f"tri-mode decoding does not use these settings: {', '.join(ignored)}", stacklevel=2)
        return config

    def override(self, kwargs: dict[str, Any]) -> TriModeGenerationConfig:
        """A copy with `kwargs` put over it.

        Raises:
            ValueError: an option is unknown, has no effect in the resulting mode, or holds a value out of its range.
        """
        config = copy.deepcopy(self)
        known = SHARED_OPTIONS.union(*MODE_OPTIONS.values())
        for name, value in kwargs.items():
            if name not in known:
                near = difflib.get_close_matches(name, sorted(known), 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
                raise ValueError(f"unknown generation option {name!r}; {hint}")
            setattr(config, name, value)
        if config.mode not in DECODERS:
            near = difflib.get_close_matches(str(config.mode), DECODERS, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"unknown mode {config.mode!r}; {hint}known: {', '.join(DECODERS)}")
        used = SHARED_OPTIONS | MODE_OPTIONS[config.mode]
        for name, value in kwargs.items():
            if name not in used and value is not None:
                users = [mode for mode, options in MODE_OPTIONS.items() if name in options]
                raise ValueError(f"mode {config.mode!r} does not use {name!r}; it belongs to {', '.join(users)}")
        if "max_length" in kwargs and "max_new_tokens" not in kwargs:
            config.max_new_tokens = None
        config._refuse_without_effect(kwargs)
        config.check()
        return config

    def _refuse_without_effect(self, kwargs: dict[str, Any]) -> None:
        """Raise ValueError for an option that was asked for and that another option switches off."""
        if not self.do_sample:
            for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
                if kwargs.get(name) not in (None, neutral):
                    raise ValueError(f"{name}={kwargs[name]} has no effect without do_sample=True")
        if self.mode == "diffusion":
            unused = "threshold" if self.commit_rule == "entropy" else "entropy_bound"
            if kwargs.get(unused) is not None:
                raise ValueError(f"{unused} has no effect with commit_rule={self.commit_rule!r}")

    def check(self) -> None:
        """Raise ValueError for values out of range, and for transformers options that no mode here honours."""
        for name, least, most in (
            ("max_new_tokens", 1, None),
            ("max_length", 1, None),
            ("block_length", 1, MAX_BLOCK_LENGTH),
            ("top_k", 0, None),
            ("seed", 0, None),
        ):
            value = getattr(self, name)
            if name == "block_length" and value == "auto" and self.mode in ADAPTIVE_MODES:
                continue
            if value is not None and (type(value) is not int or value < least or (most and value > most)):
                limits = f"of at least {least}" + (f" and at most {most}" if most else "")
                raise ValueError(f"{name} must be a whole number {limits}, got {value!r}")
        for name in ("temperature", "threshold", "top_p", "entropy_bound", "verifier_mix"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ValueError(f"{name} must be a number, got {value!r}")
        if self.do_sample and self.temperature is not None and not MIN_TEMPERATURE <= self.temperature <= 1e3:
            raise ValueError(
                f"temperature must be above 0 (from {MIN_TEMPERATURE} to 1000), got {self.temperature}; "
                "greedy is do_sample=False"
            )
        if self.threshold is not None and not 0 < self.threshold <= 1:
            raise ValueError(f"threshold must lie in (0, 1], got {self.threshold}; None commits one token per forward")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.verifier_mix is None or not 0 < self.verifier_mix <= 1:
            raise ValueError(f"verifier_mix must lie in (0, 1], got {self.verifier_mix}; 1 keeps the output of ar")
        if self.commit_rule not in COMMIT_RULES:
            raise ValueError(f"unknown commit_rule {self.commit_rule!r}; known: {', '.join(COMMIT_RULES)}")
        if not self.entropy_bound >= 0:
            raise ValueError(f"entropy_bound must be at least 0, got {self.entropy_bound}")
        allowed = SHARED_OPTIONS.union(_BOOKKEEPING, *MODE_OPTIONS.values())
        for name, value in vars(self).items():
            if name not in allowed and _asks_for_something(name, value):
                raise ValueError(f"generation option {name}={value!r} is not supported by the tri-mode decoders")

    def settings(self, default_block_length: int) -> Settings:
        """The part that decoders read."""
        sampling = SamplingParams(
            do_sample=bool(self.do_sample),
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else float(self.top_p),
        )
        adaptive = self.block_length == "auto"
        return Settings(
            block_length=default_block_length if adaptive or not self.block_length else int(self.block_length),
            adaptive=adaptive,
            threshold=self.threshold,
            commit_rule=self.commit_rule,
            entropy_bound=self.entropy_bound,
            verifier_mix=float(self.verifier_mix),
            sampling=sampling,
        )

    @property
    def end_token_ids(self) -> frozenset[int]:
        ids = self.eos_token_id
        return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)


def _asks_for_something(name: str, value: Any) -> bool:
    unset = value is None or value is False or (name in _NEUTRAL and value == _NEUTRAL[name])
    return not name.startswith("_") and not unset
