"""Small pictures as data URIs: an encoder for 8-bit grey and colour PNG."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np


def encode(image: Any) -> bytes:
    """Return a PNG of grey values [h, w] or colours [h, w, 3] in 0..1; values outside are clipped.

    A single channel, [h, w, 1] or [1, h, w], is grey; [3, h, w] is taken as colours.
    """
    pixels = np.asarray(image, dtype=float)
    if pixels.ndim == 3 and pixels.shape[-1] not in (1, 3) and pixels.shape[0] in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    colour = pixels.ndim == 3 and pixels.shape[-1] == 3
    if not pixels.size or not (pixels.ndim == 2 or colour):
        raise ValueError(
            f"image has shape {list(np.shape(image))}; it must be [h, w] or [h, w, 3], with pixels"
        )
    levels = np.rint(np.nan_to_num(pixels).clip(0, 1) * 255).astype(np.uint8)
    height, width = levels.shape[:2]
    lines = levels.reshape(height, -1)
    raw = np.pad(lines, ((0, 0), (1, 0))).tobytes()  # filter 0 begins every line
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if colour else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def data_uri(image: Any) -> str:
    """Return the image as a `data:` address for an img element."""
    return "data:image/png;base64," + base64.b64encode(encode(image)).decode("ascii")


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
