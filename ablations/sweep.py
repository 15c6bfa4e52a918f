"""Train the variants of a question with several seeds, and perhaps several learning rates.

A run is a process of ``tokenformer-vit train`` with a whole config in its work directory. Finished
runs are skipped, interrupted ones go on, and each becomes a row of ``results.csv`` when it ends.

Of several rates, seed 0 finds the best: it trains without 5,000 of the training examples, and is
validated on these alone. The other seeds train on all of them at the best rate of their variant,
and are validated on the test data. All these rows have ``selected_on`` held-out.
"""

import argparse
import copy
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

import pandas as pd
import results
import torch
from mmengine.config import Config as MMConfig
from models import (
    PAIRS,
    Change,
    Config,
    build,
    flops,
    is_language,
    lasting,
    length_key,
    sizes_of,
    timm_part,
)
from tqdm import tqdm

from tokenformer_vit.cli import run as run_command
from tokenformer_vit.cli.arguments import Parser, add_run, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.records import environment
from tokenformer_vit.training.config import check_config, find_config, load_config, read_config
from tokenformer_vit.training.reports import read_scalars

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ("-m", "tokenformer_vit", "train")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=gpu")
# What a sweep and the report write.
OUTPUTS = ("results.csv", "curves.parquet", "TABLES.md", "README.md", "figures")
# What results.csv has from the record of a training, and curves from its log.
FIGURES = "date|hardware|cpu|dtype|epochs|iterations|flops|top[15]|top1_at.*|perplexity.*|recon.*"
MOST_LOSSES = 100  # points of a loss curve, about


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


@dataclass(frozen=True, eq=False)
class Run:
    """One training."""

    variant: Variant
    name: dict[str, Any]  # its name in results.csv
    config: Config  # whole
    begins_with: str  # the variant that it starts from, or the SHA-256 of a file of weights
    folder: Path
    start: "Run | None"

    @property
    def text(self) -> str:
        """The file of its config, by which it is known."""
        lines = [f"{key} = {pformat(own, sort_dicts=False)}\n" for key, own in self.config.items()]
        return f"# Start: {self.begins_with or 'new weights'}\n{''.join(lines)}"

    @property
    def digest(self) -> str:
        """What results.csv keeps of its config: all but the places of data and of other runs."""
        data = self.config["train_dataloader"]["dataset"]
        root = data.get("dataset", data)["data_root"]
        # The name of a text tells; images have only one folder.
        place = f"{Path(root).parent}/" if is_language(self.config) else root
        text = self.text.replace(f"{self.folder.parent}/", "").replace(place, "")
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def length(self) -> int:
        """Epochs or iterations."""
        return self.config["train_cfg"][length_key(self.config)]

    @property
    def record(self) -> dict[str, Any]:
        """Its record, or an empty dict while it has not come to its end."""
        path = self.folder / "record.json"
        record = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return record if record.get("epochs", record.get("iterations")) == self.length else {}


