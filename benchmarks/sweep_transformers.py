"""Every model family of transformers that can be built tiny, trained at the smallest feasible budget, against `aot_eager`.

    python benchmarks/sweep_transformers.py                 # an hour or more
    python benchmarks/sweep_transformers.py --only gpt2 bert --jobs 1

Families are those of the mappings for causal, masked and sequence-to-sequence language models and image classification. Every
further family that has a base model follows: encoders of text, images, videos and sound, detectors, speech models. Models
that join several others (vision-language models) are not walked: their parts are.
Configurations are shrunk by the names of their fields, weights are random, dropout is as the configuration has it. Loss,
gradients and buffers must have the bits that `torch.compile(backend="aot_eager")` gives with the same seed. Each case has a
process of its own, which is ended after `--seconds`.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy
import torch
import transformers
from harness import parser, stored, write
from shrinking import LEVELS, shrunk
from sweep_ops import FAILED, OK, SKIPPED, Late, Numbers, Row, Step, first_line, judge, limited, shown
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SEED = 0
MEMORY_LIMIT = 8 * 2**30
GRACE = 30
"""Seconds beyond its limit after which a process that does not end is killed."""
MAX_PARAMETERS = 30_000_000
BATCH, TOKENS = 2, 16

TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION")
BASE = "BASE"
"""The task of families that have none of these: the result of their base model."""


@dataclass(frozen=True)
class Case:
    """One model class of one family."""

    family: str
    task: str
    class_name: str

    @property
    def name(self) -> str:
        return f"{self.family}: {self.class_name}"


class Unbuildable(Exception):
    """No shrunk configuration gives a model that runs."""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", default=[], help="families, exactly")
    made.add_argument("--every", type=int, default=1, help="only every n-th case, for a first look")
    made.add_argument(
        "--resume", action="store_true", help="keep the output folder's rows; run what is chosen and not ok there"
    )
    made.add_argument("--seconds", type=int, default=240, help="limit for each case")
    made.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = made.parse_args()
    everything = list(cases())
    chosen = [case for case in everything if not arguments.only or case.family in arguments.only][:: arguments.every]
    kept = {row.name: row for row in stored("sweep_transformers", arguments.output, Row)} if arguments.resume else {}
    chosen = [case for case in chosen if case.name not in kept or kept[case.name].result != OK]
    for row in in_processes(chosen, arguments.seconds, arguments.jobs):
        print(f"{row.name}: {row.result} {row.graphs} {row.recomputed} {row.seconds} {row.reason} {row.note}", flush=True)
        kept[row.name] = row
    rows = [kept[case.name] for case in everything if case.name in kept]
    write("sweep_transformers", arguments.output, shown(rows), rows, transformers=transformers.__version__)


def cases() -> Iterator[Case]:
    """Yields each model class once, in the order of the mappings; base models of families that have no other."""
    seen: set[str] = set()
    families: set[str] = set()
    mappings = {task: getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS}
    for task, mapping in (mappings | {BASE: modeling_auto.MODEL_MAPPING_NAMES}).items():
        for family, names in mapping.items():
            class_name = names if isinstance(names, str) else names[0]
            if class_name not in seen and (task != BASE or family not in families):
                yield Case(family, task, class_name)
            seen.add(class_name)
            families.add(family)


# -- processes ---------------------------------------------------------------------------------------------------------


def in_processes(chosen: list[Case], seconds: int, jobs: int) -> Iterator[Row]:
    """Yields the row of each case as it ends. A crash or a hang is its case's result."""
    context = multiprocessing.get_context("fork")
    waiting = iter(chosen)
    running: dict[Connection, tuple[Case, BaseProcess, float]] = {}
    while True:
        while len(running) < jobs and (case := next(waiting, None)) is not None:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(case, seconds, theirs))
            process.start()
            theirs.close()
            running[ours] = (case, process, time.monotonic() + seconds + GRACE)
        if not running:
            return
        ready = wait(list(running), timeout=1)
        for connection, (case, process, deadline) in list(running.items()):
            if connection in ready:
                yield received(connection, case, process)
            elif time.monotonic() > deadline:
                process.kill()
                yield Row(case.name, SKIPPED, f"killed after {seconds + GRACE} s")
            else:
                continue
            process.join()
            del running[connection]


def received(connection: Connection, case: Case, process: BaseProcess) -> Row:
    """Returns the row that the process sent, or one that says that it died."""
    try:
        row: Row = connection.recv()
    except EOFError:
        process.join()
        return Row(case.name, SKIPPED, f"the process died with exit code {process.exitcode}")
    return row


