"""Weight files of every format: no code runs, and damaged or invalid files are refused."""

import io
import os
import pickle
import random
import zipfile

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from tokenformer_vit.errors import InputError
from tokenformer_vit.models.weights import (
    check_tensors,
    read_checkpoint,
    read_state_dict,
    seal_tensors,
    tensors_digest,
    write_tensors,
)


def flip(path, start, rng):
    """Flip one bit of a file after ``start``."""
    data = bytearray(path.read_bytes())
    place = rng.randrange(start, len(data))
    data[place] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return place


def test_any_flipped_bit_of_a_tensor_is_found(model, tmp_path, seed):
    rng = random.Random(seed)
    state = model.state_dict()
    whole = tmp_path / "whole.pth"
    torch.save(state, whole)
    with zipfile.ZipFile(whole) as archive:
        members = {i.filename: i for i in archive.infolist() if "/data/" in i.filename}
    write_tensors(tmp_path / "whole.safetensors", state)
    header = 8 + int.from_bytes((tmp_path / "whole.safetensors").read_bytes()[:8], "little")
    for _ in range(20):
        damaged = tmp_path / "epoch_2.pth"
        data = bytearray(whole.read_bytes())
        member = rng.choice(list(members.values()))
        # The member's own header precedes its bytes; its end is surely among them.
        offset = data.index(member.filename.encode(), member.header_offset)
        begin = offset + len(member.filename)
        begin += int.from_bytes(data[offset - 2 : offset], "little")
        data[begin + rng.randrange(member.file_size)] ^= 1 << rng.randrange(8)
        damaged.write_bytes(data)
        with pytest.raises(InputError, match=r"epoch_2\.pth is damaged.*or use whole"):
            read_checkpoint(damaged)

        other = tmp_path / "model.safetensors"
        other.write_bytes((tmp_path / "whole.safetensors").read_bytes())
        flip(other, header, rng)
        with pytest.raises(InputError, match=r"model\.safetensors.*(damaged|holds NaN|is \[?-)"):
            read_checkpoint(other)


def test_timm_itself_finds_a_damaged_export(exported, seed):
    file = exported / "model.safetensors"
    flip(file, file.stat().st_size - 1000, random.Random(seed))
    with pytest.raises(InputError, match=r"damaged|holds NaN"):
        timm.create_model(f"local-dir:{exported}", pretrained=True)


def test_equal_tensors_make_equal_files_that_other_readers_take(model, tmp_path):
    state = model.state_dict()
    for name in ("a", "b"):
        write_tensors(tmp_path / name, dict(reversed(state.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    again = load_file(tmp_path / "a")
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    save_file(state, tmp_path / "c.safetensors", {"format": "pt"})
    seal_tensors(tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").read_bytes() == (tmp_path / "a").read_bytes()


def test_the_digest_knows_names_types_shapes_and_bytes():
    x = torch.randn(4, 6)
    digest = tensors_digest({"x": x})
    assert digest == tensors_digest({"x": x.t().contiguous().t()})
    for other in ({"y": x}, {"x": x.reshape(6, 4)}, {"x": x.double()}, {"x": -x}):
        assert tensors_digest(other) != digest
    half = {"x": x.bfloat16(), "t": torch.tensor(2.0)}
    assert tensors_digest(half) == tensors_digest({name: t.clone() for name, t in half.items()})


class Evil:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (os.system, (f"touch {self.target}",))


@pytest.mark.parametrize("name", ["x.pth", "x.bin", "x.safetensors"])
def test_no_code_runs(tmp_path, name):
    content = {"state_dict": {"w": torch.zeros(1)}, "evil": Evil(tmp_path / "ran")}
    torch.save(content, tmp_path / name)
    with pytest.raises(
        InputError, match=r"not loaded, because loading could run code|not a readable"
    ):
        read_checkpoint(tmp_path / name)
    (tmp_path / name).write_bytes(pickle.dumps(content))
    with pytest.raises(InputError):
        read_checkpoint(tmp_path / name)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"blocks.0.mlp.tau": torch.tensor(-1.0)},
            "tau is -1.0, but τ must be one positive",
        ),
        ({"blocks.0.mlp.tau": torch.tensor(0.0)}, "tau is 0.0"),
        ({"blocks.0.mlp.tau": torch.ones(2)}, "but τ must be one positive number"),
        ({"norm.weight": torch.full((48,), torch.nan)}, "norm.weight holds NaN or infinity"),
        ({"head.bias": torch.full((10,), torch.inf)}, "head.bias holds NaN or infinity"),
        ({"head.weight": torch.ones(10, 48, dtype=torch.int64)}, "head.weight is of type int64"),
        ({"pos_embed": torch.ones(1, 17, 48, dtype=torch.bool)}, "pos_embed is of type bool"),
        ({"head.weight": torch.ones(10, 48).to_sparse()}, "is sparse, quantised or without values"),
        ({"head.weight": torch.ones(10, 48, dtype=torch.complex64)}, "of type complex64"),
    ],
)
def test_nonsense_is_refused(model, tmp_path, change, message):
    torch.save({**model.state_dict(), **change}, tmp_path / "x.pth")
    with pytest.raises(InputError, match=message) as raised:
        read_state_dict(tmp_path / "x.pth")
    assert "x.pth" in str(raised.value)


def test_what_is_no_weight_may_be_whole_numbers_and_low_precision_is_fine():
    check_tensors(
        {
            "bn.num_batches_tracked": torch.tensor(3),
            "relative_position_index": torch.ones(2, 2).long(),
        },
        "x",
    )
    check_tensors({"weight": torch.randn(3).to(torch.float8_e4m3fn)}, "x")
    check_tensors({"weight": torch.randn(3).bfloat16()}, "x")


@pytest.mark.parametrize("content", [b"", b"\x80", b"PK\x03\x04", b"not a checkpoint" * 99])
@pytest.mark.parametrize("suffix", ["pth", "safetensors", "bin"])
def test_foreign_bytes(tmp_path, content, suffix):
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"x\.{suffix}") as raised:
        read_state_dict(path)
    assert "\n" not in str(raised.value)


def test_an_archive_that_swells_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x00" * 10_000_000)
    with pytest.raises(InputError, match="compressed archive"):
        read_checkpoint(tmp_path / "x.pth")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes of POSIX")
def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "x.pth")
    with pytest.raises(InputError, match="there is no checkpoint file"):
        read_checkpoint(tmp_path / "x.pth")


def test_the_old_format_without_checksums_is_read(model, tmp_path):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "x.pth").write_bytes(buffer.getvalue())
    assert read_state_dict(tmp_path / "x.pth").keys() == model.state_dict().keys()
