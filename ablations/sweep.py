"""Train the variants of a question with several seeds, and perhaps several learning rates.

A run is ``tokenformer-vit train`` with a config in a folder of its own; its row is in results.csv
of the work directory. If interrupted, the same command skips finished runs and resumes the others.
Of several rates, seed 0 finds the best: it trains without 5,000 of the training examples, and is
validated on these alone. The other seeds train on all of them at the best rate of their variant,
and are validated on the test data. Started several times, such as once for each GPU, the command
shares the runs among its processes::

    CUDA_VISIBLE_DEVICES=0 python ablations/sweep.py softmax --config cifar10_micro_50k --seeds 3
"""

import argparse
import copy
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

import parts  # noqa: F401  registers models
import report
import results
import torch
from base import Base, Variant
from filelock import FileLock, Timeout
from questions import QUESTIONS
from tqdm import tqdm

from tokenformer_vit.benchmarking.costs import model_costs, total
from tokenformer_vit.cli import run as run_command
from tokenformer_vit.cli.arguments import Parser, add_run, whole_number
from tokenformer_vit.errors import InputError
from tokenformer_vit.models.sizes import at_size
from tokenformer_vit.records import environment
from tokenformer_vit.training.config import (
    check_config,
    check_folders,
    datasets,
    find_config,
    loaders,
    resolve,
)
from tokenformer_vit.training.engine import Config
from tokenformer_vit.vision.datasets import HUB

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ("-m", "tokenformer_vit", "train")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=gpu")
# What results.csv has from the record of a training.
COLUMNS = "date|hardware|cpu|dtype|epochs|iterations|flops|top[15]|perplexity.*|.*_error"
METRICS = {"top1": "accuracy/top1", "perplexity": "perplexity"}


@dataclass(frozen=True, eq=False)
class Run:
    """One training."""

    name: str  # of its variant
    variant: Variant
    lr: float
    seed: int
    held_out: bool  # whether it is validated on held-out training examples
    config: Config  # whole, without places of other runs
    digest: str
    folder: Path
    start: "Run | None"

    @property
    def record(self) -> dict[str, Any]:
        """Its record, or an empty dict while it has not come to its end."""
        path = self.folder / "record.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    @property
    def last_line(self) -> str:
        """The last line of its output, or the last error near its end."""
        path = self.folder / "output.log"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        lines = [line for line in text.splitlines() if line.strip()] or [""]
        errors = [line for line in lines[-40:] if re.match(r"error: |\w+Error\b", line)]
        return [*lines[-1:], *errors][-1]  # torchrun adds lines of its own

    @property
    def diverged(self) -> bool:
        """Whether it ended with an error of this kind."""
        return "Resume with a lower rate" in self.last_line


