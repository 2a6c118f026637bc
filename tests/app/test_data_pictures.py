"""Pictures of any size and mode are converted to what the network was trained on, and damaged ones are refused."""

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from bayestrain.app.data.pictures import read_picture
from bayestrain.errors import DataError

GRAY, COLOUR = (1, 28, 28), (3, 32, 32)


@pytest.fixture
def digit() -> Image.Image:
    """A white stroke on black, 28x28."""
    pixels = np.zeros((28, 28), dtype=np.uint8)
    pixels[4:24, 12:16] = 255
    pixels[4:8, 6:16] = 200
    return Image.fromarray(pixels)


def test_what_is_of_the_right_kind_is_taken_as_it_is_and_a_scan_made_so(digit: Image.Image, tmp_path: Path) -> None:
    digit.save(tmp_path / "a.png")
    pixels, changes = read_picture(tmp_path / "a.png", GRAY)
    assert (pixels[0] == np.asarray(digit)).all()
    assert (pixels.dtype, changes) == (np.uint8, [])
    ImageOps.invert(digit).save(tmp_path / "b.png")  # bright edge, but the network's own size: not touched
    assert "inverted" not in read_picture(tmp_path / "b.png", GRAY)[1]
    ImageOps.invert(digit).resize((280, 280), Image.Resampling.NEAREST).convert("RGB").save(tmp_path / "scan.png")
    pixels, changes = read_picture(tmp_path / "scan.png", GRAY)
    assert changes == ["280x280 to 28x28", "RGB to L", "inverted"]
    assert np.abs(pixels[0] - np.asarray(digit).astype(int)).mean() < 5
    kept, unchanged = read_picture(tmp_path / "scan.png", GRAY, False)
    assert "inverted" not in unchanged
    assert (kept == 255 - pixels).all()
    assert "inverted" not in read_picture(tmp_path / "scan.png", COLOUR)[1]  # photographs are taken as they are


@pytest.mark.parametrize(("mode", "name"), [
    ("1", "a.png"), ("L", "a.bmp"), ("LA", "a.png"), ("P", "a.gif"), ("RGB", "a.jpg"), ("RGBA", "a.webp"),
    ("CMYK", "a.jpg"), ("YCbCr", "a.jpg"), ("I;16", "a.png"), ("I", "a.tiff"), ("F", "a.tiff"),
])  # fmt: skip
@pytest.mark.parametrize("shape", [GRAY, COLOUR])
def test_every_mode_gives_the_same_picture(
    digit: Image.Image, mode: str, name: str, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    size = (shape[2], shape[1])
    digit = digit.resize(size, Image.Resampling.NEAREST)
    levels = np.asarray(digit)
    if mode == "I;16":
        image = Image.fromarray(levels.astype(np.uint16) * 257)
    elif mode == "F":
        image = Image.fromarray(levels.astype(np.float32) / 255)
    else:
        image = Image.fromarray(levels.astype(np.int32)) if mode == "I" else digit.convert(mode)
    image.save(tmp_path / name)
    pixels, changes = read_picture(tmp_path / name, shape)
    assert pixels.shape == shape
    expected = np.broadcast_to(np.asarray(digit), shape).astype(int)
    lossy = name.endswith(("jpg", "webp")) or mode == "1"
    assert np.abs(pixels - expected).mean() < (20 if lossy else 1)


@pytest.mark.parametrize("level", [np.nan, np.inf])
def test_pixels_that_are_no_numbers_are_refused(level: float, tmp_path: Path) -> None:
    levels = np.zeros((28, 28), dtype=np.float32)
    levels[3, 4] = level
    Image.fromarray(levels).save(tmp_path / "a.tiff")
    with pytest.raises(DataError, match=r"a\.tiff has pixels that are not finite numbers"):
        read_picture(tmp_path / "a.tiff", GRAY)


def test_proportions_are_kept_and_a_photograph_on_its_side_is_turned(tmp_path: Path) -> None:
    wide = Image.new("L", (200, 50), 30)
    wide.paste(255, (90, 20, 110, 30))
    wide.save(tmp_path / "wide.png")
    pixels = read_picture(tmp_path / "wide.png", GRAY)[0][0]
    assert (pixels[:8] == 30).all()
    assert (pixels[-8:] == 30).all()
    assert pixels.max() > 200
    image = Image.new("RGB", (32, 32))
    image.paste((255, 255, 255), (0, 0, 32, 8))  # bright above
    exif = Image.Exif()
    exif[0x0112] = 3  # taken upside down
    image.save(tmp_path / "a.png", exif=exif)
    assert read_picture(tmp_path / "a.png", COLOUR)[0][:, -1].min() == 255


def test_what_is_transparent_becomes_white(digit: Image.Image, tmp_path: Path) -> None:
    ink = Image.new("LA", digit.size, 0)
    ink.putalpha(digit)
    for size, resized in (((28, 28), []), ((100, 100), ["100x100 to 28x28"])):
        ink.resize(size).save(tmp_path / "a.png")
        pixels, changes = read_picture(tmp_path / "a.png", GRAY)
        assert changes == [*resized, "LA to L", "transparent to white", "inverted"]
        assert np.abs(pixels[0].astype(int) - np.asarray(digit).astype(int)).mean() < 8
    seven = Image.new("L", (28, 28), 0)
    seven.paste(255, (8, 6, 20, 9))
    seven.save(tmp_path / "seven.png", transparency=0)
    assert read_picture(tmp_path / "seven.png", GRAY)[1] == ["transparent to white", "inverted"]
    seven.convert("RGBA").save(tmp_path / "opaque.png")
    assert read_picture(tmp_path / "opaque.png", GRAY)[1] == ["RGBA to L"]


@pytest.mark.parametrize("damage", ["text", "empty", "truncated", "folder", "missing"])
def test_a_file_that_is_not_an_image_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    if damage == "folder":
        path.mkdir()
    elif damage == "truncated":
        Image.effect_noise((64, 64), 50).save(path)
        path.write_bytes(path.read_bytes()[:500])
    elif damage != "missing":
        path.write_text("no image" if damage == "text" else "")
    with pytest.raises(DataError, match=r"a\.png cannot be read as an image: "):
        read_picture(path, GRAY)


@pytest.mark.parametrize("name", ["a.avif", "a.webp", "a.png", "a.tiff", "a.gif", "a.jpg"])
def test_damaged_images_of_every_format_are_a_data_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    Image.effect_noise((64, 64), 50).convert("RGB").save(path)
    whole = path.read_bytes()
    draw = random.Random(0)
    read = 0
    for i in range(60):
        damaged = bytearray(whole[: draw.randrange(len(whole))] if i % 2 else whole)
        for _ in range(0 if i % 2 else 20):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(DataError):
            read_picture(path, GRAY)
            read += 1
    assert read < 40


def test_postscript_and_too_many_pixels_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow opens an EPS file of any name by running `gs`; the one here leaves a file behind when it is run."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path = tmp_path / "a.png"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(DataError, match=r"a\.png cannot be read as an image: .* Formats: PNG, JPEG"):
        read_picture(path, GRAY)
    assert not (tmp_path / "started").exists()
    Image.new("L", (64, 64)).save(tmp_path / "a.png")
    for limit in (100, 3_000):  # Pillow's error for twice its limit, and its warning below
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(DataError, match="exceeds limit"):
            read_picture(tmp_path / "a.png", GRAY)
