"""Picture files of any size and mode, converted to the images a network was trained on."""

import logging
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from bayestrain.errors import DataError

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "AVIF")
"""Formats that are opened, whatever the file is called. Others of Pillow's run programs (EPS starts Ghostscript)."""

logging.getLogger("PIL").addHandler(logging.NullHandler())  # the error that is raised is enough


def read_picture(path: Path, shape: tuple[int, ...], invert: bool | None = None) -> tuple[NDArray[np.uint8], list[str]]:
    """Read a picture file as uint8 `shape`, (C, H, W); 1 channel is grey, 3 are red, green and blue. Also what changed.

    `invert` swaps dark and bright. None does so for grey networks, which expect bright things on black, if the edge is
    bright, unless the picture has the size of the network's images and nothing transparent.
    """
    channels, height, width = shape
    mode = "L" if channels == 1 else "RGB"
    image = _open(path)
    if image.mode == "F" and not np.isfinite(np.asarray(image)).all():
        raise DataError(f"{path} has pixels that are not finite numbers. Give them a value first.")
    changes = [] if image.mode == mode else [f"{image.mode} to {mode}"]
    transparent = image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema() != (255, 255)
    if transparent:
        changes.append("transparent to white")
    fits = image.size == (width, height)
    image = _eight_bits(image, mode)
    pixels = np.asarray(image).reshape(image.height, image.width, -1)
    edge = np.median(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]), axis=0)
    if invert is None:
        invert = channels == 1 and (transparent or not fits) and edge[0] > 127
    if not fits:
        changes.insert(0, f"{image.width}x{image.height} to {width}x{height}")
        background = tuple(int(level) for level in edge)
        image = ImageOps.pad(image, (width, height), Image.Resampling.LANCZOS, color=background)
    if invert:
        image = ImageOps.invert(image)
        changes.append("inverted")
    return np.array(image, dtype=np.uint8).reshape(height, width, channels).transpose(2, 0, 1).copy(), changes


def _open(path: Path) -> Image.Image:
    Image.init()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as odd EXIF data
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=[name for name in FORMATS if name in Image.OPEN]) as image:
                return ImageOps.exif_transpose(image)
    except Exception as error:  # Pillow raises anything on damage
        reason = f"{getattr(error, 'strerror', None) or error}. Formats: {', '.join(FORMATS)}."
        raise DataError(f"{path} cannot be read as an image: {reason}") from None


def _eight_bits(image: Image.Image, mode: str) -> Image.Image:
    """`image` with 8 bits a channel, on white where it is transparent, as viewers show it."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        levels = np.asarray(image, dtype=np.float64)
        tops = (65535.0,) if image.mode.startswith("I;16") else (1.0, 255.0, 65535.0)[image.mode == "I" :]
        top = next((top for top in tops if levels.max(initial=0.0) <= top), levels.max(initial=0.0))
        image = Image.fromarray(((levels / top).clip(0.0, 1.0) * 255).round().astype(np.uint8))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image if image.mode == mode else image.convert("RGB").convert(mode)
