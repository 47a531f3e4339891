"""A DeepSpeed file of the user's own: what decides a step stands in the settings, what is left out follows them."""

import json

import pytest

from trimode_vlm.training.arguments import training_arguments
from trimode_vlm.training.presets import OURS, deepspeed_config
from trimode_vlm.training.train_settings import TrainSettings


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps to 4: write \"auto\" there (a step is"),
        ({"train_micro_batch_size_per_gpu": 2}, "train_micro_batch_size_per_gpu to 2"),
        ({"train_batch_size": 16}, "train_batch_size to 16"),
        ({"gradient_clipping": 0.5}, "gradient_clipping to 0.5: write \"auto\" there (grad_clip)"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "its own 'optimizer' section"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "its own 'scheduler' section"),
    ],
)  # fmt: skip
def test_what_the_settings_decide_is_refused_in_one_line(tmp_path, content, words):
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, **content}))
    with pytest.raises(ValueError) as error:
        TrainSettings(deepspeed=str(file))
    assert words in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_what_is_left_out_follows_the_settings(tmp_path):
    file = tmp_path / "own.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 1}))
    config = deepspeed_config(str(file))
    assert [config[key] for key in OURS] == [1, "auto", "auto", "auto"]
    assert config["bf16"] == config["fp16"] == {"enabled": "auto"}


def test_fp16_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("trimode_vlm.training.distributed.use_cpu", lambda: True)
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        training_arguments(TrainSettings(precision="fp16"), tmp_path)
