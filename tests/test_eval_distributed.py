"""Several processes on one evaluation: workers of one machine, and two gloo ranks under torchrun."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import REPOSITORY
from eval_cases import PAD, StubModel, StubProcessor, lines, settings
from serving import free_port
from torch.distributed import TCPStore

from trimode_vlm.eval import ranks, run, state, workers

TASKS = ("grid_cell", "text_spell")
UNLIKE = ("seconds", "seconds_to_first_token")


class BlindModel(StubModel):
    """Answers "x" to everything; the process that `TRIMODE_TEST_DIE` names dies before its third."""

    def generate(self, input_ids: Any, **options: Any) -> Any:
        self.calls.append(options)
        name = multiprocessing.current_process().name
        # The first answer in a mode is thrown away.
        if name == os.environ.get("TRIMODE_TEST_DIE") and len(self.calls) > 3:
            os.kill(os.getpid(), signal.SIGKILL)
        one = {"num_new_tokens": [1], "nfe": [1], "nfe_prefill": [1], "seconds": [0.1], "accepted_lengths": [[]]}
        sequences = torch.tensor([[*input_ids[0].tolist(), ord("x"), PAD]])
        return SimpleNamespace(sequences=sequences, finish_reasons=["stop"], **one)


class BlindProcessor(StubProcessor):
    def apply_chat_template(self, messages: Any, **options: Any) -> dict[str, Any]:
        assert messages[-1]["role"] == "user"
        return {"input_ids": torch.ones(1, 4, dtype=torch.long)}


def blind_loader(path: str, dtype: Any, device: Any) -> tuple[Any, Any]:
    return BlindModel(), BlindProcessor()


def torchrun(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    paths = f"{here}{os.pathsep}{REPOSITORY}"
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *argv]
    return subprocess.run(command, env=env, timeout=500, capture_output=True, text=True)


def alike(folder: Path) -> list[dict[str, Any]]:
    """The lines of a finished run without what a clock says."""
    records = state.read_file(folder / "samples.jsonl")
    return [{name: value for name, value in record.items() if name not in UNLIKE} for record in records]


def test_workers_share_the_samples_and_a_dead_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes on two of nano's tasks, one killed in the middle; resumed by one process."""
    chosen = settings(tmp_path, tasks=TASKS, limit=4, workers=2)
    monkeypatch.setenv("TRIMODE_TEST_DIE", "eval-worker-1")
    with pytest.raises(RuntimeError, match="worker 1 exited with code -9; .*goes on"):
        run.evaluate(chosen, loader=blind_loader)
    shards = [state.read_file(path) for path in state.shards(Path(chosen.output))]
    assert len(shards[-1]) == 2 and {r["id"] % 2 for r in shards[-1]} == {1}
    # The other may have opened its file and not yet answered.
    assert all({r["id"] % 2 for r in shard} <= {0} for shard in shards[:-1])
    run.evaluate(replace(chosen, workers=1), loader=blind_loader)
    alone = replace(chosen, workers=1, output=str(tmp_path / "alone"))
    run.evaluate(alone, loader=blind_loader)
    assert lines(chosen) == lines(alone) and len(lines(alone)) == 16


def test_no_worker_is_started_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[state.Key]] = []

    class Process:
        sentinel, exitcode = None, 0

        def __init__(self, args: Any, **_: Any) -> None:
            started.append(args[1])

        def is_alive(self) -> bool:
            return False

        start = terminate = join = lambda self: None

    monkeypatch.setattr(workers.multiprocessing, "get_context", lambda _: SimpleNamespace(Process=Process))
    monkeypatch.setattr(workers, "wait", lambda *_, **__: None)
    chosen = settings(tmp_path, tasks=TASKS, batch_size=2, workers=4)
    keys = [state.Key("model", TASKS[0], "ar", i, i) for i in range(5)]
    progress: Any = SimpleNamespace(look=lambda: None)
    for todo in (keys, keys[:2], []):
        workers.fan_out(chosen, todo, blind_loader, progress)
    assert started == [keys[:2], keys[2:4], keys[4:], keys[:2]]


