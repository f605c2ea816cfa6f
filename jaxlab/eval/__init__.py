"""Evaluation: records that survive a round trip, and statistics that know their own power."""
