"""Our settings as the arguments of transformers' Trainer."""

from __future__ import annotations

from pathlib import Path

from transformers import TrainingArguments

from trimode_vlm.training import distributed
from trimode_vlm.training.callbacks import check_report_to
from trimode_vlm.training.presets import deepspeed_config
from trimode_vlm.training.train_settings import TrainSettings


def training_arguments(settings: TrainSettings, folder: Path, evaluates: bool = False) -> TrainingArguments:
    """The Trainer's own arguments for our settings."""
    s = settings
    options: dict[str, float | str]
    warmup = round(s.warmup * s.steps)
    if s.schedule == "cosine":
        schedule, options = "cosine_with_min_lr", {"min_lr_rate": s.min_lr_ratio}
    else:
        decay = round(s.decay_fraction * s.steps)
        schedule = "warmup_stable_decay"
        options = {"num_decay_steps": decay, "min_lr_ratio": s.min_lr_ratio, "decay_type": "linear"}
    if s.precision == "fp16" and distributed.use_cpu():
        raise ValueError("precision fp16 needs a GPU for each process: use bf16 or fp32 on the CPU")
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=s.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        learning_rate=s.lr,
        weight_decay=s.weight_decay,
        adam_beta1=s.betas[0],
        adam_beta2=s.betas[1],
        max_grad_norm=s.grad_clip,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=options,
        warmup_steps=warmup,
        bf16=s.precision == "bf16",
        fp16=s.precision == "fp16",
        seed=s.seed,
        use_cpu=distributed.use_cpu(),
        ddp_backend="gloo" if distributed.use_cpu() and distributed.launched() else None,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        deepspeed=deepspeed_config(s.deepspeed),
        logging_steps=s.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=s.save_every,
        save_total_limit=None,  # rotated when the newest is whole
        eval_strategy="steps" if evaluates and s.eval_every else "no",
        eval_steps=s.eval_every,
        metric_for_best_model="loss" if evaluates else None,
        greater_is_better=False,
        ignore_data_skip=True,  # `Steps` starts where the checkpoint ends
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        report_to=check_report_to(s.report_to) or "none",
        use_cache=True,
    )
    # One GPU a process: the Trainer would copy the model to all that a lone process sees (DataParallel).
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
