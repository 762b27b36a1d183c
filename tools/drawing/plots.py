"""Every plot of docs/figures.md. To add one, add a module here and markers to the page."""

from drawing import model, ranks, sharded, step_time, tensors

PLOTS = (tensors.PLOT, model.PLOT, sharded.PLOT, ranks.PLOT, step_time.SHORT, step_time.PLOT)
