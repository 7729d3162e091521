"""The data set that needs no files: scikit-learn's handwritten digits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from credo.data.image_set import ImageSetWithOod

_TEST_SIZE = 500
_SPLIT_SEED = 0
_PATCH = 32
_PATCHES_PER_PHOTO = 250


def digits() -> ImageSetWithOod:
    """8×8 handwritten digits in fixed splits: 1,297 to train, 500 to test, 500 of something else.

    All ten digits are in training and test set. The out-of-distribution images are real too:
    32×32 patches, side by side, of scikit-learn's two sample photographs, in grey, averaged down
    to 8×8 and stretched to the digits' range [0, 1], so that a net has to recognise that they are
    no digits and can't go by their contrast. The splits never change.

    >>> data = digits()
    >>> data.train[0].shape, data.test[0].shape, data.ood.shape
    (torch.Size([1297, 1, 8, 8]), torch.Size([500, 1, 8, 8]), torch.Size([500, 1, 8, 8]))

    Licences: the digits are the test part of "Optical recognition of handwritten digits" (UCI
    Machine Learning Repository), which is CC BY 4.0; scikit-learn carries them, and two photographs
    from Flickr, "china.jpg" by danielbuechele and "flower.jpg" by vultilion, both CC BY 2.0. Credo
    holds no copy of either.

    Reference: E. Alpaydin, C. Kaynak, "Optical recognition of handwritten digits", UCI, 1998
    (doi:10.24432/C50P49).
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32).div_(16).unsqueeze(1)
    labels = torch.from_numpy(bunch.target).to(torch.int64)
    # RandomState's stream is frozen for good; newer generators may change theirs.
    order = torch.from_numpy(np.random.RandomState(_SPLIT_SEED).permutation(len(images)))
    train, test = order[_TEST_SIZE:], order[:_TEST_SIZE]
    return ImageSetWithOod(
        name="digits",
        train=(images[train], labels[train]),
        test=(images[test], labels[test]),
        classes=tuple("0123456789"),
        source="scikit-learn's load_digits; out of distribution: patches of its sample photographs",
        ood=_photo_patches(),
    )


def _photo_patches() -> Tensor:
    from sklearn.datasets import load_sample_images

    patches = []
    for photo in load_sample_images().images:
        grey = torch.from_numpy(photo.astype(np.float32)).mean(-1)
        tiles = grey.unfold(0, _PATCH, _PATCH).unfold(1, _PATCH, _PATCH)
        patches.append(tiles.reshape(-1, 1, _PATCH, _PATCH)[:_PATCHES_PER_PHOTO])
    small = torch.nn.functional.avg_pool2d(torch.cat(patches), _PATCH // 8)
    low, high = small.amin((1, 2, 3), keepdim=True), small.amax((1, 2, 3), keepdim=True)
    return (small - low) / (high - low).clamp_min(1.0)
