"""The estimate of memory and operations against what real modules, autograd, torch's counter and DeepSpeed say."""

from __future__ import annotations

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs, model_to_params
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from estimate_cases import (
    LORA,
    STREAMS,
    TRAINING,
    batch_of,
    config_of,
    inputs_of,
    loss_of,
    measured_share,
    model_of,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from trimode_vlm import TriModeVLM, patterns
from trimode_vlm.config import preset
from trimode_vlm.source_weights import skeleton
from trimode_vlm.training.estimate import EstimateInputs, estimate, estimate_report
from trimode_vlm.training.flops import attention_pairs, count_flops
from trimode_vlm.training.lora import LoraSettings, add_lora
from trimode_vlm.training.memory import state_bytes
from trimode_vlm.training.parts import part_of
from trimode_vlm.training.step_shapes import count_parameters

# Parameters


@pytest.mark.parametrize("name", ["nano", "3b", "8b", "14b"])
@pytest.mark.parametrize("changes", [{}, {"vision_config": None}, {"tie_word_embeddings": True}])
def test_parameter_counts_are_the_modules(name, changes):
    config = preset(name, **changes)
    model = skeleton(config)
    if config.tie_word_embeddings:
        model.diffusion_head.weight = model.encoder.embed_tokens.weight
    found: dict[str, int] = {}
    for weight, parameter in model.named_parameters():
        found[part_of(weight)] = found.get(part_of(weight), 0) + parameter.numel()
    assert count_parameters(config) == found


@pytest.mark.parametrize(
    "changes",
    [
        {"multimodal_projector_bias": True},
        {"spatial_merge_size": 1},
        {"vision_config": {"model_type": "timm_encoder", "architecture": "test_vit", "image_size": 64}},
        {"vision_config": {"model_type": "timm_encoder", "architecture": "test_efficientnet", "patch_size": 32}},
    ],
)
def test_parameter_counts_of_other_projectors_and_towers(changes):
    config = config_of(**changes)
    model = TriModeVLM(config)
    assert sum(count_parameters(config).values()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "lora",
    [
        LORA,
        LoraSettings(rank=2, targets=("q_proj", "diffusion_head")),
        LoraSettings(parts=("text", "vision", "projector"), targets=("k_proj", "down_proj", "linear_1")),
    ],
)
def test_lora_parameters_are_pefts(lora):
    config = config_of()
    wrapped = add_lora(TriModeVLM(config), lora)
    trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert estimate(inputs_of(lora=lora, train=()), config).trained == {"lora": trained}


# Tokens and pairs


@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("block_length", [1, 8, 21, 64])
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_and_attention_pairs_are_those_of_the_real_layout(stream, block_length, padded):
    padding = -21 % block_length if padded and stream["noisy_stream"] != "none" else 0
    inputs = inputs_of(**stream, block_length=block_length, rows=1, response=21, padding_tokens=padding)
    batch = batch_of(inputs)
    inputs = measured_share(inputs, batch)
    assert batch.input_ids.shape == (1, inputs.row_tokens)
    assert int((batch.target != -100).sum()) == inputs.labelled_tokens
    metadata = (batch.position, batch.document, batch.block_start, batch.block_id, batch.is_noisy)
    assert int(patterns.dual_stream(*metadata).attn_mask.sum()) == attention_pairs(inputs)
    assert len(batch.pixel_values) == inputs.image_copies


# Operations


PARTIAL = ("lora on vision", "lora on everything")


def counted_and_estimated(inputs):
    """Unfused attention under a dense mask is what the counter sees: all pairs, two products back for one forward."""
    config, batch = config_of(), batch_of(inputs)
    inputs = measured_share(inputs, batch)
    model = model_of(inputs, config, "eager")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss_of(model, batch, inputs).backward()
    found = count_flops(inputs, config, attention_backward=2.0, num_pairs=inputs.row_tokens**2)
    return counter.get_total_flops(), sum(part.total for part in found.values()), found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("training", list(TRAINING))
def test_operations_are_those_that_torch_counts(training, checkpointing):
    chunk_tokens = 16 if training in ("whole", "lora") else 2048
    inputs = inputs_of(**TRAINING[training], gradient_checkpointing=checkpointing, chunk_tokens=chunk_tokens)
    counted, estimated, found = counted_and_estimated(inputs)
    if training in PARTIAL:
        # Where only some of q, k and v learn, unfused attention leaves out products that the fused kernels compute.
        assert counted <= estimated <= counted + found["attention"].backward / 2
        assert estimated == pytest.approx(counted, rel=0.03)
    else:
        assert estimated == counted


@pytest.mark.parametrize("stream", STREAMS, ids=lambda s: "-".join(map(str, s.values())))
def test_operations_follow_the_noisy_stream(stream):
    counted, estimated, _ = counted_and_estimated(inputs_of(**stream, train=("text", "projector")))
    assert estimated == counted


# Memory


@pytest.mark.parametrize("training", list(TRAINING))
def test_states_are_the_real_tensors_after_a_step(training):
    inputs, config = inputs_of(**TRAINING[training]), config_of()
    model, batch = model_of(inputs, config), batch_of(inputs)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    loss_of(model, batch, inputs).backward()
    optimizer.step()
    moments = [v for state in optimizer.state.values() for key, v in state.items() if key != "step"]
    gpu, cpu = state_bytes(inputs, config, gpus=1)
    assert gpu == {
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in trained),
        "moments": sum(v.nbytes for v in moments),
    }
    assert cpu == {}


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("name", ["nano", "8b"])
def test_zero_partitions_are_deepspeeds(name, gpus):
    """Its stage 3 counts one of two gradients, 16-bit and fp32, that lie side by side at the step; we count both."""
    config = preset(name)
    model = skeleton(config)
    # Its total tells parameters apart by their addresses, which a model without memory does not have.
    total, (_, largest) = sum(p.numel() for p in model.parameters()), model_to_params(model)

    def ours(stage, offload="none"):
        inputs = EstimateInputs(
            zero_stage=stage, offload=offload, train=("text", "vision", "projector"), max_live_params=0
        )
        gpu, cpu = state_bytes(inputs, config, gpus)
        return sum(gpu.values()), sum(cpu.values()) * gpus

    options = {"num_gpus_per_node": gpus, "additional_buffer_factor": 1.0}
    _, gpu = estimate_zero2_model_states_mem_needs(total, cpu_offload=False, **options)
    assert ours(2)[0] == pytest.approx(gpu, abs=1)
    cpu, gpu = estimate_zero2_model_states_mem_needs(total, cpu_offload=True, **options)
    assert ours(2, "optimizer")[0] == gpu
    assert gpus > 4 or ours(2, "optimizer")[1] == cpu  # beyond, its figure is the loading of a whole copy by each rank
    _, gpu, _ = estimate_zero3_model_states_mem_needs(
        total, largest, cpu_offload=False, cpu_offload_params=False, **options
    )
    assert ours(3)[0] - 2 * total / gpus == pytest.approx(gpu, abs=1)
    cpu, gpu, _ = estimate_zero3_model_states_mem_needs(total, largest, cpu_offload_params=False, **options)
    assert ours(3, "optimizer") == (pytest.approx(gpu, abs=1), cpu)
    cpu, gpu, _ = estimate_zero3_model_states_mem_needs(total, largest, **options)
    assert ours(3, "all") == (gpu, cpu)