class Sweep:
    """The runs of a question."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.failed, self.several = args, set[str](), len(args.lr or ()) > 1
        typed = {"train_dataloader.batch_size": args.batch_size, "compile_blocks": args.compile}
        args.cfg_options = dict(args.cfg_options) | {key: own for key, own in typed.items() if own}
        self.base = Base(args.config, args.cfg_options, args.data_root, args.amp)
        question = QUESTIONS[args.question]
        self.variants = wanted(question(self.base), args.variants)
        self.about = {
            "sweep": args.name,
            "title": str(question.__doc__).splitlines()[0].rstrip("."),
            "question": args.question,
            "base": args.config.stem,
            "options": " ".join(
                [*(f"{key}={own}" for key, own in args.cfg_options.items()), *["--amp"] * args.amp]
            ),
        }
        self.configs = self.rated = configs_of(self.base, self.variants)
        if args.lr_length:  # rates are tried on the same question, of another length
            options = args.cfg_options | {f"train_cfg.{self.base.unit}": args.lr_length}
            base = Base(args.config, options, args.data_root, args.amp)
            self.rated = configs_of(base, wanted(question(base), args.variants))
        self.rates = {}
        for name, variant in self.variants.items():
            lr = self.configs[name].optim_wrapper.optimizer.lr
            self.rates[name] = args.lr if args.lr and not variant.config else [lr]
        # As far as they are known.
        self.best = {name: rates[0] for name, rates in self.rates.items() if len(rates) == 1}

    def run(self) -> None:
        """Train what is left: with several rates, first seed 0 at every rate."""
        if self.args.check:
            self.check(*self.args.check)
            return
        if self.several:
            self.choose_rates()
        seeds = range(self.several, self.several + self.args.seeds)
        known = [name for name in self.variants if name in self.best]
        self.train([self.planned(name, self.best[name], seed) for seed in seeds for name in known])
        if missing := [name for name in self.variants if name not in self.best]:
            print(f"{', '.join(missing)}: no best rate")
        if self.failed:
            sys.exit(f"failed: {', '.join(self.failed)}; the same command tries them again")
        rows = results.read(self.args.results).query("sweep == @self.args.name")
        for found in report.sweeps(rows).values():
            print(report.table(found))
        print(f"The rows are in {self.args.results}; report.py --add FILE takes them over")

    def choose_rates(self) -> None:
        """Find the best rate of each variant on held-out data, after that of its start."""
        left = {**self.variants}
        while ready := [name for name, own in left.items() if own.start in ("", *self.best)]:
            left = {name: own for name, own in left.items() if name not in ready}
            grid = [(name, lr) for name in ready for lr in self.rates[name]]
            runs = [self.planned(name, lr, 0, hold=True) for name, lr in grid]
            self.train(runs)
            rows = results.read(self.args.results).query("sweep == @self.args.name and seed == 0")
            rates = results.best_rates(rows[rows["selected_on"] == "held-out"]).to_dict()
            failed = {run.name for run in runs if run.folder.name in self.failed}
            known = {name for name in rates if name in ready and name not in failed}
            self.best |= {name: rates[name] for name in known - self.best.keys()}

    def planned(self, name: str, lr: float, seed: int, hold: bool = False) -> Run:
        """Return a run with its whole config; with ``hold``, it is validated on held-out data."""
        variant, start = self.variants[name], None
        cfg = copy.deepcopy((self.rated if hold else self.configs)[name])
        if variant.start:
            start = self.planned(variant.start, self.best[variant.start], seed, hold)
        if hold and not variant.config:
            hold_out(cfg)
        cfg.optim_wrapper.optimizer.lr, cfg.randomness.seed = lr, seed
        hooks, cost = cfg.get("custom_hooks") or [], {"type": "CostHook"}
        cfg.custom_hooks = [*(hook for hook in hooks if hook != cost), cost]
        cfg.pop("work_dir")
        text = str(cfg.to_dict())
        imports = (cfg.get("custom_imports") or {}).get("imports", [])
        cfg.custom_imports = {"imports": [*imports, "parts"]}
        for root in roots_of(cfg):  # data may be anywhere; a text is known by its name
            text = text.replace(root, Path(root).name if self.base.language else "data")
        text += start.digest if start else ""
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        folder = Path(self.args.work_dir, f"{name}_seed{seed}_{digest[:6]}")
        return Run(name, variant, lr, seed, hold, cfg, digest, folder, start)

    def train(self, runs: Sequence[Run]) -> None:
        """Train the runs that are not finished, and wait for those of other processes."""
        left = [run for run in runs if not self.finished(run)]
        progress = tqdm(total=len(left), unit="run", disable=not left)
        while left:
            waiting = len(left)
            for run in [*left]:
                run.folder.mkdir(parents=True, exist_ok=True)
                ready = run.start is None or run.start.record
                with suppress(Timeout), FileLock(run.folder / "sweep.lock", timeout=0):
                    if ready and not self.finished(run) and not self.hopeless(run):
                        if not (run.record or run.diverged):
                            self.execute(run)
                        self.record(run)
                if self.finished(run) or self.hopeless(run):
                    left.remove(run)
                    progress.update()
            time.sleep(2 * (len(left) == waiting))

    def finished(self, run: Run) -> bool:
        """Tell whether a run has a row, and a folder if another run goes on from it."""
        row = results.find(results.read(self.args.results), self.row_name(run))
        if not row.empty and row.iloc[0]["config"] != run.digest:
            raise InputError(
                f"{self.args.results} has {run.name}, seed {run.seed}, of another config: give the "
                "sweep another --name, or remove its rows"
            )
        needed = run.name in {each.start for each in self.variants.values()}
        return not row.empty and bool(run.record or run.diverged or not needed)

    def hopeless(self, run: Run) -> bool:
        """Tell whether a run failed, or one that it goes on from."""
        before = run.start
        if before is not None and (before.diverged or self.hopeless(before)):
            self.failed.add(run.folder.name)
        return run.folder.name in self.failed

    def execute(self, run: Run) -> None:
        """Train a run in a process; torchrun takes all GPUs that it sees."""
        values = run.config.to_dict().items()
        lines = [f"{key} = {pformat(own, sort_dicts=False)}\n" for key, own in values]
        text = "".join(lines).replace("{start}", str(run.start.folder) if run.start else "")
        (run.folder / "config.py").write_text(text, encoding="utf-8")
        words = [*TORCHRUN * (self.args.launcher == "pytorch"), *TRAIN, f"{run.folder}/config.py"]
        words += ["--work-dir", str(run.folder), "--resume", "--launcher", self.args.launcher]
        paths = os.pathsep.join([str(results.FOLDER), os.environ.get("PYTHONPATH", "")])
        with (run.folder / "output.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # Ctrl-C reaches it once, through this process
            )
        try:
            process.wait()
        except BaseException:
            process.terminate()  # it writes a checkpoint first
            process.wait()
            print("stopped; the same command goes on", file=sys.stderr)
            raise
        figures = [f"{m} {run.record[key]}" for m, key in METRICS.items() if key in run.record]
        text = ", ".join(figures) or run.last_line
        tqdm.write(f"{run.folder.name}: {text} ({run.folder}/output.log)")

    def row_name(self, run: Run) -> dict[str, Any]:
        """Return the name of a run in the results."""
        return {"sweep": self.args.name, "variant": run.name, "lr": run.lr, "seed": run.seed}

    def record(self, run: Run) -> None:
        """Write the row of a run, if it has none and has ended; one that diverged has no result."""
        if not (run.record or run.diverged):
            self.failed.add(run.folder.name)
        elif results.find(results.read(self.args.results), self.row_name(run)).empty:
            results.append(self.rows_of(run), self.args.results)

    def rows_of(self, run: Run) -> list[dict[str, Any]]:
        """Return the row of a run, and those of a nested model's smaller sizes."""
        record, variant = {**environment(), **run.record}, run.variant
        noun = "sequences" if self.base.language else "images"
        names = {key: key.removeprefix("accuracy/").replace("/error", "_error") for key in record}
        figures = {own: record[key] for key, own in names.items() if re.fullmatch(COLUMNS, own)}
        model = self.base.build(run.config)
        backbone = run.config.model.get("backbone") or {}
        # A config may append pairs before the training.
        grown = record.get("growth") or [record if backbone.get("growth") else {}]
        row = {
            **self.about,
            **self.row_name(run),
            **figures,
            "label": variant.label,
            "family": variant.family,
            "start": variant.start,
            "compare": " ".join(variant.compare),
            "paper": variant.paper,
            "text": Path(roots_of(run.config)[0]).name if self.base.language else "",
            "selected_on": "held-out" if self.several and not variant.config else "",
            "config": run.digest,
            "torch": record["versions"]["torch"],
            "commit": record["commit"],
            "batch_size": record.get(f"{noun}_per_step"),
            "examples": record.get(f"train_{noun}"),
            "parameters": sum(each.numel() for each in model.parameters()),
            "grown_to": grown[-1].get("parameters"),
            # The time of a run that was interrupted is only that since then.
            "seconds": None if record.get("resumed_at_iteration") else record.get("seconds"),
        }
        of_classes = hasattr(model, "head")
        inner: Any = model.backbone.model if of_classes else model
        if of_classes and not row["grown_to"]:
            row["forward_flops"] = total(model_costs(inner)).forward_flops
        rows = [row]
        for key in record if of_classes and not run.held_out else ():
            if size := re.fullmatch(r"accuracy/top1_at_([\d.]+)", key):  # of a nested model
                percent, same = f"{100 * float(size[1]):g}", backbone["type"] != "NestedViT"
                own = {"variant": f"{run.name}_{percent}", "label": f"{variant.label}, {size[1]}"}
                own |= {"top1": record[key], "top5": None}
                own["compare"] = f"alone_{percent}" * same
                with at_size(inner, float(size[1])):
                    own["forward_flops"] = total(model_costs(inner)).forward_flops
                rows.append({**row, **own})
        return rows

    def check(self, name: str, number: str) -> None:
        """Train a run of results.csv again in a folder of its own, and compare its result."""
        best = results.at_best(results.read().query("sweep == @self.args.name"))
        old = best[(best["variant"] == name) & (best["seed"].astype(str) == number)]
        if old.empty or name not in self.variants:
            raise InputError(
                f"results.csv has no run of {name} with seed {number}: give its --name"
            )
        metric, sigma = results.metric_of(best), results.noise(best)[0]
        self.best |= best.set_index("variant")["lr"].to_dict()
        # A finished check is of one commit and one torch.
        part = f"check_{environment()['commit']}_{torch.__version__}"
        self.args.work_dir = Path(self.args.work_dir, part)
        self.args.results = self.args.work_dir / "results.csv"
        runs = [self.planned(name, self.best[name], int(number))]
        while runs[0].start is not None:
            runs = [runs[0].start, *runs]
        self.train(runs)
        new = results.find(results.read(self.args.results), self.row_name(runs[-1]))
        if new.empty:
            sys.exit(f"not trained: {', '.join(self.failed)}")
        one, two = old.iloc[0], new.iloc[0]
        # On a GPU, sums have no fixed order.
        same = all(one[key] and one[key] == two[key] for key in ("config", "cpu", "torch"))
        allowed = 0 if same else 2 * 2**0.5 * sigma
        how = "the same config, processor and torch: equal digits"
        if not same:
            how = f"another config, processor or torch: at most 2√2 σ = {allowed:.2g} apart"
        text = f"{name}, seed {number}: {one[metric]:g} before, {two[metric]:g} now ({how})"
        if not abs(two[metric] - one[metric]) <= allowed:
            sys.exit(f"{text}: they differ")
        print(f"{text}: they agree")


