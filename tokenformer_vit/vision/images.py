"""The one reader of images: what is an image file, which there are in a folder, what it shows."""

import os
import stat
import sys
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from timm.data import create_transform
from torch import Tensor
from tqdm import tqdm

from tokenformer_vit.command_line import printable
from tokenformer_vit.errors import InputError, one_line

__all__ = [
    "FORMATS",
    "IMAGE_SUFFIXES",
    "class_folders",
    "find_images",
    "read_image",
    "read_images",
    "say_left_out",
    "say_skipped",
    "scan_images",
]

# What is decoded, whatever a file is called, by Pillow's names. Other formats are rare, and one of
# them, EPS, starts an interpreter.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "JPEG2000")
# What is looked for in folders, in upper case as well.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".pbm", ".pnm"),
    *(".tif", ".tiff", ".webp", ".jp2"),
)
# A transform that resizes the shorter side to 256 makes 13 megapixels of such an image.
_MOST_ELONGATED = 200
_MOST_KINDS = 8  # of files left out that one line names

# Pillow's error at twice that size is the limit here; a warning below would disturb a training.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def read_image(path: str | Path) -> Image.Image:
    """Decode an image file.

    Args:
        path: Regular file, or a link to one, in one of the :data:`FORMATS`.

    Returns:
        The image in the mode RGB, turned upright as its EXIF orientation says. Of an animation or
        of several pages, it is the first. Transparency is dropped and the colours under it are
        kept, as timm and torchvision do by ``convert("RGB")``. Of 16 bits a value, the upper 8 are
        kept; of 12 bits, the upper 8 also.

    Raises:
        InputError: If the file cannot be decoded, has more than Pillow's limit of 179 megapixels,
            has a side more than 200 times the other, or has signed, 32-bit or float values, whose
            range nothing says. The message is one line that begins with the path.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a named pipe would be waited for
            raise InputError("it is no regular file")
        with open(path, "rb") as file:
            return _upright_rgb(Image.open(file, formats=FORMATS))
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged data
        raise InputError(f"{printable(os.fspath(path))}: {_reason(error, path)}") from error


def _upright_rgb(image: Image.Image) -> Image.Image:
    if max(image.size) > _MOST_ELONGATED * min(image.size):
        raise InputError(
            f"it has {image.width} x {image.height} pixels; no side may be more than "
            f"{_MOST_ELONGATED} times the other"
        )
    ImageOps.exif_transpose(image, in_place=True)  # also decodes
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        # Pillow's conversion would clip at 255. The upper byte is what it takes of 16-bit colours.
        (bits,) = getattr(image, "tag_v2", {}).get(258, (16,))  # TIFF's BitsPerSample
        return Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise InputError(
            f"nothing says which of its values is white (Pillow's mode {image.mode}); save it with "
            "8 bits, or 16 without a sign"
        )
    image.info.pop("transparency", None)  # of a palette; the conversion would warn of it
    return image.convert("RGB")


def _reason(error: Exception, path: str | Path) -> str:
    """Say in one line why an image cannot be read."""
    if isinstance(error, Image.DecompressionBombError):
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        return f"it has more than the {limit:.0f} megapixels that are read; make it smaller"
    if isinstance(error, UnidentifiedImageError):
        return f"it is no readable image ({', '.join(FORMATS)})"
    if isinstance(error, FileNotFoundError) and os.path.islink(path):
        return "it is a broken link"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error)


def scan_images(
    folder: str | Path, left_out: Counter[str], suffixes: Sequence[str] = IMAGE_SUFFIXES
) -> Iterator[os.DirEntry]:
    """Find the images of a folder at any depth by their suffix, as mmpretrain does.

    Args:
        folder: The folder; links to folders are followed.
        left_out: Counts what is no image, by kind. Hidden files do not count.
        suffixes: In lower case, with the dot.

    Yields:
        Images in the order of their names. They may be broken links, or no regular files.

    Raises:
        OSError: If a folder cannot be read, or contains itself by a link; ``filename`` names it.
    """
    with os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name)
    for entry in inside:
        if entry.is_dir():
            yield from scan_images(entry.path, left_out, suffixes)
        elif entry.name.startswith("."):
            continue
        elif entry.name.lower().endswith(tuple(suffixes)):
            yield entry
        else:
            left_out[_kind(entry)] += 1


def class_folders(folder: str | Path, left_out: Counter[str]) -> list[Path]:
    """List the folders in a folder, each of which holds the images of a class.

    Args:
        folder: The folder; links to folders are followed.
        left_out: Counts what stands beside the class folders. Hidden files do not count.

    Returns:
        The folders in the order of their names, which is that of the labels.

    Raises:
        OSError: If the folder cannot be read; ``filename`` names it.
    """
    folders = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                folders.append(Path(entry.path))
            elif entry.name.lower().endswith(IMAGE_SUFFIXES):
                left_out["in no class folder"] += 1
            elif not entry.name.startswith("."):
                left_out[_kind(entry)] += 1
    return folders


def _kind(entry: os.DirEntry) -> str:
    if not entry.is_file():
        return "broken link" if entry.is_symlink() else "no regular file"
    return os.path.splitext(entry.name)[1].lower() or "without a suffix"


def say_left_out(left_out: Counter[str], folder: str | Path) -> None:
    """Say in one line on stderr, once for all processes, what of a folder is not read."""
    if left_out and os.environ.get("RANK", "0") == "0":
        tqdm.write(f"left out: {_counts(left_out)} in {printable(str(folder))}", file=sys.stderr)


def _counts(left_out: Counter[str]) -> str:
    kinds = left_out.most_common()
    named = ", ".join(f"{count} {printable(kind)}" for kind, count in kinds[:_MOST_KINDS])
    more = sum(count for _, count in kinds[_MOST_KINDS:])
    return f"{named} and {more} more" if more else named


def find_images(paths: Sequence[Path]) -> list[Path]:
    """List the files among ``paths`` and the images in folders among them, at any depth.

    Args:
        paths: Files, taken whatever their suffix, and folders. What is left out of a folder is
            counted on stderr.

    Returns:
        Files in the order given, those of a folder sorted.

    Raises:
        InputError: If a path does not exist or a folder has no image.
        OSError: If a folder cannot be read; ``filename`` names it.
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
    """Read images as a model's evaluation does, with a bar if there is more than one batch.

    Args:
        paths: Image files.
        config: How to prepare them, as :func:`~tokenformer_vit.models.description.data_config`
            says.
        batch_size: Images at a time.

    Yields:
        The paths of a batch in order, each with its (3, H, W) image or with the error of
        :func:`read_image`.
    """
    transform: Any = create_transform(**config, is_training=False)

    def read(path: Path) -> tuple[Path, Tensor | InputError]:
        try:
            return path, transform(read_image(path))
        except InputError as error:
            return path, error
        except Exception as error:  # of the transform, such as a lack of memory
            return path, InputError(f"{printable(str(path))}: {_reason(error, path)}")

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
    """Name on stderr, above any bar, an image that could not be read, and why.

    Args:
        path: The image.
        error: Of :func:`read_images`; its message names the path.
    """
    tqdm.write(f"skipped: {error}", file=sys.stderr)
