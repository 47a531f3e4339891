"""Speed of light: the search against answers written down by hand and against all prefixes, the counts, the command."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_model, tiny_config
from decoding_cases import END, MASK, PROMPT, prompts, says
from naive import Oracle, by_position, count_forwards, scripted_model

from trimode_vlm import cli
from trimode_vlm.eval import sol_report
from trimode_vlm.eval.sol import samplers, step_counts
from trimode_vlm.eval.sol_search import BlockSearch, Canvas, Look, SolBlock, largest_safe
from trimode_vlm.eval.speed_of_light import forward_over, replay, speed_of_light, start_state

Rule = Callable[[Canvas], Look]
SEED = 9


def search(rule: Rule, length: int, **options: Any) -> tuple[SolBlock, list[Canvas]]:
    """The search over a model that is a function of the canvas, and every canvas that it was asked for."""
    asked: list[Canvas] = []

    def forward(canvases: Sequence[Canvas]) -> list[Look]:
        asked.extend(canvases)
        return [rule(canvas) for canvas in canvases]

    start = (SEED, *[MASK] * (length - 1))
    return BlockSearch(forward, start, mask_token_id=MASK, **options).run(), asked


def in_order(length: int, wrong: Callable[[Canvas], set[int]]) -> Rule:
    """A model that wants token 20 + i at position i, surest at the left, but 50 at the positions that `wrong` names."""

    def rule(canvas: Canvas) -> Look:
        bad = wrong(canvas)
        tokens = [50 if i in bad else 20 + i for i in range(length)]
        return Look(tokens, [0.9 - 0.01 * i for i in range(length)])

    return rule


def filled(canvas: Canvas) -> set[int]:
    return {i for i, token in enumerate(canvas) if token != MASK}


# By hand, one after another ------------------------------------------------------------------------------------------


def test_a_block_that_is_right_at_once_takes_one_step() -> None:
    block, asked = search(in_order(6, lambda canvas: set()), 6)
    assert block.target == [SEED, 21, 22, 23, 24, 25] and list(block.canvas) == block.target
    assert block.commits == [[1, 2, 3, 4, 5]] and block.serial_steps == 5
    # A full canvas needs no forward to be known, and the first canvas was already looked at.
    assert block.simulation_forwards == 0 and len(asked) == len(set(asked)) == 5


def test_a_position_that_is_wrong_until_its_neighbour_stands_waits_for_it() -> None:
    """4 reads 50 while 3 is masked: step 1 may take 1, 2, 3 and 5, step 2 takes 4. Serially it is read after 3."""
    rule = in_order(6, lambda canvas: {4} if canvas[3] == MASK else set())
    block, _ = search(rule, 6)
    assert block.target == [SEED, 21, 22, 23, 24, 25]
    assert block.commits == [[1, 2, 3, 5], [4]]
    start = (SEED, *[MASK] * 5)
    assert replay(lambda canvases: [rule(canvas) for canvas in canvases], start, block.commits) == block.target
    assert replay(lambda canvases: [rule(canvas) for canvas in canvases], start, [[1, 2, 3, 4, 5]]) != block.target


def test_an_early_commit_that_would_spoil_a_later_one_is_not_made() -> None:
    """With 3 there before 2, position 2 turns to 50; 1 alone and then 2 is the serial way. Safe are 1; 1,2; 1,2,3."""
    rule = in_order(5, lambda canvas: {2} if canvas[3] != MASK and canvas[2] == MASK else set())

    def surest_last(canvas: Canvas) -> Look:
        """The same tokens with 3 ranked before 2, except where 1 alone is there: the serial way stays 1, 2, 3, 4."""
        tokens, sure = rule(canvas)
        if filled(canvas) == {0}:
            sure = [sure[0], 0.9, 0.5, 0.8, 0.4]
        return Look(tokens, sure)

    block, _ = search(surest_last, 5, probes=8)
    assert block.target == [SEED, 21, 22, 23, 24]
    # The ranking is 1, 3, 2, 4: the prefix of two is unsafe, those of three and four are safe again.
    assert block.commits == [[1, 3, 2, 4]]
    safe = [is_safe_prefix(surest_last, block.target, (SEED, *[MASK] * 4), [1, 3, 2, 4], n) for n in range(1, 5)]
    assert safe == [True, False, True, True]


def test_safety_is_not_monotone_and_bisection_may_miss_the_largest_prefix() -> None:
    """Safe are 1 and 3 of 4: bisection tries 4 (unsafe), 2 (unsafe) and settles for 1; four probes find 3."""
    verdict = {1: True, 2: False, 3: True, 4: False}
    tried: list[int] = []

    def are_safe(canvases: Sequence[Canvas]) -> list[bool]:
        tried.extend(canvas[0] for canvas in canvases)
        return [verdict[canvas[0]] for canvas in canvases]

    canvases = [(n,) for n in range(1, 5)]
    assert largest_safe(canvases, are_safe) == 1 and tried == [4, 2]
    assert largest_safe(canvases, are_safe, probes=4) == 3


@pytest.mark.parametrize("probes", [1, 2, 3, 7, 31])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 31])
def test_where_safety_is_monotone_every_number_of_probes_finds_the_largest(count: int, probes: int) -> None:
    for border in range(1, count + 1):
        calls: list[int] = []

        def are_safe(canvases: Sequence[Canvas], border: int = border, calls: list[int] = calls) -> list[bool]:
            assert len(canvases) <= probes
            calls.append(len(canvases))
            return [canvas[0] <= border for canvas in canvases]

        assert largest_safe([(n,) for n in range(1, count + 1)], are_safe, probes) == border
        # Halving 31 takes 1 try of all and then at most 5.
        assert probes > 1 or len(calls) <= 6


def test_what_lies_behind_the_end_token_is_free() -> None:
    """END stands at 2; 3 and 4 never agree with anything, and are neither waited for nor in the target."""

    def rule(canvas: Canvas) -> Look:
        return Look([SEED, 21, END, 30 + len(filled(canvas)), 40 + len(filled(canvas))], [0.9, 0.8, 0.7, 0.6, 0.5])

    block, _ = search(rule, 5, end_token_ids=[END])
    assert block.target == [SEED, 21, END] and block.serial_steps == 2
    assert len(block.commits) == 1 and {1, 2} <= set(block.commits[0])


def test_a_seed_that_ends_the_answer_needs_no_step() -> None:
    for options in ({"end_token_ids": [SEED]}, {"room": 1}):
        block, asked = search(in_order(4, lambda canvas: set()), 4, **options)
        assert block.target == [SEED] and block.commits == [] and asked == []


def test_the_room_of_the_answer_cuts_the_target() -> None:
    block, _ = search(in_order(6, lambda canvas: {5} if canvas[1] == MASK else set()), 6, room=3)
    assert block.target == [SEED, 21, 22] and len(block.commits) == 1


def test_a_canvas_that_the_serial_way_passed_costs_no_simulation() -> None:
    """Ranked 1, 3, 2 at first, though serially 1, 2, 3: the prefixes of one and of three are canvases of that way."""

    def rule(canvas: Canvas) -> Look:
        tokens = in_order(6, lambda canvas: {4, 5} if canvas[3] == MASK else set())(canvas).tokens
        return Look(tokens, [0.9, 0.8, 0.3, 0.7, 0.2, 0.1] if filled(canvas) == {0} else [0.9, 0.8, 0.7, 0.6, 0.5, 0.4])

    block, asked = search(rule, 6)
    assert block.commits == [[1, 3, 2], [4, 5]] and block.simulation_forwards == 0
    assert len(asked) == block.serial_steps == 5


def test_over_budget_is_not_safe_and_is_counted() -> None:
    """Right first 1, then 4; serially 1, 2, 3, 4. The canvas {1, 4} is off that way: its simulation costs forwards."""

    def rule(canvas: Canvas) -> Look:
        sure = [0.9, 0.8, 0.3, 0.2, 0.7] if filled(canvas) == {0} else [0.9, 0.8, 0.7, 0.6, 0.5]
        tokens = [SEED, 21, 22, 23, 24]
        if filled(canvas) == {0}:
            tokens[2] = tokens[3] = 50
        return Look(tokens, sure)

    rich, _ = search(rule, 5)
    assert rich.commits == [[1, 4], [2, 3]]
    assert rich.simulation_forwards == 2 and rich.cut_simulations == 0  # {1, 4} and {1, 2, 4}
    for budget in (0, 1):
        poor, _ = search(rule, 5, budget=budget)
        assert poor.commits == [[1], [2, 3, 4]] and poor.target == rich.target
        assert poor.cut_simulations == 1 and poor.simulation_forwards == budget


# Against all prefixes ------------------------------------------------------------------------------------------------


def greedy_end(rule: Rule, canvas: Canvas) -> Canvas:
    while MASK in canvas:
        tokens, sure = rule(canvas)
        best = max((i for i, token in enumerate(canvas) if token == MASK), key=lambda i: (sure[i], -i))
        canvas = (*canvas[:best], tokens[best], *canvas[best + 1 :])
    return canvas


def is_safe_prefix(rule: Rule, target: Sequence[int], canvas: Canvas, ranked: list[int], n: int) -> bool:
    """Whether the first n of the ranking may be committed."""
    tokens = rule(canvas).tokens
    after = tuple(tokens[i] if i in ranked[:n] else token for i, token in enumerate(canvas))
    return list(greedy_end(rule, after)) == list(target)


def brute_force(rule: Rule, start: Canvas) -> tuple[list[int], list[list[int]], list[list[bool]]]:
    """Target, the largest safe prefix of every step, and the verdict on every prefix of every step."""
    target, canvas = list(greedy_end(rule, start)), start
    commits, verdicts = [], []
    while MASK in canvas:
        tokens, sure = rule(canvas)
        right = [i for i, token in enumerate(canvas) if token == MASK and tokens[i] == target[i]]
        ranked = sorted(right, key=lambda i: (-sure[i], i))
        safe = [is_safe_prefix(rule, target, canvas, ranked, n) for n in range(1, len(ranked) + 1)]
        n = max(i + 1 for i, is_safe in enumerate(safe) if is_safe)
        canvas = tuple(tokens[i] if i in ranked[:n] else token for i, token in enumerate(canvas))
        commits.append(ranked[:n])
        verdicts.append(safe)
    return target, commits, verdicts


def moody(seed: int, length: int) -> Rule:
    """A random function of the canvas that mostly repeats itself: right, but for some positions on some canvases."""

    def rule(canvas: Canvas) -> Look:
        generator = random.Random(f"{seed} {canvas}")
        tokens = [20 + i if generator.random() < 0.8 else 50 + generator.randrange(2) for i in range(length)]
        return Look(tokens, [round(generator.random(), 1) for _ in range(length)])  # with ties

    return rule


def test_all_probes_find_what_brute_force_finds_and_bisection_a_safe_prefix() -> None:
    uneven = missed = cut = 0
    for seed in range(150):
        length = 4 + seed % 6
        rule = moody(seed, length)
        target, commits, verdicts = brute_force(rule, (SEED, *[MASK] * (length - 1)))
        all_tried, _ = search(rule, length, probes=length)
        assert all_tried.target == target and all_tried.commits == commits
        halved, asked = search(rule, length)
        assert halved.target == target and len(asked) == len(set(asked))
        assert replayed(rule, halved) == target
        # Up to the first difference both stand on the same canvas: there bisection's prefix is safe and no longer.
        for mine, best, safe in zip(halved.commits, commits, verdicts, strict=False):
            assert mine == best[: len(mine)] and safe[len(mine) - 1]
            if safe == sorted(safe, reverse=True):
                assert mine == best, "monotone, so that halving finds the largest"
            uneven += safe != sorted(safe, reverse=True)
            cut += len(mine) < len(safe)
            if mine != best:
                missed += 1
                break
    # The cases must hold what they are for.
    assert uneven > 10 and missed > 2 and cut > 50


def replayed(rule: Rule, block: SolBlock) -> list[int]:
    canvas: Canvas = (SEED, *[MASK] * (len(block.canvas) - 1))
    for places in block.commits:
        tokens = rule(canvas).tokens
        assert all(canvas[i] == MASK for i in places), "a committed token never changes"
        canvas = tuple(tokens[i] if i in places else token for i, token in enumerate(canvas))
    return list(canvas)


def naive_rule(oracle: Oracle, prefix: list[int]) -> Rule:
    """Look at canvases without a cache."""

    def rule(canvas: Canvas) -> Look:
        logits = oracle.logits(prefix + list(canvas), block_start=len(prefix))[len(prefix) :]
        best, tokens = logits.softmax(-1).max(-1)
        return Look(tokens.tolist(), best.tolist())

    return rule


@pytest.mark.parametrize("k", [2, 4, 6])
def test_on_a_model_the_commits_are_those_of_brute_force_without_a_cache(k: int) -> None:
    """Three blocks of several prompts, float64 so that batches and caches rank alike; the answers do not end."""
    model = make_tiny_model(vision=False).double()
    oracle = Oracle(model, (), model.config.banned_ids())
    several = 0
    for prompt in prompts(4):
        inputs = {"input_ids": torch.tensor([prompt])}
        options = {"block_length": k, "max_new_tokens": 3 * k, "end_token_ids": ()}
        answer = speed_of_light(model, inputs, probes=k, **options)
        known = list(prompt)
        for block in answer.blocks:
            seed = int(oracle.logits(known)[-1].argmax())
            target, commits, _ = brute_force(naive_rule(oracle, known), (seed, *[MASK] * (k - 1)))
            assert (block.target, block.commits) == (target, commits)
            several += any(len(places) > 1 for places in commits)
            known += target
        assert answer.token_ids == known[len(prompt) :] and all(answer.replayed)
        halved = speed_of_light(model, inputs, **options)
        assert halved.token_ids == answer.token_ids and all(halved.replayed)
    assert several > 3 or k == 2


# Beside the decoder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_target_is_what_serial_diffusion_gives(k: int) -> None:
    model = make_tiny_model(vision=False)
    for prompt in prompts(5, seed=1):
        inputs = {"input_ids": torch.tensor([prompt])}
        for budget in (1, 7, 20):
            serial = model.generate(
                **inputs, mode="diffusion", threshold=None, block_length=k, max_new_tokens=budget, eos_token_id=END
            )
            answer = speed_of_light(model, inputs, block_length=k, max_new_tokens=budget, end_token_ids=[END])
            ids = serial.sequences[0, len(prompt) :][: serial.num_new_tokens[0]].tolist()
            assert answer.token_ids == ids and all(answer.replayed)
            steps = sum(block.serial_steps for block in answer.blocks)
            assert steps + answer.refreshes == serial.nfe[0] - serial.nfe_prefill[0]


def test_pictures_and_batched_probes_change_nothing(tiny_model: Any) -> None:
    cell = 28
    pixels = torch.rand(1, 3, cell, 2 * cell, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": torch.tensor([[10, 5, 4, 4, 7, 12, 13]]), "pixel_values": pixels}
    options = {"block_length": 8, "max_new_tokens": 24, "end_token_ids": ()}
    answers = [speed_of_light(tiny_model, inputs, probes=probes, **options) for probes in (1, 3, 8)]
    serial = tiny_model.generate(
        **inputs, mode="diffusion", threshold=None, block_length=8, max_new_tokens=24, eos_token_id=-1
    )
    assert all(answer.token_ids == serial.sequences[0, 7:].tolist() for answer in answers)
    assert all(all(answer.replayed) for answer in answers)


@torch.inference_mode()
def test_rows_of_a_batch_are_looked_at_as_alone() -> None:
    """Fewer canvases than probes too, where rows are padded; the batch reads the prefix that the single row reads."""
    model = make_tiny_model(vision=False).double()
    state = start_state(model, {"input_ids": torch.tensor([PROMPT])}, 4, 8, ())
    canvases = [(SEED, MASK, MASK, MASK), (SEED, 20, MASK, MASK), (SEED, MASK, 21, MASK), (SEED, 20, 21, 22)]
    alone = [forward_over(state)([canvas])[0] for canvas in canvases]
    forward = forward_over(state, probes=5)
    for count in (2, 3, 4):
        together = forward(canvases[:count])
        assert [look.tokens for look in together] == [look.tokens for look in alone[:count]]
        for mine, wanted in zip(together, alone, strict=False):
            assert mine.confidence == pytest.approx(wanted.confidence, rel=1e-9)
    assert len({tuple(look.confidence) for look in alone}) == 4


def test_scripted_model_by_hand() -> None:
    """Every mask reads its token at once: one step per block, a refresh between, and the counts of generate() agree."""
    words = [30 + i for i in range(10)] + [END]
    model = scripted_model(tiny_config(vision=False), by_position(says(words, shift=1)), by_position(says(words)))
    answer = speed_of_light(
        model, {"input_ids": torch.tensor([PROMPT])}, block_length=4, max_new_tokens=40, end_token_ids=[END]
    )
    assert answer.token_ids == words
    assert [block.commits for block in answer.blocks[:2]] == [[[1, 2, 3]]] * 2
    assert (len(answer.blocks), answer.denoise_steps, answer.refreshes) == (3, 3, 2)
    out = model.generate(
        torch.tensor([PROMPT]), mode="diffusion", threshold=0.9, block_length=4, max_new_tokens=40, eos_token_id=END
    )
    assert step_counts("diffusion", out, 4) == {"steps": 3, "decode_forwards": 5, "committed": 8}


@pytest.mark.parametrize(
    ("mode", "length", "budget"),
    # In the last, the second cycle may give one token more and has no draft.
    [
        ("diffusion", 4, 40),
        ("diffusion", 11, 40),
        ("linear_spec", 4, 40),
        ("linear_spec", 16, 40),
        ("linear_spec", 4, 6),
    ],
)
def test_step_counts_are_counted_forwards(mode: str, length: int, budget: int) -> None:
    """Bidirectional and causal forwards of each mode, told apart by the scripted encoder."""
    words = [30 + i for i in range(10)] + [END]
    model = scripted_model(tiny_config(vision=False), by_position(says(words, shift=1)), by_position(says(words)))
    out = model.generate(
        torch.tensor([PROMPT]), mode=mode, block_length=length, max_new_tokens=budget, eos_token_id=END
    )
    decode = model.encoder.calls[1:]
    ahead = [any(any(row) for row in sees) for _, _, sees in decode]
    counts = step_counts(mode, out, length)
    assert (counts["steps"], counts["decode_forwards"]) == (sum(ahead), len(decode))


def test_no_block_starts_with_a_token_that_answers_may_not_hold() -> None:
    """Causally the mask itself is likeliest, the answer's token second; both ways the seeds would be another."""
    words = [30 + i for i in range(8)]
    ahead = [60 if i % 4 == 0 else word for i, word in enumerate(words)]
    causal = says(words, shift=1)
    causal[:, MASK] = 30.0
    model = scripted_model(tiny_config(vision=False), by_position(causal), by_position(says(ahead)))
    answer = speed_of_light(model, {"input_ids": torch.tensor([PROMPT])}, block_length=4, max_new_tokens=8)
    assert answer.token_ids == words


