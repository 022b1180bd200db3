"""The drawing code: scales, ticks, marks and pictures."""

import io
import math
import re
import struct
import xml.etree.ElementTree as ET
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpbnn.report import charts, png
from dpbnn.report.svg import Drawing, Scale, label, number, ticks

finite = st.floats(-1e9, 1e9)


@given(finite, st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_are_few_round_even_and_inside(low, width, count):
    high = low + width
    found = ticks(low, high, count)
    slack = 1e-6 * width + 1e-9 * max(abs(low), abs(high))
    assert len(found) <= count + 1
    assert all(low - slack <= t <= high + slack for t in found)
    gaps = np.diff(found)
    assert (gaps > 0).all()
    if width > 1e-4 * max(abs(low), 1) and len(found) > 1:
        step = gaps[0]
        assert np.allclose(gaps, step, rtol=1e-3)
        mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
        assert min(abs(mantissa - m) for m in (1, 2, 5, 10)) < 1e-2


def test_ticks_of_usual_axes():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(-3, 3, 6) == [-3, -2, -1, 0, 1, 2, 3]
    assert ticks(5, 5) == [5]
    with pytest.raises(ValueError, match="finite"):
        ticks(0, math.inf)


def test_scales_map_ends_to_ends_and_hold_values_inside():
    scale = Scale((0, 10), (100, 0))
    assert (scale(0), scale(5), scale(10), scale(-3), scale(12)) == (100, 50, 0, 100, 0)
    log = Scale((0.1, 10), (0, 100), log=True)
    assert log(1) == pytest.approx(50)
    assert log.ticks() == pytest.approx([0.1, 0.2, 0.5, 1, 2, 5, 10])
    assert Scale((1e-6, 1e6), (0, 1), log=True).ticks() == pytest.approx(
        [10.0**p for p in range(-6, 7)]
    )
    assert Scale((2, 2), (0, 100))(2) == 50


def test_numbers_and_labels_are_short():
    assert [number(v) for v in (0.04, -0.04, 12.0, 3.14159)] == ["0", "0", "12", "3.1"]
    assert [label(v) for v in (0, -2.5, 1e6, 2e-5)] == ["0", "−2.5", "1e6", "2e-5"]


def test_a_drawing_is_xml_whatever_the_words():
    drawing = Drawing(100, 50, 'a "title" <b>', "control \x00\x1b\ufffe \ud800 & done")
    drawing.text(1, 2, "<script>&\x07", "tick")
    drawing.rect(0, 0, -5, 3, "c1", "5 < 6 & more")
    drawing.line([(0, 0), (1, 1)], "grid")
    root = ET.fromstring(drawing.markup())
    assert root.find("title").text == 'a "title" <b>'
    assert root.find("text").text == "<script>&"
    assert root.find("rect").get("width") == "0"
    assert root.find("rect/title").text == "5 < 6 & more"


def positions(markup, role):
    root = ET.fromstring(markup)
    return [
        (float(c.get("cx")), float(c.get("cy")))
        for c in root.iter("circle")
        if role in c.get("class")
    ]


def test_reliability_points_are_where_the_numbers_say():
    markup = charts.reliability([0, 0.5, 1], [10, 30], [0.25, 1.0], [0.0, 0.5])
    (x0, y0), (x1, y1) = positions(markup, "mark")
    left, right = charts._LEFT, charts._RIGHT
    assert x0 == pytest.approx(left + 0.25 * (right - left), abs=0.1)
    assert x1 == right
    assert (y0, y1) == (272, 151)


def test_empty_bins_are_left_out():
    markup = charts.reliability([0, 0.5, 1], [0, 3], [math.nan, 0.8], [None, 1.0])
    assert len(positions(markup, "mark")) == 1
    assert "nan" not in markup


def test_wilson_intervals_are_the_closed_form():
    from scipy.stats import norm

    z = norm.ppf(0.975)
    for share, n in ((0.0, 5), (0.3, 10), (1.0, 400)):
        centre = (share * n + z * z / 2) / (n + z * z)
        half = z / (n + z * z) * math.sqrt(n * share * (1 - share) + z * z / 4)
        low, high = charts.wilson(share, n)
        assert low == pytest.approx(max(centre - half, 0), abs=1e-6)
        assert high == pytest.approx(min(centre + half, 1), abs=1e-6)
    assert charts.wilson(0.5, 0) == (0, 1)


def test_quartile_boxes_and_means_of_class_draws():
    draws = np.stack([np.linspace(0, 1, 101), np.linspace(1, 0, 101)], 1)
    root = ET.fromstring(charts.class_draws(draws, ["a", "b"], "a"))
    scale = None
    boxes = [r for r in root.iter("rect") if "box" in r.get("class")]
    assert len(boxes) == 2
    left = 14 + 6.6
    for box in boxes:
        scale = Scale((0, 1), (left, 290))
        assert float(box.get("x")) == pytest.approx(scale(0.25) - 0.5, abs=0.1)
        assert float(box.get("width")) == pytest.approx(scale(0.75) - scale(0.25) + 1, abs=0.1)
    strips = [p for p in root.iter("path") if "strip" in p.get("class")]
    assert [s.get("d").count("h0") for s in strips] == [100, 100]


def test_the_two_bands_are_posterior_and_posterior_with_noise():
    x = np.array([0.0, 1.0])
    markup = charts.band(x, x * 0, x * 0 + 3.0, x * 0 + 4.0, x_label="x", y_label="y")
    root = ET.fromstring(markup)
    heights = []
    for path in root.iter("path"):
        if "area" in path.get("class"):
            ys = [float(v) for v in re.findall(r"[ML][-\d.]+ ([-\d.]+)", path.get("d"))]
            heights.append(max(ys) - min(ys))
    wide, deep = heights
    assert deep / wide == pytest.approx(3 / 5, abs=0.01)


def test_a_constant_prediction_can_be_drawn():
    zero = np.zeros(3)
    for points in (None, (zero, zero)):
        ET.fromstring(charts.band(zero, zero, zero, zero, x_label="x", y_label="y", points=points))
    ET.fromstring(charts.real_draws(np.zeros(4), 0.0, 0.0))
    ET.fromstring(charts.metric_by_epsilon("m", {"a": [(1.0, 0.0, math.nan, math.nan)]}))
    ET.fromstring(charts.metric_by_epsilon("m", {"a": [(None, math.inf, 0, 0)], "b": []}))


def test_nearly_equal_epsilons_share_a_label():
    runs = {"a": [(0.9998, 0.7, 0.6, 0.8), (4.2, 0.8, 0.7, 0.9)], "b": [(0.999, 0.6, 0.5, 0.7)]}
    labels = re.findall(r">([^<]*)</text>", str(charts.metric_by_epsilon("m", runs)))
    assert [label for label in labels if label in ("0.999", "1", "4.2")] == ["1", "4.2"]
    ET.fromstring(charts.risk_coverage([1.0], [0.0], 0.0))
    ET.fromstring(charts.confidence_histogram([0, 1], [0]))
    ET.fromstring(charts.pit([0, 1], [0]))


def decoded(data):
    """Read back a PNG of filter-0 lines, with its checksums checked."""
    stream = io.BytesIO(data)
    assert stream.read(8) == b"\x89PNG\r\n\x1a\n"
    chunks = {}
    while header := stream.read(8):
        size, kind = struct.unpack(">I4s", header)
        content = stream.read(size)
        assert struct.unpack(">I", stream.read(4))[0] == zlib.crc32(kind + content)
        chunks[kind] = content
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert depth == 8
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
    assert not lines[:, 0].any()
    shape = (height, width, 3) if colour == 2 else (height, width)
    return lines[:, 1:].reshape(shape)


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (1, 1)])
def test_pictures_read_back(shape):
    image = np.random.default_rng(0).random(shape)
    np.testing.assert_array_equal(decoded(png.encode(image)), np.rint(image * 255))


def test_channels_first_single_channels_and_bad_values():
    image = np.random.default_rng(0).random((3, 5, 7))
    assert png.encode(image) == png.encode(image.transpose(1, 2, 0))
    assert png.encode(image[:1]) == png.encode(image[0])
    assert decoded(png.encode([[-1.0, 2.0, math.nan]])).tolist() == [[0, 255, 0]]
    with pytest.raises(ValueError, match=r"shape \[4\]"):
        png.encode([0, 0, 0, 0])
    assert png.data_uri([[0.5]]).startswith("data:image/png;base64,")


def test_other_readers_accept_the_pictures():
    image_library = pytest.importorskip("PIL.Image")
    image = np.random.default_rng(0).random((9, 4, 3))
    opened = np.asarray(image_library.open(io.BytesIO(png.encode(image))))
    np.testing.assert_array_equal(opened, np.rint(image * 255))
