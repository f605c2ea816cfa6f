"""The attention seam: functions `attend(q, k, v, rope, layer_cache) -> (o, layer_cache, stats)`."""
