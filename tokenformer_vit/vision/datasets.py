"""Find images, labels and class names: in class folders, and in data sets of Hugging Face."""

import io
import os
import re
import sys
from collections.abc import Sequence
from glob import escape
from itertools import chain
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import torch
from PIL import Image
from timm.data import ImageNetInfo
from timm.utils.misc import natural_key
from tqdm import tqdm

from tokenformer_vit.errors import InputError
from tokenformer_vit.files import write_whole

from .images import images_in, is_hidden, opened

# Names of test and validation sets, as folders or splits; the first that is there is used.
TEST = ("test", "testing")
VALIDATION = ("val", "valid", "validation", "dev", *TEST)
# hf://datasets/OWNER/NAME, then perhaps @REVISION, then perhaps /FOLDER, as huggingface_hub has it.
HUB = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@(refs/\w+/\w+|[^/]+))?(?:/(.+?))?/?")
_SUFFIXES: Any = {"JPEG": ".jpg", "MPO": ".jpg", "JPEG2000": ".jp2"}  # else the name of the format


class LabelledImages:
    """Images in the order of their labels, then of their source, as ``prepare-data`` unpacks them.

    ``files`` are paths, or rows of the library ``datasets`` with a column ``image``; one is read
    when it is used. Processes of a data loader share ``rows``, the place of each image among them,
    and ``labels``. ``source`` and ``split`` are for messages; a row may have the path of a file in
    the folder ``source`` instead of bytes.
    """

    def __init__(
        self, files: Any, labels: np.ndarray, classes: Sequence[str], source: Any, split: str
    ) -> None:
        self._files, self._source, self._split = files, source, split
        self.classes = tuple(classes)
        self.rows = torch.from_numpy(labels.argsort(kind="stable"))  # (N,)
        self.labels = torch.from_numpy(labels)[self.rows]  # (N,)

    def keep(self, chosen: Any) -> None:
        """Keep the images of a slice, a mask, or a sequence of indices."""
        self.rows, self.labels = self.rows[chosen], self.labels[chosen]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Return ``img_path``, ``img_bytes`` (None if the path is that of a file), ``gt_label``."""
        row, label = int(self.rows[index]), int(self.labels[index])
        file, path = self._files[row], f"{self._source}, {self._split}, row {row}"
        if isinstance(file, str):  # in a class folder
            return {"img_path": file, "img_bytes": None, "gt_label": label}
        if (data := file["image"]["bytes"]) is None:  # the row names a file, which may be any
            folder, name = Path(self._source).expanduser().resolve(), file["image"]["path"] or ""
            place = folder.joinpath(name).resolve()
            if not (place.is_relative_to(folder) and place.is_file()):
                raise InputError(f"{path}: {name!r} is no file in that folder: store its bytes")
            path = str(place)
        return {"img_path": path, "img_bytes": data, "gt_label": label}


def open_images(
    source: str | Path,
    split: str,
    image_column: str | None = None,
    label_column: str | None = None,
    classes: Sequence[str] | None = None,
) -> LabelledImages:
    """Open the images of a split of a source; ``val`` is also another of :data:`VALIDATION`.

    The source is a folder with a folder for each split and class; a folder of parquet files, which
    the library ``datasets`` copies to ``HF_DATASETS_CACHE``, or of ``save_to_disk``; or
    ``hf://datasets/OWNER/NAME``. Labels are numbers or texts. The two columns are found by their
    usual names, or by their type. InputError if anything is missing, or a label is no class.
    """
    splits = find_splits(source, split)
    if split not in splits:
        there = ", ".join(splits) or "no class folders and no parquet files"
        raise InputError(f"{source} has no split {split!r}, but {there}")
    where, files = f"{source}, {split}", splits[split]
    if isinstance(files, Path):
        found = class_images(files)
        labels = np.repeat(np.arange(len(found)), [len(images) for images in found.values()])
        return LabelledImages(list(chain(*found.values())), labels, list(found), source, split)
    import datasets

    rows = _read_rows(files)
    image = _column(rows, image_column, datasets.Image, "image", "img")
    label = _column(rows, label_column, datasets.ClassLabel, "label", "labels", "fine_label")
    names = classes or getattr(rows.features[label], "names", None)
    known: Any = range(len(names or ()))
    if not names:  # those of training, because another split may lack a class
        trained = _read_rows(find_splits(source, "train").get("train", files))
        known = sorted(set(trained[label]) - {None})
    elif "string" in rows.features[label].dtype:
        known = names
    numbers = {value: number for number, value in enumerate(known)}
    values = rows[label][:]
    labels = np.array([numbers.get(value, -1) for value in values], np.int64)
    if -1 in labels:
        row = int(labels.argmin())
        what = f"row {row} has the label {values[row]}, which is no class"
        raise InputError(f"{where}, {what}: use a split with labels, or give all class names")
    rows = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    rows = rows.rename_columns({image: "image"})
    return LabelledImages(rows, labels, names or [str(value) for value in known], source, split)


def find_splits(source: str | Path, split: str = "") -> dict[str, Any]:
    """Return the splits of a source: folders of classes, parquet files, or saved data sets.

    ``val`` and ``test`` are also there by their other names.
    """
    hub, folder = HUB.fullmatch(str(source)), Path(source).expanduser()
    if hub:
        from huggingface_hub import snapshot_download

        name, revision, inside = hub.groups("")
        part = "" if split == "val" else split  # val has several names
        how: Any = {"revision": revision or None, "allow_patterns": f"{inside}*{part}*.parquet"}
        folder = Path(snapshot_download(name, repo_type="dataset", **how), inside)
    if not folder.is_dir():
        raise InputError(f"there is no folder {source}: give one, or hf://datasets/OWNER/NAME")
    splits: dict[str, Any] = {}
    of_classes = any((folder / "train").glob("*/*"))  # beside which a parquet file is a stray one
    for path in () if of_classes else sorted(folder.rglob("*.parquet")):
        name = path.stem.split("-")[0]  # of train-00000-of-00001.parquet or train/0000.parquet
        splits.setdefault(path.parent.name if name.isdecimal() else name, []).append(path)
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        from datasets import load_from_disk

        saved: Any = load_from_disk(str(folder))
        splits = dict(saved) if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    elif not splits:
        folders = [each for each in folder.iterdir() if each.is_dir() and not is_hidden(each.name)]
        splits = {each.name: each for each in folders if each.name in ("train", *VALIDATION)}
        if "train" not in splits and len(splits) < len(folders):
            return {"train": folder}
    for name, names in (("val", VALIDATION), ("test", TEST)):
        if there := [splits[each] for each in names if each in splits]:
            splits[name] = there[0]
    return splits


def _read_rows(files: Any) -> Any:
    """Return the data set of the parquet files of a split, or of a saved split."""
    if not isinstance(files, list):
        return files
    from datasets import Features, load_dataset
    from pyarrow.parquet import read_schema

    patterns = [escape(str(path)) for path in files]  # datasets takes paths as patterns
    rows = load_dataset("parquet", data_files=patterns, split="train")
    # datasets gives all files the class names of the first.
    features = {str(Features.from_arrow_schema(read_schema(path))) for path in files}
    if len(features) > 1 or len({path.parent for path in files}) > 1:
        raise InputError(f"{files[0]} and {files[-1]} are of different data sets: give one of them")
    expected = re.search(r"-of-0*(\d+)$", files[0].stem)
    if expected and int(expected[1]) != len(files):
        print(f"{files[0].parent} has {len(files)} of {expected[1]} files", file=sys.stderr)
    return rows


def _column(rows: Any, given: str | None, feature: type, *usual: str) -> str:
    """Find a column: the given one, the first of the usual names, or the only one of its type."""
    typed = [name for name in rows.features if isinstance(rows.features[name], feature)]
    found = [given] if given else [name for name in usual if name in rows.features][:1] or typed
    if len(found) != 1 or found[0] not in rows.features:
        name, names = given or usual[0], ", ".join(rows.features)
        raise InputError(f"there is no column {name}: set {usual[0]}_column to one of {names}")
    return found[0]


def class_images(root: str | Path) -> dict[str, list[str]]:
    """List the images in a folder of class folders, by class, in the order of the names."""
    root = str(Path(root))
    names = [e.name for e in os.scandir(root) if os.path.isdir(e.path) and not is_hidden(e.name)]
    # One name may have two forms in Unicode: macOS and Linux write different ones.
    found: dict[str, list[str]] = {name: [] for name in sorted(normalize("NFC", n) for n in names)}
    stray: list[str] = []
    for image in images_in(root):
        name = image[len(root) + 1 :].partition(os.sep)[0]
        found.get(normalize("NFC", name), stray).append(image)
    if stray:
        print(f"left out: {len(stray)} images in no class folder of {root}", file=sys.stderr)
    return found


def labels_for(model_classes: Sequence[str], data_classes: Sequence[str]) -> list[int]:
    """Return the label that each class of the data has in a model, compared by name.

    Data may lack a class. Names of folders that ``prepare-data`` made mean the names that it had,
    and the WordNet numbers of ImageNet mean its classes.
    """
    if len(data_classes) == len(model_classes) and model_classes[0] == "class 0":  # no names
        return list(range(len(data_classes)))
    wordnet = ImageNetInfo().label_names() if len(model_classes) == 1000 else []
    numbers: dict[str, int] = {}
    for names in (wordnet, folder_names(model_classes), model_classes):
        numbers |= {normalize("NFC", name): number for number, name in enumerate(names)}
    named = [normalize("NFC", name) for name in data_classes]
    pairs = zip(named, folder_names(named), strict=True)
    found = [numbers.get(name, numbers.get(folder, -1)) for name, folder in pairs]
    if -1 in found:
        there = f"{', '.join(model_classes[:5])}, ... ({len(model_classes)})"
        other = f"the data have a class {named[found.index(-1)]!r}, but the model has {there}"
        raise InputError(f"{other}: give the data that it was trained on")
    return found


def folder_names(names: Sequence[str]) -> list[str]:
    """Name class folders in a way that every library gives each class the same number.

    Libraries number the sorted folders: torchvision and mmpretrain sort texts, timm ignores case
    and compares digits as numbers. Where these orders differ, a number begins: ``03_chain_saw``.
    """
    safe = [re.sub(r'[/\\:*?"<>|\x00-\x1f]', "_", name).strip(" .") for name in names]
    orders = [sorted(safe), sorted(safe, key=lambda name: tuple(natural_key(name)))]
    if orders == [safe, safe] and all(safe) and len({n.casefold() for n in safe}) == len(safe):
        return safe
    return [f"{index:0{len(str(len(safe) - 1))}d}_{name}" for index, name in enumerate(safe)]


def unpack(images: LabelledImages, folder: Path, split: str) -> None:
    """Write the images that are missing into class folders, with their bytes unchanged."""
    names = folder_names(images.classes)
    places = zip(images.labels.tolist(), images.rows.tolist(), strict=True)
    stems = [f"{names[label]}/{split}_{row:07d}" for label, row in places]
    there = {str(path.relative_to(folder).with_suffix("")) for path in folder.glob("*/[!.]*")}
    folders = {path.name for path in folder.glob("[!.]*")}
    if others := there.difference(stems) | folders.difference(names):
        raise InputError(f"{folder} holds others, such as {min(others)}: choose another folder")
    for name in names:  # also without images: other libraries number the folders
        (folder / name).mkdir(parents=True, exist_ok=True)
    for index, stem in enumerate(tqdm(stems, split, unit="image")):
        if stem not in there:
            sample = images[index]
            path, data = sample["img_path"], sample["img_bytes"]
            with opened(path, data) as image:  # which refuses what is no regular file
                suffix = _SUFFIXES.get(image.format, f".{image.format}".lower())
            data = Path(path).read_bytes() if data is None else data
            write_whole(folder / f"{stem}{suffix}", data, sync=False)
    print(f"{folder}: {len(stems)} images of {len(images.labels.unique())} of {len(names)} classes")


def digits() -> dict[str, LabelledImages]:
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels as PNG; a fifth of each class is val."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data: Any = load_digits()
    files, found = [], {}
    for pixels in np.rint(data.images * (255 / 16)).astype(np.uint8):  # from 0..16
        Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
        files.append({"image": {"path": None, "bytes": file.getvalue()}})
    how: Any = {"test_size": 0.2, "stratify": data.target, "random_state": 0}
    rows = zip(("train", "val"), train_test_split(np.arange(len(files)), **how), strict=True)
    for name, chosen in rows:
        found[name] = LabelledImages(files, data.target, "0123456789", "digits", name)
        found[name].keep(torch.from_numpy(np.isin(found[name].rows, chosen)))
    return found
