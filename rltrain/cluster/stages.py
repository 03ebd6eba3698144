"""How a model's layers are shared out over the stages of a pipeline."""

from collections.abc import Sequence


def planned_layers(num_layers: int, num_chunks: int) -> tuple[int, ...]:
    """Layers of each of as many consecutive chunks of a model.

    As many in each where they divide; else the embedding and the loss count as a layer each, and those with fewer come
    last and first, where one is. ValueError where there are fewer layers than chunks.
    """
    if num_layers < num_chunks:
        raise ValueError(f"{num_layers} layers cannot be shared out over {num_chunks} chunks of a pipeline")
    if num_layers % num_chunks == 0:
        return (num_layers // num_chunks,) * num_chunks
    ends = [(number == 0) + (number == num_chunks - 1) for number in range(num_chunks)]
    counts = [1] * num_chunks
    for _ in range(num_layers - num_chunks):
        least = min(range(num_chunks), key=lambda number: (counts[number] + ends[number], ends[number], number))
        counts[least] += 1
    return tuple(counts)


def checked_layers(given: Sequence[int], num_layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """`given` as the layers of pp * vpp chunks; ValueError where they are not that many that sum up to `num_layers`."""
    if len(given) != pp * vpp or sum(given) != num_layers or min(given) < 0:
        raise ValueError(
            f"layers_per_stage is {list(given)}; expected {pp * vpp} numbers (pp {pp} x vpp {vpp}) that sum up to the "
            f"model's {num_layers} layers"
        )
    return tuple(given)
