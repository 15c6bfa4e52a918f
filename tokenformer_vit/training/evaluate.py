"""Test a trained model: figures, a table of classes, a confusion matrix, and predictions."""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from sklearn.metrics import ConfusionMatrixDisplay, precision_recall_fscore_support
from timm.data import resolve_input_data_config
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import make_folder, whole_file, write_whole
from tokenformer_vit.models.checkpoints import description_of, find_weights, load_model
from tokenformer_vit.records import environment
from tokenformer_vit.vision.datasets import class_images, find_splits, labels_for

from .checkpoint import flat_config, load_plain_checkpoint
from .config import (
    FOLDERS,
    datasets,
    drop_start,
    listed,
    name_of,
    place_of,
    read_config,
    set_precision,
)
from .engine import (
    DATASETS,
    Config,
    ConfigDict,
    CustomDataset,
    Hook,
    all_gather_object,
    get_device,
    is_main_process,
)
from .metrics import AccuracyAndLoss
from .runner import TrainingRunner

_MANY = 30  # above this many classes, the numbers are only in the files
# Metrics of mmpretrain and ours for one label an image: with these, there are also tables.
_ONE_LABEL = {"Accuracy", "AccuracyAndLoss", "SingleLabelMetric", "ConfusionMatrix"}


@DATASETS.register_module()
class ClassFolders(CustomDataset):
    """mmpretrain's ``CustomDataset`` of class folders, which may lack some of its ``classes``."""

    def load_data_list(self) -> list[dict]:
        """List the images, with the labels that ``classes`` give to the names of the folders."""
        found = class_images(self.img_prefix)
        numbers = labels_for(list(self.CLASSES or ()), list(found))
        pairs = zip(numbers, found.values(), strict=True)
        return [{"img_path": path, "gt_label": n} for n, paths in pairs for path in paths]


def find_test(source: Path) -> Path:
    """Return the weights of a run, exported folder or checkpoint."""
    weights = find_weights(source)
    pointer = weights.parent / "last_checkpoint"
    if not weights.is_file() and pointer.is_file():  # a run whose model is not exported
        last = Path(pointer.read_text().strip())
        weights = last if last.is_file() else weights.with_name(last.name)
    if not weights.is_file():
        raise InputError(f"there is no checkpoint {weights}: give a run, or a file that is there")
    return weights


def written_config(weights: Path) -> Path | None:
    """Return the config that a run wrote beside its weights."""
    is_run = weights.with_name("last_checkpoint").is_file()
    written = sorted(weights.parent.glob("*.py"), key=lambda path: path.stat().st_mtime)
    return written[-1] if is_run and written else None


def described_config(weights: Path) -> Config:
    """Make the config of a test from what an export, or a checkpoint, says of its model."""
    model: Any = load_model(None, weights)
    if not model.num_classes:
        raise InputError(f"{weights} has no classifier: give a model that was trained to classify")
    images, described = resolve_input_data_config(model), description_of(weights)
    cfg = Config(read_config("imagenet_base").to_dict())  # without its name
    backbone = {"model_name": described["architecture"], **described["model_args"]}
    cfg.model.backbone = {"type": "TimmClassificationBackbone", **backbone}
    cfg.model.head.update(num_classes=model.num_classes, in_channels=model.num_features)
    if hasattr(model, "head_dist"):
        cfg.model.head.type = "DistilledHead"
    scales = {key: [255 * value for value in images[key]] for key in ("mean", "std")}
    cfg.data_preprocessor.update(num_classes=model.num_classes, **scales)
    cfg.test_dataloader.dataset.update(type="CustomDataset", data_root="", split="")
    load, how, pack = cfg.test_dataloader.dataset.pipeline
    how.update({key: images[key] for key in how.keys() & images.keys()})
    if images["input_size"][0] == 1:
        cfg.test_dataloader.dataset.pipeline = [load, how, {"type": "v2/Grayscale"}, pack]
    return cfg


