"""Judging a checkpoint: tasks, metrics, tokens per forward, resumable runs and reports.

`run.py` answers and scores (one JSON line per sample) with the processes of `workers.py`, `state.py` keeps the lines,
`report.py` turns them into JSON and Markdown, `tpf.py` counts tokens and forwards, `metrics.py` scores, `tasks.py` says
what a task is, `nano_tasks.py` wraps the held-out synthetic tasks of the training package, `benchmarks.py` lists the
public benchmarks, and `own_tasks.py` reads a user's own.
"""
