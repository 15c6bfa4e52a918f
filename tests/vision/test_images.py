"""One image has the same pixels in training, testing, prediction and all other readers."""

import io
import os
import struct
import warnings
import zlib

import mmcv
import numpy as np
import pytest
import torch
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from tokenformer_vit.errors import InputError
from tokenformer_vit.training.data.images import LoadImage
from tokenformer_vit.vision.folders import check_images
from tokenformer_vit.vision.images import IMAGE_SUFFIXES, read_image, read_images, read_rgb

ORIENTATION = 0x0112
CONFIG = {
    "interpolation": "nearest",
    "mean": [0.0, 0.0, 0.0],
    "std": [1.0, 1.0, 1.0],
    "crop_pct": 1.0,
    "crop_mode": "squash",
}
# How stored pixels (rows, columns, ...) are turned for each value of the EXIF orientation.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


def readers(path):
    """Pixels (H, W, 3) that training and testing see, and those of prediction and inspection."""
    loaded = LoadImage()({"img_path": str(path)})
    assert loaded["img"].dtype == np.uint8
    assert loaded["img_shape"] == loaded["ori_shape"] == loaded["img"].shape[:2]
    config = {**CONFIG, "input_size": (3, *loaded["img_shape"])}
    [[(_, tensor)]] = read_images([path], config, 1)
    assert isinstance(tensor, torch.Tensor), tensor
    predicted = (tensor * 255).round().byte().permute(1, 2, 0).numpy()
    return loaded["img"], predicted


def grey(values):
    return np.repeat(np.asarray(values)[..., None], 3, axis=-1)


def stored(mode, rng):
    """An image of 5 x 7 pixels, and the (5, 7, 3) pixels that it should be read as."""
    values = rng.integers(0, 256, (5, 7, 4), dtype=np.uint8)
    if mode in ("L", "LA", "RGB", "RGBA"):
        channels = values[..., : len(mode)] if len(mode) > 1 else values[..., 0]
        colours = values[..., :3] if "RGB" in mode else grey(values[..., 0])
        return Image.fromarray(np.ascontiguousarray(channels), mode), colours
    if mode == "P":
        palette = rng.integers(0, 256, (256, 3), dtype=np.uint8)
        image = Image.fromarray(values[..., 0], "P")
        image.putpalette(palette.tobytes())
        image.info["transparency"] = bytes(range(256))
        return image, palette[values[..., 0]]
    if mode == "1":
        return Image.fromarray(values[..., 0] > 127), grey(np.where(values[..., 0] > 127, 255, 0))
    if mode == "I;16":
        wide = rng.integers(0, 2**16, (5, 7), dtype=np.uint16)
        return Image.fromarray(wide), grey(wide >> 8)
    assert mode == "CMYK"
    image = Image.fromarray(values, "CMYK")
    return image, np.asarray(image.convert("RGB"))


MODES = ["L", "LA", "RGB", "RGBA", "P", "1", "I;16", "CMYK"]


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_and_orientation_is_read_alike(mode, orientation, tmp_path, seed):
    image, colours = stored(mode, np.random.default_rng(seed))
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    image.save(path, exif=exif, **({"transparency": bytes(range(256))} if mode == "P" else {}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the conversion of a transparent palette would warn
        trained, predicted = readers(path)
    np.testing.assert_array_equal(trained, UPRIGHT[orientation](colours))
    np.testing.assert_array_equal(predicted, trained)


def test_digits_on_their_side_are_tested_and_predicted_upright(tmp_path):
    digits = pytest.importorskip("sklearn.datasets").load_digits().images[:20]
    exif = Image.Exif()
    exif[ORIENTATION] = 6  # as phones write it: to be turned by a quarter, clockwise
    for index, digit in enumerate(digits):
        upright = grey(np.rint(digit * (255 / 16)).astype(np.uint8))
        path = tmp_path / f"{index}.jpg"
        Image.fromarray(np.rot90(upright)).save(path, quality=100, subsampling=0, exif=exif)
        tested, predicted = readers(path)
        np.testing.assert_array_equal(predicted, tested)
        np.testing.assert_allclose(predicted.astype(int), upright, atol=4)


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


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.float32])
def test_values_of_unknown_range_are_refused(dtype, tmp_path):
    path = tmp_path / "x.tif"
    signed = dtype == np.int16  # which Pillow writes only as unsigned, with a tag that corrects it
    image = Image.fromarray(np.arange(12, dtype=np.uint16 if signed else dtype).reshape(3, 4))
    image.save(path, tiffinfo={339: 2} if signed else {})
    with pytest.raises(
        InputError,
        match=r"x\.tif: .*mode .*; save the image with 8 bits",
    ):
        read_image(path)


