"""Optimisers and learning rates: `adamw`, `schedules`. Thin over Optax."""
