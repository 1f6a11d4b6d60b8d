import math

import pytest
import torch
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from helpers.augmentation import augment


def parameters(generator_seed, n, degrees, shift):
    """What `augment` draws: angles in degrees, shifts in pixels."""
    rand = torch.rand(3, n, generator=torch.Generator().manual_seed(generator_seed)) * 2 - 1
    return (rand[0] * degrees).tolist(), (rand[1] * shift).tolist(), (rand[2] * shift).tolist()


@pytest.mark.parametrize("shape", [(4, 1, 28, 28), (3, 2, 21, 21), (2, 1, 20, 30)])
def test_agrees_with_the_definition(shape):
    y, x = (torch.linspace(-1, 1, s) for s in shape[2:])
    blob = torch.exp(-8 * ((x[None] - 0.1) ** 2 + (y[:, None] + 0.2) ** 2))
    images = blob.expand(shape).contiguous()
    got = augment(images, torch.Generator().manual_seed(5), degrees=30, shift=2)
    angles, dx, dy = parameters(5, shape[0], 30, 2)
    for i, image in enumerate(images):
        want = rotate_shift(image, math.radians(angles[i]), dx[i], dy[i])
        assert torch.allclose(got[i], want, atol=1e-5)


def rotate_shift(image, angle, dx, dy):
    """The specification, pixel by pixel in float64: rotate about the center, then look up."""
    channels, height, width = image.shape
    out = torch.zeros_like(image)
    cos, sin = math.cos(angle), math.sin(angle)
    for r in range(height):
        for c in range(width):
            y, x = r - (height - 1) / 2, c - (width - 1) / 2
            sx = cos * x + sin * y + dx + (width - 1) / 2
            sy = -sin * x + cos * y + dy + (height - 1) / 2
            x0, y0 = math.floor(sx), math.floor(sy)
            for yy, wy in ((y0, y0 + 1 - sy), (y0 + 1, sy - y0)):
                for xx, wx in ((x0, x0 + 1 - sx), (x0 + 1, sx - x0)):
                    pixel = image[:, min(max(yy, 0), height - 1), min(max(xx, 0), width - 1)]
                    out[:, r, c] += wx * wy * pixel
    return out


def test_rotation_agrees_with_torchvision():
    y, x = torch.linspace(-1, 1, 28), torch.linspace(-1, 1, 28)
    image = torch.exp(-25 * ((x[None] - 0.2) ** 2 + (y[:, None] + 0.1) ** 2))[None]
    got = augment(image[None], torch.Generator().manual_seed(1), degrees=40, shift=0)
    (angle,), _, _ = parameters(1, 1, 40, 0)
    want = tv.rotate(image, -angle, interpolation=InterpolationMode.BILINEAR)
    assert torch.allclose(got[0], want, atol=1e-4)


def test_nothing_moves_without_range():
    images = torch.rand(3, 1, 28, 28)
    got = augment(images, torch.Generator().manual_seed(0), degrees=0, shift=0)
    assert torch.allclose(got, images, atol=1e-5)


def test_repeats_with_its_generator_and_leaves_its_input():
    images = torch.rand(5, 1, 28, 28)
    before = images.clone()
    a, b = (augment(images, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(a, b) and torch.equal(images, before)


def test_empty_and_non_contiguous():
    assert augment(torch.rand(0, 1, 28, 28), torch.Generator()).shape == (0, 1, 28, 28)
    images = torch.rand(28, 28, 1, 4).permute(3, 2, 0, 1)
    a = augment(images, torch.Generator().manual_seed(0))
    b = augment(images.contiguous(), torch.Generator().manual_seed(0))
    assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [torch.zeros(3, 28, 28), torch.zeros(2, 1, 28, 28).byte()])
def test_bad_images(bad):
    with pytest.raises(ValueError, match=rf"expected float \[N, C, H, W\], got {bad.dtype}"):
        augment(bad, torch.Generator())
