"""Train the variants of a question with several seeds, and perhaps several learning rates.

Every run is a process of ``tokenformer-vit train`` with a whole config of its own in its work
directory. Finished runs are skipped, interrupted ones go on, and each becomes a row of
``results.csv`` when it ends.

Of several rates, seed 0 finds the best: it trains without 5,000 of the training examples, and is
validated on these alone. The other seeds train on all of them at the best rate of their variant,
and are validated on the test data. All these rows have ``selected_on`` held-out.
"""

import argparse
import copy
import hashlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from pprint import pformat
from typing import Any

import numpy as np
import pandas as pd
import results
import torch
from models import PAIRS, Change, Config, build, flops, is_language, length_key, sizes_of, timm_part

from tokenformer_vit.cli import run as run_command
from tokenformer_vit.cli.arguments import Parser, add_run, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.records import environment

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ("-m", "tokenformer_vit", "train")
# What a sweep and the report write.
OUTPUTS = ("results.csv", "curves.parquet", "TABLES.md", "README.md", "figures")
LARGEST_GAP = 0.01  # between the numbers of parameters of two variants
MOST_LOSSES = 100  # points of a loss curve
PATIENCE = 60  # seconds in which an interrupted training writes its checkpoint


@dataclass(frozen=True)
class Variant:
    """One row of a table."""

    name: str  # in results.csv, in folders and on the command line
    label: str  # in tables and charts
    change: Change | None  # edits a copy of the config; None: it can no longer be trained
    start: str | None = None  # name of the earlier variant whose trained model it goes on from
    compare: tuple[str, ...] = ()  # names of the variants to which a table shows its difference
    paper: float | None = None  # what the paper reports for it, where its table has this row
    # Names and shares: its training costs as many FLOPs as these shares of theirs together.
    costs: tuple[tuple[str, float], ...] = ()
    start_folder: str = ""  # where its weights are, within the work directory of ``start``
    prepares: bool = False  # trains weights for others, by the config's rate; it has no result


@dataclass(frozen=True)
class Question:
    """One question: its variants are the rows of one table for each base config."""

    name: str  # in results.csv and on the command line
    title: str
    text: str  # Markdown: the question, and what the paper says
    variants: tuple[Variant, ...]  # each after the one that it starts from
    metric: str = "top1"  # in results.csv: top1 of images, perplexity of language
    same_size: bool = True  # all variants have as many parameters, within 1 %
    from_scratch: bool = True  # its config starts from no trained weights
    diagnose: bool = False  # whether the layers are measured during training

    @property
    def higher_is_better(self) -> bool:
        """Perplexity is better if it is lower."""
        return self.metric != "perplexity"


@dataclass(frozen=True)
class Run:
    """One training."""

    variant: Variant
    lr: float
    seed: int
    config: Config  # whole
    folder: Path
    start: "Run | None"

    @property
    def length(self) -> int:
        """Epochs or iterations."""
        return self.config["train_cfg"][length_key(self.config)]

    @property
    def record(self) -> dict[str, Any]:
        """The record of the training, or an empty dict while it has not ended."""
        path = self.folder / "record.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @property
    def is_finished(self) -> bool:
        """Whether the training came to its end."""
        record = self.record
        return record.get("epochs", record.get("iterations")) == self.length

    @property
    def begins_with(self) -> str:
        """The variant that it starts from, or the SHA-256 of a file of weights, or nothing."""
        model = self.config["model"]
        path = timm_part(model["backbone"]).get("checkpoint_path") if "backbone" in model else ""
        if self.start is not None or not path:
            return self.variant.start or ""
        return f"sha256:{hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}"

    @property
    def text(self) -> str:
        """Its config as a file."""
        text = f"# Start: {self.begins_with or 'new weights'}\n"
        for key, value in self.config.items():
            text += f"{key} = {pformat(value, sort_dicts=False)}\n"
        return text

    def write_config(self) -> None:
        """Write the config, or check that the one that is there is the same."""
        path, text = self.folder / "config.py", self.text
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif (old := path.read_text(encoding="utf-8")) != text:
            both = zip_longest(old.splitlines(), text.splitlines(), fillvalue="nothing")
            there, here = next((a.strip(), b.strip()) for a, b in both if a != b)
            raise InputError(
                f"{path} is of another training ({there!r} there, {here!r} now): delete its folder "
                "or choose another --work-dir"
            )


