"""Scattering: features of images by fixed wavelets, which have seen no data.

Reference: Bruna and Mallat, Invariant scattering convolution networks, 2013; Tramer and Boneh,
Differentially private learning needs better features, 2021, for its use under privacy.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbnn.networks.layers import attributes, register

__all__ = ["Scattering"]


class Scattering(nn.Module):
    """The scattering transform of two layers, normalised by groups of channels per image.

    With a low pass phi of scale 2^J, and Morlet wavelets psi of J scales and L angles,

        S0 = x * phi,    S1 = |x * psi_1| * phi,    S2 = ||x * psi_1| * psi_2| * phi,  j_2 > j_1,

    each taken at every 2^J-th pixel: 1 + J L + L^2 J (J - 1)/2 maps a channel. By default these are
    81 maps of 8 x 8 for an image of 28 x 28, padded to 32 x 32. Then every group of maps is shifted
    and scaled to mean 0 and variance 1 within its image. There are no parameters, and an image's
    features depend on that image alone, so that the layer costs no privacy.

    Args:
        size: height and width of the images.
        scales: J.
        angles: L.
        groups: groups of maps a channel that are normalised; 0 leaves the maps as they are.
    """

    filters: Tensor

    def __init__(self, size: int = 28, scales: int = 2, angles: int = 8, groups: int = 27) -> None:
        super().__init__()
        if size < 2 or scales < 1 or angles < 1 or groups < 0:
            raise ValueError(
                f"size={size}, scales={scales}, angles={angles}, groups={groups}: must be at least "
                f"2, 1, 1 and 0"
            )
        self.size, self.scales, self.angles, self.groups = size, scales, angles, groups
        self.maps = 1 + scales * angles + angles**2 * scales * (scales - 1) // 2
        if groups and self.maps % groups:
            raise ValueError(f"groups={groups}: must divide the number of maps, {self.maps}")
        step = 2**scales
        self.padded = step * math.ceil((size + step) / step)
        bands = [
            _wavelet(self.padded, 0.8 * 2**j, math.pi * k / angles, 0.75 * math.pi / 2**j)
            for j in range(scales)
            for k in range(angles)
        ]
        low = _gaussian(self.padded, 0.8 * 2 ** (scales - 1))
        self.register_buffer("filters", torch.stack([low, *bands]).float())

    def forward(self, x: Tensor) -> Tensor:
        """Return maps [..., channels * maps, h, w] of images [..., channels, size, size]."""
        if x.shape[-1] != self.size or x.shape[-2] != self.size or x.dim() < 3:
            raise ValueError(
                f"images of shape {list(x.shape)}: must end in [channels, {self.size}, {self.size}]"
            )
        before = (self.padded - self.size) // 2
        after = self.padded - self.size - before
        flat = F.pad(x.reshape(-1, self.size, self.size), (before, after, before, after))
        spectrum = torch.fft.fft2(flat)
        found = [self._smooth(spectrum).unsqueeze(1)]
        first = torch.fft.fft2(self._moduli(spectrum, self.filters[1:]))
        found.append(self._smooth(first))
        for j in range(self.scales - 1):
            own = first[:, j * self.angles : (j + 1) * self.angles].flatten(0, 1)
            second = self._moduli(own, self.filters[1 + (j + 1) * self.angles :])
            maps = self._smooth(torch.fft.fft2(second))
            found.append(maps.unflatten(0, (len(flat), -1)).flatten(1, 2))
        maps = torch.cat(found, 1)
        maps = maps.reshape(-1, x.shape[-3] * self.maps, *maps.shape[-2:])
        if self.groups:
            maps = F.group_norm(maps, self.groups * x.shape[-3])
        return maps.reshape(*x.shape[:-3], *maps.shape[-3:])

    def _moduli(self, spectrum: Tensor, bands: Tensor) -> Tensor:
        """Return |x * psi| for all bands, [images, bands, padded, padded]."""
        return torch.fft.ifft2(spectrum.unsqueeze(1) * bands).abs()

    def _smooth(self, spectrum: Tensor) -> Tensor:
        """Return x * phi at every 2^J-th pixel: the spectrum is folded, which subsamples."""
        step = 2**self.scales
        few = self.padded // step
        folded = (spectrum * self.filters[0]).unflatten(-1, (step, few)).mean(-2)
        folded = folded.unflatten(-2, (step, few)).mean(-3)
        return torch.fft.ifft2(folded).real


def _grid(size: int) -> tuple[Tensor, Tensor]:
    """Return rows and columns of a periodic grid about 0, with copies for the wrapped tails."""
    place = torch.arange(size, dtype=torch.float64)
    tiled = torch.stack([place + size * copy for copy in range(-2, 3)])
    return tiled[:, None, :, None], tiled[None, :, None, :]


def _envelope(size: int, sigma: float, angle: float, slant: float, frequency: float) -> Tensor:
    """Return a wrapped Gabor function, a Gaussian times exp(i frequency u) along its angle."""
    rows, columns = _grid(size)
    along = math.cos(angle) * rows + math.sin(angle) * columns
    across = -math.sin(angle) * rows + math.cos(angle) * columns
    weight = torch.exp(-(along.square() + (slant * across).square()) / (2 * sigma**2))
    wave = torch.polar(weight, frequency * along)
    return wave.sum((0, 1)) * slant / (2 * math.pi * sigma**2)


def _wavelet(size: int, sigma: float, angle: float, frequency: float) -> Tensor:
    """Return the spectrum of a Morlet wavelet: a Gabor function less what gives it a mean."""
    wave = _envelope(size, sigma, angle, 0.5, frequency)
    plain = _envelope(size, sigma, angle, 0.5, 0.0)
    return torch.fft.fft2(wave - wave.sum() / plain.sum() * plain).real


def _gaussian(size: int, sigma: float) -> Tensor:
    """Return the spectrum of a Gaussian low pass."""
    return torch.fft.fft2(_envelope(size, sigma, 0.0, 1.0, 0.0)).real


register(Scattering, saved=attributes("size", "scales", "angles", "groups"))
