"""Find and read image files. All commands and the training use this reader."""

import errno
import io
import os
import stat
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from timm.data import create_transform
from torch import Tensor
from tqdm import tqdm

from tokenformer_vit.errors import InputError, one_line

# The formats that are decoded, by Pillow's names, whatever the suffix. Other formats are rare, and
# one of them, EPS, starts an interpreter.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "JPEG2000")
HIDDEN = "hidden folder"  # kind of what a reader of folders leaves out
# Suffixes of images in folders, in lower or upper case.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".pbm", ".pnm"),
    *(".tif", ".tiff", ".webp", ".jp2"),
)
# A transform that resizes the shorter side to 256 makes 13 megapixels out of such an image.
_MOST_ELONGATED = 200
_MOST_PIXELS = 2**26  # of a JPEG that is read in one piece; Pillow reads larger ones
# Bytes that may follow 0xFF among the pixels of a JPEG: a stuffed zero, restarts, filling, and the
# tables and headers of further scans.
_AMONG_PIXELS = np.zeros(256, bool)
_AMONG_PIXELS[[0x00, *range(0xD0, 0xD8), 0xFF, 0xC4, 0xDA]] = True
_MOST_KINDS = 8  # kinds of skipped files that one line names

# Pillow warns at half the size at which it raises. Only its error matters here: a warning would
# disturb the log of a training run.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def read_image(path: str | Path, content: bytes | None = None) -> Image.Image:
    """Decode an image file.

    Args:
        path: Regular file, or a link to one, in one of the :data:`FORMATS`.
        content: Content of the file if it is in memory; ``path`` is then only a name for messages.

    Returns:
        The image in mode RGB, turned upright by its EXIF orientation. An animation or a file of
        several pages gives its first image. Transparency is dropped and the colours under it are
        kept, as timm and torchvision do with ``convert("RGB")``. Values of 16 or 12 bits keep their
        upper 8 bits.

    Raises:
        InputError: If the file cannot be decoded, has more pixels than Pillow's limit of 179
            megapixels, has a side more than 200 times as long as the other, or has signed, 32-bit
            or float values, whose range is unknown. The message is one line and begins with the
            path.
    """
    try:
        if content is not None:
            return _upright_rgb(Image.open(io.BytesIO(content), formats=FORMATS))
        if not stat.S_ISREG(os.stat(path).st_mode):  # a named pipe would be waited for
            raise InputError("it is not a regular file")
        with open(path, "rb") as file:
            return _upright_rgb(Image.open(file, formats=FORMATS))
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged data
        raise InputError(f"{os.fspath(path)}: {_reason(error, path)}") from error


def read_rgb(path: str | Path, content: bytes | None = None) -> np.ndarray:
    """Decode an image file by OpenCV, which has to be installed: faster, with the same pixels.

    Args:
        path: As for :func:`read_image`.
        content: As for :func:`read_image`.

    Returns:
        (H, W, 3) uint8, the image of :func:`read_image`.

    Raises:
        InputError: As :func:`read_image` does.
    """
    import cv2  # only training has it

    with suppress(Exception):  # Pillow knows what is wrong with a file
        data = content
        if data is None and stat.S_ISREG(os.stat(path).st_mode):
            data = Path(path).read_bytes()
        if data is not None and _is_plain_jpeg(data):
            flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
            pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
            if pixels is not None:
                return pixels
    return np.array(read_image(path, content))