# The report


def test_the_report_says_what_was_counted():
    inputs = EstimateInputs(
        vision_tokens=2048, rows=2, micro_batches=4, lora=LoraSettings(), zero_stage=3, offload="all"
    )
    found = estimate(inputs, preset("8b"), 8)
    assert found.step_flops == 8 * 4 * sum(sum(vars(part).values()) for part in found.flops.values())
    report = estimate_report(inputs, preset("8b"), 8)
    assert report == str(found)
    for shown in (
        f"{found.parameters['text']:,}",
        f"{found.trained['lora']:,}",
        f"{sum(found.gpu_bytes.values()) / 2**30:.2f}",
        f"{sum(found.cpu_bytes.values()) / 2**30:.2f}",
        f"{found.step_flops / 1e12:,.4g} TFLOP",
        "8 GPUs x 4 micro-batches = 64 rows",
    ):
        assert shown in report, shown


def test_the_report_of_a_small_model_has_units_in_which_it_is_something():
    report = estimate_report(EstimateInputs(sequence_tokens=64), preset("nano"))
    assert "MiB" in report and "GFLOP" in report


def test_whole_8b_fine_tuning_costs_what_is_known_of_it():
    """Anchors from outside: 16 bytes a parameter and 4 more at the step; 8 x parameters x tokens with recomputation."""
    inputs = EstimateInputs(
        train=("text",), zero_stage=0, noisy_stream="none", sequence_tokens=2048, response_share=1.0
    )
    found = estimate(inputs, preset("8b", vision_config=None), 1)
    num_params = found.parameters["text"]
    states = sum(size for name, size in found.gpu_bytes.items() if "activations" not in name)
    assert states == 20 * num_params
    matrices = num_params - preset("8b").vocab_size * 4096
    assert found.micro_batch_flops == pytest.approx(8 * matrices * 2048, rel=0.08)


