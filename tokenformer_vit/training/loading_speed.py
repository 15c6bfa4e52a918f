"""Measure how fast one process prepares the training images of configs, without a model.

The configs are measured in turn, round after round, without workers and with one thread::

    python -m tokenformer_vit.training.loading_speed CONFIG CONFIG --data-root DATA --out RECORD

The record holds what every record holds, the number of ``images`` in each of ``n`` rounds, and a
list ``configs``. An entry of this list has ``seconds_to_open``, for what is read only once,
``images_per_s`` of every round, and ``ratio_p20``, ``ratio_p50`` and ``ratio_p80`` of its speed,
divided by the speed of the first config in the same round. On a CPU, time is processor time.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from tqdm import tqdm

from tokenformer_vit.benchmarking.measures import percentiles
from tokenformer_vit.command_line import run_tool, whole_number
from tokenformer_vit.records import environment, write_record

from .config import check_data_folders, load_config
from .transforms import seeded_transforms


class _Loader:
    """The training images of a config, batch after batch and epoch after epoch."""

    def __init__(self, config: str, data_root: str | None) -> None:
        without_workers = {"train_dataloader.num_workers": 0}
        cfg = load_config(config, without_workers, data_root)
        check_data_folders(cfg, ("train_dataloader",))
        start = time.perf_counter()
        self.loader: Any = Runner.build_dataloader(cfg.train_dataloader, seed=0)
        self.seconds_to_open = time.perf_counter() - start
        self.batches = self._batches()

    def _batches(self) -> Iterator[dict[str, Any]]:
        for epoch in count():
            self.loader.sampler.set_epoch(epoch)
            for transform in seeded_transforms(self.loader.dataset):
                transform.set_epoch(0, epoch)
            yield from self.loader

    def rate(self, images: int) -> float:
        """Return how many images a second the next ``images`` of them take, or a few more."""
        start, done = _seconds(), 0
        while done < images:
            done += len(next(self.batches)["inputs"])
        return done / (_seconds() - start)


def _seconds() -> float:
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="the first is compared with")
    parser.add_argument("--data-root", help="folder that holds train/")
    parser.add_argument("--images", type=whole_number(1), default=2048, help="of each round")
    parser.add_argument("--rounds", type=whole_number(1), default=11, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("work_dirs/loading.json"), help="record")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with DefaultScope.overwrite_default_scope("mmpretrain"):
        loaders = [_Loader(config, args.data_root) for config in args.configs]
        for loader in loaders:
            loader.rate(1)  # what a first batch does once is not measured
        rates = [
            [loader.rate(args.images) for loader in loaders]
            for _ in tqdm(range(args.rounds), unit="round", disable=None)
        ]
    entries = []
    for index, (config, loader) in enumerate(zip(args.configs, loaders, strict=True)):
        quantiles = percentiles([each[index] / each[0] for each in rates])
        entry = {
            "config": Path(config).name,
            "seconds_to_open": round(loader.seconds_to_open, 1),
            "images_per_s": [round(each[index]) for each in rates],
        }
        names = ("ratio_p20", "ratio_p50", "ratio_p80")
        entry |= {name: round(q, 2) for name, q in zip(names, quantiles, strict=True)}
        entries.append(entry)
        median = percentiles(entry["images_per_s"])[1]
        print(f"{entry['config']}: {median:,.0f} images/s, {entry['ratio_p50']} x the first")
    words = ["python", "-m", "tokenformer_vit.training.loading_speed", *sys.argv[1:]]
    record = {
        "command": shlex.join(words),
        **environment(),
        "threads": 1,
        "images": args.images,
        "n": args.rounds,
        "configs": entries,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_record(args.out, record)


if __name__ == "__main__":
    run_tool(main)
