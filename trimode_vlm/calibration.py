"""What a forward costs on this machine, by rows and tokens per row: measured at first use, kept in the cache folder.

Measured with PREFIX_TOKENS in the cache, in cycles as `auto` decodes them; far longer contexts make long blocks dearer
than this says. What was kept is read back for the same config, versions, device and number of threads only.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from .policy import Policy

if TYPE_CHECKING:
    from .decoders.state import DecodeState
    from .model import TriModeVLM

CACHE_VARIABLE = "TRIMODE_VLM_CACHE"
ROWS = (1, 2, 4, 8, 16)
TOKENS = (1, 2, 4, 8, 16, 32)
PREFIX_TOKENS = 256
ROUNDS = 8
# Cycles of one block length that follow each other take at least this together.
RUN_SEC = 0.005
# What more rows or rounds may take in all; the first round over one row is made however long it is.
BUDGET_SEC = 2.0

# seconds_per_forward[rows][tokens per row]
Seconds = dict[int, dict[int, float]]


class CostTable:
    """Seconds of a forward and of a cycle, straight lines between what was measured and beyond it.

    A forward of fewer rows or tokens is not dearer: where the measurement says so, it takes the cheaper neighbour's,
    for whatever else the machine does can only add to a measurement.
    """

    def __init__(self, seconds_per_forward: Seconds) -> None:
        found: Seconds = {}
        ceiling: dict[int, float] = {}
        for rows, by_tokens in sorted(seconds_per_forward.items(), reverse=True):
            most = float("inf")
            for tokens, sec in sorted(by_tokens.items(), reverse=True):
                most = min(most, sec, ceiling.get(tokens, most))
                ceiling[tokens] = most
            found[rows] = {tokens: ceiling[tokens] for tokens in sorted(by_tokens)}
        self.seconds_per_forward: Seconds = dict(sorted(found.items()))
        self._cycles: dict[tuple[int, int], float] = {}

    def cycle_sec(self, rows: int, block_length: int) -> float:
        """cost(B, k): draft and verify, two forwards of k tokens; with block length 1 one forward."""
        key = rows, block_length
        if key not in self._cycles:
            self._cycles[key] = self.forward_sec(rows, block_length) * (2 if block_length > 1 else 1)
        return self._cycles[key]

    def forward_sec(self, rows: int, tokens: int) -> float:
        """Seconds of a forward of `tokens` tokens in each of `rows` rows."""
        measured = self.seconds_per_forward
        if rows > 1 and list(measured) == [1]:
            # As if all tokens were one row's.
            return _line(measured[1], rows * tokens)
        return _line({n: _line(by_tokens, tokens) for n, by_tokens in measured.items()}, rows)


def _line(points: Mapping[int, float], x: int) -> float:
    """Through the two points around x, or the last two; flat before the first."""
    xs = sorted(points)
    if x in points or len(xs) == 1 or x < xs[0]:
        return points.get(x, points[xs[0]])
    left, right = next(((a, b) for a, b in zip(xs, xs[1:], strict=False) if a < x < b), (xs[-2], xs[-1]))
    return points[left] + (points[right] - points[left]) * (x - left) / (right - left)


class Calibration:
    """A model's measured costs in one setting of the machine, and the policy that chooses by them."""

    def __init__(self, fingerprint: dict[str, Any]) -> None:
        self.fingerprint = fingerprint
        self.seconds: Seconds = read_costs(fingerprint) or {}
        self.spent_sec = 0.0
        self.policy = Policy(CostTable(self.seconds).cycle_sec)

    def cover(self, model: TriModeVLM, rows: int) -> None:
        """Measure what is missing for so many rows, as far as BUDGET_SEC of this process allows."""
        known = len(self.seconds)
        for n in ROWS:
            # As many as asked for lie then between two measurements, or all there are have been made.
            if n in self.seconds or max(self.seconds, default=0) >= rows:
                continue
            if self.seconds:
                table = CostTable(self.seconds)
                needed_sec = 2 * sum(table.cycle_sec(n, tokens) for tokens in TOKENS)
                if self.spent_sec + needed_sec > BUDGET_SEC:
                    break
            start = time.perf_counter()
            try:
                self.seconds[n] = measure(model, n)
            except torch.OutOfMemoryError:
                if n == 1:
                    raise
                break
            finally:
                self.spent_sec += time.perf_counter() - start
        if len(self.seconds) > known:
            self.policy.cost = CostTable(self.seconds).cycle_sec
            write_costs(self.fingerprint, self.seconds)