def test_less_of_everything_where_it_is_meant_to_be_less():
    config = preset("8b")

    def total(**changes):
        return estimate(EstimateInputs(**{"vision_tokens": 3072, "train": ("text", "projector"), **changes}), config, 8)

    streams = [total(noisy_stream=stream) for stream in ("response", "text", "all")]
    assert [e.inputs.row_tokens for e in streams] == [5120, 5120, 8192]
    assert streams[0].micro_batch_flops <= streams[1].micro_batch_flops < streams[2].micro_batch_flops
    stages = [total(zero_stage=stage).total_bytes for stage in (0, 1, 2, 3)]
    assert stages == sorted(stages, reverse=True)
    assert total(zero_stage=2, offload="optimizer").total_bytes < stages[2]
    assert total(zero_stage=3, offload="all").total_bytes < total(zero_stage=3, offload="optimizer").total_bytes
    assert total(gradient_checkpointing=True).total_bytes < total(gradient_checkpointing=False).total_bytes
    assert total(gradient_checkpointing=True).micro_batch_flops > total(gradient_checkpointing=False).micro_batch_flops
    lora = LoraSettings(rank=16)
    four_bits = total(lora=LoraSettings(rank=16, quantize="4bit"), train=(), zero_stage=None)
    assert four_bits.total_bytes < total(lora=lora, train=(), zero_stage=None).total_bytes / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noisy_stream": "both"}, "noisy_stream must be one of none, response, text, all, got 'both'"),
        ({"precision": "fp8"}, "precision must be one of"),
        ({"zero_stage": 4}, "zero_stage must be one of None, 0, 1, 2, 3, got 4"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"response_share": 0.0}, "response_share must be above 0"),
        ({"vision_tokens": 4000}, "4000 vision tokens and 1024 answer tokens do not fit 4096 tokens"),
        ({"offload": "optimizer", "zero_stage": None}, "offload 'optimizer' needs a zero_stage of 1 to 3"),
        ({"offload": "all"}, "offload 'all' needs zero_stage 3"),
    ],
)
def test_inputs_that_mean_nothing_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError) as error:
        EstimateInputs(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_estimate_needs_a_gpu_and_targets_that_are_there():
    with pytest.raises(ValueError, match="gpus must be at least 1"):
        estimate(EstimateInputs(), preset("8b"), 0)
    with pytest.raises(ValueError, match="'query' matches no linear layer of text"):
        estimate(EstimateInputs(lora=LoraSettings(targets=("query",))), preset("8b"))