def test_simulated_forwards_are_counted_forwards() -> None:
    model = make_tiny_model(vision=False)
    sizes = count_forwards(model)
    answer = speed_of_light(model, {"input_ids": torch.tensor([PROMPT])}, block_length=8, max_new_tokens=8)
    block = answer.blocks[0]
    # Prefill, the serial way, the simulations, the steps off both, and the replay.
    least = 1 + block.serial_steps + block.simulation_forwards + len(block.commits)
    assert least <= len(sizes) <= least + len(block.commits) and set(sizes) == {1}


def test_bad_input_is_refused() -> None:
    model = make_tiny_model(vision=False)
    with pytest.raises(ValueError, match="one row at a time; input_ids has 2"):
        speed_of_light(model, {"input_ids": torch.tensor([PROMPT] * 2)}, block_length=4, max_new_tokens=4)
    model.config.mask_token_id = None
    with pytest.raises(ValueError, match="needs a mask token"):
        speed_of_light(model, {"input_ids": torch.tensor([PROMPT])}, block_length=4, max_new_tokens=4)


# The report and the command ------------------------------------------------------------------------------------------


def record(sampler: str, tokens: int, steps: int, forwards: int, **more: Any) -> dict[str, Any]:
    own = {"blocks": 2, "replayed_blocks": 2, "serial_steps": 9, "simulation_forwards": [3, 5], "over_budget_blocks": 1}
    base = {"task": "spell", "id": 0, "block_length": 8, "score": 1.0, "committed": steps, "equals_target": True}
    extra = own if sampler == sol_report.ORACLE else {}
    return {
        **base,
        "sampler": sampler,
        "num_tokens": tokens,
        "steps": steps,
        "decode_forwards": forwards,
        **extra,
        **more,
    }


