"""The decoding parameters of one request: defaults, overrides and what is refused."""

from __future__ import annotations

import copy
import difflib
import warnings
from typing import Any

from transformers import GenerationConfig

from .decoders import DECODERS, MODE_OPTIONS, Settings
from .sampling import SamplingParams

COMMIT_RULES = ("confidence", "entropy", "learned")
# threshold_from= names the commit rule by what the threshold is held against.
THRESHOLD_FROM = {"confidence": "confidence", "sampler": "learned"}
VERIFICATIONS = ("token", "block")
# Every cycle runs whole blocks, so a slip of the finger here would run for minutes.
MAX_BLOCK_LENGTH = 1024
# quadratic_spec makes forwards of k (k + 1) tokens, each beside a mask of their square.
MAX_QUADRATIC_BLOCK_LENGTH = 64
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
    "verification": "token",
    "logit_bias": None,
    "thinking_budget": None,
    "start_of_thought_token_id": None,
    "end_of_thought_token_id": None,
    "output_logprobs": False,
    "top_logprobs": None,
    "seed": None,
}
SHARED_OPTIONS = frozenset(
    {
        "mode",
        "max_new_tokens",
        "max_length",
        "min_new_tokens",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "stop_strings",
        "logit_bias",
        "sequence_bias",
        "suppress_tokens",
        "bad_words_ids",
        "repetition_penalty",
        "thinking_budget",
        "start_of_thought_token_id",
        "end_of_thought_token_id",
        "output_logprobs",
        "top_logprobs",
        "num_return_sequences",
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
        commit_rule: "confidence", "entropy" or "learned"; entropy_bound: nats that the entropy rule may commit at once.
            "learned" (greedy only) commits the most confident position and those whose likeliest token is the final one
            with more than `threshold` probability, as the model's learned sampler says; threshold_from="sampler" means
            the same.
        verifier_mix: quadratic_spec accepts by verifier_mix * p_AR + (1 - verifier_mix) * p_diffusion. Below 1 (the
            default) it is not exact: the output is no longer that of ar.
        verification: of sampled drafts in linear_spec and quadratic_spec: "token" (arXiv 2211.17192) or "block"
            (arXiv 2403.10444), which accepts at least as many on average; both keep the distribution of ar.
        stop_strings: the answer ends where the first of them is complete. min_new_tokens: until then no end token is
            emitted; stop strings and criteria end an answer all the same, as in transformers.
        logit_bias: {token id: from -100 to 100}, added to the logits. sequence_bias, suppress_tokens, bad_words_ids,
            repetition_penalty: as in transformers, on the logits that tokens are chosen by. In self-speculation these
            are the verifier's. Diffusion takes what concerns single tokens and refuses the rest.
        thinking_budget: when the first thought of an answer has this many tokens, end_of_thought_token_id is forced.
            The thought is open where the prompt leaves start_of_thought_token_id open or the answer emits it; without
            that id, from the first token on. Both ids default to the <think> and </think> of tokenizer=. In diffusion
            a thought that opens in the middle of a block may run past its budget by less than the block.
        output_logprobs, top_logprobs: report log-probabilities (not in diffusion), see TriModeGenerateOutput.
        num_return_sequences: samples per prompt, behind one prefill; rows come prompt by prompt.
        seed: of the request; row b draws from a stream of its own, seeded with seed + b.
    """

    mode: str
    block_length: int | str | None
    threshold: float | None
    commit_rule: str
    entropy_bound: float
    verifier_mix: float
    verification: str
    logit_bias: dict[int, float] | None
    thinking_budget: int | None
    start_of_thought_token_id: int | None
    end_of_thought_token_id: int | None
    output_logprobs: bool
    top_logprobs: int | None
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
        kwargs = _with_commit_rule(kwargs)
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
            for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("verification", "token")):
                if kwargs.get(name) not in (None, neutral):
                    raise ValueError(f"{name}={kwargs[name]} has no effect without do_sample=True")
        if kwargs.get("verification") == "block" and self.block_length == "auto":
            raise ValueError(
                "verification='block' has no effect with block_length='auto', whose drafts share AR's draws"
            )
        for name in ("start_of_thought_token_id", "end_of_thought_token_id"):
            if kwargs.get(name) is not None and self.thinking_budget is None:
                raise ValueError(f"{name} has no effect without thinking_budget=")
        if self.mode == "diffusion":
            unused = "threshold" if self.commit_rule == "entropy" else "entropy_bound"
            if kwargs.get(unused) is not None:
                raise ValueError(f"{unused} has no effect with commit_rule={self.commit_rule!r}")
            if self.commit_rule == "learned" and self.do_sample:
                raise ValueError("commit_rule='learned' judges likeliest tokens, not drawn ones: use do_sample=False")

    def check(self) -> None:
        """Raise ValueError for values out of range, and for transformers options that no mode here honours."""
        for name, least, most in (
            ("max_new_tokens", 1, None),
            ("max_length", 1, None),
            ("block_length", 1, MAX_BLOCK_LENGTH),
            ("min_new_tokens", 0, None),
            ("thinking_budget", 0, None),
            ("start_of_thought_token_id", 0, None),
            ("end_of_thought_token_id", 0, None),
            ("top_logprobs", 0, None),
            ("num_return_sequences", 1, None),
            ("top_k", 0, None),
            ("seed", 0, None),
        ):
            value = getattr(self, name)
            if name == "block_length" and value == "auto" and self.mode in ADAPTIVE_MODES:
                continue
            if value is not None and (type(value) is not int or value < least or (most and value > most)):
                limits = f"of at least {least}" + (f" and at most {most}" if most else "")
                raise ValueError(f"{name} must be a whole number {limits}, got {value!r}")
        k = self.block_length
        if self.mode == "quadratic_spec" and isinstance(k, int) and k > MAX_QUADRATIC_BLOCK_LENGTH:
            raise ValueError(
                f"block_length {k} is too long for quadratic_spec, whose forwards have k (k + 1) = {k * (k + 1)} "
                f"tokens: at most {MAX_QUADRATIC_BLOCK_LENGTH}"
            )
        for name in ("temperature", "threshold", "top_p", "entropy_bound", "verifier_mix", "repetition_penalty"):
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
        if self.verification not in VERIFICATIONS:
            raise ValueError(f"unknown verification {self.verification!r}; known: {', '.join(VERIFICATIONS)}")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}; 1 leaves it out")
        if (self.num_return_sequences or 1) > 1 and not self.do_sample:
            raise ValueError(
                f"num_return_sequences={self.num_return_sequences} needs do_sample=True: greedy answers agree"
            )
        if self.top_logprobs and not self.output_logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} has no effect without output_logprobs=True")
        if self.output_logprobs and self.mode == "diffusion":
            raise ValueError(
                "mode 'diffusion' has no log-probabilities: its tokens are not chosen one after the other; every other "
                "mode has output_logprobs"
            )
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
            verification=self.verification,
            sampling=sampling,
        )

    @property
    def end_token_ids(self) -> frozenset[int]:
        ids = self.eos_token_id
        return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)


def _with_commit_rule(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options with commit_rule in place of its synonym threshold_from."""
    if "threshold_from" not in kwargs:
        return kwargs
    kwargs = dict(kwargs)
    source = kwargs.pop("threshold_from")
    if source not in THRESHOLD_FROM:
        raise ValueError(f"threshold_from must be one of {', '.join(THRESHOLD_FROM)}, got {source!r}")
    if kwargs.get("commit_rule", THRESHOLD_FROM[source]) != THRESHOLD_FROM[source]:
        raise ValueError(f"threshold_from={source!r} and commit_rule={kwargs['commit_rule']!r} ask for two rules")
    return kwargs | {"commit_rule": THRESHOLD_FROM[source]}


def _asks_for_something(name: str, value: Any) -> bool:
    unset = value is None or value is False or (name in _NEUTRAL and value == _NEUTRAL[name])
    return not name.startswith("_") and not unset
