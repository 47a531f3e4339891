"""Mode auto: the text against that of AR, whatever the policy chooses; what it does choose; sampling."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_answer_reports as answer_reports
import test_decoding_pitfalls as pitfalls
import test_decoding_rows as decoding_rows
import torch
from conftest import make_tiny_model, tiny_config
from decoding_cases import PROMPT, generate, padded, prompts, says, speaker
from naive import by_position, count_forwards, scripted_model
from test_draft_adapter import peft_folder
from test_policy import cheap_blocks
from test_sampled_distribution import WORDS, chi_square_p, filtered, random_language

from trimode_vlm.draft_adapter import read_adapter
from trimode_vlm.policy import PROBE_SHARE, Acceptance, Policy

auto = importlib.import_module("trimode_vlm.decoders.auto")

Cost = Callable[[int, int], float]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Decode by this policy, or by one with this cost."""

    def set_policy(policy: Any) -> Any:
        policy = policy if hasattr(policy, "observe") else Policy(policy)
        monkeypatch.setattr(auto, "policy_for", lambda model, rows: policy)
        return policy

    return set_policy


class AnyLength:
    """Chooses at random: what is generated may not depend on it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.known: list[Acceptance] | None = None

    def next_block_length(self, rows: Any, limits: Any, longest: int, shortest: int = 1) -> int:
        if self.known is not None:
            self.known += [row for row in rows if not any(row is other for other in self.known)]
        return self.random.randint(shortest, longest)

    def observe(self, row: Any, tokens: int, block_length: int) -> None:
        assert 1 <= tokens <= block_length


# --- Probes.


def cycle_costs(out: Any, cost: Cost) -> tuple[float, float]:
    """Costs of the drafting and of the AR cycles of a one-row answer."""
    lengths = out.block_lengths[0]
    return sum(cost(1, k) for k in lengths if k > 1), sum(cost(1, k) for k in lengths if k == 1)


def test_probes_lose_a_bounded_share(use: Any) -> None:
    """Drafts are always wrong: some failures teach that; from then on a few probes are all that is drafted."""
    words = [8 + i % 50 for i in range(900)]
    config = tiny_config(vision=False, max_position_embeddings=1024)
    ahead = by_position(says([60], length=1024))
    model = scripted_model(config, by_position(says(words, shift=1, length=1024)), ahead)
    policy = use(cheap_blocks)
    [tokens], out = generate(model, [PROMPT], max_new_tokens=900, mode="auto", block_length=32)
    assert tokens == words
    drafts = [i for i, k in enumerate(out.block_lengths[0]) if k > 1]
    assert drafts[0] == 0 and 3 <= len(drafts) <= 20
    policy.young, policy.probe_sec = policy.old, 0.0
    out = generate(model, [PROMPT], max_new_tokens=900, mode="auto", block_length=32)[1]
    lengths = out.block_lengths[0]
    drafting, ar = cycle_costs(out, cheap_blocks)
    num_probes = len(lengths) - lengths.count(1)
    assert 2 <= num_probes and drafting - num_probes * cheap_blocks(1, 1) <= PROBE_SHARE * ar
    assert policy.rates(Acceptance(tokens=100))[0] < 0.6


def test_a_probe_finds_that_drafts_became_good(use: Any) -> None:
    """The drafts of the first 100 tokens are wrong."""
    words = [8 + i % 50 for i in range(700)]
    config = tiny_config(vision=False, max_position_embeddings=1024)
    ahead = says(words, length=1024)
    ahead[: len(PROMPT) + 100] = says([60], length=1024)[: len(PROMPT) + 100]
    model = scripted_model(config, by_position(says(words, shift=1, length=1024)), by_position(ahead))
    use(cheap_blocks)
    [tokens], out = generate(model, [PROMPT], max_new_tokens=700, mode="auto", block_length=32)
    assert tokens == words
    lengths = out.block_lengths[0]
    assert lengths[2:90].count(1) >= 80 and min(lengths[-5:-1]) >= 16 and 32 in lengths
    assert out.tokens_per_forward[0] > 2


# --- The decoder.


def test_good_drafts_grow_and_bad_ones_end(use: Any) -> None:
    words = [8 + i % 50 for i in range(130)]
    use(cheap_blocks)
    good = generate(speaker(words), [PROMPT], max_new_tokens=130, mode="auto", block_length=32)[1]
    lengths = good.block_lengths[0]
    assert lengths[0] > 1 and max(lengths) == 32 and lengths.index(32) <= 3
    use(cheap_blocks)
    bad = generate(speaker(words, [60]), [PROMPT], max_new_tokens=60, mode="auto", block_length=32)[1]
    assert bad.block_lengths[0][0] > 1 and bad.block_lengths[0][2:50].count(1) >= 45


def test_many_rows_decode_by_ar_and_the_last_ones_draft(use: Any) -> None:
    """The policy sees how many rows there are now, not how many there were."""
    words = [8 + i % 50 for i in range(60)]
    use(lambda rows, k: cheap_blocks(rows, k) if rows < 3 else (1 if k == 1 else 2) * k * rows)
    model = speaker(words)
    inputs = padded([PROMPT] * 3)
    events = list(model.stream(**inputs, max_new_tokens=60, mode="auto", stopping_criteria=[_stop_after(20, rows=2)]))
    drafted = {len(event.draft) + 1 for event in events if event.draft is not None and event.row == 2}
    together = [event for event in events if event.row == 0 and event.draft is not None]
    assert {len(event.draft) for event in together} == {0} and max(drafted) == 8


def _stop_after(count: int, rows: int) -> Callable[..., bool]:
    """Stop the first `rows` answers that reach so many tokens; the others go on."""
    stopped: list[int] = []

    def rule(ids: Any, scores: Any) -> bool:
        if ids.shape[1] - len(PROMPT) == count and len(stopped) < rows:
            stopped.append(1)
            return True
        return False

    return rule


@pytest.mark.parametrize("seed", range(6))
def test_greedy_text_is_that_of_ar_whatever_is_chosen(seed: int, use: Any) -> None:
    """Ragged batches of random models; one forward per AR cycle, two per draft, each counted once."""
    model = make_tiny_model(seed=seed, vision=False)
    rows = prompts(1 + seed % 4, seed=seed)
    expected, _ = generate(model, rows, mode="ar", max_new_tokens=40)
    sizes = count_forwards(model)
    for mode, longest in (("auto", {}), ("auto", {"block_length": 5}), ("linear_spec", {"block_length": "auto"})):
        use(AnyLength(seed))
        sizes.clear()
        got, out = generate(model, rows, mode=mode, max_new_tokens=40, **longest)
        assert got == expected
        assert out.total_nfe == len(sizes) and sum(out.nfe) - sum(out.nfe_prefill) <= sum(sizes[1:])
        for tokens, lengths, gave, nfe in zip(got, out.block_lengths, out.accepted_lengths, out.nfe, strict=True):
            assert sum(gave) == len(tokens) - 1 and all(1 <= n <= k for n, k in zip(gave, lengths, strict=True))
            # Of the budget's last token no row drafts, though its neighbours may.
            last_alone = len(tokens) == 40 and gave[-1:] == [1] and lengths[-1] > 1
            assert nfe == 1 + sum(1 if k == 1 else 2 for k in lengths) - (last_alone and sum(gave[:-1]) == 38)
        used = {k for lengths in out.block_lengths for k in lengths}
        assert used <= set(range(2 if mode == "linear_spec" else 1, longest.get("block_length") == 5 and 6 or 9))


def test_greedy_text_is_that_of_ar_by_measured_costs() -> None:
    for seed in range(3):
        model = make_tiny_model(seed=seed, vision=False)
        rows = prompts(3, seed=seed)
        assert (
            generate(model, rows, mode="auto", max_new_tokens=30)[0]
            == generate(model, rows, mode="ar", max_new_tokens=30)[0]
        )


class Longest:
    """Always the longest draft, so that how a cycle is cut short is seen."""

    def next_block_length(self, rows: Any, limits: Any, longest: int, shortest: int = 1) -> int:
        return longest if max(limits) > 1 else 1

    def observe(self, row: Any, tokens: int, block_length: int) -> None:
        pass


@pytest.mark.parametrize(
    "case",
    [
        pitfalls.test_any_of_several_end_tokens_ends_the_output,
        pitfalls.test_a_stopping_criterion_ends_the_output_inside_a_block,
        pitfalls.test_the_budget_is_exact,
        pitfalls.test_the_models_positions_bound_the_budget,
        pitfalls.test_mask_image_and_filler_ids_are_never_returned_even_when_likeliest,
        pitfalls.test_exact_ties_of_real_weights,
        pitfalls.test_a_conversations_cache_gives_the_answer_of_a_fresh_call,
        pitfalls.test_a_cache_survives_an_edited_history_and_a_closed_stream,
        decoding_rows.test_finished_rows_cost_and_count_nothing,
        decoding_rows.test_streamed_tokens_are_final_and_equal_generates,
        decoding_rows.test_a_closed_stream_makes_no_more_forwards,
        decoding_rows.test_nfe_is_the_number_of_backbone_calls,
        answer_reports.test_streams_carry_logprobs,
        answer_reports.test_samples_are_the_rows_of_single_requests,
        answer_reports.test_samples_continue_a_conversation,
    ],
    ids=lambda case: case.__name__,
)
def test_what_holds_for_every_mode_holds_here(case: Callable[[str], None], use: Any) -> None:
    use(Longest())
    case("auto")


def test_images_and_a_continued_cache(chat_model: Any, processor: Any, use: Any) -> None:
    from data_cases import picture

    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "What is it?"}]}
    ]
    options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    caches: dict[str, Any] = {"ar": None, "auto": None}
    use(AnyLength(3))
    for question in ("And now?", None):
        inputs = processor.apply_chat_template(turns, **options, return_tensors="pt")
        outs = {m: chat_model.generate(**inputs, mode=m, max_new_tokens=25, cache=caches[m]) for m in caches}
        caches = {m: out.cache for m, out in outs.items()}
        assert outs["ar"].sequences.tolist() == outs["auto"].sequences.tolist()
        assert caches["ar"].token_ids[: len(inputs["input_ids"][0])] == inputs["input_ids"][0].tolist()
        turns += [{"role": "assistant", "content": "So."}, {"role": "user", "content": question or ""}]


def test_the_adapter_drafts(tmp_path: Path, use: Any) -> None:
    model = make_tiny_model()
    expected = generate(model, [PROMPT], mode="ar", max_new_tokens=30)[0]
    drafts = []
    for adapter in (None, read_adapter(peft_folder(tmp_path), model)):
        model.draft_adapter = adapter
        use(AnyLength(1))
        events = list(model.stream(torch.tensor([PROMPT]), mode="auto", max_new_tokens=30))
        assert [token for event in events for token in event.token_ids] == expected[0]
        drafts.append([event.draft for event in events])
    assert drafts[0] != drafts[1]


def test_rows_that_join_get_what_they_get_alone(use: Any) -> None:
    """As an engine brings them in, sampled, at every round."""
    model = make_tiny_model(seed=8, vision=False)
    rows = prompts(4, seed=2)
    chosen: dict[str, Any] = {"mode": "auto", "max_new_tokens": 12, "do_sample": True, "temperature": 1.5}
    policy = use(AnyLength(0))
    alone = [generate(model, [row], seed=i, **chosen)[0][0] for i, row in enumerate(rows)]
    with torch.inference_mode():
        runs = [model.begin_generation(torch.tensor([row]), seed=i, **chosen) for i, row in enumerate(rows)]
        states = [run.begin() for run in runs]
        policy.known = []
        for i, state in enumerate(states):
            state.rows = [i]
        first, waiting = states[0], states[1:]
        for number, steps in enumerate(auto.decode_auto(first)):
            for step in steps:
                run = runs[step.row]
                run.take(run.rows[0], step)
                first.remaining[first.rows.index(step.row)] = run.rows[0].remaining
                if run.rows[0].finish_reason:
                    first.finished.add(step.row)
            if waiting and number % 2:
                first.joining.append(waiting.pop(0))
    assert [run.rows[0].token_ids for run in runs] == alone
    assert len(policy.known) == sum(len(a) > 1 for a in alone) > 2, "a row keeps what it knew while others come and go"


def test_without_a_mask_token_it_is_ar() -> None:
    model = make_tiny_model(seed=1, vision=False)
    expected = generate(model, [PROMPT], mode="ar", max_new_tokens=10)[0]
    model.config.mask_token_id = None
    got, out = generate(model, [PROMPT], mode="auto", max_new_tokens=10)
    assert got == expected and set(out.block_lengths[0]) == {1}


def test_adaptive_drafts_are_for_self_speculation_alone(use: Any) -> None:
    model = speaker([20])
    for mode in ("diffusion", "quadratic_spec"):
        with pytest.raises(ValueError, match="block_length must be a whole number"):
            generate(model, [PROMPT], mode=mode, block_length="auto")
    with pytest.raises(ValueError, match="does not use 'threshold'"):
        generate(model, [PROMPT], mode="auto", threshold=0.5)
    use(lambda rows, k: float(k * k))
    out = generate(model, [PROMPT], mode="linear_spec", block_length="auto", max_new_tokens=9)[1]
    assert out.block_lengths[0][0] == 2, "the shortest draft, though AR would be cheaper"


# --- Sampling.


@pytest.mark.parametrize("sampling", [{"temperature": 1.3}, {"temperature": 0.8, "top_p": 0.9}, {"top_k": 5}])
def test_a_seeds_sample_is_that_of_ar_whatever_is_chosen(sampling: dict[str, Any], use: Any) -> None:
    """In a batch whose rows speculate together; alone as well."""
    for seed in range(3):
        model = make_tiny_model(seed=seed, vision=False)
        rows = prompts(3, seed=seed)
        chosen: dict[str, Any] = {"do_sample": True, "max_new_tokens": 24, "seed": 5, **sampling}
        expected = generate(model, rows, mode="ar", **chosen)[0]
        for policy_seed in range(3):
            use(AnyLength(policy_seed))
            assert generate(model, rows, mode="auto", **chosen)[0] == expected
        use(AnyLength(7))
        assert generate(model, rows[:1], mode="linear_spec", block_length="auto", **chosen)[0] == expected[:1]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.7, 0, 1.0), (1.0, 0, 1.0)])
def test_sampled_tokens_have_the_ar_distribution(temperature: float, top_k: int, top_p: float, use: Any) -> None:
    """Marginals of each place and pairs of neighbours over 20,000 rows, the block length another one each cycle."""
    model, causal = random_language(seed=11)
    use(AnyLength(0))
    num_draws, length = 20_000, 5
    out = model.generate(
        torch.tensor([[30, 20]] * num_draws), mode="auto", block_length=4, max_new_tokens=length, do_sample=True,
        temperature=temperature, top_k=top_k, top_p=top_p, seed=99,
    )  # fmt: skip
    index = (out.sequences[:, 2:, None] == torch.tensor(WORDS)).long().argmax(-1)
    marginal, p_values = torch.eye(len(WORDS))[0], []
    for place in range(length):
        rows = [filtered(causal[1 + place, word], temperature, top_k, top_p)[WORDS] for word in WORDS]
        joint = marginal[:, None] * torch.stack(rows)
        marginal = joint.sum(0)
        p_values.append(chi_square_p(index[:, place].bincount(minlength=len(WORDS)), marginal))
        if place:
            pairs = index[:, place - 1] * len(WORDS) + index[:, place]
            p_values.append(chi_square_p(pairs.bincount(minlength=len(WORDS) ** 2), joint.flatten()))
    assert min(p_values) * len(p_values) > 0.01, p_values
    assert max(n for lengths in out.accepted_lengths for n in lengths) > 1, "drafts were accepted"