def variant_configs(question: Question, base: Config, names: Iterable[str]) -> dict[str, Config]:
    """Return the config of each variant, without seed and rate, and check that they compare."""
    from mmengine import Config as MMConfig

    from tokenformer_vit.training.config import check_config

    known = {variant.name: variant for variant in question.variants}
    sizes, configs = sizes_of(base), {}

    def config_of(name: str) -> Config:
        if name not in configs:
            variant, cfg = known[name], copy.deepcopy(base)
            assert variant.change is not None, f"{name} can no longer be trained"
            if variant.start is not None:
                take_model(cfg, config_of(variant.start))
            variant.change(cfg, sizes)
            if variant.costs:
                total = sum(share * flops(config_of(other)) for other, share in variant.costs)
                key = length_key(cfg)
                cfg["train_cfg"][key] = max(1, round(total / flops(cfg) * base["train_cfg"][key]))
            configs[name] = cfg
        return configs[name]

    for name in names:
        check_config(MMConfig(copy.deepcopy(config_of(name))))
        own = count(config_of(name))["parameters"]
        if question.same_size and abs(own / sizes.parameters - 1) > LARGEST_GAP:
            raise InputError(
                f"{name} has {own:,} parameters and the config's model {sizes.parameters:,}, which "
                f"do not compare: leave {name} out of --variants"
            )
    return {name: configs[name] for name in names}


def take_model(cfg: Config, before: Config) -> None:
    """Use the model of an earlier variant, as it is after a growth at its start."""
    if not is_language(cfg):
        cfg["model"]["backbone"] = copy.deepcopy(before["model"]["backbone"])
        return
    model = copy.deepcopy(before["model"])
    growth = model.pop("growth", None) or {}
    model["config"] |= {name: growth[name] for name in PAIRS if name in growth}
    cfg["model"] = {key: model[key] for key in model if key not in ("masks", "frozen_stem")}


def count(cfg: Config) -> dict[str, int]:
    """Count parameters after a growth at the start, and those that are trained."""
    whole = copy.deepcopy(cfg)
    take_model(whole, cfg)
    parameters = list(build(whole).parameters())
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    return {"parameters": sum(each.numel() for each in parameters), "trainable": trained}


def hold_out(cfg: Config) -> None:
    """Train without some of the training examples, and validate on these."""
    train, val = cfg["train_dataloader"]["dataset"], cfg["val_dataloader"]["dataset"]
    same = {**train, "pipeline": val["pipeline"], "test_mode": True} if "pipeline" in val else train
    for name, dataset in (("train", train), ("val", same)):
        if is_language(cfg):
            part = {**dataset, "type": "masked_lm.HeldOutRows"}
        else:
            part = {"type": "HeldOutImages", "dataset": dataset}
        cfg[f"{name}_dataloader"]["dataset"] = {**copy.deepcopy(part), "held_out": name == "val"}


