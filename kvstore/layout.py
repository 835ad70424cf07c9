"""Layout words: how an engine orders the axes of a layer's tensors.

B block, H head, N token in the block, C one cell's channels (K then V), D the channels of K or of V alone,
2 the K/V axis. A word without C and without 2 describes a pair (K, V) of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore.checksum import PIECE_BYTES
from kvstore.errors import (
    InvalidCache,
    InvalidShape,
    UnknownLayout,
    UnsupportedCache,
    UnsupportedDevice,
    UnsupportedDtype,
)

LayerTensors = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

DTYPES = {
    getattr(torch, name): name
    for name in (
        *("bfloat16", "float16", "float32", "int8", "uint8"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
}
EXAMPLES = "BHNC, BNHC, BNC, 2BNHD, B2NHD, 2BHND, or BHND and BNHD for a (K, V) pair of tensors per layer"


Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Plane:
    """Where K or V of one layer lies, on the CPU or a device: byte address of block 0, head 0, token 0, and byte strides.

    channels elements of itemsize bytes make one head's part of a cell; channels is 0 where a layer has no V.
    """

    address: int
    block_stride: int
    head_stride: int
    token_stride: int
    channel_stride: int
    channels: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of one head and one token."""
        return self.channels * self.itemsize

    def axes(self, sizes: Sizes) -> tuple[dict[int, int], int]:
        """{stride: size} of the axes that have more than one entry, and the bytes that lie side by side; sizes: how many
        blocks, heads and tokens."""
        contiguous = self.channel_stride == self.itemsize
        strides = (self.block_stride, self.head_stride, self.token_stride, self.channel_stride)
        counts = (*sizes, 1 if contiguous else self.channels)
        found = {stride: count for stride, count in zip(strides, counts, strict=True) if count > 1}
        return found, self.nbytes if contiguous else self.itemsize

    def end(self, sizes: Sizes) -> int:
        """The address past the last byte."""
        axes, run = self.axes(sizes)
        return self.address + sum((size - 1) * stride for stride, size in axes.items()) + run

    def runs(self, sizes: Sizes) -> npt.NDArray[np.int64]:
        """The address of each run of bytes that lie side by side, sorted."""
        axes, _ = self.axes(sizes)
        starts = np.array([self.address], np.int64)
        for stride, size in axes.items():
            starts = np.add.outer(starts, np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return np.sort(starts)

    def shares_bytes(self, above: Plane, sizes: Sizes, above_sizes: Sizes) -> bool:
        """Whether a plane that begins at or above this one's address has a byte in common with it."""
        if self._interleaves(above, sizes, above_sizes):
            return False
        starts, others = self.runs(sizes), above.runs(above_sizes)
        run, run_above = self.axes(sizes)[1], above.axes(above_sizes)[1]
        before = np.searchsorted(starts, others, side="right") - 1
        after = np.minimum(before + 1, starts.size - 1)
        covered = (before >= 0) & (others < starts[before] + run)
        reaches = (starts[after] >= others) & (starts[after] < others + run_above)
        return bool((covered | reaches).any())

    def _interleaves(self, above: Plane, sizes: Sizes, above_sizes: Sizes) -> bool:
        """Whether the strides alone show that no byte is shared, as they do where an engine lets planes alternate.

        Axes are taken by rising stride, and the distance of the two planes as one more axis among them: where each
        stride is at least the extent of all that is smaller, no sum of steps reaches a byte twice.
        """
        (axes, extent), (others, extent_above) = self.axes(sizes), above.axes(above_sizes)
        apart, joined = above.address - self.address, False
        for stride in (*sorted({*axes, *others}), 2**64):
            if not joined and stride > apart:
                if apart < extent:
                    return False
                extent, joined = max(extent, apart + extent_above), True
            if joined and stride < extent:
                return False
            size, size_above = axes.get(stride, 1), others.get(stride, 1)
            extent += (max(size, size_above) if joined else size) * stride - stride
            extent_above += (size_above - 1) * stride
        return True

    @property
    def regular(self) -> bool:
        """Whether every token's bytes are one run of aligned 8-byte words, as the compiled loops need it."""
        strides = self.block_stride | self.head_stride | self.token_stride | self.address | self.nbytes
        return self.channels == 0 or (self.channel_stride == self.itemsize and strides % PIECE_BYTES == 0)


@dataclass(frozen=True)
class LayerPlanes:
    """One layer's tensors taken apart: sizes of the axes, K's plane and V's."""

    blocks: int
    heads: int
    tokens: int
    k: Plane
    v: Plane
    dtype: str
    device: torch.device


def check_layout(word: object) -> str:
    """The layout word; raises UnknownLayout unless its axes are B, N, H or no H, and C, D or 2 with D."""
    axes = sorted(word) if isinstance(word, str) else []
    if "".join(axes).replace("H", "") not in ("BCN", "2BDN", "BDN") or axes.count("H") > 1:
        raise UnknownLayout(f"layout {word!r}: expected an order of the axes such as {EXAMPLES}")
    return str(word)


def take_apart(name: str, tensors: LayerTensors, layout: str, value_channels: int | None) -> LayerPlanes:
    """Read one layer's tensors by its layout; raises InvalidCache or one of its kinds with the reason."""
    if "C" in layout:
        return _packed(name, _one_tensor(name, tensors, layout), layout, value_channels)
    if "2" in layout:
        tensor = _one_tensor(name, tensors, layout)
        axis = layout.index("2")
        if tensor.shape[axis] != 2:
            raise InvalidShape(
                f"layer {name}: {tuple(tensor.shape)} has {tensor.shape[axis]} entries along axis {axis}, the K/V axis "
                f"2 of layout {layout!r}: expected 2"
            )
        pair: LayerTensors = (tensor.select(axis, 0), tensor.select(axis, 1))
        return _pair(name, pair, layout.replace("2", ""))
    return _pair(name, tensors, layout)


def _one_tensor(name: str, tensors: LayerTensors, layout: str) -> torch.Tensor:
    if not isinstance(tensors, torch.Tensor):
        raise InvalidCache(
            f"layer {name}: a {type(tensors).__name__}, layout {layout!r} needs one torch tensor a layer"
        )
    check_tensor(name, tensors, layout)
    return tensors


def check_tensor(name: str, tensor: torch.Tensor, layout: str) -> None:
    """Raise unless the tensor is dense memory of a known dtype with one axis for each of the layout's."""
    if tensor.device.type == "meta":
        raise UnsupportedDevice(
            f"layer {name}: its tensor is on the device 'meta', which has no memory: pass the tensors that "
            "the engine allocated"
        )
    if tensor.dtype not in DTYPES:
        raise UnsupportedDtype(f"layer {name}: dtype {tensor.dtype}: expected one of {', '.join(DTYPES.values())}")
    if tensor.layout != torch.strided or tensor.is_nested:
        raise InvalidShape(f"layer {name}: its tensor is {tensor.layout}: expected a dense one (torch.strided)")
    if tensor.dim() != len(layout) or min(tensor.shape) < 1:
        raise InvalidShape(
            f"layer {name}: shape {tuple(tensor.shape)} has {tensor.dim()} axes: expected {len(layout)} "
            f"non-empty ones, as layout {layout!r} names them"
        )
    if overlaps(tensor):
        raise InvalidShape(
            f"layer {name}: shape {tuple(tensor.shape)} with strides {tensor.stride()} maps several elements to one place; "
            "expected a cache whose blocks have memory of their own (no expand, no as_strided overlap)"
        )


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements lie in one place."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += (size - 1) * stride
    return False


def _plane(tensor: torch.Tensor, layout: str, first: int, channels: int) -> Plane:
    stride = dict(zip(layout, (s * tensor.itemsize for s in tensor.stride()), strict=True))
    channel_stride = stride["C"] if "C" in layout else stride["D"]
    return Plane(
        address=tensor.data_ptr() + first * channel_stride,
        block_stride=stride["B"],
        head_stride=stride.get("H", 0),
        token_stride=stride["N"],
        channel_stride=tensor.itemsize if channels == 1 else channel_stride,
        channels=channels,
        itemsize=tensor.itemsize,
    )


def _packed(name: str, tensor: torch.Tensor, layout: str, value_channels: int | None) -> LayerPlanes:
    size = dict(zip(layout, tensor.shape, strict=True))
    channels = size["C"]
    if value_channels is None:
        value_channels = channels // 2 if "H" in layout else 0
        if "H" in layout and channels % 2:
            raise InvalidShape(
                f"layer {name}: {channels} channels do not split into equal K and V; say value_channels={{{name!r}: n}}"
            )
    if not isinstance(value_channels, int) or not 0 <= value_channels < channels:
        raise InvalidShape(f"layer {name}: value_channels is {value_channels!r}: expected 0 to {channels - 1}")
    k_channels = channels - value_channels
    planes = _plane(tensor, layout, 0, k_channels), _plane(tensor, layout, k_channels, value_channels)
    return _checked(name, size, *planes, tensor)


def _pair(name: str, tensors: LayerTensors, layout: str) -> LayerPlanes:
    if (
        not isinstance(tensors, tuple | list)
        or len(tensors) != 2
        or not all(isinstance(t, torch.Tensor) for t in tensors)
    ):
        raise InvalidCache(
            f"layer {name}: a {type(tensors).__name__}, layout {layout!r} needs a pair (K, V) of tensors"
        )
    k, v = tensors
    for tensor in (k, v):
        check_tensor(name, tensor, layout)
    if k.device != v.device:
        raise UnsupportedDevice(f"layer {name}: K is on {k.device}, V on {v.device}: expected both on one device")
    size, v_size = (dict(zip(layout, t.shape, strict=True)) for t in (k, v))
    if k.dtype != v.dtype or any(size[axis] != v_size[axis] for axis in layout if axis != "D"):
        raise InvalidShape(
            f"layer {name}: K is {tuple(k.shape)} {k.dtype}, V is {tuple(v.shape)} {v.dtype}: expected equal dtypes and "
            "shapes that differ in the channels at most"
        )
    planes = _plane(k, layout, 0, size["D"]), _plane(v, layout, 0, v_size["D"])
    return _checked(name, size, *planes, k)


def _checked(name: str, size: dict[str, int], k: Plane, v: Plane, tensor: torch.Tensor) -> LayerPlanes:
    dtype = DTYPES[tensor.dtype]
    for letter, plane in (("K", k), ("V", v)):
        if plane.nbytes % PIECE_BYTES:
            raise UnsupportedCache(
                f"layer {name}: {letter} has {plane.nbytes} bytes a token and head ({plane.channels} channels of {dtype}): "
                f"the checksum needs a whole number of {PIECE_BYTES}-byte pieces"
            )
        if plane.nbytes >= 2**32:
            raise UnsupportedCache(
                f"layer {name}: {letter} has {plane.nbytes} bytes a token and head: at most 2**32 - 8"
            )
    return LayerPlanes(size["B"], size.get("H", 1), size["N"], k, v, dtype, tensor.device)