def test_report_pools_sums_and_compares_on_the_same_answers() -> None:
    oracle, quick = sol_report.ORACLE, "threshold 0.5"
    records = [record(oracle, 9, 2, 2), record(quick, 9, 4, 4), record(oracle, 101, 20, 30, id=1)]
    records.append(record(quick, 101, 5, 8, id=1, equals_target=False, score=0.0))
    result = sol_report.build({"budget": 5000}, records)
    cells = result["groups"]["all"]["8"]
    assert cells[oracle]["acceptance"] == 108 / 22 and cells[oracle]["tpf_decode"] == 108 / 32
    assert cells[quick]["tpf_decode"] == 108 / 12 and cells[quick]["score"] == 0.5
    assert result["groups"][">100 tokens"]["8"][quick]["acceptance"] == 100 / 5
    assert result["same_answers"]["8"][quick] == {"prompts": 1, "tpf_decode": 8 / 4, "oracle_tpf_decode": 8 / 2}
    assert result["oracle"]["8"]["over_budget_blocks"] == 2 and result["oracle"]["8"]["most_simulation_forwards"] == 5
    assert result["checks"]["samplers_with_more_tpf_than_the_oracle"] == ["threshold 0.5 at 8"]
    assert result["checks"]["of_these_on_answers_equal_to_the_target"] == []
    text = sol_report.markdown(result)
    assert text.startswith(f"**{sol_report.LABEL}**") and "an oracle against the model's own serial output" in text
    assert "threshold 0.5 at 8 has more TPF than the oracle; on the 1 prompts" in text
    assert sol_report.pool([record(oracle, 1, 0, 0)])["acceptance"] is None


