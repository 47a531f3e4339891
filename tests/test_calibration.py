"""What forwards cost: measured once, kept in a file that may be damaged, foreign or unwritable."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tiny_model
from naive import count_forwards

from trimode_vlm import calibration
from trimode_vlm.calibration import TOKENS, CostTable, policy_for


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's own costs."""
    monkeypatch.setenv(calibration.CACHE_VARIABLE, str(tmp_path / "costs"))
    return tmp_path / "costs"


def test_costs_lie_on_lines_between_what_was_measured_and_beyond() -> None:
    table = CostTable({1: {1: 1.0, 2: 1.2, 4: 2.0}, 4: {1: 2.0, 2: 4.2, 4: 8.0}})
    assert table.forward_sec(1, 3) == pytest.approx(1.6) and table.forward_sec(1, 8) == pytest.approx(3.6)
    assert table.forward_sec(2, 2) == pytest.approx(2.2) and table.forward_sec(7, 1) == pytest.approx(3.0)
    assert table.cycle_sec(4, 4) == 16.0 and table.cycle_sec(4, 1) == 2.0
    one_row = CostTable({1: {1: 1.0, 2: 1.2, 4: 2.0}})
    assert one_row.forward_sec(2, 2) == 2.0 and one_row.forward_sec(3, 2) == pytest.approx(2.8)


def test_more_tokens_and_more_rows_are_never_cheaper() -> None:
    """Other work made one token of one row look dear."""
    table = CostTable({2: {1: 1.5, 8: 3.0, 32: 9.0}, 1: {1: 2.0, 8: 1.0, 32: 4.0}})
    for rows, tokens in itertools.product((1, 2, 3, 9), range(1, 80)):
        assert table.forward_sec(rows, tokens + 1) >= table.forward_sec(rows, tokens) > 0
        assert table.forward_sec(rows + 1, tokens) >= table.forward_sec(rows, tokens)
    assert table.seconds_per_forward == {1: {1: 1.0, 8: 1.0, 32: 4.0}, 2: {1: 1.5, 8: 3.0, 32: 9.0}}


