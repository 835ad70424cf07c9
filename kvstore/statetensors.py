"""Tensors of Mamba state checked and described as a group of states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvstore.checksum import MAX_KV_HEADS_PER_LAYER
from kvstore.errors import InvalidCache, InvalidShape, UnsupportedCache, UnsupportedDevice
from kvstore.identity import heads_before, layer_number
from kvstore.layout import DTYPES, overlaps
from kvstore.stategeometry import ITEM_SIZES, MAX_RANGES
from kvstore.states import LayerStates, Pairs, State, StateGroup, StateTensor

MAX_ELEMENTS: Final = 2**31


def make_state_group(
    number: int, layers: Mapping[str, Sequence[StateTensor]], block_size: object, tp_rank: int
) -> StateGroup:
    """Describe a group's states. Raises InvalidCache or one of its kinds."""
    if not _whole(block_size, 1):
        raise InvalidCache(
            f"state_block_size[{number}] is {block_size!r}: expected how many tokens a block of group {number} stands for"
        )
    assert isinstance(block_size, int)
    tensors = {name: _tensors(name, given) for name, given in layers.items()}
    first = next(iter(tensors.values()))[0].tensor
    for name, given in tensors.items():
        for state in given:
            if state.tensor.shape[0] != first.shape[0]:
                raise UnsupportedCache(
                    f"group {number}: {name} has {state.tensor.shape[0]} slots, another state {first.shape[0]}: states of "
                    "a group share their block ids, so all must be equal"
                )
            if state.tensor.device != first.device:
                raise UnsupportedDevice(
                    f"group {number}: {name} is on {state.tensor.device}, another state on {first.device}: a group lies on "
                    "one device; put the layers of each device into a group of their own"
                )
    made = _numbered([_layer(name, given, tp_rank) for name, given in tensors.items()])
    group = StateGroup(number, tuple(made), block_size, first.shape[0], first.device)
    _check_apart(group)
    return group


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _tensors(name: str, given: object) -> list[StateTensor]:
    if not isinstance(given, Sequence) or not given or not all(isinstance(state, StateTensor) for state in given):
        raise InvalidCache(f"states[{name!r}] is {given!r}: expected a list of StateTensor, one a state, in order")
    if len(given) > MAX_RANGES:
        raise UnsupportedCache(f"layer {name}: {len(given)} states: at most {MAX_RANGES}")
    for state in given:
        _check_tensor(name, state)
    return list(given)


def _check_tensor(name: str, state: StateTensor) -> None:
    tensor, axis = state.tensor, state.split_axis
    if not isinstance(tensor, torch.Tensor):
        raise InvalidCache(f"layer {name}: a state is a {type(tensor).__name__}: expected a torch tensor (slots, ...)")
    if tensor.device.type == "meta":
        raise UnsupportedDevice(f"layer {name}: a state is on the device 'meta', which has no memory")
    if tensor.itemsize not in ITEM_SIZES or tensor.dtype not in DTYPES:
        raise UnsupportedCache(
            f"layer {name}: a state of {tensor.dtype}: the checksum takes elements of 2 or 4 bytes "
            "(bfloat16, float16, float32)"
        )
    if tensor.layout != torch.strided or tensor.is_nested or tensor.dim() < 2 or min(tensor.shape) < 1:
        raise InvalidShape(
            f"layer {name}: a state of shape {tuple(tensor.shape)}, {tensor.layout}: expected a dense tensor "
            "(slots, ...) of two non-empty axes or more"
        )
    if overlaps(tensor):
        raise InvalidShape(
            f"layer {name}: a state of shape {tuple(tensor.shape)} with strides {tensor.stride()} maps several elements "
            "to one place: expected slots that have memory of their own"
        )
    if axis is not None and (not _whole(axis, 1) or axis >= tensor.dim()):
        raise InvalidCache(
            f"layer {name}: split_axis is {axis!r}, its tensor has the shape {tuple(tensor.shape)}: expected 1 to "
            f"{tensor.dim() - 1}, or None where the split is not known"
        )


def _layer(name: str, given: list[StateTensor], tp_rank: int) -> LayerStates:
    known = all(state.split_axis is not None for state in given)
    states = tuple(_split(name, state) if known else _unsplit(name, state) for state in given)
    dtype = ",".join(state.dtype for state in states)
    made = LayerStates(name, layer_number(name), dtype, states, None if known else tp_rank)
    ranges = sum(entry.ranges for entry in made.entries)
    if ranges > MAX_RANGES:
        raise UnsupportedCache(
            f"layer {name}: its rows lie in {ranges} ranges: a record's table has at most {MAX_RANGES} a layer; a rank's "
            "rows should be a few ranges"
        )
    return made


def _split(name: str, given: StateTensor) -> State:
    tensor, axis = given.tensor, given.split_axis
    assert axis is not None
    size = tensor.shape[axis]
    rows = _rows(name, given, size)
    return _state(name, tensor, tensor.stride(axis) * tensor.itemsize, {0, axis}, rows, _model_rows(name, given, rows))


def _unsplit(name: str, given: StateTensor) -> State:
    if given.rows is not None or given.model_rows is not None:
        raise InvalidCache(
            f"layer {name}: rows or model_rows, and a state whose split_axis is None: a layer has one slice where the "
            "split of one of its states is not known; leave them out"
        )
    return _state(name, given.tensor, 0, {0}, ((0, 1),), 0)


