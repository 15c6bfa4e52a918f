"""One image has the same pixels in training, testing, prediction and all other readers."""

import io
import os
import warnings
from itertools import chain

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.data.images import LoadImage
from tokenformer_vit.vision.images import (
    IMAGE_SUFFIXES,
    list_images,
    read_image,
    read_images,
    read_pixels,
)

ORIENTATION = 0x0112
CONFIG = {"interpolation": "nearest", "crop_pct": 1.0, "crop_mode": "squash"}
CONFIG |= {"mean": [0.0] * 3, "std": [1.0] * 3}


def readers(path):
    """Pixels (H, W, 3) that training and testing see, and those of prediction and inspection."""
    loaded = LoadImage()({"img_path": str(path)})
    assert loaded["img"].dtype == np.uint8
    loaded["img"][0, 0, 0] ^= 0  # writable: random erasing writes
    assert loaded["img_shape"] == loaded["ori_shape"] == loaded["img"].shape[:2]
    config = {**CONFIG, "input_size": (3, *loaded["img_shape"])}
    [(found, tensors)] = read_images([path], config, 1)
    assert found == [(path, None)]
    predicted = (tensors[0] * 255).round().byte().permute(1, 2, 0).numpy()
    return loaded["img"], predicted


def grey(values):
    return np.repeat(np.asarray(values)[..., None], 3, axis=-1)