def _is_plain_jpeg(data: bytes) -> bool:
    """Return whether this is a JPEG that is whole, upright, not too large, and not in CMYK.

    OpenCV does not see that a file is truncated. In the data of an image, the two bytes of the end
    are impossible, so a file that ends with them is whole. It also reads on after a marker that
    does not belong among the pixels, where Pillow sees that the file is damaged.
    """
    if data[:2] != b"\xff\xd8" or data[-2:] != b"\xff\xd9":
        return False
    place, suits = 2, False
    while data[place] == 0xFF:
        marker, length = struct.unpack_from(">BH", data, place + 1)
        if marker == 0xDA:  # the pixels follow; up to here, also after the frame, EXIF counts
            pixels = np.frombuffer(data, np.uint8)[place + 2 : -2]
            return suits and bool(_AMONG_PIXELS[pixels[1:][pixels[:-1] == 0xFF]].all())
        if marker == 0xE1:  # EXIF or XMP
            exif = Image.open(io.BytesIO(data), formats=FORMATS).getexif()
            if exif.get(ExifTags.Base.Orientation, 1) != 1:
                return False
        if marker in (0xC0, 0xC2):  # a frame, baseline or progressive
            bits, height, width, channels = struct.unpack_from(">BHHB", data, place + 4)
            suits = (
                (bits, channels) in ((8, 1), (8, 3))
                and max(height, width) <= _MOST_ELONGATED * min(height, width)
                and height * width <= _MOST_PIXELS
            )
        place += 2 + length
    return False


def _upright_rgb(image: Image.Image) -> Image.Image:
    if max(image.size) > _MOST_ELONGATED * min(image.size):
        raise InputError(
            f"it has {image.width} x {image.height} pixels; no side may be more than "
            f"{_MOST_ELONGATED} times the other; crop it"
        )
    ImageOps.exif_transpose(image, in_place=True)  # also decodes
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # Pillow's conversion would clip at 255. For 16-bit colours it takes the upper byte.
        (bits,) = getattr(image, "tag_v2", {}).get(258, (16,))  # TIFF's BitsPerSample
        return Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise InputError(
            f"the range of pixel values is unknown (Pillow mode {image.mode}); save the image "
            "with 8 bits, or with 16 unsigned bits"
        )
    image.info.pop("transparency", None)  # of a palette; the conversion would warn about it
    return image.convert("RGB")


def _reason(error: Exception, path: str | Path) -> str:
    """Say in one line why an image cannot be read."""
    if isinstance(error, Image.DecompressionBombError):
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        return f"it has more than {limit:.0f} megapixels, the limit; make it smaller"
    if isinstance(error, UnidentifiedImageError):
        return f"it is not a readable image ({', '.join(FORMATS)})"
    nowhere = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ELOOP)
    if nowhere and os.path.islink(path):
        return "it is a broken link"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error)


def scan_images(
    folder: str | Path, left_out: Counter[str], suffixes: Sequence[str] = IMAGE_SUFFIXES
) -> Iterator[os.DirEntry]:
    """Find the images in a folder, at any depth, by their suffix, as mmpretrain does.

    Unlike mmpretrain, it leaves out hidden folders: Jupyter and file managers keep copies there.

    Args:
        folder: Folder to search; links to folders are followed.
        left_out: Counter of other files and of hidden folders, by kind; the function adds to it.
            Hidden files are not counted.
        suffixes: Suffixes of images, in lower case, with the dot.

    Yields:
        Images in the order of their names. An image may be a broken link or not a regular file.

    Raises:
        OSError: If a folder cannot be read, or a link makes it contain itself; ``filename`` names
            the folder.
    """
    with os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        if _is_folder(entry):
            if entry.name.startswith("."):
                left_out[HIDDEN] += 1
            else:
                yield from scan_images(entry.path, left_out, suffixes)
        elif entry.name.startswith("."):
            continue
        elif entry.name.lower().endswith(tuple(suffixes)):
            yield entry
        else:
            left_out[_kind(entry)] += 1


def class_folders(folder: str | Path, left_out: Counter[str]) -> list[Path]:
    """List the class folders in a folder.

    Args:
        folder: Folder to search; links to folders are followed.
        left_out: Counter of other files and of hidden folders, by kind; the function adds to it.
            Hidden files are not counted.

    Returns:
        The class folders in the order of their names, which is also the order of the labels.

    Raises:
        OSError: If the folder cannot be read; ``filename`` names the folder.
    """
    folders = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if _is_folder(entry):
                if entry.name.startswith("."):
                    left_out[HIDDEN] += 1
                else:
                    folders.append(Path(entry.path))
            elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                left_out["in no class folder"] += 1
            elif not entry.name.startswith("."):
                left_out[_kind(entry)] += 1
    return folders


