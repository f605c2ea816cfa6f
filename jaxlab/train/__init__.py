"""Training: one loop for every objective.

`step.make_train_step` makes the jitted update, `fit.fit` runs it: resume, checkpoints, metrics,
signals, bad steps. `state.TrainState` is what changes, `guard.guarded` wraps the optimiser.
"""