class Sweep:
    """The runs of a question."""

    def __init__(self, question: Question, args: argparse.Namespace) -> None:
        self.question, self.args, self.commit = question, args, commit_of(args.allow_dirty)
        options = " ".join(f"{key}={value}" for key, value in args.cfg_options.items())
        self.name = {"question": question.name, "base": args.config.stem, "options": options}
        self.variants = {each.name: each for each in wanted(question, args.variants)}
        self.starts = {each.start for each in self.variants.values()}
        self.several = len(args.lr or ()) > 1
        self.base = read_base(question, args)
        self.sizes = sizes_of(self.base)
        self.configs, self.counts, self.rates, self.failed = {}, {}, {}, []
        for name, variant in self.variants.items():
            cfg = self.config_of(name)
            check_config(MMConfig(copy.deepcopy(cfg)))
            own, lr = count(cfg), cfg["optim_wrapper"]["optimizer"]["lr"]
            if question.same_size and abs(own["parameters"] / self.sizes.parameters - 1) > 0.01:
                raise InputError(
                    f"{name} has {own['parameters']:,} parameters and the config's model "
                    f"{self.sizes.parameters:,}: leave {name} out of --variants"
                )
            self.counts[name] = own
            self.rates[name] = args.lr if args.lr and not variant.prepares else [lr]
        # As far as they are known.
        self.best = {name: rates[0] for name, rates in self.rates.items() if len(rates) == 1}

    def config_of(self, name: str) -> Config:
        """Return the config of a variant, without seed and rate."""
        if name in self.configs:
            return self.configs[name]
        variant = next(each for each in self.question.variants if each.name == name)
        assert variant.change is not None, f"{name} can no longer be trained"
        cfg = self.configs[name] = copy.deepcopy(self.base)
        if variant.start is not None:
            take_model(cfg, self.config_of(variant.start))
        variant.change(cfg, self.sizes)
        if variant.costs:
            total = sum(share * flops(self.config_of(other)) for other, share in variant.costs)
            lasting(total / flops(cfg))(cfg, self.sizes)
        return cfg

    def run(self) -> None:
        """Train what is left: with several rates, first seed 0 at every rate."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
        if self.args.check:
            self.check(*self.args.check)
            return
        if self.several:
            self.choose_rates()
        seeds = range(self.several, self.several + self.args.seeds)
        known = [each for name, each in self.variants.items() if name in self.best]
        self.train([self.planned(own, self.best[own.name], n) for n in seeds for own in known])
        if missing := [name for name in self.variants if name not in self.best]:
            print(f"{', '.join(missing)}: no best rate yet")
        if self.failed:
            sys.exit(f"failed: {', '.join(self.failed)}; the same command tries them again")

    def choose_rates(self) -> None:
        """Find the best rate of each variant on held-out data, after that of its start."""
        left = [*self.variants.values()]
        while ready := [each for each in left if each.start is None or each.start in self.best]:
            left = [each for each in left if each not in ready]
            grid = [(each, lr) for each in ready for lr in self.rates[each.name]]
            runs = [self.planned(variant, lr, 0, hold=True) for variant, lr in grid]
            self.train(runs)
            for name in [each.name for each in ready if each.name not in self.best]:
                own = [self.row_of(run) for run in runs if run.variant.name == name]
                rows = pd.DataFrame(row for row in own if row is not None)
                # Commands that were printed may still run.
                if len(rows) == len(own) or (len(rows) and not self.args.print_commands):
                    self.best |= results.best_rates(rows, self.question.metric)

    def check(self, name: str, number: str) -> None:
        """Train a recorded run again in a folder of its own, and compare its result."""
        metric, kept, args = self.question.metric, self.args.results, self.args
        seed = int(number) if number.isdecimal() else -1
        rows = results.find(results.read(kept), self.name, results.SWEEP)
        rows = results.at_best(rows, metric)
        row = results.find(rows, {"variant": name, "seed": seed}, ("variant", "seed"))
        if row.empty or name not in self.variants:
            raise InputError(f"{kept} has no run of {name} with seed {number} that counts")
        old, noise = row.iloc[0], results.noise(rows, metric)
        if not noise.degrees:
            raise InputError(f"{kept} has one seed of each variant: there is no σ to compare with")
        self.best |= rows.set_index("variant")["lr"].to_dict()
        variant, lr = self.variants[name], self.best[name]
        if old["config"] not in ("", self.planned(variant, lr, seed).digest):
            raise InputError(f"{kept} has {name} of another config: give the options of that sweep")
        # A finished check is of one commit and one torch.
        args.work_dir /= f"check-{self.commit}-{torch.__version__}"
        args.results = args.work_dir / "results.csv"
        runs = [self.planned(variant, lr, seed)]
        while (start := runs[0].start) is not None:
            runs = [start, *runs]
        self.train(runs)
        new = self.row_of(runs[-1])
        if new is None:
            sys.exit(f"not trained: {', '.join(self.failed) or 'the commands are printed'}")
        alike = ("dtype", "batch_size", "examples", "epochs", "iterations", "parameters")
        one, two = old.reindex(alike), new.reindex(alike)
        if other := [*one.index[(one != two) & (one.notna() | two.notna())]]:
            sys.exit(f"the row has another {', '.join(other)}: give the options of that sweep")
        # On a GPU, sums have no fixed order.
        same = all(old.get(key) and old[key] == new.get(key) for key in ("cpu", "torch"))
        allowed, change = 0 if same else 2 * noise.sigma, new[metric] - old[metric]
        where = "on the same processor and torch" if same else "elsewhere"
        text = f"{name}, seed {seed}: {old[metric]:g}, and {new[metric]:g} {where}"
        if abs(change) > allowed:
            sys.exit(f"{text}: more than {allowed:.2g} apart")
        print(f"{text}: agrees, at most {allowed:.2g} apart")

    def planned(self, variant: Variant, lr: float, seed: int, hold: bool = False) -> Run:
        """Return a run with its whole config; with ``hold``, it is validated on held-out data."""
        cfg, start, begins_with = copy.deepcopy(self.configs[variant.name]), None, ""
        optimizer, model = cfg["optim_wrapper"]["optimizer"], cfg["model"]
        folder = f"{variant.name}_seed{seed}" + f"_lr{lr:g}" * (lr != optimizer["lr"])
        optimizer["lr"] = lr
        cfg["randomness"] = {**(cfg.get("randomness") or {}), "seed": seed}
        vit = {} if is_language(cfg) else timm_part(model["backbone"])
        if variant.start is not None:
            begins_with, best = variant.start, self.best[variant.start]
            start = self.planned(self.variants[begins_with], best, seed, hold)
            weights = start.folder / variant.start_folder
            if is_language(cfg):
                model |= {"checkpoint": str(weights), "config": {}}  # it has the sizes
            elif start.variant.prepares:  # an encoder without this head
                vit["checkpoint_path"] = str(weights / "model.safetensors")
            else:
                cfg["load_from"] = str(weights / "model.safetensors")
        elif path := vit.get("checkpoint_path") or teacher_of(model):
            begins_with = f"sha256:{hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}"
        if vit and not vit.get("checkpoint_path"):
            # Weights outside the blocks start alike in all variants.
            model["backbone"] |= {"type": "ProbeBackbone", "stem_seed": seed}
        if hold:
            hold_out(cfg)
            if self.args.lr_length:
                if any("schedule" in each for each in cfg.get("custom_hooks") or []):
                    raise InputError(f"{variant.name} grows at fixed times: omit --lr-length")
                whole = self.base["train_cfg"][length_key(cfg)]
                lasting(self.args.lr_length / whole)(cfg, self.sizes)
        hooks = [{"type": "CostHook"}, *[{"type": "DiagnosticsHook"}] * self.question.diagnose]
        present = cfg.get("custom_hooks") or []
        cfg["custom_hooks"] = [*present, *(hook for hook in hooks if hook not in present)]
        imports = cfg.get("custom_imports") or {"imports": []}
        cfg["custom_imports"] = {**imports, "imports": [*imports["imports"], "probes", "net2net"]}
        name = {**self.name, "variant": variant.name, "lr": lr, "seed": seed}
        return Run(variant, name, cfg, begins_with, Path(self.args.work_dir, folder), start)

    def train(self, runs: Sequence[Run]) -> None:
        """Train the runs that are not finished, or print their commands."""
        left = [run for run in runs if not self.finished(run)]
        if self.args.print_commands:
            paths = f"PYTHONPATH={ROOT}/ablations"
            for run in left:
                print(shlex.join(["env", paths, "python", *self.words(run)]))
            return
        progress = tqdm(total=sum(run.length for run in left), disable=not left)
        slots, active = slots_of(self.args.jobs), {}
        try:
            while True:
                ready = [run for run in left if run.start is None or run.start.record]
                for run in ready[: len(slots)]:
                    left.remove(run)
                    gpus = slots.pop()
                    active[run] = self.begin(run, gpus), gpus
                if not active:
                    break
                time.sleep(0.1)
                for run, (process, gpus) in [*active.items()]:
                    if process.poll() is not None:
                        del active[run]
                        slots.append(gpus)
                        self.end(run)
                        progress.update(run.length)
        except BaseException:
            for process, _ in active.values():
                process.terminate()  # it writes a checkpoint first
            for process, _ in active.values():
                process.wait()
            print("stopped; the same command goes on", file=sys.stderr)
            raise
        self.failed += [run.folder.name for run in left]  # as what they start from

    def finished(self, run: Run) -> bool:
        """Tell whether a run has ended, and record it; else see that its config is in its folder.

        A run with a row is finished, although its folder may be lost, if no other starts from it.
        So is one that starts from no other, if any question has a row of its config and torch.
        """
        path, text = run.folder / "config.py", run.text
        if path.is_file() and (old := path.read_text(encoding="utf-8")) != text:
            new = [line.strip() for line in text.splitlines() if line not in old.splitlines()]
            raise InputError(
                f"{path} is of another training (now {', '.join(new[:1])}): delete its folder or "
                "choose another --work-dir"
            )
        run.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if self.row_of(run) is None:
            if run.record:
                results.append(self.facts(run), curves_of(run), self.args.results)
            elif run.start is None and self.args.results.exists():
                results.repeat(run.name, run.digest, torch.__version__, self.args.results)
        row = self.row_of(run)
        return bool(run.record) or (row is not None and run.variant.name not in self.starts)

    def words(self, run: Run) -> list[str]:
        """Return the command of a run after the interpreter; torchrun takes all GPUs it sees."""
        launcher, folder = self.args.launcher, str(run.folder)
        train = [*TRAIN, f"{folder}/config.py", "--work-dir", folder, "--resume"]
        return [*TORCHRUN * (launcher == "pytorch"), *train, "--launcher", launcher]

    def begin(self, run: Run, gpus: str) -> subprocess.Popen:
        """Start the process of a run, which finds the probes."""
        paths = f"{ROOT}/ablations{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        with (run.folder / "commits.txt").open("a") as commits:
            commits.write(f"{self.commit}\n")
        with (run.folder / "output.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *self.words(run)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": gpus},
                start_new_session=True,  # Ctrl-C reaches it once, through this process
            )

    def end(self, run: Run) -> None:
        """Record a run whose process has ended, or say that it failed."""
        metric, text = self.question.metric, f"failed, see {run.folder}/output.log"
        if self.finished(run):
            text = f"{metric} {figures_of(run.record).get(metric)}"
        else:
            self.failed.append(run.folder.name)
        tqdm.write(f"{run.folder.name}: {text}")

    def row_of(self, run: Run) -> Any:
        """Return the row of a run in the results, or None; refuse that of another config."""
        path = self.args.results
        rows = results.find(results.read(path), run.name) if path.exists() else pd.DataFrame()
        if rows.empty:
            return None
        if rows.iloc[0]["config"] != run.digest:
            raise InputError(
                f"{path} has {run.folder.name} of another config: remove the rows of that sweep, "
                "or give --results another file"
            )
        return rows.iloc[0]

    def facts(self, run: Run) -> dict[str, Any]:
        """Return the row of a finished run."""
        record, language = run.record, is_language(run.config)
        noun = "sequences" if language else "images"
        data, commits = run.config["train_dataloader"]["dataset"], run.folder / "commits.txt"
        known = commits.read_text() if commits.is_file() else record["commit"]
        row = {
            **run.name,
            **figures_of(record),
            **record.get("compression", {}),
            **self.counts[run.variant.name],
            "also": "",
            "config": run.digest,
            "start": run.begins_with,
            "text": Path(data["data_root"]).name if language else "",
            "selected_on": "held-out" if self.several and not run.variant.prepares else "",
            "commit": "+".join(dict.fromkeys(known.split())),
            "torch": record["versions"]["torch"],
            "batch_size": record[f"{noun}_per_step"],
            "examples": record[f"train_{noun}"],
            "grown_to": (record.get("growth") or [{}])[-1].get("parameters"),
            # The time of a run that was interrupted is only that since then.
            "seconds": None if record["resumed_at_iteration"] else record["seconds"],
        }
        # FLOPs are counted for a training of all parameters.
        part = any(own["trainable"] < own["parameters"] for own in self.counts.values())
        row["flops" if part and not self.question.from_scratch else "trainable"] = None
        return row


def teacher_of(model: Config) -> str:
    """Return the weights of the model that teaches another, if it is in a folder."""
    path = Path(model.get("distillation", {}).get("teacher", ""), "model.safetensors")
    return str(path) if path.is_file() else ""


def take_model(cfg: Config, before: Config) -> None:
    """Use the model of an earlier variant, as it is after a growth at its start."""
    if not is_language(cfg):
        cfg["model"]["backbone"] = copy.deepcopy(before["model"]["backbone"])
        if width := before["model"]["head"].get("in_channels"):
            cfg["model"]["head"]["in_channels"] = width
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


def slots_of(jobs: int) -> list[str]:
    """Return the GPUs of each of the runs at a time: one, or all of them for a single run."""
    every = ",".join(map(str, range(torch.cuda.device_count())))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or every
    return [visible] if jobs == 1 else (visible.split(",") * jobs)[:jobs]


def figures_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run or a validation measured, by column of results.csv."""
    names = {key: key.removeprefix("accuracy/").replace("/error", "_error") for key in record}
    return {name: record[key] for key, name in names.items() if re.fullmatch(FIGURES, name)}


