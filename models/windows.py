"""Which layers of a model see the last tokens only (Beltagy et al. 2020, Longformer)."""

from jpaged.errors import CheckpointError
from jpaged.models.config_reader import ConfigReader

LAYER_TYPES = FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(
    reader: ConfigReader, num_layers: int, *, has_windows: bool
) -> tuple[int | None, ...]:
    """How many tokens a token sees in each layer, itself included; None: all before it.

    has_windows: whether the architecture, as transformers computes it, knows windows. Without them
    a window in force is refused: transformers' own models ignore it, but not their cache.
    """
    if not has_windows:
        if reader.boolean("use_sliding_window", True):
            reader.refuse_unless("sliding_window")
        _layer_types(reader, num_layers, FULL)
        return (None,) * num_layers
    layer_types = _layer_types(reader, num_layers, *LAYER_TYPES)
    if layer_types is None:
        is_windowed = reader.values.get("sliding_window") is not None
        layer_types = (SLIDING if is_windowed else FULL,) * num_layers
    if SLIDING not in layer_types:
        return (None,) * num_layers
    # transformers applies the window all the same, which the config's author cannot have meant.
    reader.refuse_unless("use_sliding_window", True)
    window = reader.integer("sliding_window")
    return tuple(window if layer_type == SLIDING else None for layer_type in layer_types)


def _layer_types(reader: ConfigReader, num_layers: int, *supported: str) -> tuple[str, ...] | None:
    layer_types = reader.strings("layer_types", None)
    if layer_types is None:
        return None
    for layer_type in layer_types:
        ConfigReader({"layer_types": layer_type}, name=reader.name).refuse_unless(
            "layer_types", *supported
        )
    if len(layer_types) != num_layers:
        raise CheckpointError(
            f"layer_types in {reader.name} must have one entry for each of num_hidden_layers "
            f"({num_layers}), got {len(layer_types)}"
        )
    return layer_types
