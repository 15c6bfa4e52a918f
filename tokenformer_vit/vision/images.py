"""Find and read image files. All commands and the training use this reader."""

import io
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, features
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from tokenformer_vit.errors import InputError, one_line

try:
    import simplejpeg  # pyright: ignore[reportMissingImports]
except ImportError:  # Pillow reads the same pixels in 1.4 times the time
    simplejpeg = None

# What is decoded, by Pillow's names, whatever the suffix. EPS, for one, would start an interpreter.
FORMATS = ["JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP", "JPEG2000"]
_SUFFIXES = ".jpg .jpeg .jpe .jfif .png .bmp .gif .ppm .pgm .pbm .pnm .tif .tiff .webp .jp2"
FORMATS += ["AVIF"] if features.check("avif") else []
IMAGE_SUFFIXES = (*_SUFFIXES.split(), *([".avif"] if features.check("avif") else []))


@contextmanager
def opened(path: str | Path, content: bytes | None = None) -> Iterator[Image.Image]:
    """Open an image file, or its ``content``; every error becomes one line that names ``path``."""
    try:
        if content is None and not os.path.isfile(path):  # a named pipe would be waited for
            raise InputError("no such file, a broken link, or no regular file")
        # From a path, Pillow would map the file, and then not turn a TIFF.
        with open(path, "rb") if content is None else io.BytesIO(content) as file:
            yield Image.open(file, formats=FORMATS)
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged data
        raise InputError(f"{path}: {one_line(error)}") from error


def read_image(path: str | Path, content: bytes | None = None, mode: str = "RGB") -> Image.Image:
    """Decode an image, of which ``content`` may be in memory, in RGB and upright by its EXIF data.

    An animation, or a TIFF of several pages, gives its first image. Transparency is dropped and the
    colours under it are kept, as timm does. Values of 16 or 12 bits keep their upper 8 bits. With
    ``mode`` "L", the image is grey.
    """
    with opened(path, content) as image:
        if max(image.size) > 200 * min(image.size):  # resized, it could fill the memory
            raise InputError(f"{image.width} × {image.height} pixels are no photograph")
        ImageOps.exif_transpose(image, in_place=True)  # also decodes
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
            # Pillow's conversion would clip at 255. For 16-bit colours it takes the upper byte.
            (bits,) = getattr(image, "tag_v2", {}).get(258, (16,))  # TIFF's BitsPerSample
            image = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise InputError(f"values of mode {image.mode} have an unknown range: save 8 bits")
        image.info.pop("transparency", None)  # of a palette; the conversion would warn about it
        image = image.convert("RGB")
        return image if mode == "RGB" else image.convert(mode)


def read_pixels(path: str | Path, content: bytes | None = None) -> np.ndarray:
    """Return the image of :func:`read_image`, (H, W, 3) uint8; it is faster for common JPEGs."""
    with suppress(Exception):  # Pillow says what is wrong with a file, if anything
        if content is None and os.path.isfile(path):
            content = Path(path).read_bytes()
        if simplejpeg is not None and content is not None and content.startswith(b"\xff\xd8"):
            with opened(path, content) as image:
                upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
            if upright and image.format == "JPEG" and image.mode in ("RGB", "L"):
                return simplejpeg.decode_jpeg(content, "RGB")  # raises if the file is truncated
    return np.array(read_image(path, content))


def is_hidden(name: str) -> bool:
    """Tell whether a folder is one of thumbnails and the like, which people do not see."""
    return name.startswith(".") or name in ("@eaDir", "#recycle", "__MACOSX", "lost+found")


def images_in(folder: str | Path) -> list[str]:
    """List the images in a folder, at any depth, by their suffix; count the rest on stderr."""
    images, left_out = [], Counter()

    def fail(error: OSError) -> None:
        raise error

    for root, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        here = Path(root).resolve()
        kept = [name for name in sorted(folders) if not is_hidden(name)]
        left_out["hidden or system folders"] += len(folders) - len(kept)
        # A link to a folder above would be followed until its path is too long.
        folders[:] = [n for n in kept if not here.is_relative_to(Path(root, n).resolve())]
        for name in sorted(name for name in files if not name.startswith(".")):
            if name.lower().endswith(IMAGE_SUFFIXES):
                images.append(os.path.join(root, name))
            else:
                suffix = os.path.splitext(name)[1].lower() or "without a suffix"
                left_out[suffix + " (save as JPEG)" * (suffix in (".heic", ".heif"))] += 1
    counts = ", ".join(f"{count} {kind}" for kind, count in left_out.most_common(8) if count)
    if not images:
        raise InputError(f"there is no image in {folder}, but {counts or 'nothing'}")
    if counts and os.environ.get("RANK", "0") == "0":
        print(f"left out: {counts} in {folder}", file=sys.stderr)
    return images


def list_images(paths: Sequence[str | Path]) -> list[str]:
    """List files, whatever their suffix, and the images in folders."""
    if missing := [str(path) for path in paths if not os.path.lexists(path)]:
        raise InputError(f"there is no file or folder {', '.join(missing)}")
    found = [images_in(path) if os.path.isdir(path) else [str(path)] for path in paths]
    return [image for images in found for image in images]


Batch = tuple[list[tuple[Path, InputError | None]], Tensor]


def _read_batch(transform: Any, mode: str, samples: Sequence[Any]) -> Batch:
    """Read images in a process of a data loader; as one tensor they are one open file, not many."""
    found, images = [], []
    for sample in samples:
        file = sample if isinstance(sample, dict) else {"img_path": sample}
        try:
            images.append(transform(read_image(file["img_path"], file.get("img_bytes"), mode)))
            found.append((Path(file["img_path"]), None))
        except InputError as error:
            found.append((Path(file["img_path"]), error))
    return found, torch.stack(images) if images else torch.empty(0)


def read_images(samples: Sequence[Any], config: dict[str, Any], batch_size: int) -> Iterator[Batch]:
    """Yield the paths of a batch, each with the error of reading it or None, and the images read.

    Other processes read the next batches meanwhile. ``samples`` are paths or ``LabelledImages``,
    ``config`` is timm's data config, whose first input size is the number of channels.
    """
    channels, transform = config["input_size"][0], create_transform(**config, is_training=False)
    if channels not in (1, 3):
        raise InputError(f"the model takes {channels} channels, but images are read as grey or RGB")
    workers = min(8, os.cpu_count() or 1) if len(samples) > batch_size else 0
    read: Any = partial(_read_batch, transform, "L" if channels == 1 else "RGB")
    loader = DataLoader(samples, batch_size, num_workers=workers, collate_fn=read)  # type: ignore
    with tqdm(total=len(samples), unit="image", leave=False, disable=not workers or None) as bar:
        for batch in loader:
            yield batch
            bar.update(len(batch[0]))


def check_images(folder: Path) -> bool:
    """Print which images of a folder cannot be read or have several pages; return if any cannot."""
    bad, read = 0, read_images(list_images([folder]), {"input_size": (3, 1, 1)}, batch_size=32)
    for path, error in (each for found, _ in read for each in found):
        if error:
            bad += 1
            print(f"unreadable: {error}")
        elif path.suffix.lower() in (".tif", ".tiff"):
            with opened(path) as tiff:
                if getattr(tiff, "n_frames", 1) > 1:
                    print(f"of several pages, the first is used: {path}")
    print(f"{bad} are unreadable")
    return bad > 0
