"""Resume a ZeRO run with another number of ranks: universal checkpoints, and what DeepSpeed 0.19.8 gets wrong there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from trimode_vlm.training import distributed


def to_universal(checkpoint: Path) -> None:
    """Write a ZeRO checkpoint anew beside itself, in the layout that any number of ranks can load; once, by rank 0.

    Raises:
        ValueError: DeepSpeed's converter failed; its last line.
    """
    parts = next(path for path in checkpoint.glob("global_step*") if not path.name.endswith("_universal"))
    whole = parts.with_name(f"{parts.name}_universal")
    if distributed.rank() == 0 and not (checkpoint / "latest_universal").is_file():
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        command += ["--input_folder", str(parts), "--output_folder", str(whole)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            raise ValueError(f"{checkpoint}: DeepSpeed cannot reshape it for another number of ranks ({last})")
    distributed.wait()


def mend_groups(optimizer: Any, groups: list[dict[str, Any]]) -> None:
    """Give each parameter group its own hyper-parameters and each state its own step count.

    DeepSpeed 0.19.8 loads a universal ZeRO-3 checkpoint with group 0's values in every group, and with one `step`
    tensor that all parameters share, so that it grows once for each of them in a step.
    """
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in own.items() if name not in ("params", "lr")})
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