def configure_test(cfg: Config, weights: Path, out: Path, data_root: str | None = None) -> None:
    """Turn the config of a training into that of a test of a file of weights.

    It tests in the precision of the run's validation. Images in class folders, or in a list, have
    the classes of the checkpoint, and may lack some. ``data_root`` holds class folders, or a folder
    of these for each split.
    """
    if name_of(cfg.model.type) == "CausalLM" or not cfg.get("test_dataloader"):
        raise InputError(
            f"{cfg.filename} tests no images: give test_dataloader, test_cfg and test_evaluator; "
            "for a language model use `tokenformer-vit evaluate-lm`"
        )
    make_folder(out, "--out")
    checkpoint = load_plain_checkpoint(str(weights))
    classes = ((checkpoint.get("meta") or {}).get("dataset_meta") or {}).get("classes")
    for dataset in datasets(cfg.test_dataloader.dataset):
        _find_images(dataset, data_root, classes)
        for step in dataset.pipeline:
            if name_of(step["type"]) == "PackInputs":
                step["meta_keys"] = ("img_path", "sample_idx")
    run = (checkpoint.get("exact_resume") or {}).get("config")  # by dotted key
    if run is None:
        written = written_config(weights)
        run = flat_config(read_config(written) if written else cfg)
    cfg.test_cfg.setdefault("fp16", bool(run.get("val_cfg.fp16")))
    kind = run.get("optim_wrapper.type")
    set_precision(kind)
    if cfg.get("optim_wrapper"):  # whose type also chooses how attention is computed
        cfg.optim_wrapper.type = kind or "OptimWrapper"
    cfg.load_from, cfg.resume = str(weights), False
    cfg.work_dir = str(out)  # not the run's own
    drop_start(cfg.model)
    if cfg.test_dataloader.get("sampler"):
        cfg.test_dataloader.sampler.round_up = False
    # None removes mmengine's default hooks, which are for trainings.
    unwanted = ("timer", "sampler_seed", "logger", "param_scheduler", "checkpoint")
    cfg.default_hooks = ConfigDict({"guard": {"type": "GuardHook"}, **dict.fromkeys(unwanted)})
    hooks = cfg.get("custom_hooks") or []  # GrowthHook gives the model the checkpoint's size
    cfg.custom_hooks = [hook for hook in hooks if name_of(hook.type) == "GrowthHook"]


def _find_images(dataset: Any, data_root: str | None, classes: Sequence[str] | None) -> None:
    """Point a data set at the images in ``data_root``, and give it the classes of a checkpoint."""
    before, part = place_of(dataset)
    root = before if data_root is None else data_root
    moved = Path(before).resolve() != Path(root).resolve()
    if data_root is not None:
        dataset.data_root = data_root
    if name_of(dataset.type) not in FOLDERS or Path(root, "meta", f"{part}.txt").is_file():
        return
    if not root and not part and not dataset.get("ann_file"):
        raise InputError("the weights name no images: give a folder of them with --data-root")
    if moved and os.path.isabs(dataset.get("ann_file") or ""):  # of the other images
        dataset.ann_file = ""
    if dataset.get("ann_file"):
        if classes and name_of(dataset.type) != "ImageNet" and "metainfo" not in dataset:
            dataset.setdefault("classes", list(classes))
        return
    if moved and not (part and Path(root, part).is_dir()):
        splits = find_splits(root)
        found = splits.get("val", splits["train"] if splits.get("train") == Path(root) else None)
        if not isinstance(found, Path):
            raise InputError(f"{root} has no val/ and no class folders: give another --data-root")
        part = os.path.relpath(found, root)
    if classes and dataset.get("with_label", True) and "share" not in dataset:
        dataset.pop("split", None)
        dataset.update(type="ClassFolders", data_prefix=part, classes=list(classes))


class _TestHook(Hook):
    """Shows progress and, with a metric of one label an image, notes the answer to each."""

    def __init__(self, metric: AccuracyAndLoss | None) -> None:
        self._metric, self._rows = metric, []

    def before_test(self, runner) -> None:
        hidden = not is_main_process() or None  # None: where standard error is no terminal
        number = len(runner.test_dataloader)
        self._bar = tqdm(total=number, disable=hidden, desc="testing", leave=False)

    def after_test_iter(self, runner, batch_idx: int, data_batch=None, outputs: Any = None) -> None:
        self._bar.update()
        if self._metric is not None:
            self._metric.process(None, [each.to_dict() for each in outputs])
            scores, best = torch.stack([each.pred_score for each in outputs]).max(dim=1)
            paths = [str(each.get("img_path", each.get("sample_idx", ""))) for each in outputs]
            labels = torch.cat([each.gt_label for each in outputs]).tolist()
            self._rows += zip(paths, labels, best.tolist(), scores.tolist(), strict=True)

    def after_test(self, runner) -> None:
        self._bar.close()

    def found(self, images: int) -> tuple[dict[str, Any], pd.DataFrame | None]:
        """Return figures, and path, label, best class and its probability in the data's order."""
        if self._metric is None:
            return {}, None
        turns = zip_longest(*all_gather_object(self._rows))  # processes take images in turn
        rows = [row for turn in turns for row in turn if row is not None]
        table = pd.DataFrame(rows, columns=["path", "label", "predicted", "score"])
        if not np.isfinite(table.score).all():
            raise InputError("the model's output is not finite: test an earlier checkpoint")
        return self._metric.evaluate(images), table


