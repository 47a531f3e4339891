"""What a training run will need: memory on each GPU and operations of a step, as a table."""

from __future__ import annotations

from dataclasses import dataclass

from trimode_vlm.config import TriModeConfig
from trimode_vlm.training.flops import Flops, count_flops
from trimode_vlm.training.memory import activation_bytes, features_bytes, state_bytes
from trimode_vlm.training.step_shapes import EstimateInputs, count_parameters, lora_targets, whole_parts

__all__ = ["Estimate", "EstimateInputs", "estimate", "estimate_report"]

BYTES = ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))
# Of a GPU in a well-tuned run: about 40 % of an H100's peak in bf16.
ASSUMED_FLOPS_PER_SEC = 400e12
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
OPERATIONS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Memory of one GPU in bytes, operations of one micro-batch of one GPU. See memory.py and flops.py.

    parameters, trained: of each part (trained: "lora" for LoRA's factors). cpu_bytes: what is offloaded, for one GPU.
    """

    inputs: EstimateInputs
    gpus: int
    parameters: dict[str, int]
    trained: dict[str, int]
    gpu_bytes: dict[str, float]
    cpu_bytes: dict[str, float]
    flops: dict[str, Flops]

    @property
    def total_bytes(self) -> float:
        """Of one GPU."""
        return sum(self.gpu_bytes.values())

    @property
    def micro_batch_flops(self) -> float:
        return sum(part.total for part in self.flops.values())

    @property
    def step_flops(self) -> float:
        """Of an optimizer step on all GPUs."""
        return self.micro_batch_flops * self.inputs.micro_batches * self.gpus

    def __str__(self) -> str:
        return "\n".join([*_tokens(self), "", *_parameters(self), "", *_memory(self), "", *_operations(self)])


def estimate(inputs: EstimateInputs, model_config: TriModeConfig, gpus: int = 1) -> Estimate:
    """Memory and operations of a run on so many GPUs.

    Raises:
        ValueError: no GPU, or LoRA targets that the model does not have.
    """
    if gpus < 1:
        raise ValueError(f"gpus must be at least 1, got {gpus}")
    counts, whole = count_parameters(model_config), whole_parts(inputs, model_config)
    trained = {part: counts[part] for part in whole}
    if inputs.lora:
        trained["lora"] = sum(lora_targets(inputs, model_config).values())
    gpu, cpu = state_bytes(inputs, model_config, gpus)
    kept = {f"activations: {name}": size for name, size in activation_bytes(inputs, model_config).items()}
    return Estimate(
        inputs=inputs,
        gpus=gpus,
        parameters=counts,
        trained=trained,
        gpu_bytes=gpu | kept | {"image features": features_bytes(inputs, model_config)},
        cpu_bytes=cpu,
        flops=count_flops(inputs, model_config),
    )


def estimate_report(inputs: EstimateInputs, model_config: TriModeConfig, gpus: int = 1) -> str:
    """The estimate as the table that `trimode-vlm train --estimate` prints."""
    return str(estimate(inputs, model_config, gpus))


def _tokens(e: Estimate) -> list[str]:
    i = e.inputs
    return [
        f"micro-batch of a GPU: {i.rows} rows of {i.row_tokens:,} tokens = {i.noisy_tokens:,} noisy "
        f"({i.noisy_stream}) + {i.sequence_tokens:,} clean, {i.vision_tokens:,} of them image features",
        f"step: {e.gpus} GPUs x {i.micro_batches} micro-batches = {e.gpus * i.micro_batches * i.rows:,} rows, "
        f"{e.gpus * i.micro_batches * i.rows * i.response_tokens:,} answer tokens",
        f"{i.precision}, {'no DeepSpeed' if i.zero_stage is None else f'ZeRO {i.zero_stage}'}, offload {i.offload}, "
        f"gradient checkpointing {'on' if i.gradient_checkpointing else 'off'}",
    ]


def _parameters(e: Estimate) -> list[str]:
    total, trained = sum(e.parameters.values()), sum(e.trained.values())
    lines = [f"{'parameters':24}{'all':>16}{'trained':>16}"]
    lines += [f"  {part:22}{count:16,}{e.trained.get(part, 0):16,}" for part, count in e.parameters.items()]
    lines += [f"  {'lora':22}{'':16}{e.trained['lora']:16,}"] if "lora" in e.trained else []
    return [*lines, f"  {'all':22}{total:16,}{trained:16,}"]


def _memory(e: Estimate) -> list[str]:
    unit, name = _unit(e.total_bytes, BYTES)
    lines = [f"{'memory of a GPU':34}{name:>10}"]
    lines += [f"  {what:32}{size / unit:10.2f}" for what, size in e.gpu_bytes.items() if size]
    lines.append(f"  {'all, and leave 10-15 % free':32}{e.total_bytes / unit:10.2f}")
    if e.cpu_bytes:
        lines.append(f"  {'on the CPU, for each GPU':32}{sum(e.cpu_bytes.values()) / unit:10.2f}")
    return lines


def _operations(e: Estimate) -> list[str]:
    unit, name = _unit(e.micro_batch_flops, OPERATIONS)
    lines = [f"{f'{name} of a micro-batch':24}{'forward':>12}{'backward':>12}{'again':>12}"]
    for what, part in e.flops.items():
        if part.total:
            lines.append(f"  {what:22}" + "".join(f"{count / unit:12.3f}" for count in vars(part).values()))
    lines.append(f"  {'all':22}{e.micro_batch_flops / unit:12.3f}")
    unit, name = _unit(e.step_flops, OPERATIONS)
    seconds = e.step_flops / e.gpus / ASSUMED_FLOPS_PER_SEC
    second, second_name = _unit(seconds, SECONDS)
    speed = f"at 400 TFLOP/s each {seconds / second:.3g} {second_name}"
    return [*lines, f"a step of all GPUs: {e.step_flops / unit:,.4g} {name}; {speed}"]


def _unit(largest: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """The largest unit of which there is one, else the smallest."""
    return next((unit for unit in units if largest >= unit[0]), units[-1])
