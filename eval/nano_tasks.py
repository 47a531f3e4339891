"""The held-out synthetic tasks of the shipped `nano` model.

The one place where `eval` looks into `training`: the generator that made the training pictures also makes the held-out
ones, from seeds that no training run uses. Imported on use only.
"""

from __future__ import annotations

from trimode_vlm.eval.tasks import EvalTask, Example

# One evaluation seed owns this many sample seeds, so that different seeds never share a sample.
SAMPLES_PER_SEED = 1_000_000
# The longest right answer, a board of 8 x 8 as JSON, has about 420 tokens.
MAX_NEW_TOKENS = 640
DEFAULT_LIMIT = 500


def tasks() -> dict[str, EvalTask]:
    """All tasks of the generator by name."""
    from trimode_vlm.training import synthetic

    return {name: _task(name, task) for name, task in synthetic.TASKS.items()}


def _task(name: str, task: object) -> EvalTask:
    def example(index: int, seed: int) -> Example:
        from trimode_vlm.training import synthetic

        sample_seed = synthetic.HELD_OUT_SEED + seed * SAMPLES_PER_SEED + index
        sample = synthetic.make_sample(name, sample_seed)
        messages = sample.messages
        if messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        return Example(id=index, messages=messages, gold=sample.answer, seed=sample_seed)

    needs_image = getattr(task, "needs_image", True)
    return EvalTask(
        name=name,
        example=example,
        needs_image=needs_image,
        num_rows=SAMPLES_PER_SEED,
        max_new_tokens=MAX_NEW_TOKENS,
        default_limit=DEFAULT_LIMIT,
    )