def run_test(cfg: Config, cfg_options: Mapping[str, Any] | None = None) -> None:
    """Run the test that :func:`configure_test` prepared; ``cfg_options`` are for the record."""
    weights, cfg.load_from = cfg.load_from, None
    runner = TrainingRunner.from_cfg(cfg)
    known = [each for each in listed(cfg.test_evaluator) if name_of(each.type) in _ONE_LABEL]
    topk = next((listed(each.topk) for each in known if "topk" in each), (1, 5))
    hook = _TestHook(AccuracyAndLoss(topk) if known else None)
    runner.register_hook(hook)
    checkpoint = runner.load_checkpoint(weights)  # wrong ones are found before the data are read
    meta = checkpoint.get("meta") or {}
    epoch = meta.get("epoch")  # an exported file does not say it
    averaged = meta.get("averaged", "ema_state_dict" in checkpoint)
    own = runner.test()
    dataset: Any = runner.test_dataloader.dataset
    figures, rows = hook.found(len(dataset))
    if not is_main_process():
        return
    classes = None if rows is None else _per_class(rows, dataset.metainfo["classes"])
    dtype = torch.get_autocast_dtype(get_device())
    record = {
        "config": cfg.filename and str(cfg.filename),
        "checkpoint": weights,
        "epoch": epoch,
        "averaged_weights": None if epoch is None else averaged,
        "precision": f"{dtype} autocast".removeprefix("torch.") if cfg.test_cfg.fp16 else "float32",
        "data_root": next(datasets(cfg.test_dataloader.dataset)).get("data_root"),
        "images": len(dataset),
        "cfg_options": dict(cfg_options or {}),
        "metrics": {**figures, **own},
        **environment(),
        "classes": [] if classes is None else classes.to_dict("records"),
    }
    folder = Path(cfg.work_dir)
    text = json.dumps(record, indent=1, ensure_ascii=False, default=_plain) + "\n"
    # Undecodable bytes in a folder's name become escapes, which JSON can hold.
    write_whole(folder / "metrics.json", text.encode(errors="backslashreplace"))
    for name, value in json.loads(text)["metrics"].items():
        if isinstance(value, int | float):
            print(f"{name}: {value:.3f}")
    if rows is None or classes is None:
        return
    if len(classes) <= _MANY:
        print(classes.drop(columns="index").to_string(index=False, float_format="%.2f"))
    names = list(classes["class"])
    draw_confusion(rows.label, rows.predicted, names, folder / "confusion_matrix.png")
    _write_csv(folder / "per_class.csv", classes)
    named = {key: rows[key].map(dict(enumerate(names))) for key in ("label", "predicted")}
    _write_csv(folder / "predictions.csv", rows.assign(**named))


def _plain(value: Any) -> Any:
    """Return numbers or lists for a tensor or an array in a record."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _per_class(rows: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Return precision, recall and F1 score in percent, and the number of images, by class."""
    numbers = range(len(names))
    how: Any = {"labels": numbers, "zero_division": 0.0}
    *shares, support = precision_recall_fscore_support(rows.label, rows.predicted, **how)
    precision, recall, f1 = (100 * share for share in shares)
    figures = {"precision": precision, "recall": recall, "f1-score": f1, "support": support}
    return pd.DataFrame({"index": numbers, "class": names, **figures})


def _write_csv(path: Path, table: pd.DataFrame) -> None:
    # A spreadsheet computes what begins with one of these; after ' it is text.
    safe = table.replace(r"^(?=[=+\-@])", "'", regex=True)
    text = safe.to_csv(index=False, lineterminator="\n")
    write_whole(path, text.encode(errors="backslashreplace"))


def draw_confusion(
    labels: Sequence[int], answers: Sequence[int], names: Sequence[str], path: Path
) -> None:
    """Draw counts by true and predicted class into a PNG, with what there is room for."""
    size = len(names)
    # Escaped: matplotlib reads text between two $ as a formula, and only UTF-8.
    shown = [name[:32].encode(errors="backslashreplace").decode() for name in names]
    shown = [name.replace("$", r"\$") for name in shown]
    figure = Figure(figsize=(10, 10), layout="constrained")
    how: Any = {"labels": range(size), "display_labels": shown, "xticks_rotation": "vertical"}
    if size > _MANY:  # makes a single image off the diagonal visible beside many on it
        how |= {"include_values": False, "im_kw": {"norm": PowerNorm(0.4, vmin=0)}}
    axes = figure.subplots()
    ConfusionMatrixDisplay.from_predictions(labels, answers, values_format="d", ax=axes, **how)
    axes.tick_params(labelsize=10 if size <= _MANY else 6)
    if size > 50:  # no room for names
        axes.set(xticks=[], yticks=[])
    axes.set_title(f"Confusion matrix: {len(labels):,} images, {size} classes")
    with whole_file(path) as file:
        figure.savefig(file, dpi=150, format="png")
