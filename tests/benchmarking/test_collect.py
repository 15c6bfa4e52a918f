"""Records are taken into the repository, and none is lost without a word."""

import json
import shutil
from pathlib import Path

import pytest

from tokenformer_vit.benchmarking import collect
from tokenformer_vit.benchmarking.collect import take, unpacked
from tokenformer_vit.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
SPEED = "tokenformer_vit/benchmarking/results/speed_tokenformer_base_matched_cpu.json"
LOOP = "tokenformer_vit/benchmarking/results/loop_digits_demo_cpu.json"
SWEEP = "ablations/results/softmax_cifar10_mini/gelu_l2_seed0.json"
RUN = "configs/results/digits_demo.json"


@pytest.fixture
def folders(tmp_path):
    """A repository with records, and the folder of a device with the same records."""
    root, device = tmp_path / "root", tmp_path / "device"
    for name in (SPEED, LOOP, SWEEP, RUN):
        for folder in (root, device / "records"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return root, device


def change(folder, name, edit):
    path = folder / name
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))


def test_new_records_and_unchanged_ones(folders, tmp_path):
    root, device = folders
    (root / SPEED).unlink()
    before = (root / RUN).read_bytes()
    change(device / "records", RUN, lambda record: record.update(seconds=1.5))
    archive = shutil.make_archive(str(tmp_path / "h100"), "zip", device)
    folder = unpacked(Path(archive), tmp_path / "results")
    assert folder == tmp_path / "results/h100"
    taken, lines = take(folder, root, replace=False)
    expected = {SWEEP: "unchanged", RUN: "replaced", LOOP: "unchanged", SPEED: "new"}
    assert lines == [f"{what:9}  {name}" for name, what in expected.items()]
    assert [each.path for each in taken] == [root / RUN, root / SPEED]
    assert json.loads((root / RUN).read_text())["seconds"] == 1.5
    assert (root / SPEED).read_bytes() == (ROOT / SPEED).read_bytes()
    for each in taken:
        each.put_back()
    assert (root / RUN).read_bytes() == before
    assert not (root / SPEED).exists()


def other_device(record):
    record["hardware"] = "64 CPU cores (arm64)"


def one_group_less(record):
    del record["groups"][1:]


def one_variant_less(record):
    del record["groups"][0]["variants"][0]


def fewer_steps(record):
    record["n"] -= 1


def no_real_data(record):
    record["runs"] = [run for run in record["runs"] if run["data"] == "synthetic"]


def failed(record):
    record["failed"] = "out of memory"


def failed_variant(record):
    record["groups"][0]["variants"][0]["failed"] = "out of memory"


def fewer_epochs(record):
    record["epochs"] -= 1


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (SPEED, other_device, r"is of .* and .* is of 64 CPU cores \(arm64\)"),
        (SPEED, one_group_less, r"has \d+ measurements that .* lacks, such as infer"),
        (SPEED, one_variant_less, "such as train .* batch 4 baseline eager"),
        (SPEED, failed_variant, "such as train .* batch 4 baseline eager"),
        (RUN, fewer_epochs, "has 40 epochs, and .* has 39"),
        (LOOP, fewer_steps, r"has (\d+) rounds or steps"),
        (LOOP, no_real_data, "such as real data"),
        (SWEEP, failed, "such as a finished training"),
    ],
)
def test_what_a_new_record_lacks_is_not_lost(folders, name, edit, message):
    root, device = folders
    change(device / "records", RUN, lambda record: record.update(seconds=1.5))
    change(device / "records", name, edit)
    with pytest.raises(InputError, match=rf"{message}.*--replace"):
        take(device, root, replace=False)
    for each in (SPEED, LOOP, SWEEP, RUN):
        assert (root / each).read_bytes() == (ROOT / each).read_bytes()
    take(device, root, replace=True)
    for each in (SPEED, LOOP, SWEEP, RUN):
        assert (root / each).read_bytes() == (device / "records" / each).read_bytes()


def test_more_groups_replace_fewer(folders):
    root, device = folders
    change(root, SPEED, one_group_less)
    assert f"replaced   {SPEED}" in take(device, root, replace=False)[1]


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (SPEED, lambda record: record.pop("groups"), "is not a record"),
        (LOOP, lambda record: record.pop("hardware"), r"is not a record .*hardware"),
        (SWEEP, lambda record: record.update(commit=""), "has no commit"),
        (RUN, lambda record: record.pop("seconds"), r"is not a record .*seconds"),
    ],
)
def test_what_is_no_record_is_not_taken(folders, name, edit, message):
    root, device = folders
    change(device / "records", name, edit)
    with pytest.raises(InputError, match=message):
        take(device, root, replace=True)


def test_places_and_archives_that_are_none(folders, tmp_path):
    root, device = folders
    other = device / "records/tokenformer_vit/x.json"
    other.write_text("{}")
    with pytest.raises(InputError, match=r"x.json is in none of the folders configs/results"):
        take(device, root, replace=True)
    for source in (tmp_path / "nowhere", tmp_path, other):
        with pytest.raises(InputError, match=r"give its folder or archive|damaged or no archive"):
            unpacked(source, tmp_path / "results")


def test_an_archive_that_cannot_be_used_leaves_the_folder_as_it_is(folders, tmp_path):
    _, device = folders
    archive = Path(shutil.make_archive(str(tmp_path / "h100"), "zip", device))
    folder = unpacked(archive, tmp_path / "results")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(before) == 4
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 0xFF
    archive.write_bytes(data)
    with pytest.raises(InputError, match=r"h100.zip is damaged .*copy it again"):
        unpacked(archive, tmp_path / "results")
    shutil.make_archive(str(tmp_path / "h100"), "zip", tmp_path / "root/configs")
    with pytest.raises(InputError, match="give its folder or archive"):
        unpacked(archive, tmp_path / "results")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["h100"]


def test_records_are_whole_or_as_before(folders, monkeypatch):
    root, device = folders
    for name in (RUN, SWEEP):
        change(device / "records", name, lambda record: record.update(seconds=1.5))
    (root / LOOP).unlink()
    write, written = collect.write_whole, []

    def fail_at_last(path, data):
        written.append(path)
        if len(written) == 3:
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(collect, "write_whole", fail_at_last)
    with pytest.raises(KeyboardInterrupt):
        take(device, root, replace=False)
    assert {path.relative_to(root).as_posix() for path in written} == {RUN, SWEEP, LOOP}
    for name in (RUN, SWEEP, SPEED):
        assert (root / name).read_bytes() == (ROOT / name).read_bytes()
    assert not (root / LOOP).exists()
