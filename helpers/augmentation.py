"""Chapter 05: random rotations and shifts for a whole batch at once."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def augment(
    images: Tensor, generator: torch.Generator, *, degrees: float = 10, shift: float = 2
) -> Tensor:
    """Rotate each image by up to ±degrees and shift it by up to ±shift pixels; float [N, C, H, W].

    The batched form of `torchvision.transforms.v2.RandomAffine`: one `grid_sample` for all images.
    No flips: a mirrored 2 is not a 2. New pixels repeat the border, so any normalization will do.
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise ValueError(f"expected float [N, C, H, W], got {images.dtype} {list(images.shape)}")
    n, _, height, width = images.shape
    if n == 0:
        return images.clone()
    rand = torch.rand(3, n, generator=generator) * 2 - 1  # [3, N] in [-1, 1)
    angle = rand[0] * math.radians(degrees)
    cos, sin = angle.cos(), angle.sin()
    # Output pixel -> input pixel, in coordinates where the image spans [-1, 1]: 2 / size per pixel.
    dx, dy = rand[1] * shift * 2 / width, rand[2] * shift * 2 / height
    aspect = height / width
    rows = [torch.stack([cos, sin * aspect, dx], 1), torch.stack([-sin / aspect, cos, dy], 1)]
    theta = torch.stack(rows, 1).to(images)  # [N, 2, 3]
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)