def configs_of(base: Base, variants: dict[str, Variant]) -> dict[str, Config]:
    """Return the checked configs of variants."""
    found = {}
    for name, own in variants.items():
        found[name] = base.with_options(own.options, own.length, own.config)
        check(found[name])
    return found


def check(cfg: Config) -> None:
    """Check a config, and that its data are there, before anything is trained."""
    cfg = resolve(copy.deepcopy(cfg))
    check_config(cfg)
    for root in roots_of(cfg):
        if not (Path(root).exists() or HUB.fullmatch(root)):
            source = f"prepare them as the head of {cfg.filename} says, or give --data-root"
            raise InputError(f"there are no data in {root}: {source}")
    check_folders(cfg, ("train_dataloader", "val_dataloader"))


def roots_of(cfg: Config) -> list[str]:
    """Return the folders of the data of a config."""
    found = [data.get("data_root") for _, each in loaders(cfg) for data in datasets(each.dataset)]
    return [*dict.fromkeys(str(root) for root in found)]


def hold_out(cfg: Config) -> None:
    """Train without some of the training examples, and validate on these."""
    train, val = cfg["train_dataloader"]["dataset"], cfg["val_dataloader"]["dataset"]
    same = {**train, "pipeline": val["pipeline"], "test_mode": True} if "pipeline" in val else train
    for name, dataset in (("train", train), ("val", same)):
        part = {"type": "HeldOutImages", "dataset": dataset}
        if "pipeline" not in val:
            part = {**dataset, "type": "HeldOutRows"}
        cfg[f"{name}_dataloader"]["dataset"] = {**copy.deepcopy(part), "held_out": name == "val"}