_calibrations: weakref.WeakKeyDictionary[torch.nn.Module, dict[Any, Calibration]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def policy_for(model: TriModeVLM, rows: int = 1) -> Policy:
    """The policy that all requests to this model share; measures first what costs are missing for so many rows.

    A server calls it once after loading, with the most rows that it will decode together.
    """
    return _calibration_of(model, rows).policy


def costs_for(model: TriModeVLM, rows: int = 1) -> CostTable:
    """What that policy reckons with."""
    return CostTable(_calibration_of(model, rows).seconds)


def _calibration_of(model: TriModeVLM, rows: int) -> Calibration:
    adapter = None if model.draft_adapter is None else model.draft_adapter.rank
    key = model.device, model.dtype, torch.get_num_threads(), adapter, model.config._attn_implementation
    with _lock:
        of_model = _calibrations.setdefault(model, {})
        if key not in of_model:
            of_model[key] = Calibration(fingerprint_of(model))
        of_model[key].cover(model, rows)
        return of_model[key]


@torch.inference_mode()
def measure(model: TriModeVLM, rows: int) -> dict[int, float]:
    """Median seconds of a forward by tokens per row: cycles as `auto` decodes them, a run of each length in turns."""
    from .decoders.auto import cycle

    state, prefix = _scratch_state(model, rows)
    seed = torch.zeros(rows, dtype=torch.long, device=model.device)
    seconds: dict[int, list[float]] = {tokens: [] for tokens in TOKENS}
    clock = _clock(model.device)
    start = time.perf_counter()
    cycle(state, seed, TOKENS[1], [])  # whatever is made at first use
    for _ in range(ROUNDS):
        for tokens in TOKENS:
            run: list[float] = []
            while sum(run) < RUN_SEC:
                state.cache.set_lengths(prefix)
                begin = clock()
                cycle(state, seed, tokens, [])
                run.append(clock() - begin)
            # A cycle behind one of another length finds less of the weights in the processor's caches.
            seconds[tokens] += [sec / (2 if tokens > 1 else 1) for sec in run[1:] or run]
        if time.perf_counter() - start > BUDGET_SEC / len(ROWS):
            break
    return {tokens: statistics.median(values) for tokens, values in seconds.items()}


def _clock(device: torch.device) -> Callable[[], float]:
    """On a CPU the thread's own time: other programs' share falls on short and long forwards alike, but not on each."""
    is_fine = time.get_clock_info("thread_time").resolution < 1e-5
    return time.thread_time if device.type == "cpu" and is_fine else time.perf_counter


def _scratch_state(model: TriModeVLM, rows: int) -> tuple[DecodeState, list[int]]:
    """A greedy state over an empty cache, and its lengths: all different, as rows of a batch soon are."""
    from .cache import KVCache
    from .decoders.state import DecodeState, Settings
    from .lean_forward import lean_forward

    config = model.config
    longest = max(1, min(PREFIX_TOKENS, config.max_position_embeddings - TOKENS[-1]))
    lengths = [max(1, longest - i) for i in range(rows)]
    cache = KVCache(config, rows, longest + TOKENS[-1], model.dtype, model.device)
    banned = torch.tensor(config.banned_ids(frozenset()), dtype=torch.long, device=model.device)
    state = DecodeState(
        model=model,
        cache=cache,
        rows=list(range(rows)),
        next_logits=torch.empty(rows, 0, device=model.device),
        generators=[],
        remaining=[2 * TOKENS[-1]] * rows,
        settings=Settings(),
        banned=banned,
        lean=lean_forward(model.encoder),
        adapter=model.draft_adapter.deltas(model) if model.draft_adapter else None,
    )
    return state, lengths


def fingerprint_of(model: TriModeVLM) -> dict[str, Any]:
    """Everything that costs depend on, as JSON values."""
    from . import __version__

    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    modules = [*model.encoder.layers.modules(), model.diffusion_head]
    weights = {type(p).__name__ for p in model.encoder.parameters()}
    is_cuda = model.device.type == "cuda"
    return {
        "config": json.loads(json.dumps(config, default=str)),
        "layers": sorted({type(module).__name__ for module in modules} | weights),
        "attention": model.config._attn_implementation,
        "adapter_rank": model.draft_adapter.rank if model.draft_adapter else None,
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name(model.device) if is_cuda else f"{model.device.type} {cpu_name()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": [__version__, torch.__version__, transformers.__version__],
    }


def cpu_name() -> str:
    """The processor's name as far as this system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cache_file(fingerprint: dict[str, Any]) -> Path | None:
    """Where these costs are kept: in $TRIMODE_VLM_CACHE, else in the user's cache folder; None where there is none."""
    digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # this user has no home
        base = ""
    folder = os.environ.get(CACHE_VARIABLE) or (Path(base) / "trimode-vlm" if base else None)
    return None if folder is None else Path(folder) / f"costs-{digest[:16]}.json"


def read_costs(fingerprint: dict[str, Any]) -> Seconds | None:
    """The kept costs; None where there are none. A damaged file is passed over with a warning."""
    path = cache_file(fingerprint)
    if path is None:
        return None
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["fingerprint"] != fingerprint:
            return None
        seconds = {int(n): {int(t): float(s) for t, s in row.items()} for n, row in kept["seconds_per_forward"].items()}
        if 1 not in seconds or any(set(r) != set(TOKENS) or not 0 < min(r.values()) for r in seconds.values()):
            raise ValueError("costs are missing or not positive")
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"{path}: measuring again, since the kept costs cannot be read ({error})", stacklevel=2)
        return None
    return seconds


def write_costs(fingerprint: dict[str, Any], seconds: Seconds) -> None:
    """Keep the costs, whole or not at all; where nothing can be written they last as long as this process."""
    path = cache_file(fingerprint)
    if path is None:
        return
    text = json.dumps({"fingerprint": fingerprint, "seconds_per_forward": seconds}, indent=1)
    draft = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            draft = Path(file.name)
            file.write(text)
        os.replace(draft, path)
    except OSError:
        if draft is not None:
            draft.unlink(missing_ok=True)
