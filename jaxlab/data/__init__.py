"""Where data and packaged models come from."""
