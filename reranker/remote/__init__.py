"""Training with rows in the parameter server: looked up for each step, changed through the stream."""
