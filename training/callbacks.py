"""What a user sees while training, as transformers callbacks: progress, log file, curves, generations, stall watch."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import transformers
from tqdm import tqdm
from transformers import TrainerCallback

from trimode_vlm.training import curves, generations, progress
from trimode_vlm.training.run_log import LOG_NAME, RunLog
from trimode_vlm.training.watch import Watchdog, dump_stacks, innermost, stall_message

GENERATIONS_NAME = "generations.jsonl"

REPORTERS = {
    "tensorboard": "pip install 'trimode-vlm[train]'",
    "wandb": "pip install wandb",
}
"""The trackers that `report_to` may name, and how to get each."""


def check_report_to(report_to: str | Sequence[str] | None) -> list[str]:
    """The trackers as a list, for TrainingArguments(report_to=); the logging itself is transformers' own.

    Raises:
        ValueError: a tracker is unknown or not installed.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [name for name in names if name != "none"]
    for name in names:
        if name not in REPORTERS:
            raise ValueError(f"report_to must name {', '.join(REPORTERS)} or none, got {name!r}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"report_to: {name} is not installed ({REPORTERS[name]}); or leave it out of report_to")
    return names


def install(trainer: transformers.Trainer, callbacks: Sequence[TrainerCallback]) -> None:
    """Put our callbacks into a trainer, in place of transformers' own progress bar and printer."""
    for default in (transformers.ProgressCallback, transformers.PrinterCallback):
        trainer.remove_callback(default)
    for callback in callbacks:
        trainer.add_callback(callback)


def say(text: str) -> None:
    """Print to stderr above the progress bar, if there is one."""
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


class TrainingProgress(TrainerCallback):
    """One bar on rank 0, or a plain line per logged step where stderr is no terminal; a summary at the end.

    Put it last, so that the summary is the last thing printed.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "train",
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.name, self.clock = Path(folder), name, clock
        self.stream = sys.stderr if stream is None else stream
        self.bar: tqdm | None = None
        self.began: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.began, self.first_step, self.num_evaluated = self.clock(), state.global_step, 0
        if self.first_step:
            self._write(f"{self.name}: resumed at step {self.first_step:,} of {state.max_steps:,}")
        if self.stream.isatty():
            self.bar = tqdm(
                total=state.max_steps, initial=self.first_step, desc=self.name, dynamic_ncols=True, file=self.stream
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.num_evaluated += 1
            self.bar.set_description(f"{self.name}, evaluating batch {self.num_evaluated}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.bar is not None:
            self.num_evaluated = 0
            self.bar.set_description(self.name)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not logs or not state.is_world_process_zero:
            return
        if progress.is_evaluation(logs):
            self._write(f"{self.name}, {progress.evaluation_line(state.global_step, logs)}")
        elif self.began is None or not progress.is_training(logs):
            return
        elif self.bar is not None:
            self.bar.set_postfix_str(progress.losses_text(logs), refresh=False)
        else:
            elapsed = self.clock() - self.began
            step = state.global_step
            self._write(progress.progress_line(self.name, step, state.max_steps, self.first_step, elapsed, logs))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.began is None:
            return
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        best_name = args.metric_for_best_model or "loss"
        text = progress.summary(
            state.log_history,
            step=state.global_step,
            first_step=self.first_step,
            seconds=self.clock() - self.began,
            folder=str(self.folder),
            best_name=best_name if best_name.startswith("eval_") else f"eval_{best_name}",
            greater_is_better=bool(args.greater_is_better),
        )
        self._write(text)
        self.began = None

    def _write(self, text: str) -> None:
        tqdm.write(text, file=self.stream)
        self.stream.flush()


class LogFile(TrainerCallback):
    """Appends every logged step and evaluation to folder/log.jsonl (run_log.RunLog), on rank 0.

    A line holds step, elapsed_sec (training time of all sessions) and what the trainer logged.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.log = RunLog(Path(folder) / LOG_NAME)
        self.clock = clock
        self.began: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            kept = self.log.start(state.global_step)
            self.began = self.clock() - (kept[-1].get("elapsed_sec", 0.0) if kept else 0.0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.began is None or not logs or not (progress.is_evaluation(logs) or progress.is_training(logs)):
            return
        elapsed = round(self.clock() - self.began, 3)
        self.log.append({**logs, "step": state.global_step, "elapsed_sec": elapsed})


class LossCurves(TrainerCallback):
    """Draws folder/curves.png from the log when training ends; says so in one line where matplotlib is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        try:
            path = curves.plot_curves(self.folder)
        except ImportError:
            say(curves.NO_MATPLOTLIB)
            return
        if path is not None:
            say(f"loss curves: {path}")


class SampleGenerations(TrainerCallback):
    """Answers a few prompts in every mode at each evaluation: to folder/generations.jsonl and a table on stderr.

    Rank 0 answers and the others go on to the next step, which is right for one process, DDP and ZeRO 0 to 2. Under
    ZeRO 3 a rank holds a part of each weight only and each forward gathers them: every rank answers, rank 0 writes.
    """

    def __init__(
        self,
        folder: Path,
        prompts: Sequence[generations.EvalPrompt],
        processor: Any,
        *,
        modes: Sequence[str] = generations.DEFAULT_MODES,
        max_new_tokens: int = 256,
        buckets: Sequence[int] = generations.DEFAULT_BUCKETS,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """beat: called after each answer; give StallWatch.beat, so that slow answers do not pass for a stall.

        Raises:
            ValueError: no decoder has the name of a mode.
        """
        self.log = RunLog(Path(folder) / GENERATIONS_NAME)
        self.prompts, self.processor, self.modes = list(prompts), processor, generations.known_modes(modes)
        self.max_new_tokens, self.buckets = max_new_tokens, tuple(buckets)
        self.beat = beat
        self.has_begun = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.has_begun = True
        if state.is_world_process_zero:
            self.log.start(state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.prompts or not self.has_begun:
            return
        is_main = state.is_world_process_zero
        if not (is_main or generations.is_partitioned(model)):
            return
        record = generations.generate_all(
            model,
            self.processor,
            self.prompts,
            self.modes,
            max_new_tokens=self.max_new_tokens,
            buckets=self.buckets,
            after_each=self.beat,
        )
        if is_main and self.log.append({"step": state.global_step, **record}):
            say(generations.report(state.global_step, record))


def _exit_at_once(code: int) -> NoReturn:
    # The training thread may hang in a collective inside C code, where no exception can reach it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class StallWatch(TrainerCallback):
    """Stops the process with an error when nothing happened for `stall_minutes`; every rank watches itself.

    The trainer names the running batch by `running(sample_names)` and calls `stop()` when train() is left by an
    exception. Steps, logs, evaluation batches, saves and `beat()` count as something happening. 0 minutes: off.
    """

    def __init__(
        self,
        folder: Path,
        stall_minutes: float = 30.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        poll_sec: float | None = None,
        stop_process: Callable[[int], Any] = _exit_at_once,
    ) -> None:
        self.folder, self.stall_sec = Path(folder), 60 * stall_minutes
        self.clock, self.poll_sec, self.stop_process = clock, poll_sec, stop_process
        self.sample_names: tuple[str, ...] = ()
        self.watchdog: Watchdog | None = None

    def running(self, sample_names: Sequence[Any]) -> None:
        """Name the samples of the batch that begins now, for the message."""
        self.sample_names = tuple(map(str, sample_names))
        self.beat()

    def beat(self) -> None:
        """Say that something happened."""
        if self.watchdog is not None:
            self.watchdog.beat()

    def stop(self) -> None:
        """Watch no longer."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stop()
        if self.stall_sec <= 0:
            return
        self.state, self.rank, self.thread_id = state, args.process_index, threading.get_ident()
        self.watchdog = Watchdog(self.stall_sec, self._on_stall, clock=self.clock, poll_sec=self.poll_sec)
        self.watchdog.start()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.stop()

    def _beat(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.beat()

    on_step_begin = on_substep_end = on_step_end = _beat
    on_log = on_prediction_step = on_evaluate = on_save = _beat

    def _on_stall(self, idle_sec: float) -> None:
        frame = sys._current_frames().get(self.thread_id)
        if not _is_training(frame):
            return  # train() was left by an exception that somebody caught: nothing to stop
        path = self.folder / f"stall-rank{self.rank}.txt"
        dump_stacks(path)
        step = self.state.global_step + 1
        place = innermost(frame)
        message = stall_message(step, self.sample_names, idle_sec, rank=self.rank, place=place, dump=path)
        # Not by tqdm: the thread that hangs may hold its lock.
        print(f"\n{message}", file=sys.stderr, flush=True)
        self.stop_process(1)


def _is_training(frame: Any) -> bool:
    """True if a thread's stack is inside transformers' Trainer.train."""
    train = inspect.unwrap(transformers.Trainer.train).__code__
    while frame is not None:
        if frame.f_code is train:
            return True
        frame = frame.f_back
    return False
