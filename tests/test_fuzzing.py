"""Damaged files and hostile values: a right answer, or one line; never a traceback or a hang.

Each test draws a few examples; ``make fuzz`` draws thousands. ``--hypothesis-seed=N`` repeats them.
"""

import copy
import io
import itertools
import json
import math
import shutil
import sys
import time
import zipfile
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tokenformer_vit.command_line import run_tool
from tokenformer_vit.models.checkpoints import save_model
from tokenformer_vit.models.description import DESCRIPTION
from tokenformer_vit.models.weights import read_state_dict

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 10
# A training builds everything that mmengine has, and leaves some of it in memory.
TRAINING_SECONDS = 30

SMALL = f"""
_base_ = "{ROOT}/configs/digits_demo.py"
model = dict(
    backbone=dict(embed_dim=24, depth=1, num_heads=2),
    head=dict(num_classes=2, in_channels=24),
)
data_preprocessor = dict(num_classes=2)
train_dataloader = dict(batch_size=2, num_workers=0)
val_dataloader = dict(batch_size=2, num_workers=0)
test_dataloader = dict(batch_size=2, num_workers=0)
val_evaluator = dict(topk=(1,))
test_evaluator = dict(topk=(1,))
param_scheduler = [dict(type="ConstantLR", factor=1.0)]
train_cfg = dict(max_epochs=1)
"""


class Command:
    """A command of tools/, run with arguments inside this process."""

    def __init__(self, name: str, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self._tool = import_module(f"tokenformer_vit.cli.{name}")
        self._name = name

    def __call__(self, *words: object) -> tuple[int, str, str]:
        """Run, and check what must hold for every command line.

        Returns:
            Status, standard output and standard error.
        """
        out, err, status = io.StringIO(), io.StringIO(), 0
        argv = [self._name, *map(str, words)]
        start = time.monotonic(), time.process_time()
        with redirect_stdout(out), redirect_stderr(err), patch.object(sys, "argv", argv):
            try:
                run_tool(self._tool.main)
            except SystemExit as end:
                status = end.code or 0
        # Of a busy machine's time, this process may have had a part.
        assert time.process_time() - start[1] < self._seconds
        assert time.monotonic() - start[0] < 6 * self._seconds
        assert status in (0, 1, 2), status
        lines = err.getvalue().splitlines()  # a progress bar ends its lines by a return
        said = [line for line in lines if not line.startswith(("skipped: ", "warning: "))]
        assert "Traceback" not in err.getvalue(), err.getvalue()
        assert "(unexpected; " not in err.getvalue(), err.getvalue()
        if status == 2 and said and said[0].startswith("usage:"):
            assert "error: " in said[-1]
        elif status:
            errors = [line for line in said if line.startswith("error: ")]
            skipped = [line for line in lines if line.startswith("skipped: ")]
            assert len(errors) == 1 or (not errors and skipped), err.getvalue()
        assert all(char.isprintable() or char in "\n\r" for char in err.getvalue()), err.getvalue()
        return status, out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def nothing_is_written_elsewhere(tmp_path_factory, monkeypatch):
    """Run in an empty folder, with a home of its own, and look at both afterwards."""
    root = tmp_path_factory.mktemp("around")
    here, home = root / "here", root / "home"
    here.mkdir()
    home.mkdir()
    (home / "mine").write_text("mine")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    yield
    assert not list(here.iterdir())
    assert (home / "mine").read_text() == "mine"


def answers(out: str) -> list:
    """Read what predict printed, and see that it is finite."""
    found = [json.loads(line)["top"] for line in out.splitlines()]
    assert all(math.isfinite(guess["probability"]) for top in found for guess in top)
    return found


@pytest.fixture(scope="session")
def predict() -> Command:
    return Command("predict")


@pytest.fixture(scope="session")
def photo(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    noise = np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Path:
    """A small trained-looking model in timm's folder."""
    torch.manual_seed(0)
    model = timm.create_model(
        "tokenformer_tiny", num_classes=3, depth=1, img_size=32, patch_size=8, embed_dim=48
    )
    torch.nn.init.normal_(model.head.weight)
    folder = tmp_path_factory.mktemp("model") / "exported"
    save_model(model, folder, ["cat", "dog", "eel"])
    return folder


# What breaks readers of numbers, names and sizes.
HOSTILE = st.one_of(
    st.sampled_from(
        [
            *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**30, 1e-300, 1e300),
            *(float("nan"), float("inf"), -float("inf"), 0.5, -0.5, 1e-6),
            *(
                "",
                "x",
                "nan",
                "\x1b[31m",
                "../../x",
                "a\nb",
                "\u202e",
                "$",
                "|",
                "%s",
                "{}",
                "0" * 300,
            ),
            *([], {}, [[]], [None], {"": None}, [1, 2, 3, 4], ["a", "b", "c"], [0.0, 0.0, 0.0]),
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
).map(copy.deepcopy)  # lists and dicts among them are changed later


def leaves(value: Any, path: tuple = ()) -> list[tuple]:
    """List the paths of everything in nested dicts and lists."""
    found = [path] if path else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        found += leaves(item, (*path, key))
    return found


@st.composite
def mutated_json(draw: Any, content: Any) -> Any:
    """Replace, remove or add one to three things in a JSON value."""
    changed = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 3))):
        paths = leaves(changed)
        if not paths:
            return draw(HOSTILE)
        *parents, last = draw(st.sampled_from(paths))
        node = changed
        for key in parents:
            node = node[key]
        what = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if what == "remove":
            del node[last]
        elif what == "add" and isinstance(node, dict):
            node[draw(st.text(max_size=8))] = draw(HOSTILE)
        else:
            node[last] = draw(HOSTILE)
    return changed