def curves_of(run: Run) -> pd.DataFrame:
    """Return validations, losses and layers of a run by iteration."""
    train, val = read_scalars(sorted(run.folder.glob("*/vis_data/scalars.json")))
    step = run.record["iterations"] / run.length  # iterations of an epoch
    lines = [{"x": time_, "loss": line["loss"]} for time_, line in train.items()]
    lines = lines[:: -(-len(lines) // MOST_LOSSES) or 1]
    lines += [{"x": round(end * step), **figures_of(line)} for end, line in val.items()]
    curves = pd.DataFrame(lines).melt("x", var_name="kind").dropna().assign(layer="")
    path = run.folder / "layers.json"
    return pd.concat([curves, pd.read_json(path)]) if path.is_file() else curves


def wanted(question: Question, names: Sequence[str] | None) -> list[Variant]:
    """Return the variants to train, each after the one that it starts from."""
    known = {each.name: each for each in question.variants if each.change is not None}
    chosen: set[str | None] = {*(names or known)}
    if unknown := chosen - known.keys():
        raise InputError(f"there is no variant {unknown.pop()}; there are {', '.join(known)}")
    for name in reversed(known):
        if name in chosen:
            chosen.add(known[name].start)
    return [variant for name, variant in known.items() if name in chosen]


def read_base(question: Question, args: argparse.Namespace) -> Config:
    """Read the config of a sweep with the options of the command line."""
    load_config(args.config, args.cfg_options)  # refuses unknown keys
    cfg = read_config(args.config)  # without what depends on this machine
    cfg.merge_from_dict(args.cfg_options)
    if args.data_root:
        for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
            cfg[name].dataset.data_root = args.data_root
    if args.batch_size:
        cfg.train_dataloader.batch_size = args.batch_size
    if args.amp:
        cfg.optim_wrapper.type = "AutocastOptimWrapper"
    base = cfg.to_dict()
    kind = "language models" if question.metric == "perplexity" else "image classifiers"
    if is_language(base) != (question.metric == "perplexity"):
        raise InputError(f"{question.name} compares {kind}: choose another --config")
    model = base["model"].get("backbone", base["model"])
    if args.compile:
        base["compile_blocks"] = True
    weights = base.get("load_from") or model.get("checkpoint_path") or model.get("checkpoint")
    if question.from_scratch and weights:
        raise InputError(f"{question.name} trains from scratch, but {args.config} loads {weights}")
    return base


def commit_of(allow_dirty: bool) -> str:
    """Return the commit of the repository; refuse changes, with which no row can be repeated."""
    if os.environ.get("TOKENFORMER_VIT_COMMIT") or not (ROOT / ".git").exists():  # a copy
        return environment()["commit"]
    git, outputs = ["git", "-C", str(ROOT)], [f":!ablations/{name}" for name in OUTPUTS]
    status = [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", *outputs]
    changed = subprocess.check_output(status, text=True).split()
    if changed and not allow_dirty:
        raise InputError(
            f"the repository has changes, such as in {changed[1]}: commit them, or give "
            "--allow-dirty, which marks the rows"
        )
    head = subprocess.check_output([*git, "rev-parse", "--short=7", "HEAD"], text=True)
    return head.strip() + "-dirty" * bool(changed)


def parse(
    questions: Sequence[Question], words: Sequence[str]
) -> tuple[Question, argparse.Namespace]:
    """Return the question that a command line asks, and its options."""
    known = {each.name: each for each in questions}
    parser = Parser(description="\n\n".join(f"{k}: {own.text}" for k, own in known.items()))
    add, only = parser.add_argument, questions[0].name if len(questions) == 1 else None
    add("question", choices=known, nargs="?" if only else None, default=only)
    add("--config", required=True, help="such as configs/cifar10_micro_50k.py")
    add("--lr", type=float, nargs="+", help="learning rates; of several, seed 0 finds the best")
    add("--lr-length", type=whole_number(1), help="epochs or iterations of these runs of seed 0")
    add("--seeds", type=whole_number(0), default=1, metavar="N", help="runs of each; or only rates")
    add("--variants", nargs="+", metavar="NAME", help="default: all")
    add_run(parser)
    add("--amp", action="store_true", help="train under bfloat16 autocast")
    add("--jobs", type=whole_number(1), default=1, help="runs at a time, which share the GPUs")
    add("--check", nargs=2, metavar=("VARIANT", "SEED"), help="repeat a run, and compare it")
    add("--print-commands", action="store_true", help="print what is left to train, no more")
    add("--allow-dirty", action="store_true", help="train although the repository has changes")
    add("--work-dir", type=Path, help="default: work_dirs/ablations/QUESTION/CONFIG")
    add("--results", type=Path, help="default: ablations/results.csv, or one in --work-dir")
    args = parser.parse_args(words)
    args.lr = sorted({*args.lr}) if args.lr else None
    if (args.lr_length or not args.seeds) and len(args.lr or ()) < 2:
        parser.error("--lr-length and --seeds 0 need several rates, as in --lr 0.001 0.002 0.004")
    args.config = find_config(args.config)
    args.work_dir = args.work_dir or Path("work_dirs/ablations", args.question, args.config.stem)
    ours = args.config.resolve().is_relative_to(ROOT / "configs")
    args.results = args.results or (results.RESULTS if ours else args.work_dir / "results.csv")
    return known[args.question], args


def main(questions: Sequence[Question], argv: Sequence[str] | None = None) -> None:
    """Run the command line of a question file."""
    run_command(lambda words: Sweep(*parse(questions, words)).run(), argv)