def _is_folder(entry: os.DirEntry) -> bool:
    """Return whether an entry is a folder or a link to one."""
    try:
        return entry.is_dir()
    except OSError as error:
        # A link to itself is a broken link. One in a folder that contains itself leads somewhere.
        if error.errno != errno.ELOOP or os.path.exists(os.path.realpath(entry.path)):
            raise
        return False


def _kind(entry: os.DirEntry) -> str:
    if not os.path.isfile(entry.path):  # entry.is_file() fails for a link to itself
        return "broken link" if entry.is_symlink() else "not a regular file"
    return os.path.splitext(entry.name)[1].lower() or "without a suffix"


def say_left_out(left_out: Counter[str], folder: str | Path) -> None:
    """Print one line on stderr, from the first process only, about files that are not read."""
    if left_out and os.environ.get("RANK", "0") == "0":
        tqdm.write(f"left out: {_counts(left_out)} in {folder}", file=sys.stderr)


def _counts(left_out: Counter[str]) -> str:
    kinds = left_out.most_common()
    named = ", ".join(f"{count} {kind}" for kind, count in kinds[:_MOST_KINDS])
    more = sum(count for _, count in kinds[_MOST_KINDS:])
    return f"{named} and {more} more" if more else named


def find_images(paths: Sequence[Path]) -> list[Path]:
    """List the files in ``paths`` and the images in the folders in ``paths``.

    Args:
        paths: Files with any suffix, and folders, which are searched at any depth. One line on
            stderr counts the other files in a folder.

    Returns:
        Files in the order of ``paths``; the files of a folder are sorted.

    Raises:
        InputError: If a path does not exist, or a folder has no image.
        OSError: If a folder cannot be read; ``filename`` names the folder.
    """
    images: list[Path] = []
    for path in paths:
        if path.is_dir():
            left_out: Counter[str] = Counter()
            found = [Path(entry.path) for entry in scan_images(path, left_out)]
            if not found:
                others = f", but {_counts(left_out)}" if left_out else ""
                raise InputError(
                    f"there is no image in the folder {path}{others} ({' '.join(IMAGE_SUFFIXES)})"
                )
            say_left_out(left_out, path)
            images += found
        elif os.path.lexists(path):
            images.append(path)
        else:
            raise InputError(f"there is no file or folder {path}")
    return images


def read_images(
    paths: Sequence[Path], config: dict[str, Any], batch_size: int
) -> Generator[list[tuple[Path, Tensor | InputError]], None, None]:
    """Read images with a model's evaluation transform; show a progress bar for several batches.

    Args:
        paths: Image files.
        config: Preprocessing, from timm's ``resolve_input_data_config``.
        batch_size: Images in a batch.

    Yields:
        One batch: the paths in order, each with its (3, H, W) image or with the error of
        :func:`read_image`.
    """
    transform: Any = create_transform(**config, is_training=False)

    def read(path: Path) -> tuple[Path, Tensor | InputError]:
        try:
            return path, transform(read_image(path))
        except InputError as error:
            return path, error
        except Exception as error:  # raised by the transform, such as a lack of memory
            return path, InputError(f"{path}: {_reason(error, path)}")

    quiet = len(paths) <= batch_size  # tqdm's None: a bar if stderr is a terminal
    with (
        ThreadPoolExecutor() as pool,
        tqdm(total=len(paths), unit="image", leave=False, disable=quiet or None) as bar,
    ):
        for start in range(0, len(paths), batch_size):
            batch = list(pool.map(read, paths[start : start + batch_size]))
            yield batch
            bar.update(len(batch))


def say_skipped(path: Path, error: Exception) -> None:
    """Print on stderr, above any progress bar, why an image could not be read.

    Args:
        path: Image file.
        error: Error from :func:`read_images`; its message names the path.
    """
    tqdm.write(f"skipped: {error}", file=sys.stderr)