@pytest.mark.parametrize("suffix", ["gif", "webp", "tif", "png"])
def test_of_several_pictures_the_first_is_read(suffix, tmp_path):
    red, blue = (Image.new("RGB", (9, 6), colour) for colour in ("red", "blue"))
    path = tmp_path / f"x.{suffix}"
    options = {"lossless": True} if suffix == "webp" else {}
    red.save(path, save_all=True, append_images=[blue], **options)
    with Image.open(path) as image:
        assert image.n_frames == 2
    for pixels in readers(path):
        np.testing.assert_array_equal(pixels, np.asarray(red))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_ordinary_images_are_decoded_as_mmcv_and_timm_decode_them(mode, suffix, tmp_path, seed):
    values = np.random.default_rng(seed).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    path = tmp_path / f"x.{suffix}"
    Image.fromarray(values).convert(mode).save(path)
    trained, predicted = readers(path)
    expected = mmcv.imfrombytes(path.read_bytes(), backend="pillow")
    np.testing.assert_array_equal(trained[:, :, ::-1], expected)
    with Image.open(path) as image:
        np.testing.assert_array_equal(predicted, np.asarray(image.convert("RGB")))


JPEGS = {
    "common": {},
    "full colours": {"subsampling": 0},
    "progressive": {"progressive": True},
    "not YCbCr": {"keep_rgb": True},
    "restarts": {"restart_marker_rows": 1},
    "poor": {"quality": 20},
    "XMP": {"xmp": b'<rdf:RDF tiff:Orientation="6"/>'},
    "grey": {"mode": "L"},
    "CMYK": {"mode": "CMYK"},
}


def jpeg(rng, mode="RGB", size=(37, 45), **options):
    pixels = np.repeat(rng.integers(0, 256, (9, 8, 3), dtype=np.uint8), 6, axis=0)
    file = io.BytesIO()
    image = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    image.convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def in_training_and_elsewhere(path, data):
    """What training and the other readers make of a file: its pixels, or the error."""
    path.write_bytes(data)
    results = []
    for read in (read_rgb, lambda file: np.asarray(read_image(file))):
        try:
            results.append(read(path))
        except InputError as error:
            results.append(str(error))
    return results


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("orientation", [None, 1, 6])
def test_training_reads_a_jpeg_as_all_do(kind, orientation, tmp_path, seed):
    options = dict(JPEGS[kind])
    if orientation:
        options["exif"] = Image.Exif()
        options["exif"][ORIENTATION] = orientation
    trained, predicted = in_training_and_elsewhere(
        tmp_path / "x.jpg", jpeg(np.random.default_rng(seed), **options)
    )
    turned = orientation == 6 or (kind == "XMP" and orientation is None)
    assert predicted.shape == ((37, 45, 3) if turned else (45, 37, 3))
    np.testing.assert_array_equal(trained, predicted)


