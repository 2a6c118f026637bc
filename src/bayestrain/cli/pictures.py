"""Picture files of any size and mode, made into what a network was trained on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from bayestrain.errors import DataError

BRIGHT = 127


@dataclass(frozen=True)
class Picture:
    """A picture ready for the network: uint8 (C, H, W), whether it was inverted, and what else was done to it."""

    path: Path
    pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
    inverted: bool
    changes: tuple[str, ...]


def read_picture(path: Path, shape: tuple[int, int, int], invert: bool | None) -> Picture:
    """Read a picture file and bring it to `shape` (C, H, W).

    Args:
        path: any format Pillow reads.
        shape: of the network's images; 1 channel is gray, 3 are red, green and blue.
        invert: swap dark and bright, or not; None decides for gray networks, which were trained on bright things on
            black: a picture whose edge is bright is inverted, unless it has the network's size, as theirs had, and
            nothing transparent. `Picture.inverted` says so.
    """
    channels, height, width = shape
    mode = "L" if channels == 1 else "RGB"
    image = _opened(path)
    if image.mode == "F" and not np.isfinite(np.asarray(image)).all():
        raise DataError(f"{path} has pixels that are no finite numbers. Give them a value first.")
    changes = []
    if image.mode != mode:
        changes.append(f"{image.mode} to {mode}")
    transparent = image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema() != (255, 255)
    if transparent:
        changes.append("transparent to white")
    ready = image.size == (width, height)
    image = _plain(image, mode)
    if invert is None:
        own = ready and not transparent
        invert = channels == 1 and not own and int(np.median(_edge(image))) > BRIGHT
    if not ready:
        changes.insert(0, f"{image.width}x{image.height} to {width}x{height}")
        background = tuple(int(level) for level in np.median(_edge(image), axis=0))
        image = ImageOps.pad(image, (width, height), Image.Resampling.LANCZOS, color=background)
    if invert:
        image = ImageOps.invert(image)
    pixels = np.asarray(image, dtype=np.uint8).reshape(height, width, channels)
    return Picture(path, pixels.transpose(2, 0, 1).copy(), bool(invert), tuple(changes))


def _opened(path: Path) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                image.load()
                return ImageOps.exif_transpose(image)
    except UnidentifiedImageError:
        raise DataError(f"{path} is no image, or of a kind that Pillow cannot read.") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DataError(f"{path} is an image of far too many pixels. Make it smaller first.") from None
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"{path} cannot be read as an image: {why}.") from None
    except (ValueError, SyntaxError) as error:  # Pillow raises these for damaged files
        raise DataError(f"{path} is a damaged image: {error}.") from None


def _plain(image: Image.Image, mode: str) -> Image.Image:
    """`image` in 8 bits; what is transparent lies on white, as viewers show it."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        levels = np.asarray(image, dtype=np.float64)
        top = next(top for top in (1.0, 255.0, 65535.0, float("inf")) if levels.max(initial=0.0) <= top)
        if top == 1.0 and image.mode != "F":
            top = 255.0 if image.mode == "I" else 65535.0
        if image.mode.startswith("I;16"):
            top = 65535.0
        scaled = (levels / (levels.max() if top == float("inf") else top)).clip(0.0, 1.0)
        image = Image.fromarray((scaled * 255).round().astype(np.uint8))
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return image if image.mode == mode else image.convert("RGB").convert(mode)


def _edge(image: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The pixels along the four sides, (n, channels)."""
    pixels = np.asarray(image).reshape(image.height, image.width, -1)
    return np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
