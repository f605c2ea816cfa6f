"""The command line: one file a verb, `registry.py` for gin, `common.py` for what verbs share."""
