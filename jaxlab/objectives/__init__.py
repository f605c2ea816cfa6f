"""Objectives: `(params, batch, key) -> (Weighted, {name: Weighted})`, divided once by the loop."""