class Sweep:
    """The runs of a question."""

    def __init__(self, question: Question, args: argparse.Namespace) -> None:
        self.question, self.args = question, args
        self.commit = commit_of(args.allow_dirty)
        self.variants = wanted(question, args.variants)
        base = read_base(question, args)
        self.configs = variant_configs(question, base, [each.name for each in self.variants])
        self.counts = {name: count(cfg) for name, cfg in self.configs.items()}
        # FLOPs are counted for a training of all parameters.
        self.tunes = not question.from_scratch and any(
            each["trainable"] < each["parameters"] for each in self.counts.values()
        )
        self.failed: list[str] = []
        self.processes: list[subprocess.Popen] = []
        self.stopping = False
        self.slots: queue.Queue[int] = queue.Queue()
        for slot in range(args.jobs):
            self.slots.put(slot)

    def own_rate(self, variant: Variant) -> float:
        """Return the rate of a variant's config."""
        return self.configs[variant.name]["optim_wrapper"]["optimizer"]["lr"]

    def run(self) -> None:
        """Train what is left: with several rates, first seed 0 at every rate."""
        rates = {each.name: self.args.lr or [self.own_rate(each)] for each in self.variants}
        rates |= {each.name: [self.own_rate(each)] for each in self.variants if each.prepares}
        first = 0
        if len(self.args.lr or ()) > 1:
            best = self.train_all(rates, [0], hold=True)
            rates = {name: [] if lr is None else [lr] for name, lr in best.items()}
            first = 1
        self.train_all(rates, range(first, first + self.args.seeds), hold=False)
        if missing := [name for name, own in rates.items() if not own]:
            print(f"{', '.join(missing)}: no best rate yet")
        if self.failed:
            print(f"failed: {', '.join(self.failed)}; the same command tries them again")
            sys.exit(1)

    def train_all(
        self, rates: Mapping[str, Sequence[float]], seeds: Sequence[int], hold: bool
    ) -> dict[str, float | None]:
        """Train every variant at its rates, and return the best of them, if it is known."""
        runs: dict[tuple[str, float | None, int], Run] = {}
        best: dict[str, float | None] = {}
        while len(best) < len(self.variants):
            # A variant comes after the one that it starts from, whose best rate is known then.
            left = [each for each in self.variants if each.name not in best]
            ready = [each for each in left if each.start is None or each.start in best]
            own = []
            for variant in ready:
                for lr in rates[variant.name]:
                    for seed in seeds:
                        start = None
                        if variant.start is not None:
                            start = runs.get((variant.start, best[variant.start], seed))
                            if start is None:
                                continue
                        own.append(self.planned(variant, lr, seed, start, hold))
                        runs[variant.name, lr, seed] = own[-1]
            self.train(own)
            for variant in ready:
                mine = [run for run in own if run.variant is variant]
                best[variant.name] = self.best_rate(mine, rates[variant.name])
        return best

    def planned(self, variant: Variant, lr: float, seed: int, start: Run | None, hold: bool) -> Run:
        """Return a run with its whole config; with ``hold``, it is validated on held-out data."""
        name = f"{variant.name}_seed{seed}" + (f"_lr{lr:g}" if lr != self.own_rate(variant) else "")
        cfg = copy.deepcopy(self.configs[variant.name])
        language = is_language(cfg)
        cfg["randomness"] = {**(cfg.get("randomness") or {}), "seed": seed}
        cfg["optim_wrapper"]["optimizer"]["lr"] = lr
        if start is not None:
            weights = start.folder / variant.start_folder
            if language:
                cfg["model"] |= {"checkpoint": str(weights), "config": {}}  # it has the sizes
            elif start.variant.prepares:  # an encoder without this head
                cfg["model"]["backbone"]["checkpoint_path"] = str(weights / "model.safetensors")
            else:
                cfg["load_from"] = str(weights / "model.safetensors")
        if not language and not timm_part(cfg["model"]["backbone"]).get("checkpoint_path"):
            # Weights outside the blocks start alike in all variants.
            cfg["model"]["backbone"] |= {"type": "ProbeBackbone", "stem_seed": seed}
        if hold:
            hold_out(cfg)
        hooks = [{"type": "CostHook"}, *[{"type": "DiagnosticsHook"}] * self.question.diagnose]
        present = cfg.get("custom_hooks") or []
        cfg["custom_hooks"] = [*present, *(hook for hook in hooks if hook not in present)]
        imports = cfg.get("custom_imports") or {"imports": []}
        cfg["custom_imports"] = {**imports, "imports": [*imports["imports"], "probes", "net2net"]}
        return Run(variant, lr, seed, cfg, Path(self.args.work_dir, name), start)

    def best_rate(self, runs: Sequence[Run], rates: Sequence[float]) -> float | None:
        """Return the best of several rates, or the only one."""
        if len(rates) == 1:
            return rates[0]
        rows = {run.lr: self.row_of(run) for run in runs}
        found = {lr: row[self.question.metric] for lr, row in rows.items() if row is not None}
        if not found or (self.args.print_commands and len(found) < len(runs)):
            return None  # others have not ended
        choose = max if self.question.higher_is_better else min
        best = choose(found, key=lambda lr: found[lr])
        if best in (min(rates), max(rates)):
            print(f"{runs[0].variant.name}: its best rate, {best:g}, is at the end of the grid")
        return best

    def train(self, runs: Sequence[Run]) -> None:
        """Train the runs that are not finished, or print their commands; record the finished.

        A run with a row is finished, although its folder may be lost, if no other starts from it.
        """
        for run in runs:
            run.write_config()
        starts, left = {variant.start for variant in self.variants}, []
        for run in runs:
            row = self.row_of(run)
            if run.is_finished and row is None:
                self.record(run)
            elif not run.is_finished and (row is None or run.variant.name in starts):
                left.append(run)
        if self.args.print_commands:
            for run in left:
                words = command(run, self.args.launcher)
                print(shlex.join(["env", f"PYTHONPATH={ROOT}/ablations", "python", *words]))
            return
        begun, done, total = time.monotonic(), 0, sum(run.length for run in left)
        with ThreadPoolExecutor(self.args.jobs) as pool:
            futures = {pool.submit(self.train_one, run): run for run in left}
            try:
                for number, future in enumerate(as_completed(futures), 1):
                    run, problem = futures[future], future.result()
                    if problem is not None:
                        self.failed.append(run.folder.name)
                    elif self.row_of(run) is None:
                        self.record(run)
                    done += run.length
                    minutes = (time.monotonic() - begun) / 60 * (total - done) / done
                    metric = self.question.metric
                    result = dict(figures_of(run.record)).get(metric, "none")
                    text = problem or f"{metric} {result}"
                    text = f"{run.folder.name}: {text}; {minutes:.0f} minutes left"
                    print(f"{number}/{len(left)} {text}", flush=True)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.stop()
                print("stopped; the same command goes on", file=sys.stderr)
                raise

    def train_one(self, run: Run) -> str | None:
        """Train a run in a process; return why it failed, or None."""
        if run.start is not None and not run.start.is_finished:
            return f"left out, because {run.start.folder.name} is not finished"
        slot, log = self.slots.get(), run.folder / "output.log"
        with (run.folder / "commits.txt").open("a") as file:
            file.write(f"{self.commit}\n")
        with log.open("ab") as file:
            begin = file.tell()
            process = subprocess.Popen(
                [sys.executable, *command(run, self.args.launcher)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment_of(slot, self.args.jobs),
                start_new_session=True,  # Ctrl-C reaches it once, through this process
            )
        self.processes.append(process)
        if self.stopping:
            process.terminate()
        process.wait()
        self.slots.put(slot)
        if process.returncode == 0 and run.is_finished:
            return None
        words = log.read_bytes()[begin:].decode(errors="replace").strip() or "no output"
        last = words.splitlines()[-1][:200]
        return f"failed: {last} (exit status {process.returncode}, see {log})"

    def stop(self) -> None:
        """End the trainings, each of which writes a checkpoint first."""
        self.stopping = True
        try:
            for process in self.processes:
                process.terminate()  # nothing happens if it has ended
            for process in self.processes:
                process.wait(PATIENCE)
        finally:
            for process in self.processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def name_of(self, run: Run) -> dict[str, Any]:
        """Return the columns that name a run in the results."""
        return {
            "question": self.question.name,
            "base": self.args.config.stem,
            "options": " ".join(f"{k}={v}" for k, v in (self.args.cfg_options or {}).items()),
            "variant": run.variant.name,
            "lr": run.lr,
            "seed": run.seed,
        }

    def row_of(self, run: Run) -> Any:
        """Return the row of a run in the results, or None; refuse that of another config."""
        if not self.args.results.exists():
            return None
        rows, name = results.read(self.args.results), self.name_of(run)
        rows = rows[(rows[results.RUN] == pd.Series(name)[results.RUN]).all(axis=1)]
        if rows.empty:
            return None
        if rows.iloc[0]["config"] != digest(run.text):
            raise InputError(
                f"{self.args.results} has {run.folder.name} of another config: remove the rows of "
                "that sweep, or give --results another file"
            )
        return rows.iloc[0]

    def record(self, run: Run) -> None:
        """Add a finished run to the results."""
        several = len(self.args.lr or ()) > 1 and not run.variant.prepares
        commits = run.folder / "commits.txt"
        text = commits.read_text() if commits.is_file() else run.record["commit"]
        row = {
            **self.name_of(run),
            "config": digest(run.text),
            "selected_on": "held-out" if several else "",
            "commit": "+".join(dict.fromkeys(text.split())),
            **facts_of(run),
            **self.counts[run.variant.name],
        }
        row["flops" if self.tunes else "trainable"] = None
        path = self.args.results
        results.append(row, curves_of(run), path, path.with_name(results.CURVES.name))


def digest(text: str) -> str:
    """Return a short digest."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def command(run: Run, launcher: str) -> list[str]:
    """Return the command of a run, without the interpreter; torchrun takes all GPUs it sees."""
    folder = str(run.folder)
    train = [*TRAIN, f"{folder}/config.py", "--work-dir", folder, "--resume"]
    train += ["--launcher", launcher] * (launcher != "none")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=gpu"]
    return [*torchrun, *train] if launcher == "pytorch" else train


def environment_of(slot: int, jobs: int) -> dict[str, str]:
    """Return the environment of a run, which has the GPU of its slot and finds the probes."""
    variables = dict(os.environ)
    paths = (str(ROOT / "ablations"), variables.get("PYTHONPATH"))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if jobs > 1 and (number := torch.cuda.device_count()) > 1:
        visible = variables.get("CUDA_VISIBLE_DEVICES", "").split(",")
        gpus = visible if len(visible) == number else [str(each) for each in range(number)]
        variables["CUDA_VISIBLE_DEVICES"] = gpus[slot % number]
    return variables


def facts_of(run: Run) -> dict[str, Any]:
    """Return the columns of a finished run that come from its record and its start."""
    record = run.record
    noun = "sequences" if is_language(run.config) else "images"
    facts = {"start": run.begins_with, "torch": record["versions"]["torch"]}
    if is_language(run.config):
        facts["text"] = Path(run.config["train_dataloader"]["dataset"]["data_root"]).name
    for name in ("date", "hardware", "cpu", "dtype", "epochs", "iterations", "flops"):
        facts[name] = record.get(name)
    facts["batch_size"], facts["examples"] = record[f"{noun}_per_step"], record[f"train_{noun}"]
    facts["grown_to"] = (record.get("growth") or [{}])[-1].get("parameters")
    # The time of a run that was interrupted is only that since then.
    facts["seconds"] = None if record["resumed_at_iteration"] else record["seconds"]
    facts |= {name: value for name, value in figures_of(record) if "top5_at" not in name}
    for point in record.get("compression", ()):
        method = {"prune": "pruned", "top-k": "top_k"}[point["method"]]
        facts[f"{method}_at_{point['keep']:g}"] = point["top1"]
    return facts


def figures_of(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a validation measured, by column of results.csv."""
    for key, value in record.items():
        name = key.removeprefix("accuracy/").replace("reconstruction/error", "reconstruction_error")
        if re.match("top[15]|perplexity|reconstruction_error", name):
            yield name, value


def curves_of(run: Run) -> pd.DataFrame:
    """Return validations, losses and layers of a run by iteration."""
    from tokenformer_vit.training.reports import read_scalars

    train, val = read_scalars(sorted(run.folder.glob("*/vis_data/scalars.json")))
    step = run.record["iterations"] / run.length  # iterations of an epoch
    kept = np.linspace(0, len(train) - 1, min(len(train), MOST_LOSSES)).round().astype(int)
    curves = [("loss", time_, train[time_]["loss"], "") for time_ in np.array([*train])[kept]]
    for end, line in val.items():
        figures = [*figures_of(line), ("flops", line["flops"])]
        curves += [(kind, round(end * step), value, "") for kind, value in figures]
    path, measured = run.folder / "diagnostics.jsonl", {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with suppress(json.JSONDecodeError):  # the line that a killed run was writing
            figures = json.loads(line)
            measured[figures["iteration"]] = figures["layers"]  # a resumed run repeats one
    for iteration, layers in measured.items():
        for layer, figures in layers.items():
            known = [kind for kind in figures if figures[kind] is not None]
            curves += [(kind, iteration, figures[kind], layer) for kind in known]
    return pd.DataFrame(curves, columns=["kind", "x", "value", "layer"])


def wanted(question: Question, names: Sequence[str] | None) -> list[Variant]:
    """Return the variants to train, each after the one that it starts from."""
    known = {each.name: each for each in question.variants if each.change is not None}
    chosen = set(known if names is None else names)
    if unknown := chosen - known.keys():
        raise InputError(f"there is no variant {unknown.pop()}; there are {', '.join(known)}")
    for variant in reversed(question.variants):
        if variant.name in chosen and variant.start is not None:
            chosen.add(variant.start)
    return [variant for name, variant in known.items() if name in chosen]


def read_base(question: Question, args: argparse.Namespace) -> Config:
    """Read the config of a sweep with the options of the command line, and check it."""
    from tokenformer_vit.training.config import check_config, load_config, read_config

    check_config(load_config(args.config, args.cfg_options))
    cfg = read_config(args.config)
    cfg.merge_from_dict(args.cfg_options or {})
    if args.data_root is not None:
        for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
            cfg[name].dataset.data_root = args.data_root
    if args.batch_size is not None:
        cfg.train_dataloader.batch_size = args.batch_size
    if args.amp:
        cfg.optim_wrapper.type = "AutocastOptimWrapper"
    base = cfg.to_dict()
    if is_language(base) != (question.metric == "perplexity"):
        kind = "language models" if question.metric == "perplexity" else "image classifiers"
        raise InputError(f"{question.name} compares {kind}: choose another --config")
    model = base["model"] if is_language(base) else base["model"]["backbone"]
    if args.compile:
        model["compile"] = True
    weights = base.get("load_from") or model.get("checkpoint_path") or model.get("checkpoint")
    if question.from_scratch and weights:
        raise InputError(f"{question.name} trains from scratch, but {args.config} loads {weights}")
    return base


def commit_of(allow_dirty: bool) -> str:
    """Return the commit of the repository; refuse changes, with which no row can be repeated."""
    if not (ROOT / ".git").exists():
        return environment()["commit"]  # a copy knows it from a variable

    def git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()

    outputs = [f":!ablations/{name}" for name in OUTPUTS]
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *outputs)
    if changed and not allow_dirty:
        raise InputError(
            f"the repository has changes, such as in {changed.split()[1]}: commit them, or give "
            "--allow-dirty, which marks the rows"
        )
    return git("rev-parse", "--short=7", "HEAD") + ("-dirty" if changed else "")


def parse(questions: Sequence[Question], words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of a question file."""
    from tokenformer_vit.training.config import find_config

    parser = Parser(description="\n\n".join(f"{each.name}: {each.text}" for each in questions))
    add, names = parser.add_argument, [each.name for each in questions]
    add("question", choices=names, nargs="?" if len(names) == 1 else None, default=names[0])
    add("--config", required=True, help="such as configs/cifar10_micro_50k.py")
    add("--lr", type=float, nargs="+", help="learning rates; of several, seed 0 finds the best")
    add("--seeds", type=whole_number(1), default=1, metavar="N", help="runs of each variant")
    add("--variants", nargs="+", metavar="NAME", help="default: all")
    add_run(parser)
    add("--amp", action="store_true", help="train under bfloat16 autocast")
    add("--jobs", type=whole_number(1), default=1, help="runs at a time, which share the GPUs")
    add("--print-commands", action="store_true", help="print what is left to train, no more")
    add("--allow-dirty", action="store_true", help="train although the repository has changes")
    add("--work-dir", type=Path, help="default: work_dirs/ablations/QUESTION/CONFIG")
    add("--results", type=Path, help="default: ablations/results.csv, or one in --work-dir")
    args = parser.parse_args(words)
    args.lr = sorted({*args.lr}) if args.lr else None
    args.config = find_config(args.config)
    args.work_dir = args.work_dir or Path("work_dirs/ablations", args.question, args.config.stem)
    ours = args.config.resolve().is_relative_to(ROOT / "configs")
    args.results = args.results or (results.RESULTS if ours else args.work_dir / "results.csv")
    return args


def main(questions: Sequence[Question], argv: Sequence[str] | None = None) -> None:
    """Run the command line of a question file."""

    def begin(words: Sequence[str]) -> None:
        args = parse(questions, words)
        (question,) = (each for each in questions if each.name == args.question)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
        Sweep(question, args).run()

    run_command(begin, argv)