def wanted(known: dict[str, Variant], names: Sequence[str] | None) -> dict[str, Variant]:
    """Return the variants to train, with those that they start from, in the question's order."""
    chosen = {*(names or known)}
    if unknown := chosen - known.keys():
        raise InputError(f"there is no variant {unknown.pop()}; there are {', '.join(known)}")
    for name in reversed(known):
        if name in chosen:
            chosen.add(known[name].start)
    return {name: variant for name, variant in known.items() if name in chosen}


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command line."""
    titles = (f"  {name}: {str(own.__doc__).splitlines()[0]}" for name, own in QUESTIONS.items())
    parser = Parser(description="\n".join([str(__doc__), "questions:", *titles]))
    add = parser.add_argument
    add("question", choices=QUESTIONS)
    add("--config", required=True, help="such as configs/cifar10_micro_50k.py")
    add("--lr", type=float, nargs="+", help="learning rates; of several, seed 0 finds the best")
    add("--lr-length", type=whole_number(1), help="epochs or iterations of these runs of seed 0")
    add("--seeds", type=whole_number(0), default=1, metavar="N", help="runs of each; or only rates")
    add("--variants", nargs="+", metavar="NAME", help="default: all")
    add_run(parser)
    add("--amp", action="store_true", help="train under bfloat16 autocast")
    add("--check", nargs=2, metavar=("VARIANT", "SEED"), help="repeat a run, and compare it")
    add("--name", help="name of the sweep in the results (default: QUESTION_CONFIG)")
    add("--work-dir", type=Path, help="folder of the runs (default: work_dirs/NAME)")
    args = parser.parse_args(words)
    args.lr = sorted({*args.lr}) if args.lr else None
    if (args.lr_length or not args.seeds) and len(args.lr or ()) < 2:
        parser.error("--lr-length and --seeds 0 need several rates, as in --lr 0.001 0.002 0.004")
    if args.launcher not in ("none", "pytorch"):
        parser.error("--launcher: none, or pytorch, which takes all GPUs of a machine")
    args.config = find_config(args.config)
    args.name = args.name or f"{args.question}_{args.config.stem}"
    args.work_dir = args.work_dir or Path("work_dirs", args.name)
    args.results = args.work_dir / "results.csv"
    return args


def main(words: Sequence[str]) -> None:
    """Run a question."""
    Sweep(parse(words)).run()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    run_command(main)
