"""TensorRT and TensorRT-RTX: building engines, and running them without torch."""
