"""The data plane: request bytes between gateway, shards and replicas, over ZeroMQ."""
