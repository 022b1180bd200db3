"""The scattering layer: its shapes, its symmetries, and one map against a direct sum."""

import math

import pytest
import torch
from torch import nn

import dpbnn
from dpbnn.networks import Scattering


def images(n=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(n, 1, 28, 28)
    x[..., 9:19, 9:19] = torch.rand(n, 1, 10, 10, generator=generator)
    return x


def plain(**settings):
    return Scattering(groups=0, **settings)


def test_the_papers_shape_and_no_parameters():
    layer = Scattering()
    assert layer(images()).shape == (3, 81, 8, 8)
    assert layer(images().expand(3, 2, 28, 28)).shape == (3, 162, 8, 8)
    assert layer(images()[:, None].expand(3, 5, 1, 28, 28)).shape == (3, 5, 81, 8, 8)
    assert not list(layer.parameters())
    assert list(layer.state_dict()) == ["filters"]


def test_an_image_stands_alone():
    layer, x = Scattering(), images()
    torch.testing.assert_close(layer(x)[1:2], layer(x[1:2]), rtol=1e-4, atol=1e-5)


def test_maps_of_an_order_match_a_direct_sum():
    """S1 of one wavelet, computed by the definition in space, in float64."""
    layer, x = plain(), images(1)
    j, k, size = 1, 3, layer.padded
    sigma, angle, frequency = 0.8 * 2**j, math.pi * k / 8, 0.75 * math.pi / 2**j
    place = torch.arange(-2 * size, 2 * size, dtype=torch.float64)
    rows, columns = place[:, None], place[None, :]
    along = math.cos(angle) * rows + math.sin(angle) * columns
    across = -math.sin(angle) * rows + math.cos(angle) * columns
    weight = torch.exp(-(along**2 + (0.5 * across) ** 2) / (2 * sigma**2))
    weight *= 0.5 / (2 * math.pi * sigma**2)
    wave = torch.polar(weight, frequency * along)
    wavelet = wave - wave.sum() / weight.sum() * weight
    low = torch.exp(-(rows**2 + columns**2) / (2 * 1.6**2)) / (2 * math.pi * 1.6**2)
    padded = torch.nn.functional.pad(x[0, 0].double(), (2, 2, 2, 2))

    def convolved(image, kernel):
        out = torch.zeros(size, size, dtype=kernel.dtype)
        for r, c in image.nonzero():
            out += (
                image[r, c]
                * kernel.roll((int(r), int(c)), (0, 1))[2 * size : 3 * size, 2 * size : 3 * size]
            )
        return out

    smooth = convolved(convolved(padded, wavelet).abs(), low)[::4, ::4]
    found = layer(x)[0, 1 + j * 8 + k].double()
    inner = slice(1, -1)  # at the edges the layer wraps around, which changes 1e-3 of the largest
    torch.testing.assert_close(
        found[inner, inner], smooth[inner, inner], rtol=1e-2, atol=1e-3 * float(smooth.max())
    )


def test_a_shift_by_four_pixels_is_a_shift_of_the_maps():
    layer, x = plain(), images()
    moved = layer(x.roll(4, -1))
    torch.testing.assert_close(moved, layer(x).roll(1, -1), rtol=1e-4, atol=1e-6)


def test_a_quarter_turn_turns_the_angles():
    """Sums of the maps of order one: angle k of the turned image is angle k + 4 of the image."""
    layer, x = plain(), images(1)
    turned, straight = (
        layer(v)[0, 1:17].unflatten(0, (2, 8)).sum((-2, -1)) for v in (x.rot90(1, (-2, -1)), x)
    )
    torch.testing.assert_close(turned, straight.roll(4, 1), rtol=1.5e-2, atol=0)
    assert not torch.allclose(turned, straight, rtol=5e-2)


def test_it_does_not_expand_distances():
    layer, x = plain(), images(20)
    out = layer(x).flatten(1)
    assert (torch.pdist(out) <= torch.pdist(x.flatten(1))).all()


def test_groups_are_normalised_within_an_image():
    groups = Scattering()(images()).reshape(3, 27, -1)
    torch.testing.assert_close(groups.mean(-1), torch.zeros(3, 27), atol=1e-4, rtol=0)
    assert (groups.var(-1, correction=0) < 1.001).all()


@pytest.mark.parametrize(
    "settings", [{"size": 1}, {"scales": 0}, {"angles": 0}, {"groups": 2}, {"groups": -1}]
)
def test_bad_settings_say_so(settings):
    with pytest.raises(ValueError, match="must"):
        Scattering(**settings)


def test_wrong_images_say_so():
    with pytest.raises(ValueError, match=r"must end in \[channels, 28, 28\]"):
        Scattering()(torch.zeros(2, 1, 32, 32))


def test_a_private_network_with_it_is_trained_saved_and_loaded(tmp_path):
    x, y = images(40), torch.arange(40) % 10
    plan = dpbnn.plan(noise_multiplier=1.0, delta=1e-5, n=40, batch_size=10, steps=3)
    make = lambda: nn.Sequential(Scattering(), nn.Flatten(), nn.Linear(5184, 10))  # noqa: E731
    posterior = dpbnn.fit(make, (x, y), method=dpbnn.SGLD(learning_rate=1e-4), plan=plan)
    posterior.save(tmp_path / "run")
    again = dpbnn.load(tmp_path / "run")
    first, second = (p.predict(x[:4], seed=0).mean for p in (posterior, again))
    torch.testing.assert_close(first, second)