@pytest.mark.parametrize("kind", ["common", "progressive", "grey"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_exif_after_the_frame_of_a_jpeg_counts(kind, orientation, tmp_path, seed):
    data = jpeg(np.random.default_rng(seed), **JPEGS[kind])
    frame = data.index(b"\xff\xc2" if kind == "progressive" else b"\xff\xc0")
    end = frame + 2 + int.from_bytes(data[frame + 2 : frame + 4], "big")
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    segment = b"\xff\xe1" + struct.pack(">H", 2 + len(exif.tobytes())) + exif.tobytes()
    trained, predicted = in_training_and_elsewhere(
        tmp_path / "x.jpg", data[:end] + segment + data[end:]
    )
    assert predicted.shape == ((37, 45, 3) if orientation == 6 else (45, 37, 3))
    np.testing.assert_array_equal(trained, predicted)


@pytest.mark.parametrize("kind", ["common", "progressive", "grey"])
def test_training_decodes_a_common_jpeg_with_opencv(kind, monkeypatch, seed):
    data = jpeg(np.random.default_rng(seed), **JPEGS[kind])
    monkeypatch.setattr("tokenformer_vit.vision.images.read_image", None)
    assert read_rgb("x.jpg", data).shape == (45, 37, 3)


def test_training_and_others_agree_on_damaged_jpegs(tmp_path, seed):
    rng = np.random.default_rng(seed)
    whole = jpeg(rng)
    refused = 0
    for _ in range(60):
        data = bytearray(whole[: rng.integers(1, len(whole))] if rng.random() < 0.3 else whole)
        for place in rng.integers(0, len(data), rng.integers(0, 4)):
            data[place] = rng.integers(256)
        data += [b"", b"\xff\xd9", b"\0"][rng.integers(3)]
        trained, others = in_training_and_elsewhere(tmp_path / "x.jpg", bytes(data))
        assert isinstance(trained, str) == isinstance(others, str), (trained, others)
        np.testing.assert_array_equal(trained, others)
        refused += isinstance(others, str)
    assert 0 < refused < 60


def test_what_is_read_can_be_written_to(tmp_path):
    Image.new("RGB", (3, 2)).save(tmp_path / "x.png")
    array = LoadImage()({"img_path": str(tmp_path / "x.png")})["img"]
    array[:] = 7  # as random erasing does


def refusal(path):
    """Why an image is refused: the same line for every reader."""
    with pytest.raises(InputError) as raised:
        read_image(path)
    message = str(raised.value)
    assert len(message.splitlines()) == 1
    with pytest.raises(InputError) as raised:
        LoadImage()({"img_path": str(path)})
    assert str(raised.value).startswith(f"cannot read image {message}; replace or delete it")
    [[(_, error)]] = read_images([path], {**CONFIG, "input_size": (3, 8, 8)}, 1)
    assert str(error) == message
    return message


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")  # opening it would wait for a writer for ever
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "device.png").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "device"):
        path = tmp_path / f"{name}.png"
        assert refusal(path) == f"{path}: it is not a regular file"


def test_missing_files_and_broken_links_are_named(tmp_path):
    (tmp_path / "x.png").symlink_to(tmp_path / "nowhere")
    assert refusal(tmp_path / "x.png") == f"{tmp_path / 'x.png'}: it is a broken link"
    assert refusal(tmp_path / "y.png") == f"{tmp_path / 'y.png'}: No such file or directory"


def test_formats_that_run_programs_are_not_opened(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "x.eps")
    (tmp_path / "x.eps").rename(tmp_path / "x.png")
    assert "(JPEG, PNG," in refusal(tmp_path / "x.png")


def png_of_size(width, height):
    """A PNG that claims a large size and has few pixels."""

    def chunk(name, data):
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0"))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(13_500, 13_500), (2**31 - 1, 2**31 - 1)])
def test_huge_images_are_refused_by_their_header(size, tmp_path, capsys):
    path = tmp_path / "x.png"
    path.write_bytes(png_of_size(*size))
    assert "x.png: it has more than 179 megapixels, the limit; make it smaller" in refusal(path)
    assert check_images(tmp_path, workers=1) == [path]
    assert f"unreadable: {path}: it has more than 179 megapixels" in capsys.readouterr().out


def test_slips_of_paper_are_refused(tmp_path):
    path = tmp_path / "x.png"
    Image.new("L", (2001, 10)).save(path)  # its shorter side made 224, it would be 44,822 wide
    assert "it has 2001 x 10 pixels; no side may be more than 200 times" in refusal(path)
    Image.new("L", (2000, 10)).save(path)
    assert read_image(path).size == (2000, 10)


@pytest.mark.parametrize("suffix", IMAGE_SUFFIXES)
def test_every_suffix_can_be_written_and_read(suffix, tmp_path):
    path = tmp_path / f"x{suffix}"
    mode = {".pbm": "1", ".pgm": "L"}.get(suffix, "RGB")
    Image.new("RGB", (8, 6), "white").convert(mode).save(path)
    for pixels in readers(path):
        assert (pixels > 250).all()
        assert pixels.shape == (6, 8, 3)
