"""`trimode-vlm sol`: the oracle of speed_of_light.py beside the real samplers, on the same held-out prompts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trimode_vlm.cli import UsageError, check_device, main, print_settings
from trimode_vlm.eval import sol_report
from trimode_vlm.eval.arguments import check_file, check_plot, numbers
from trimode_vlm.eval.metrics import score
from trimode_vlm.eval.prompts import inputs_of
from trimode_vlm.eval.sol_report import ORACLE, Record
from trimode_vlm.eval.tasks import EvalTask, select

EXAMPLES = """examples:
  trimode-vlm sol --limit 2 --json reports/sol.json --plot reports/sol.png
  trimode-vlm sol --tasks grid_json,text_spell --block-lengths 8,32 --thresholds 0.9,0.6
  trimode-vlm sol --probes 31 --block-lengths 32     # tries every prefix: the largest safe one, not bisection's
An oracle: it knows the tokens that the model will have given in the end. No sampler can run it.
"""
MAX_BLOCK_LENGTH = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `trimode-vlm sol`."""
    add = parser.add_argument
    add("--model", default="nano", help="checkpoint folder or hub id (default: the shipped nano)")
    add("--tasks", default="nano", help="comma-separated tasks; 'nano' is all held-out synthetic tasks")
    add("--limit", type=int, default=2, help="prompts per task (default 2)")
    add("--seed", type=int, default=0, help="which held-out prompts (default 0)")
    add("--block-lengths", default="4,8,16,32", help="comma-separated (default 4,8,16,32)")
    add("--thresholds", default="0.9,0.7,0.5", help="of the real diffusion samplers (default 0.9,0.7,0.5)")
    add("--sampler", metavar="FOLDER", help="learned sampler; default: learned_sampler/ beside the weights, if there")
    add("--budget", type=int, default=5000, help="simulated forwards per block; beyond it nothing is safe (5000)")
    add("--probes", type=int, default=1, help="prefixes tried together as rows of one batch (default 1: bisection)")
    add("--max-new-tokens", type=int, help="budget of every answer; default: the task's")
    add("--dtype", help="such as bfloat16; default: the checkpoint's")
    add("--device", help="such as cuda; default: cpu")
    add("--json", metavar="FILE", help="also write the JSON document to this file")
    add("--plot", metavar="FILE.png", help="draw acceptance and TPF by block length, and acceptance by task")


def run(args: argparse.Namespace) -> int:
    """Measure, print the tables, and end with the JSON document; returns the exit code."""
    tasks = check(args)
    settings = {name: value for name, value in vars(args).items() if value is not None and name not in ("json", "plot")}
    print_settings(settings)
    import trimode_vlm

    model, processor = trimode_vlm.load(
        args.model, dtype=args.dtype, device=args.device, sampler=args.sampler or "auto"
    )
    result = sol_report.build(settings, list(measure(model, processor, tasks, args)))
    text = json.dumps(result)
    # Before the files, whose disk may be full by now: the measurement is not lost then.
    print(f"{sol_report.markdown(result)}\n\n{text}", flush=True)
    if args.json:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.plot:
        sol_report.plot(result, Path(args.plot))
    return 0