@st.composite
def mutated_bytes(draw: Any, data: bytes) -> bytes:
    """Flip, overwrite, cut, repeat or insert bytes in a file."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        if not changed:
            break
        # Headers are where structure is: half of all damage goes there.
        end = draw(st.sampled_from([min(len(changed), 512), len(changed)]))
        place = draw(st.integers(0, end - 1))
        what = draw(st.sampled_from(["flip", "flip", "write", "cut", "repeat", "insert"]))
        if what == "flip":
            changed[place] ^= 1 << draw(st.integers(0, 7))
        elif what == "write":
            new = draw(st.sampled_from([b"\x00", b"\xff", b"\x7f"])) * draw(st.integers(1, 8))
            changed[place : place + len(new)] = new
        elif what == "cut":
            del changed[place : place + draw(st.sampled_from([1, 16, len(changed)]))]
        elif what == "repeat":
            changed[place:place] = changed[place : place + 64]
        else:
            changed[place:place] = draw(st.binary(max_size=16))
    return bytes(changed)


@st.composite
def mutated_safetensors(draw: Any, data: bytes) -> bytes:
    """Change the header of a safetensors file and keep the file well-formed, or damage it."""
    if draw(st.booleans()):
        return draw(mutated_bytes(data))
    start = 8 + int.from_bytes(data[:8], "little")
    header = draw(mutated_json(json.loads(data[8:start])))
    text = json.dumps(header).encode(errors="surrogatepass")
    return len(text).to_bytes(8, "little") + text + data[start:]


def listing(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def test_config_json(predict, exported, photo, tmp_path):
    content = json.loads((exported / "config.json").read_text())
    folder = shutil.copytree(exported, tmp_path / "model")

    @given(mutated_json(content))
    def check(changed):
        text = json.dumps(changed)
        (folder / "config.json").write_text(text, encoding="utf-8", errors="surrogateescape")
        before = listing(tmp_path)
        status, out, _ = predict(photo, "--model", f"local-dir:{folder}", "--json")
        assert status or len(answers(out)) == 1
        assert listing(tmp_path) == before

    check()


def test_safetensors(predict, exported, photo, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "model")
    right = answers(predict(photo, "--model", f"local-dir:{exported}", "--json")[1])

    @given(mutated_safetensors((exported / "model.safetensors").read_bytes()))
    def check(data):
        (folder / "model.safetensors").write_bytes(data)
        status, out, _ = predict(photo, "--model", f"local-dir:{folder}", "--json")
        # What carries no SHA-256 any more may say anything; else the answer must be right.
        assert status or answers(out) == right or b"sha256" not in data

    check()


def checkpoint(exported):
    content = {
        "state_dict": read_state_dict(exported / "model.safetensors"),
        DESCRIPTION: json.loads((exported / "config.json").read_text()),
        "meta": {"epoch": 3},
    }
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return content, buffer.getvalue()


def test_training_checkpoint(predict, exported, photo, tmp_path):
    _, data = checkpoint(exported)
    file = tmp_path / "epoch_3.pth"
    file.write_bytes(data)
    right = answers(predict(photo, "--checkpoint", file, "--json")[1])

    @given(mutated_bytes(data))
    def check(changed):
        file.write_bytes(changed)
        status, out, _ = predict(photo, "--checkpoint", file, "--json")
        assert status or answers(out) == right

    check()


def test_members_of_a_checkpoint(predict, exported, photo, tmp_path):
    """The archive is intact, with right checksums, but its content is invalid."""
    _, data = checkpoint(exported)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))
    file = tmp_path / "epoch_3.pth"

    @given(st.data())
    def check(drawn):
        name = drawn.draw(st.sampled_from([pickled, *members]))
        changed = {**members, name: drawn.draw(mutated_bytes(members[name]))}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            for member, content in changed.items():
                archive.writestr(member, content)
        status, out, _ = predict(photo, "--checkpoint", file, "--json")
        assert status or answers(out)

    check()


def test_contents_of_a_checkpoint(predict, exported, photo, tmp_path):
    content, _ = checkpoint(exported)
    tensors = content["state_dict"]
    file = tmp_path / "epoch_3.pth"
    odd = st.sampled_from(
        [
            lambda t: t.reshape(-1)[:0],
            lambda t: t.reshape(-1),
            lambda t: t.double(),
            lambda t: t.half(),
            lambda t: t.long(),
            lambda t: t * torch.nan,
            lambda t: t * torch.inf,
            lambda t: -t,
            lambda t: t.to(torch.complex64),
            lambda t: t.to("meta"),
            lambda t: torch.zeros(()),
            lambda t: t.tolist(),
        ]
    )

    @given(
        st.sampled_from(list(tensors)),
        odd,
        st.dictionaries(st.text(max_size=5), HOSTILE, max_size=2),
    )
    def check(name, change, more):
        changed = {**more, **content, "state_dict": {**tensors, name: change(tensors[name])}}
        torch.save(changed, file)
        status, out, _ = predict(photo, "--checkpoint", file, "--json")
        assert status or answers(out)

    check()


FORMATS = {
    "jpg": {"format": "JPEG"},
    "png": {"format": "PNG"},
    "gif": {"format": "GIF"},
    "webp": {"format": "WEBP"},
    "tif": {"format": "TIFF", "compression": "tiff_lzw"},
    "bmp": {"format": "BMP"},
    "ppm": {"format": "PPM"},
}


@pytest.mark.parametrize("suffix", FORMATS)
def test_images(predict, exported, tmp_path, suffix):
    pixels = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    whole = io.BytesIO()
    Image.fromarray(pixels).save(whole, **FORMATS[suffix])
    file = tmp_path / f"x.{suffix}"

    @given(mutated_bytes(whole.getvalue()))
    def check(data):
        file.write_bytes(data)
        status, out, err = predict(file, "--model", f"local-dir:{exported}", "--json")
        assert len(answers(out)) == (status == 0)
        assert status == 0 or "skipped: " in err

    check()


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    prepare = Command("prepare_data")
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4)).save(buffer, "PNG")
    rows = {"image": [{"bytes": buffer.getvalue(), "path": "x.png"}] * 4, "label": [0, 1, 0, 1]}
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    source = tmp_path / "source"
    source.mkdir()

    def write(metadata, file):
        table = pa.table(rows).replace_schema_metadata({"huggingface": json.dumps(metadata)})
        parquet.write_table(table, file)

    described = {"info": {"features": features}}
    write(described, tmp_path / "whole")

    @given(mutated_bytes((tmp_path / "whole").read_bytes()), mutated_json(described), st.booleans())
    def check(data, metadata, blind):
        shutil.rmtree(tmp_path / "target", ignore_errors=True)
        file = source / "train.parquet"
        if blind:
            file.write_bytes(data)
        else:
            write(metadata, file)
        status, _, _ = prepare(source, tmp_path / "target")
        written = [path for path in (tmp_path / "target").rglob("*") if path.is_file()]
        assert status or len(written) == 4
        assert {path.name for path in tmp_path.iterdir()} <= {"source", "target", "whole"}

    check()


# Hostile, but no request for more memory or time than there is.
VALUES = [
    "None",
    "True",
    "-1",
    "0",
    "1",
    "2",
    "0.5",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e-300",
    "x",
    "''",
]
VALUES += ["[]", "[1,2]", "[None]", "()", "\x1b[31m", "a=b", "100000", "4294967296"]


@pytest.fixture(scope="session")
def few_images(tmp_path_factory):
    """Two images of two classes, to train and to validate."""
    root = tmp_path_factory.mktemp("few")
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(root / split / name / "0.png")
    return root


def test_options_of_training(tmp_path, few_images):
    """A config that passes the checks trains an epoch of four images; others end in one line."""
    from tokenformer_vit.training.config import load_config

    config = tmp_path / "small.py"
    config.write_text(SMALL)
    train, number = Command("train", TRAINING_SECONDS), itertools.count()
    cfg = load_config(config).to_dict()
    keys = [".".join(map(str, path)) for path in leaves(_listed(cfg))]
    # These are no settings: names of types and files, and what decides how long a run takes.
    long = ("max_epochs", "depth", "dim", "tokens", "num_workers", "mlp_ratio", "img_size", "scale")
    keys = [key for key in keys if not key.endswith(("type", "work_dir", *long))]
    # What a transform is told is checked by mmpretrain, when it is built or used.
    keys = [key for key in keys if "pipeline." not in key]

    @settings(max_examples=settings.default.max_examples // 5)  # each is a training
    @given(st.sampled_from(keys), st.sampled_from(VALUES))
    def check(key, value):
        work_dir = tmp_path / f"run_{next(number)}"
        name = f"experiment_name = 'fuzz_{work_dir.name}_{time.time_ns()}'\n"
        config.write_text(SMALL + name)
        words = [config, "--data-root", few_images, "--work-dir", work_dir]
        status, _, _ = train(*words, "--cfg-options", f"{key}={value}")
        assert status or (work_dir / "record.json").is_file() or "record" in key
        shutil.rmtree(work_dir, ignore_errors=True)

    # What is imported for the first time takes its time.
    assert train(config, "--data-root", few_images, "--work-dir", tmp_path / "first")[0] == 0
    check()


def _listed(value):
    """Turn tuples within a config into lists."""
    if isinstance(value, dict):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value