def test_the_command_on_held_out_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On nano the oracle's acceptance grows with the block; no sampler with refreshes or checks exceeds it."""
    pytest.importorskip("matplotlib")
    files = {"--json": tmp_path / "sol.json", "--plot": tmp_path / "sol.png"}
    tasks, options = "receipt_describe_row,chart_json", ["--limit", "1", "--thresholds", "0.9"]
    assert cli.main(["sol", "--tasks", tasks, *options, *[str(x) for pair in files.items() for x in pair]]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads(files["--json"].read_text()) and files["--plot"].read_bytes()[1:4] == b"PNG"
    assert (
        "oracle" in result["label"]
        and sol_report.ORACLE in out
        and list(result["groups"]["all"]) == ["4", "8", "16", "32"]
    )
    checks = result["checks"]
    assert checks["acceptance_grows_with_block_length"] and checks["replayed_share"] == 1.0
    same = checks["of_these_on_answers_equal_to_the_target"]
    exceeding = [name for name in same if not name.startswith("quadratic")]
    assert exceeding == []
    for cells in result["groups"]["all"].values():
        assert cells["serial"]["equals_target"] == cells["serial"]["prompts"] == 2
        assert set(samplers(8, [0.9])) < set(cells)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tasks", "grid_jsn"], "did you mean grid_json?"),
        (["--block-lengths", "4,x"], "--block-lengths takes numbers"),
        (["--block-lengths", "0"], "--block-lengths takes numbers"),
        (["--thresholds", "0"], "--thresholds takes numbers"),
        (["--thresholds", "1.5"], "--thresholds takes numbers"),
        (["--probes", "0"], "--probes must be at least 1, got 0"),
        (["--budget", "-1"], "--budget must be at least 0, got -1"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--json", "no/such/sol.json"], "not a file in a folder that exists"),
        (["--plot", "sol.pdf"], "the plot is a .png"),
        (["--tasks", ","], "--tasks names no task"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sol", *argv]) == 2
    assert message in capsys.readouterr().err