def check(args: argparse.Namespace) -> list[EvalTask]:
    """Read the lists in place; return the tasks. Raises UsageError for what could not be measured or written."""
    args.block_lengths = numbers(args.block_lengths, int, "--block-lengths", 1, MAX_BLOCK_LENGTH)
    args.thresholds = numbers(args.thresholds, float, "--thresholds", 0, 1)
    for name, least in (("limit", 1), ("budget", 0), ("probes", 1), ("max_new_tokens", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    check_file("--json", args.json)
    check_plot(args.plot)
    check_device(args.device)
    try:
        tasks = select([name.strip() for name in args.tasks.split(",") if name.strip()])
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not tasks:
        raise UsageError("--tasks names no task")
    return tasks


def samplers(block_length: int, thresholds: Sequence[float], longest_learned: int = 0) -> dict[str, dict[str, Any]]:
    """generate()'s options of every real sampler, by name; the learned one for blocks that it knows."""
    from trimode_vlm.decoders import DECODERS

    found: dict[str, dict[str, Any]] = {"serial": {"mode": "diffusion", "threshold": None}}
    found |= {f"threshold {value:g}": {"mode": "diffusion", "threshold": value} for value in thresholds}
    if block_length <= longest_learned:
        learned = {"mode": "diffusion", "commit_rule": "learned"}
        found |= {f"learned {value:g}": {**learned, "threshold": value} for value in thresholds}
    found |= {mode: {"mode": mode} for mode in ("linear_spec", "quadratic_spec") if mode in DECODERS}
    return {name: {**options, "block_length": block_length} for name, options in found.items()}


def measure(model: Any, processor: Any, tasks: Sequence[EvalTask], args: argparse.Namespace) -> Iterator[Record]:
    """One record for each prompt, block length and sampler, the oracle first."""
    from tqdm import tqdm

    work = [(task, index) for task in tasks for index in range(min(args.limit, task.num_examples or args.limit))]
    for task, index in tqdm(work, unit="prompt", dynamic_ncols=True):
        example = task.example(index, args.seed)
        inputs = dict(inputs_of(processor, [example.messages]).to(model.device))
        budget = args.max_new_tokens or task.max_new_tokens
        for block_length in args.block_lengths:
            for name, ids, counts in _answers(model, inputs, block_length, budget, args):
                if name == ORACLE:
                    target = ids
                text = processor.decode(ids, skip_special_tokens=True)
                yield {
                    "task": task.name,
                    "id": index,
                    "block_length": block_length,
                    "sampler": name,
                    "score": score(task.metric, text, example.gold).score,
                    "num_tokens": len(ids),
                    "equals_target": ids == target,
                    **counts,
                }


def _answers(
    model: Any, inputs: dict[str, Any], block_length: int, budget: int, args: argparse.Namespace
) -> Iterator[tuple[str, list[int], dict[str, Any]]]:
    """(sampler, ids, counts) of one prompt: the oracle, whose ids are the serial target, then the real samplers."""
    from trimode_vlm.eval.speed_of_light import speed_of_light

    answer = speed_of_light(
        model,
        inputs,
        block_length=block_length,
        max_new_tokens=budget,
        end_token_ids=_end_token_ids(model),
        budget=args.budget,
        probes=args.probes,
    )
    blocks = answer.blocks
    yield (
        ORACLE,
        answer.token_ids,
        {
            "steps": answer.denoise_steps,
            "decode_forwards": answer.denoise_steps + answer.refreshes,
            "committed": sum(len(block.target) - 1 for block in blocks),
            "blocks": len(blocks),
            "replayed_blocks": sum(answer.replayed),
            "serial_steps": sum(block.serial_steps for block in blocks),
            "simulation_forwards": [block.simulation_forwards for block in blocks],
            "over_budget_blocks": sum(block.cut_simulations > 0 for block in blocks),
        },
    )
    learned = model.learned_sampler
    longest_learned = learned.config.block_length if learned is not None else 0
    for name, options in samplers(block_length, args.thresholds, longest_learned).items():
        out = model.generate(**inputs, **options, max_new_tokens=budget, do_sample=False)
        count = out.num_new_tokens[0]
        ids = out.sequences[0, inputs["input_ids"].shape[1] :][:count].tolist()
        yield name, ids, step_counts(options["mode"], out, block_length)


def step_counts(mode: str, out: Any, block_length: int) -> dict[str, int]:
    """Denoising (or drafting) forwards, all decode forwards, and tokens that the former committed, of one answer.

    Diffusion: every block but the last has one refresh, and every block's first token is a causal pass's. Speculation:
    every cycle's last token is the verifier's own; quadratic's one forward drafts and verifies, so all are counted.
    """
    count, forwards = out.num_new_tokens[0], out.nfe[0] - out.nfe_prefill[0]
    if mode == "diffusion":
        blocks = -(-count // block_length)
        return {"steps": forwards - (blocks - 1), "decode_forwards": forwards, "committed": count - blocks}
    accepted = out.accepted_lengths[0]
    steps = forwards if mode == "quadratic_spec" else forwards - len(accepted)
    return {"steps": steps, "decode_forwards": forwards, "committed": sum(accepted) - len(accepted)}


def _end_token_ids(model: Any) -> frozenset[int]:
    """The end tokens that generate() would stop at: the generation config's, else the model's."""
    ids = model.generation_config.eos_token_id
    ids = model.config.eos_token_id if ids is None else ids
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)


if __name__ == "__main__":
    sys.exit(main(["sol", *sys.argv[1:]]))
