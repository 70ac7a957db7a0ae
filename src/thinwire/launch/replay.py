"""`thinwire replay`: an elastic run again, in processes of this machine."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from thinwire.comm.addresses import gloo_interface
from thinwire.comm.process_groups import without_grace
from thinwire.comm.store import local_store
from thinwire.config import RunConfig
from thinwire.elastic.command import job_of, load
from thinwire.elastic.notes import Notes, client
from thinwire.elastic.record import Record
from thinwire.elastic.replay import Seat, play, refuse_difference, seats, told_apart
from thinwire.errors import RunError, UsageError
from thinwire.launch.fork_server import start_fork_server
from thinwire.run.records import RunFolder
from thinwire.run.startup import use_device


def replay(folder: Path) -> str:
    """Run again what is recorded in a folder, in processes of this machine; RunError if a round is not the same."""
    config, record = RunFolder.existing(folder).load_config(), Record.read(folder / "membership.jsonl")
    if not record.rows:
        raise UsageError(f"{folder} has no rounds of an elastic run (membership.jsonl)")
    start_fork_server()
    store, context, given = local_store(1), multiprocessing.get_context("forkserver"), seats(told_apart(record.rows))
    pipes, processes = [], []
    try:
        for seat in given:
            here, there = context.Pipe()
            payload = (config.model_dump(mode="json"), str(folder), seat.members, store.port)
            processes.append(context.Process(target=_play, args=(payload, there), daemon=True))
            processes[-1].start()
            there.close()
            pipes.append(here)
        answers = [json.loads(pipe.recv_bytes()) for pipe in pipes]
    except EOFError:
        raise RunError("a rank of the replay has ended before it was done") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    for answer in answers:
        if "error" in answer:
            raise RunError(answer["error"])
    same_model = any(answer["same_model"] for answer in answers)
    if (folder / "model.safetensors").exists() and not same_model:
        raise RunError("all rounds are the same again, but model.safetensors has other weights")
    what = "weights, outer momentum, learning rate, samples and position"
    return f"{len(record.rows)} rounds on {len(given)} processes: {what} are bit for bit the same again"


def _play(payload: tuple[dict[str, Any], str, list[int], int], pipe: Any) -> None:
    """A process of a replay: it plays some of the members in turn."""
    config, folder, members, port = RunConfig(**payload[0]), Path(payload[1]), payload[2], payload[3]
    rows = told_apart(Record.read(folder / "membership.jsonl").rows)
    try:
        task, config = load(config)
        job = job_of(config, task, use_device(config, None))
        with without_grace(), gloo_interface("127.0.0.1"):
            played = play(
                rows, Seat(members), job, lambda: Notes(lambda: client("127.0.0.1", port), "this machine"), True
            )
        for record, _ in played:
            refuse_difference(rows, record.rows)
        is_same = any(
            record.rows[-1] == rows[-1] and _is_saved(weights, folder / "model.safetensors")
            for record, weights in played
            if record.rows
        )
        answer: dict[str, Any] = {"same_model": is_same}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}" if not isinstance(error, RunError) else str(error)}
    pipe.send_bytes(json.dumps(answer).encode())
    os._exit(0)


def _is_saved(weights: dict[str, torch.Tensor], path: Path) -> bool:
    saved = load_file(path) if path.exists() else {}
    return saved.keys() == weights.keys() and all(torch.equal(saved[name], weights[name].cpu()) for name in saved)
