"""Tiny rankers made on the spot: the dot product of candidate and masked mean history, plus a user term."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper


def write_ranker(path: Path, token_dim: int, user_dim: int, *, scale: float = 1.0, poison: bool = False) -> Path:
    """Write a ranker: logit = scale * (target . (sum(hist * mask) / (sum(mask) + 1)) + sum(user)); NaN with `poison`
    where the first number of a candidate is above 100."""
    f = TensorProto.FLOAT
    inputs = [
        helper.make_tensor_value_info("hist", f, ["B", "L", token_dim]),
        helper.make_tensor_value_info("target", f, ["B", "N", token_dim]),
        helper.make_tensor_value_info("mask", f, ["B", "L"]),
        helper.make_tensor_value_info("user", f, ["B", user_dim]),
    ]
    constants = [
        helper.make_tensor("one", f, [], [1.0]),
        helper.make_tensor("scale", f, [], [scale]),
        helper.make_tensor("limit", f, [], [100.0]),
        helper.make_tensor("axis1", TensorProto.INT64, [1], [1]),
        helper.make_tensor("axis2", TensorProto.INT64, [1], [2]),
        helper.make_tensor("zero", TensorProto.INT64, [], [0]),
    ]
    node = helper.make_node
    nodes = [
        node("Unsqueeze", ["mask", "axis2"], ["mask3"]),
        node("Mul", ["hist", "mask3"], ["masked"]),
        node("ReduceSum", ["masked", "axis1"], ["summed"], keepdims=1),
        node("ReduceSum", ["mask", "axis1"], ["count"], keepdims=1),
        node("Add", ["count", "one"], ["count1"]),
        node("Unsqueeze", ["count1", "axis2"], ["count3"]),
        node("Div", ["summed", "count3"], ["mean"]),
        node("Transpose", ["mean"], ["mean_t"], perm=[0, 2, 1]),
        node("MatMul", ["target", "mean_t"], ["dots3"]),
        node("Squeeze", ["dots3", "axis2"], ["dots"]),
        node("ReduceSum", ["user", "axis1"], ["user_sum"], keepdims=1),
        node("Add", ["dots", "user_sum"], ["sum"]),
        node("Mul", ["sum", "scale"], ["clean" if poison else "scores"]),
    ]
    if poison:
        nodes += [
            node("Gather", ["target", "zero"], ["first"], axis=2),
            node("Greater", ["first", "limit"], ["bad"]),
            node("Sub", ["clean", "clean"], ["nil"]),
            node("Div", ["nil", "nil"], ["nan"]),
            node("Where", ["bad", "nan", "clean"], ["scores"]),
        ]
    outputs = [helper.make_tensor_value_info("scores", f, ["B", "N"])]
    graph = helper.make_graph(nodes, "ranker", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path
