"""What goes wrong around a resumed run: torn and stray folders, changed settings, rotation, the best checkpoint."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from test_finetune import FAST, chats, text_folder, write_rows  # noqa: F401 - fixtures
from test_trainer import SAMPLES, SETTINGS, log_of, trainer, weights
from training_cases import sample, tiny_model

from trimode_vlm.training import saves
from trimode_vlm.training.data import ListSource
from trimode_vlm.training.train_settings import TrainSettings
from trimode_vlm.training.trainer import TriModeTrainer


def test_a_resumed_run_logs_saves_and_evaluates_as_often_as_it_is_now_told(tmp_path):
    trainer(tmp_path, until=2, log_every=1, save_every=2).fit()
    trainer(tmp_path, log_every=2, save_every=3, keep_checkpoints=9).fit()
    assert [entry["step"] for entry in log_of(tmp_path)] == [1, 2, 3, 4, 6], "a saved step is logged as well"
    assert [saves.step_of(path) for path in saves.checkpoints(tmp_path)] == [2, 3, 6]


def test_a_changed_learning_rate_that_was_allowed_is_the_one_that_is_used(tmp_path):
    trainer(tmp_path, until=3, warmup=0).fit()
    changed = trainer(tmp_path, warmup=0, lr=2e-2)
    changed.allow_changed = True
    changed.fit()
    straight = trainer(tmp_path / "straight", warmup=0, lr=2e-2)
    straight.fit()
    rates = [[entry["learning_rate"] for entry in log_of(f)] for f in (tmp_path, tmp_path / "straight")]
    assert rates[0][3:] == rates[1][3:]


def test_grown_steps_follow_the_longer_schedule_at_once(tmp_path):
    trainer(tmp_path, steps=3).fit()
    trainer(tmp_path, steps=6).fit()
    straight = trainer(tmp_path / "straight", steps=6)
    straight.fit()
    rates = [[entry["learning_rate"] for entry in log_of(f)] for f in (tmp_path, tmp_path / "straight")]
    assert rates[0][3:] == rates[1][3:]


def test_rotation_keeps_the_new_checkpoint_and_not_a_torn_one_from_further_on(tmp_path):
    trainer(tmp_path, save_every=3).fit()
    (tmp_path / "checkpoint-6" / saves.MANIFEST).unlink()
    with pytest.warns(UserWarning, match="torn"):
        trainer(tmp_path, until=4, save_every=1, keep_checkpoints=1).fit()
    assert saves.newest_checkpoint(tmp_path).name == "checkpoint-4"


def test_a_torn_folder_of_the_same_step_leaves_nothing_behind(tmp_path):
    trainer(tmp_path, save_every=3).fit()
    torn = tmp_path / "checkpoint-6"
    (torn / saves.MANIFEST).unlink()
    (torn / "random-1.safetensors").write_bytes(b"of another number of ranks")
    with pytest.warns(UserWarning, match="torn"):
        trainer(tmp_path).fit()
    assert saves.newest_checkpoint(tmp_path) == torn and not (torn / "random-1.safetensors").exists()


def test_a_users_copy_of_a_checkpoint_is_left_alone(tmp_path):
    trainer(tmp_path, until=2).fit()
    copy = tmp_path / "checkpoint-2-good"
    shutil.copytree(tmp_path / "checkpoint-2", copy)
    trainer(tmp_path, save_every=1, keep_checkpoints=1).fit()
    assert copy.is_dir() and [path.name for path in saves.checkpoints(tmp_path)] == ["checkpoint-6"]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00garbage", b"[]", b"null", b'{"a.json": 3}', b"{}", b""])
def test_a_manifest_of_garbage_is_a_torn_checkpoint(tmp_path, content):
    trainer(tmp_path, until=4, save_every=2).fit()
    (tmp_path / "checkpoint-4" / saves.MANIFEST).write_bytes(content)
    with pytest.warns(UserWarning, match="torn checkpoint checkpoint-4"):
        assert saves.newest_checkpoint(tmp_path).name == "checkpoint-2"


@pytest.mark.parametrize(
    "name", ["optimizer.safetensors", "scheduler.json", "trainer_state.json", "random-0.safetensors", "run.json"]
)
@pytest.mark.parametrize("gone", [False, True])
def test_every_file_of_a_checkpoint_is_missed(tmp_path, name, gone):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    for file in ("optimizer.safetensors", "scheduler.json", "trainer_state.json", "random-0.safetensors", "run.json"):
        (folder / file).write_text(f"content of {file}")
    saves.write_manifest(folder)
    assert saves.newest_checkpoint(tmp_path) == folder
    (folder / name).unlink() if gone else (folder / name).write_text("content")
    with pytest.warns(UserWarning, match=name):
        assert saves.newest_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    "changes",
    [
        dict(workers=2, packing_length=120, micro_batch_samples=None, micro_batch_tokens=200),
        dict(complementary_masks=True, noise="block", response_padding="block", block_length=(2, 4)),
        dict(block_length_schedule=[[0, 2], [0.5, 8]], ar_share=0.5),
        dict(gradient_checkpointing=True, optimizer="muon", schedule="wsd"),
    ],
)
def test_resume_is_bitwise_with(tmp_path, changes):
    straight = trainer(tmp_path / "a", **changes)
    straight.fit()
    trainer(tmp_path / "b", until=3, **changes).fit()
    resumed = trainer(tmp_path / "b", **changes)
    resumed.fit()
    assert torch.equal(weights(straight), weights(resumed))


def with_evaluation(folder, until=None, **changes):
    held_out = ListSource([sample(9, ((4, 8),))], batch_samples=1)
    settings = TrainSettings(
        **{**SETTINGS, "lr": 0.5, "eval_every": 1, "keep_checkpoints": 1, "save_every": 6, **changes}
    )
    return TriModeTrainer(tiny_model(), ListSource(SAMPLES, batch_samples=4), settings, folder, eval_source=held_out)


def test_a_finished_run_still_knows_its_best_checkpoint(tmp_path):
    first = with_evaluation(tmp_path)
    first.fit()
    again = with_evaluation(tmp_path)
    again.fit()
    assert again.state.best_model_checkpoint == first.state.best_model_checkpoint is not None


def test_a_moved_folder_still_knows_its_best_checkpoint(tmp_path):
    first = with_evaluation(tmp_path / "a")
    first.fit()
    (tmp_path / "a").rename(tmp_path / "b")
    again = with_evaluation(tmp_path / "b", steps=7)
    again._mend_state(saves.newest_checkpoint(tmp_path / "b"))
    assert again.state.best_model_checkpoint == first.state.best_model_checkpoint.replace("/a/", "/b/")


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    trainer(tmp_path, until=2).fit()
    monkeypatch.setattr(saves, "save_file", full)
    with pytest.raises(OSError, match=r"checkpoint-4 could not be written .*No space left"):
        trainer(tmp_path, save_every=4).fit()
    with pytest.warns(UserWarning, match="torn checkpoint checkpoint-4"):
        assert saves.newest_checkpoint(tmp_path).name == "checkpoint-2"


def test_an_evaluation_set_that_counts_twice_hides_no_other(tmp_path):
    class Mixture:
        """The first data set twice, then the second, as a mixture with weight 2 draws them in order."""

        num_samples, batch_samples = 6, 2

        def draw(self, step, rank, world):
            drawn = [
                sample(0),
                sample(1),
                replace(sample(0), epoch=1),
                replace(sample(1), epoch=1),
                sample(2),
                sample(3),
            ]
            return drawn[2 * step + rank : 2 * step + 2 : world]

    settings = TrainSettings(**{**SETTINGS, "eval_every": 1})
    source = ListSource(SAMPLES, batch_samples=4)

    t = TriModeTrainer(tiny_model(), source, settings, tmp_path, eval_source=Mixture())
    assert t.evaluate()["eval_samples"] == 4


def test_rotation_keeps_the_best_beside_the_newest(tmp_path):
    for step in (1, 2, 3, 4, 10, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    saves.rotate(tmp_path / "checkpoint-10", 2, best="somewhere/else/checkpoint-2")
    assert [path.name for path in saves.checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4", "checkpoint-10"]