def work(case: Case, seconds: int, results: Connection) -> None:
    """Judges a case in a process of its own and sends its row."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # transformers' advice on every model
    warnings.simplefilter("ignore")
    progress: list[str] = ["while the model was built"]
    begin = time.perf_counter()
    try:
        with limited(seconds):
            row = examine(case, progress)
    except Late as late:
        row = Row(case.name, FAILED if "autoremat" in progress[-1] else SKIPPED, f"{late}, {progress[-1]}")
    except Unbuildable as error:
        row = Row(case.name, SKIPPED, str(error), seconds=round(time.perf_counter() - begin, 2))
    results.send(row)


# -- one case ----------------------------------------------------------------------------------------------------------


def examine(case: Case, progress: list[str]) -> Row:
    """Returns the row of the case's model, built at the first level of shrinking at which it runs."""
    model, batch = built(case)
    step = training_step(model, batch)
    stages = iter(("under eager", "under plain aot_eager", "under autoremat"))

    def counted(compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Numbers:
        progress.append(next(stages))
        return step(compile)

    return judge(case.name, counted)


def built(case: Case) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns a tiny model of the case that runs, and its batch.

    Raises ``Unbuildable`` with the first level's reason.
    """
    parts = CONFIG_MAPPING[case.family].sub_configs
    if case.task == BASE and len(parts) > 1:
        raise Unbuildable(f"joins other models: {', '.join(sorted(parts))}")
    model_class = getattr(transformers, case.class_name, None)
    if model_class is None:
        raise Unbuildable(f"{case.class_name} is not exported by transformers")
    reasons = []
    for level in LEVELS:
        try:
            config = shrunk(model_class.config_class, level)
            torch.manual_seed(SEED)
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
            if size > MAX_PARAMETERS:
                raise Unbuildable(f"still {size / 1e6:.0f} million parameters")
            model = model_class(config).float().train()
            batch = runnable(model, examples(case, model))
            return model, batch
        except Exception as error:  # a configuration that does not fit together fails in any way: try the next
            reasons.append(first_line(error))
    raise Unbuildable(f"cannot be shrunk: {reasons[0]}")


def runnable(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns the first of the batches with which the model trains, eagerly. Raises the error of the first one."""
    errors = []
    for batch in batches:
        try:
            loss_of(copy.deepcopy(model), batch).backward()
        except Exception as error:  # inputs of another form fail in any way
            errors.append(error)
        else:
            return batch
    raise errors[0]


def examples(case: Case, model: Any) -> list[dict[str, torch.Tensor]]:
    """Returns batches for the model's main input, with labels where its task has any.

    They have several forms where the input's name allows them.
    """
    config = model.config
    torch.manual_seed(SEED)
    classes = torch.zeros(BATCH, dtype=torch.long)
    labels = {"labels": classes} if case.task == "IMAGE_CLASSIFICATION" else {}
    if model.main_input_name in SHAPES and (labels or case.task == BASE):
        shapes = SHAPES[model.main_input_name](config)
        return [{model.main_input_name: torch.randn(BATCH, *shape)} | labels for shape in shapes]
    if model.main_input_name != "input_ids":
        raise Unbuildable(f"its main input is {model.main_input_name}")
    tokens = torch.randint(4, min(getattr(config.get_text_config(), "vocab_size", 100), 100), (BATCH, TOKENS))
    return [{"input_ids": tokens} | (labels or ({} if case.task == BASE else {"labels": tokens.clone()}))]


def of_images(config: Any) -> list[tuple[int, ...]]:
    """Returns shapes of channels, height and width; for videos, with frames before or after the channels."""
    size = getattr(config, "image_size", None) or 32
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    frames = getattr(config, "num_frames", None)
    if frames is None:
        return [(channels, height, width)]
    return [(frames, channels, height, width), (channels, frames, height, width), (channels, height, width)]


def of_sound(config: Any) -> list[tuple[int, ...]]:
    """Returns shapes of samples, with or without a channel, and of spectrograms, with frames or bands first."""
    bands = next((getattr(config, name) for name in BANDS if getattr(config, name, None)), 80)
    frames = getattr(config, "max_length", None) or 2 * getattr(config, "max_source_positions", 32)
    spectrograms: list[tuple[int, ...]] = [(frames, bands), (bands, frames)]
    samples: list[tuple[int, ...]] = [(SAMPLES,), (1, SAMPLES)]
    return spectrograms + samples if hasattr(config, "num_mel_bins") else samples + spectrograms


BANDS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
SAMPLES = 4000

SHAPES: dict[str, Callable[[Any], list[tuple[int, ...]]]] = {
    "pixel_values": of_images,
    "pixel_values_videos": of_images,
    "input_values": of_sound,
    "input_features": of_sound,
}
"""The shapes, but for the batch, that a main input of this name may have."""


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the model's own loss; without one, a mean of its first output that has gradients behind a layer norm."""
    outputs = model(**batch)
    loss = getattr(outputs, "loss", None)
    return outputs[0].tanh().square().mean() if loss is None else loss


def training_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Step:
    """Returns a step of a copy of ``model``, so that each starts from the same weights and buffers."""

    def step(compile: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Numbers:
        fresh = copy.deepcopy(model)
        torch.manual_seed(SEED)
        numpy.random.seed(SEED)  # what speech models mask
        random.seed(SEED)
        loss = compile(lambda inputs: loss_of(fresh, inputs))(batch)
        loss.backward()
        numbers: Numbers = {"loss": loss.detach()}
        numbers |= {f"gradient of {name}": p.grad for name, p in fresh.named_parameters()}
        return numbers | {f"buffer {name}": b for name, b in fresh.named_buffers()}

    return step


if __name__ == "__main__":
    main()