def test_two_ranks_answer_byte_for_byte_what_one_answers(tmp_path: Path) -> None:
    """nano itself, through the command: a folder that three ranks had begun, one line of it torn, and a fresh one."""
    chosen = settings(
        tmp_path / "one", model="nano", tasks=TASKS, modes=("ar", "diffusion", "linear_spec"), limit=3, batch_size=2
    )
    chosen = replace(chosen, max_new_tokens=24, device="cpu")
    result = run.evaluate(chosen)
    expected = alike(Path(chosen.output))
    begun = tmp_path / "begun"
    begun.mkdir()
    text = (Path(chosen.output) / "samples.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (begun / "samples.jsonl").write_text("".join(text[:2]), encoding="utf-8")
    (begun / "samples.worker0.jsonl").write_text(text[1] + text[2], encoding="utf-8")
    (begun / "samples.worker2.jsonl").write_text(text[7] + text[5][:40], encoding="utf-8")
    (begun / "settings.json").write_bytes((Path(chosen.output) / "settings.json").read_bytes())
    options = "--model nano --mode ar,diffusion,linear_spec --limit 3 --batch-size 2 --max-new-tokens 24 --device cpu"
    argv = [*options.split(), "--tasks", ",".join(TASKS)]
    done = torchrun("-m", "trimode_vlm", "eval", *argv, "--output", str(begun))
    assert done.returncode == 0, done.stderr[-3000:]
    assert alike(begun) == expected and len({state.key_of(r) for r in expected}) == len(expected) == 18
    assert not list(begun.glob("*.worker*"))
    assert done.stdout.count("| grid_cell |") == 1 and done.stderr.count("settings: ") == 1
    two = json.loads((begun / "report.json").read_text(encoding="utf-8"))
    assert two["settings"]["workers"] == 2
    for task, cells in result["tasks"].items():
        for mode, cell in cells.items():
            other = two["tasks"][task][mode]
            same = ("score", "num_samples", "num_tokens", "num_forwards", "tpf_decode", "tpf_end_to_end")
            assert [cell[name] for name in same] == [other[name] for name in same]


def meet(rank: int, variables: dict[str, str], fate: str, pipe: Any, has_waited: Any) -> None:
    """One of three ranks, none of which has an agent to stop it when another dies."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", **variables}
    looks: list[None] = []

    def prepare() -> list[int]:
        if fate == "refused":
            raise ValueError("no")
        return [rank]

    def look() -> None:
        looks.append(None)
        if rank == 0 and len(looks) == 2:
            pipe.send("waited")
            has_waited.set()

    try:
        with ranks.joined() as group:
            assert group.first(prepare) == [0]
            if rank == 1 and fate == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 2 and fate == "slow":
                assert has_waited.wait(60)
            group.wait(look)
        pipe.send("met")
    except (ValueError, RuntimeError, SystemExit) as error:
        pipe.send(f"{type(error).__name__} {error}")


def meeting(fate: str, **variables: str) -> list[list[str]]:
    """What each of the three ranks said."""
    context = multiprocessing.get_context("fork")
    pipes, has_waited = [context.Pipe() for _ in range(3)], context.Event()
    processes = [
        context.Process(target=meet, args=(rank, variables, fate, pipes[rank][1], has_waited)) for rank in range(3)
    ]
    for process in processes:
        process.start()
    heard: list[list[str]] = []
    for process, (receive, _) in zip(processes, pipes, strict=True):
        process.join(120)
        process.kill()
        heard.append([])
        while receive.poll(0):
            heard[-1].append(receive.recv())
    return heard


@pytest.mark.parametrize("fate", ["slow", "killed", "refused"])
def test_ranks_wait_for_the_slow_and_not_for_the_dead(fate: str) -> None:
    heard = meeting(fate, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    if fate == "slow":
        assert heard == [["waited", "met"], ["met"], ["met"]]
    elif fate == "killed":
        assert heard[1] == []
        assert all("RuntimeError a rank ended before its work was done" in heard[rank][-1] for rank in (0, 2))
    else:
        assert heard == [["ValueError no"], ["SystemExit 1"], ["SystemExit 1"]]


def test_ranks_that_a_launcher_starts_again_find_each_other() -> None:
    """torchrun's agent keeps one store over all attempts, with the addresses of the dead in it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert meeting("killed", **agents, TORCHELASTIC_RESTART_COUNT="0")[1] == []
    assert meeting("slow", **agents, TORCHELASTIC_RESTART_COUNT="1")[1:] == [["met"], ["met"]]


def test_workers_and_ranks_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--workers starts processes of its own: leave it out under torchrun"):
        run.evaluate(settings(tmp_path, workers=2), loader=blind_loader)
    assert not (tmp_path / "out").exists()


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.own_device("cuda") == "cuda" and ranks.own_device("cuda:3") == "cuda:3"
    for name, value in (("RANK", "9"), ("WORLD_SIZE", "16"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ranks.own_device("cuda") == "cuda:1" and ranks.own_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="--device cuda:0 would put every rank on one GPU"):
        ranks.own_device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="rank 2 of this machine has no GPU of its own"):
        ranks.own_device("cuda")


def test_the_option_of_deepspeeds_launcher_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """It puts --local_rank before the command's name."""
    assert run.main(["--local_rank=1", "eval", "--list-tasks"]) == 0
    assert "grid_cell" in capsys.readouterr().out
