"""Standard ONNX operators that move values: shapes, slices, gathers, scatters, and the loop over rows.

Sizes, axes and places of slices lie on the host, so that nothing here waits for a device.
"""

from __future__ import annotations

import torch

from mtp_engines.backends.torch.call import Call, Values, operator


@operator("Shape", attributes="start end")
def shape(call: Call) -> Values:
    """int64 sizes of some axes, on the host."""
    sizes = list(call[0].shape)[call.attributes.get("start", 0) : call.attributes.get("end")]
    return [torch.tensor(sizes, dtype=torch.int64)]


@operator("Range")
def value_range(call: Call) -> Values:
    """From start to limit by delta, on the device, where it is compared with other rows."""
    start, limit, delta = (call.ints(index)[0] for index in range(3))
    return [torch.arange(start, limit, delta, dtype=call[0].dtype, device=call.device)]


@operator("Reshape")
def reshape(call: Call) -> Values:
    """0 keeps a size, -1 takes the rest."""
    sizes = [call[0].shape[axis] if size == 0 else size for axis, size in enumerate(call.ints(1))]
    return [call[0].reshape(sizes)]


@operator("Transpose", attributes="perm")
def transpose(call: Call) -> Values:
    """Axes in another order."""
    return [call[0].permute(call.attributes["perm"])]


@operator("Unsqueeze")
def unsqueeze(call: Call) -> Values:
    """New axes of size 1, counted in the result."""
    x, axes = call[0], call.ints(1)
    for axis in sorted(axis % (call[0].ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return [x]


@operator("Squeeze")
def squeeze(call: Call) -> Values:
    """Axes of size 1 away: the named ones, or all."""
    if call.optional(1) is None:
        return [call[0].squeeze()]
    return [call[0].squeeze(call.ints(1))]


@operator("Expand")
def expand(call: Call) -> Values:
    """Broadcast to a shape, in which 1 keeps a size."""
    x, sizes = call[0], call.ints(1)
    own = [1] * (len(sizes) - x.ndim) + list(x.shape)
    wanted = [1] * (x.ndim - len(sizes)) + sizes
    return [x.expand([b if a == 1 else a for a, b in zip(own, wanted, strict=True)])]


@operator("Concat", attributes="axis")
def concat(call: Call) -> Values:
    """Side by side along one axis."""
    return [torch.cat([value for value in call.inputs if value is not None], call.attributes["axis"])]


@operator("Split", attributes="axis num_outputs")
def split(call: Call) -> Values:
    """Into the given sizes, or into equal parts."""
    axis = call.attributes.get("axis", 0)
    if call.optional(1) is not None:
        return list(torch.split(call[0], call.ints(1), axis))
    return list(torch.chunk(call[0], call.outputs, axis))


@operator("Slice", inputs=4)
def take_slice(call: Call) -> Values:
    """From starts to ends along axes, steps of 1."""
    x = call[0]
    axes = call.ints(3) if call.optional(3) is not None else list(range(len(call.ints(1))))
    for start, end, axis in zip(call.ints(1), call.ints(2), axes, strict=True):
        size = x.shape[axis]
        low, high = (min(max(place + size if place < 0 else place, 0), size) for place in (start, end))
        x = x.narrow(axis, low, max(high - low, 0))
    return [x]


@operator("Pad")
def pad(call: Call) -> Values:
    """Zeros before and behind along axes."""
    x, pads = call[0], call.ints(1)
    axes = call.ints(3) if call.optional(3) is not None else list(range(x.ndim))
    both = [0] * (2 * x.ndim)  # torch counts from the last axis.
    for place, axis in enumerate(axes):
        at = 2 * (x.ndim - 1 - axis % x.ndim)
        both[at], both[at + 1] = pads[place], pads[place + len(axes)]
    return [torch.nn.functional.pad(x, both)]


@operator("Gather", attributes="axis")
def gather(call: Call) -> Values:
    """Entries along one axis, whatever the shape of the indices."""
    x, indices, axis = call[0], call[1], call.attributes.get("axis", 0)
    if indices.ndim == 0:
        return [x.select(axis, int(indices))] if indices.device.type == "cpu" else [x.index_select(axis, indices)]
    taken = x.index_select(axis, indices.reshape(-1))
    return [taken.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis % x.ndim + 1 :])]


@operator("GatherElements", attributes="axis")
def gather_elements(call: Call) -> Values:
    """One entry for each index, along one axis."""
    return [torch.gather(call[0], call.attributes.get("axis", 0), call[1])]


@operator("GatherND", attributes="batch_dims")
def gather_nd(call: Call) -> Values:
    """Rows of each sequence, for one batch axis and one index a row."""
    x, indices = call[0], call[1]
    assert call.attributes.get("batch_dims", 0) == 1 and indices.shape[-1] == 1
    sequences = torch.arange(x.shape[0], device=x.device)[:, None]
    return [x[sequences, indices[..., 0]]]


@operator("ScatterElements", attributes="axis")
def scatter_elements(call: Call) -> Values:
    """A copy with one entry for each index changed, along one axis."""
    return [call[0].scatter(call.attributes.get("axis", 0), call[1], call[2])]


@operator("ScatterND")
def scatter_nd(call: Call) -> Values:
    """A copy with the rows at index tuples changed."""
    result = call[0].clone()
    result[tuple(call[1].unbind(-1))] = call[2]
    return [result]


@operator("TensorScatter", attributes="axis")
def tensor_scatter(call: Call) -> Values:
    """A copy of a cache with the new rows of each sequence from its length on."""
    past, rows, lengths = call[0], call[1], call[2]
    axis = call.attributes.get("axis", -2) % past.ndim
    result = past.clone().movedim(axis, 1)
    places = lengths[:, None] + torch.arange(rows.shape[axis], device=past.device)
    sequences = torch.arange(past.shape[0], device=past.device)[:, None]
    result[sequences, places] = rows.movedim(axis, 1)
    return [result.movedim(1, axis)]


@operator("Scan", attributes="body num_scan_inputs scan_input_axes scan_output_axes")
def scan(call: Call) -> Values:
    """A body over slices of the scanned inputs: the last state, and the outputs of every step."""
    assert call.subgraph is not None
    scanned = call.attributes["num_scan_inputs"]
    states, sequences = list(call.inputs[:-scanned]), list(call.inputs[-scanned:])
    in_axes = call.attributes.get("scan_input_axes", [0] * scanned)
    collected: list[list[torch.Tensor]] = []
    count = next(x.shape[axis] for x, axis in zip(sequences, in_axes, strict=True) if x is not None)
    for step in range(count):
        rows = [x.select(axis, step) for x, axis in zip(sequences, in_axes, strict=True) if x is not None]
        results = call.subgraph([*(state for state in states if state is not None), *rows])
        states = list(results[: len(states)])
        collected.append(results[len(states) :])
    out_axes = call.attributes.get("scan_output_axes", [0] * len(collected[0]))
    outputs = [torch.stack(rows, axis) for rows, axis in zip(zip(*collected, strict=True), out_axes, strict=True)]
    return [*(state for state in states if state is not None), *outputs]