@pytest.mark.parametrize("orientation", [1, 6, 8])
@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "1", "I;16", "CMYK"])
def test_every_mode_and_orientation_is_read_alike(mode, orientation, tmp_path, generator):
    values = generator.integers(0, 256, (5, 7, 4), dtype=np.uint8)
    image = Image.fromarray(values, "RGBA").convert(mode.replace("I;16", "L"))
    colours = np.asarray(image.convert("RGB"))
    if mode == "I;16":
        wide = generator.integers(0, 2**16, (5, 7), dtype=np.uint16)
        image, colours = Image.fromarray(wide), grey(wide >> 8)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    image.save(path, exif=exif, **({"transparency": bytes(range(256))} if mode == "P" else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the conversion of a transparent palette would warn
        trained, predicted = readers(path)
    quarters = {1: 0, 6: -1, 8: 1}[orientation]
    np.testing.assert_array_equal(trained, np.rot90(colours, quarters))
    np.testing.assert_array_equal(predicted, trained)


def test_16_bit_grey_of_a_pgm(tmp_path):
    wide = np.arange(0, 2**16, 1000, dtype=np.uint16)[None].repeat(2, axis=0)  # opened as mode I
    path = tmp_path / "x.pgm"
    path.write_bytes(b"P5 66 2 65535\n" + wide.astype(">u2").tobytes())
    for pixels in readers(path):
        np.testing.assert_array_equal(pixels, grey(wide >> 8))


def test_12_bit_grey_of_a_tiff(tmp_path):
    values = [0, 0x00F, 0x7FF, 0xFFF]
    packed = bytes.fromhex("".join(f"{value:03x}" for value in values))
    directory = ImageFileDirectory_v2()
    # 4 x 1 pixels, 12 bits, not compressed, black is 0, in one strip right after the directory
    tags = {256: 4, 257: 1, 258: 12, 259: 1, 262: 1, 273: 0, 277: 1, 278: 1, 279: len(packed)}
    for tag, value in tags.items():
        directory[tag] = value
    file = io.BytesIO()
    directory.save(file)
    (tmp_path / "x.tif").write_bytes(file.getvalue() + packed)
    for pixels in readers(tmp_path / "x.tif"):
        np.testing.assert_array_equal(pixels, grey([[value >> 4 for value in values]]))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_values_of_unknown_range_are_refused(dtype, tmp_path):
    Image.fromarray(np.arange(12, dtype=dtype).reshape(3, 4)).save(tmp_path / "x.tif")
    with pytest.raises(InputError, match=r"x\.tif: .*mode [IF] .*: save 8 bits"):
        read_image(tmp_path / "x.tif")


@pytest.mark.parametrize("suffix", IMAGE_SUFFIXES)
def test_every_suffix_is_read_and_of_several_pictures_the_first(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    mode = {".pbm": "1", ".pgm": "L"}.get(suffix, "RGB")
    first, second = (Image.new("RGB", (9, 6), each).convert(mode) for each in ("white", "black"))
    several = suffix in (".gif", ".webp", ".tif", ".png")
    first.save(path, **({"save_all": True, "append_images": [second]} if several else {}))
    for pixels in readers(path):
        assert pixels.shape == (6, 9, 3)
        assert (pixels > 250).all()


JPEGS = {
    "common": {},
    "full colours": {"subsampling": 0},
    "progressive": {"progressive": True},
    "not YCbCr": {"keep_rgb": True},
    "restarts": {"restart_marker_rows": 1},
    "XMP": {"xmp": b'<rdf:RDF tiff:Orientation="6"/>'},
    "grey": {"mode": "L"},
    "CMYK": {"mode": "CMYK"},
}


def jpeg(rng, mode="RGB", **options):
    pixels = np.repeat(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8), 6, axis=0)
    file = io.BytesIO()
    image = Image.fromarray(pixels).resize((37, 45), Image.Resampling.BICUBIC)
    image.convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def in_training_and_elsewhere(data):
    """What training and the other readers make of a file: its pixels, or the error."""
    results = []
    for read in (read_pixels, lambda *file: np.asarray(read_image(*file))):
        try:
            results.append(read("x.jpg", data))
        except InputError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("orientation", [None, 1, 6])
def test_training_reads_a_jpeg_as_all_do(kind, orientation, generator):
    options = dict(JPEGS[kind])
    if orientation:
        options["exif"] = Image.Exif()
        options["exif"][ORIENTATION] = orientation
    trained, predicted = in_training_and_elsewhere(jpeg(generator, **options))
    turned = orientation == 6 or (kind == "XMP" and orientation is None)
    assert predicted.shape == ((37, 45, 3) if turned else (45, 37, 3))
    np.testing.assert_array_equal(trained, predicted)


def test_training_and_others_agree_on_damaged_jpegs(generator):
    refused = 0
    for number in range(90):
        whole = jpeg(generator, **list(JPEGS.values())[number % len(JPEGS)])
        cut = generator.integers(1, len(whole)) if generator.random() < 0.3 else len(whole)
        data = bytearray(whole[:cut])
        for place in generator.integers(0, len(data), generator.integers(0, 4)):
            data[place] = generator.integers(256)
        data += [b"", b"\xff\xd9", b"\0"][generator.integers(3)]
        trained, others = in_training_and_elsewhere(bytes(data))
        assert isinstance(trained, str) == isinstance(others, str), (trained, others)
        np.testing.assert_array_equal(trained, others)
        refused += isinstance(others, str)
    assert 0 < refused < 90


def test_files_that_cannot_be_read_are_named_by_every_reader(tmp_path, generator):
    os.mkfifo(tmp_path / "pipe.png")  # opening it would wait for a writer for ever
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "link.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "itself.png").symlink_to(tmp_path / "itself.png")
    (tmp_path / "cut.jpg").write_bytes(jpeg(generator)[:500])
    Image.new("RGB", (4, 4)).save(tmp_path / "x.eps")  # opening it would start a program
    (tmp_path / "x.eps").rename(tmp_path / "eps.png")
    Image.new("RGB", (1, 201)).save(tmp_path / "long.png")  # resized, it could fill the memory
    names = [path.name for path in sorted(tmp_path.iterdir())]
    for name in [*names, "missing.png"]:
        path = tmp_path / name
        with pytest.raises(InputError, match=r"^[^\n]*$") as raised:
            read_image(path)
        assert str(raised.value).startswith(f"{path}: ")
        with pytest.raises(InputError, match=f"cannot read image {path}: .*--check"):
            LoadImage()({"img_path": str(path)})
        [([(_, error)], _)] = read_images([path], {**CONFIG, "input_size": (3, 8, 8)}, 1)
        assert str(error) == str(raised.value)


def test_other_processes_read_batches_in_order(tmp_path, capfd):
    for index in range(10):
        Image.new("L", (4, 4), index).save(tmp_path / f"{index}.png")
    (tmp_path / "4.png").write_bytes(b"no image")
    config = {**CONFIG, "input_size": (3, 4, 4)}
    batches = list(read_images(list_images([tmp_path]), config, 4))
    assert [len(found) for found, _ in batches] == [4, 4, 2]
    for index, (path, error) in enumerate(chain(*(found for found, _ in batches))):
        assert path == tmp_path / f"{index}.png"
        assert isinstance(error, InputError) == (index == 4)
    values = torch.cat([images for _, images in batches])[:, 0, 0, 0]
    assert (values * 255).round().tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]


def test_images_are_found_and_the_rest_is_counted(tmp_path, capsys):
    photos = tmp_path / "photos"
    for name in ("a/b.PNG", "a/deep/c.jpg", "@eaDir/c.png", "a/.ipynb_checkpoints/d.png"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4)).save(photos / name)
    for name in ("1.txt", "2.txt", "nothing", ".hidden", "a/._b.png", "x.HEIC"):
        (photos / name).touch()
    (photos / "linked").symlink_to(photos / "a/deep")
    (photos / "a/again").symlink_to(photos)  # it would contain itself
    expected = [str(photos / name) for name in ("a/b.PNG", "a/deep/c.jpg", "linked/c.jpg")]
    assert list_images([photos, photos / "1.txt"]) == [*expected, str(photos / "1.txt")]
    said = "2 hidden or system folders, 2 .txt, 1 without a suffix, 1 .heic (save as JPEG)"
    assert capsys.readouterr().err == f"left out: {said} in {photos}\n"
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=rf"no image in {tmp_path}/empty, but nothing"):
        list_images([tmp_path / "empty"])
    with pytest.raises(InputError, match=r"no file or folder none\.png"):
        list_images(["none.png"])