def _state(name: str, tensor: torch.Tensor, row_stride: int, outer: set[int], rows: Pairs, model_rows: int) -> State:
    item = tensor.itemsize
    axes = tuple((tensor.shape[a], tensor.stride(a) * item) for a in range(tensor.dim()) if a not in outer)
    place = (tensor.data_ptr(), tensor.stride(0) * item, row_stride)
    made = State(DTYPES[tensor.dtype], item, *place, axes, rows, model_rows)
    if made.elements >= MAX_ELEMENTS:
        raise UnsupportedCache(f"layer {name}: a row of {made.elements} elements: at most {MAX_ELEMENTS - 1}")
    return made


def _rows(name: str, given: StateTensor, size: int) -> Pairs:
    """The local rows' numbers."""
    if given.rows is None:
        return ((0, size),)
    listed = isinstance(given.rows, Sequence) and all(isinstance(r, Sequence) and len(r) == 2 for r in given.rows)
    if not listed or not all(_whole(r[0], 0) and _whole(r[1], 1) for r in given.rows):
        raise InvalidCache(f"layer {name}: rows is {given.rows!r}: expected (first row, how many) of each range")
    rows = tuple((first, count) for first, count in given.rows)
    end = 0
    for first, count in sorted(rows):
        if first < end:
            raise InvalidCache(f"layer {name}: rows is {given.rows!r}: row {first} is named twice")
        end = first + count
    if sum(count for _, count in rows) != size:
        raise InvalidCache(
            f"layer {name}: rows names {sum(count for _, count in rows)} rows, the tensor has {size} along axis "
            f"{given.split_axis}"
        )
    return rows


def _model_rows(name: str, given: StateTensor, rows: Pairs) -> int:
    count, end = given.model_rows, max(first + count for first, count in rows)
    if count is None and sum(n for _, n in rows) != end:
        raise InvalidCache(
            f"layer {name}: rows is {given.rows!r}, a part of the model's: say model_rows, the rows of the unsharded model"
        )
    if count is not None and (not _whole(count, 1) or count < end):
        raise InvalidCache(f"layer {name}: model_rows is {count!r}: expected {end} or more, as its rows are numbered")
    return end if count is None else count


def _numbered(layers: list[LayerStates]) -> list[LayerStates]:
    """The layers in order, with the rows numbered behind those of others of the same number."""
    for layer in layers:
        twins = [other.name for other in layers if other.number == layer.number and other is not layer]
        if twins and layer.rank is not None:
            raise UnsupportedCache(
                f"{layer.name} and {twins[0]} have one layer number, and the split of the first is not known: its slice "
                "would have a number that rows of the other have"
            )
        if layer.rank is None and layer.model_rows > MAX_KV_HEADS_PER_LAYER:
            raise UnsupportedCache(
                f"layer {layer.name}: {layer.model_rows} rows: the checksum numbers at most {MAX_KV_HEADS_PER_LAYER} a layer"
            )
    before = heads_before({layer.name: layer.model_rows for layer in layers})
    numbered = [replace(layer, heads_before=before[layer.name]) for layer in layers]
    return sorted(numbered, key=lambda layer: (layer.number, layer.name))


def _check_apart(group: StateGroup) -> None:
    """Raise UnsupportedCache where two states of a group share bytes. Groups may: an engine gives them other slots."""
    states = [(state, layer.name) for layer in group.layers for state in layer.states]
    states.sort(key=lambda entry: entry[0].address)
    ends = [_end(state, group.num_blocks) for state, _ in states]
    for i, (state, name) in enumerate(states):
        for above, other in states[i + 1 :]:
            if above.address >= ends[i]:
                break
            if _share(state, above, group.num_blocks):
                raise UnsupportedCache(
                    f"group {group.number}: states of {name} and {other} share memory, or their slots alternate with "
                    f"strides of {state.slot_stride} and {above.slot_stride} bytes: each needs bytes of its own in every slot"
                )


def _end(state: State, slots: int) -> int:
    starts, run = _runs(state)
    return int(starts[-1]) + run + (slots - 1) * state.slot_stride


def _runs(state: State) -> tuple[npt.NDArray[np.int64], int]:
    """The addresses of runs of bytes in slot 0, sorted, and the bytes of each."""
    offsets, count, stride = state.runs
    rows = np.arange(sum(n for _, n in state.rows), dtype=np.int64) * state.row_stride
    starts = np.add.outer(rows, np.array(offsets, np.int64)).reshape(-1) + state.address
    if stride == state.itemsize:
        return np.sort(starts), count * stride
    steps = np.arange(count, dtype=np.int64) * stride
    return np.sort(np.add.outer(starts, steps).reshape(-1)), state.itemsize


def _share(state: State, above: State, slots: int) -> bool:
    """Whether any slots of two states have a byte in common; a guess where their strides differ."""
    (starts, run), (others, run_above) = _runs(state), _runs(above)
    if slots > 1:
        if state.slot_stride != above.slot_stride:
            return True
        stride = state.slot_stride
        starts = np.sort((starts - state.address) % stride)
        others = (others - state.address) % stride
        starts = np.concatenate((starts[-1:] - stride, starts, starts[:1] + stride))
    before = np.clip(np.searchsorted(starts, others, side="right") - 1, 0, None)
    after = np.minimum(before + 1, starts.size - 1)
    covered = (others >= starts[before]) & (others < starts[before] + run)
    reaches = (starts[after] >= others) & (starts[after] < others + run_above)
    return bool((covered | reaches).any())