def test_a_measurement_runs_cycles_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(seed=2, vision=False)
    state = torch.get_rng_state()
    sizes = count_forwards(model)
    monkeypatch.setattr(calibration, "BUDGET_SEC", 0.0)
    monkeypatch.setattr(calibration, "RUN_SEC", 1e-12)
    seconds = calibration.measure(model, 4)
    # A cycle to warm up; one round: a forward for one token, a draft and its check for each longer block.
    assert sizes == [4] * (2 + 2 * len(TOKENS) - 1) and set(seconds) == set(TOKENS) and min(seconds.values()) > 0
    assert torch.equal(state, torch.get_rng_state())
    monkeypatch.setattr(calibration, "BUDGET_SEC", 60.0)
    monkeypatch.setattr(calibration, "ROUNDS", 3)
    sizes.clear()
    calibration.measure(model, 1)
    assert len(sizes) == 2 + 3 * (2 * len(TOKENS) - 1)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row counts that were measured, each at once and at invented costs."""
    rows: list[int] = []

    def measure(model: Any, n: int) -> dict[int, float]:
        rows.append(n)
        return {tokens: 1e-5 * (n + tokens) for tokens in TOKENS}

    monkeypatch.setattr(calibration, "measure", measure)
    return rows


def forget(model: Any) -> None:
    """As a new process would begin."""
    calibration._calibrations.pop(model, None)


def test_costs_are_measured_once_and_as_far_as_needed(measured: list[int], cache_folder: Path) -> None:
    model = make_tiny_model(vision=False)
    policy = policy_for(model, 1)
    assert measured == [1] and policy_for(model, 1) is policy and measured == [1]
    assert policy_for(model, 3) is policy and measured == [1, 2, 4]
    forget(model)
    again = policy_for(model, 4)
    assert measured == [1, 2, 4] and again is not policy
    assert again.cost(2, 8) == policy.cost(2, 8) == pytest.approx(2e-4)
    policy_for(model, 100)
    assert measured == [1, 2, 4, 8, 16]
    assert [path.suffix for path in cache_folder.iterdir()] == [".json"], "nothing half-written lies beside it"


def test_other_threads_and_other_models_measure_anew(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(vision=False)
    policy_for(model)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    policy_for(model)
    policy_for(make_tiny_model(vision=False, num_hidden_layers=1))
    policy_for(make_tiny_model(vision=False, num_hidden_layers=1).double())
    assert measured == [1, 1, 1, 1]
    policy_for(make_tiny_model(seed=5, vision=False))
    assert measured == [1, 1, 1, 1], "other weights cost the same"


@pytest.mark.parametrize("damage", ["{", "[]", '{"fingerprint": 0}', "\ufffe", "costs", "negative", "text"])
def test_a_damaged_file_is_measured_again(measured: list[int], cache_folder: Path, damage: str) -> None:
    model = make_tiny_model(vision=False)
    policy_for(model)
    [path] = cache_folder.iterdir()
    kept = json.loads(path.read_text())
    broken = {
        "costs": kept | {"seconds_per_forward": {"1": {"1": 1.0}}},
        "negative": kept | {"seconds_per_forward": {"1": {str(t): -1.0 for t in TOKENS}}},
        "text": kept | {"seconds_per_forward": {"1": {str(t): "soon" for t in TOKENS}}},
    }
    path.write_text(json.dumps(broken[damage]) if damage in broken else damage)
    forget(model)
    if "fingerprint" in damage:
        policy_for(model)
    else:
        with pytest.warns(UserWarning, match=f"{path.name}: measuring again"):
            policy_for(model)
    assert measured == [1, 1] and json.loads(path.read_text()) == kept


def test_costs_of_another_fingerprint_are_not_taken(measured: list[int], cache_folder: Path) -> None:
    model = make_tiny_model(vision=False)
    policy_for(model)
    [path] = cache_folder.iterdir()
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"fingerprint": kept["fingerprint"] | {"cores": 999}}))
    forget(model)
    policy_for(model)
    assert measured == [1, 1] and json.loads(path.read_text()) == kept


def test_where_nothing_can_be_written_costs_stay_in_memory(
    measured: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (str(tmp_path / "file" / "below"), "/proc/nowhere"):
        monkeypatch.setenv(calibration.CACHE_VARIABLE, folder)
        model = make_tiny_model(vision=False)
        measured.clear()
        assert policy_for(model).cost(1, 1) > 0 and policy_for(model) and measured == [1]
    monkeypatch.delenv(calibration.CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert policy_for(make_tiny_model(vision=False)).cost(1, 1) > 0
    assert calibration.cache_file({}) is None


def test_a_write_that_breaks_off_leaves_the_old_file(
    measured: list[int], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(vision=False)
    policy_for(model)
    [path] = cache_folder.iterdir()
    kept = path.read_text()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    policy_for(model, 2)
    assert path.read_text() == kept and measured == [1, 2] and list(cache_folder.iterdir()) == [path]


def test_a_slow_model_is_measured_on_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row takes longer than all the time there is: nothing more is tried, now or later."""
    rows: list[int] = []

    def slow(model: Any, n: int) -> dict[int, float]:
        rows.append(n)
        return {tokens: calibration.BUDGET_SEC * tokens for tokens in TOKENS}

    monkeypatch.setattr(calibration, "measure", slow)
    model = make_tiny_model(vision=False)
    policy = policy_for(model, 16)
    assert rows == [1] and policy_for(model, 16) is policy and rows == [1]
    # Rows that were not measured cost what as many tokens of one row would.
    assert policy.cost(4, 1) == pytest.approx(4 * calibration.BUDGET_SEC)
    assert policy.cost(4, 8) == pytest.approx(2 * 32 * calibration.BUDGET_SEC)


def test_memory_that_does_not_suffice_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(model: Any, n: int) -> dict[int, float]:
        if n > 2:
            raise torch.OutOfMemoryError("no room for so many rows")
        return {tokens: 1e-6 * tokens for tokens in TOKENS}

    monkeypatch.setattr(calibration, "measure", measure)
    policy = policy_for(make_tiny_model(vision=False), 16)
    assert policy.cost(16, 1) > 0
