"""Every architecture keeps the one contract, in training as in serving; wrong combinations are named."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_ranker.history import HistoryParts, logits_of
from edge_ranker.model import EdgeMLP
from feature_service.schema import FeatureSchema
from infra.engine.export import export_ranker
from infra.engine.onnx_cpu import OnnxEngine
from infra.engine.ranker_contract import ModelRefused, check_ranker, example
from infra.errors import InvalidInput
from reranker.architectures import (
    EDGE,
    RERANK,
    Architecture,
    build_edge,
    build_rerank,
    edge_architecture,
    rerank_architecture,
)
from reranker.deep import DeepBST
from reranker.din import DIN
from reranker.model import BST

SCHEMA = FeatureSchema(n_user_buckets=8, max_history=10)
TOKEN, USER = SCHEMA.token_dim, SCHEMA.user_dim
SHIPPED = [
    RERANK,
    rerank_architecture("din"),
    rerank_architecture("bst", blocks=2),
    rerank_architecture("bst", readout="mean"),
    rerank_architecture("bst", blocks=2, readout="concat"),
]


def _built(architecture: Architecture) -> nn.Module:
    torch.manual_seed(5)
    return build_rerank(architecture, SCHEMA).eval()


@pytest.mark.parametrize("architecture", SHIPPED, ids=str)
def test_every_architecture_keeps_the_contract_of_a_ranker(architecture: Architecture) -> None:
    check_ranker(_built(architecture), str(architecture), token_dim=TOKEN, user_dim=USER)


def test_the_edge_ranker_keeps_it_too() -> None:
    check_ranker(build_edge(EDGE, SCHEMA), "mlp", token_dim=TOKEN, user_dim=USER)


@pytest.mark.parametrize("architecture", [SHIPPED[1], SHIPPED[2], SHIPPED[4]], ids=str)
def test_the_exported_graph_computes_the_same_on_every_shape(architecture: Architecture, tmp_path: Path) -> None:
    model, file = _built(architecture), tmp_path / "model.onnx"
    assert export_ranker(model, file, token_dim=TOKEN, user_dim=USER) <= 1e-4
    for seed, shape in enumerate([(5, 13, 17), (1, 100, 1), (2, 1, 30)]):
        inputs = example(shape, TOKEN, USER, seed=seed)
        with torch.no_grad():
            expected = model(*inputs).numpy()
        np.testing.assert_allclose(OnnxEngine(file).run(*(x.numpy() for x in inputs)), expected, atol=1e-5)


@pytest.mark.parametrize("architecture", SHIPPED, ids=str)
def test_training_computes_what_serving_computes(architecture: Architecture) -> None:
    random = torch.Generator().manual_seed(1)
    tokens, gaps = torch.randn(6, 48, generator=random), torch.randn(11, 16, generator=random)
    history = HistoryParts(
        tokens,
        gaps,
        torch.randint(0, 6, (3, 10), generator=random),
        torch.randint(0, 11, (3, 10), generator=random),
        (torch.rand(3, 10, generator=random) < 0.6).float(),
    )
    target, user = torch.randn(3, 4, TOKEN, generator=random), torch.randn(3, USER, generator=random)
    model = _built(architecture)
    with torch.no_grad():
        served = model(history.laid_out(), target, history.mask, user)
        torch.testing.assert_close(logits_of(model, history, target, user), served, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits_of(model, history, target, user).detach(), served, atol=1e-5, rtol=1e-5)


def test_an_evaluation_of_many_candidates_goes_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_ranker.history._TOKENS_AT_ONCE", 60)
    seen: list[int] = []

    class Counting(nn.Module):
        def forward(self, hist: Tensor, target: Tensor, mask: Tensor, user: Tensor) -> Tensor:
            seen.append(target.shape[1])
            return target.sum(2)

    zeros = torch.zeros(3, 10, dtype=torch.int64)
    history = HistoryParts(torch.ones(1, 48), torch.ones(1, 16), zeros, zeros, torch.ones(3, 10))
    target = torch.randn(3, 5, TOKEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(Counting(), history, target, torch.zeros(3, USER)), target.sum(2))
    assert seen == [2, 2, 1]


@pytest.mark.parametrize("architecture", SHIPPED, ids=str)
def test_every_parameter_is_trained(architecture: Architecture) -> None:
    model = _built(architecture)
    model(*example((4, 10, 6), TOKEN, USER, seed=2)).square().sum().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not idle


@pytest.mark.parametrize("architecture", SHIPPED, ids=str)
def test_history_candidate_and_user_each_change_the_logits(architecture: Architecture) -> None:
    model = _built(architecture)
    hist, target, mask, user = example((2, 10, 6), TOKEN, USER, seed=3)
    mask[0] = 1.0
    with torch.no_grad():
        base = model(hist, target, mask, user)
        for changed in ((hist + 1, target, user), (hist, target + 1, user), (hist, target, user + 1)):
            assert (model(changed[0], changed[1], mask, changed[2]) - base).abs().min() > 0


def test_one_deep_block_read_at_the_candidate_is_the_shared_form() -> None:
    shared = BST(TOKEN, USER).eval()
    deep = DeepBST(TOKEN, USER, blocks=1, readout="target", max_history=10).eval()
    deep.load_state_dict(
        {
            name if name.startswith(("head", "second", "out")) else f"blocks.0.{name}": value
            for name, value in shared.state_dict().items()
        }
    )
    inputs = example((3, 10, 6), TOKEN, USER, seed=4)
    with torch.no_grad():
        torch.testing.assert_close(deep(*inputs), shared(*inputs), atol=1e-5, rtol=1e-5)


def test_concat_reads_the_newest_real_tokens_by_their_place() -> None:
    model = _built(SHIPPED[4])
    hist, target, mask, user = example((1, 14, 3), TOKEN, USER, seed=6)
    mask[:] = 1.0
    with torch.no_grad():
        base = model(hist, target, mask, user)
        gap = torch.cat((hist[:, :5], torch.ones(1, 2, TOKEN), hist[:, 5:]), dim=1)
        holes = torch.cat((mask[:, :5], torch.zeros(1, 2), mask[:, 5:]), dim=1)
        torch.testing.assert_close(model(gap, target, holes, user), base, atol=1e-5, rtol=1e-5)
        assert (model(hist.flip(1), target, mask, user) - base).abs().max() > 1e-4


def test_a_din_without_history_ranks_by_candidate_and_user_alone() -> None:
    model = _built(SHIPPED[1])
    hist, target, mask, user = example((2, 10, 6), TOKEN, USER, seed=7)
    with torch.no_grad():
        torch.testing.assert_close(
            model(hist, target, torch.zeros_like(mask), user), model(0 * hist, target, torch.ones_like(mask), user)
        )


def test_names_and_parameters_make_the_model_they_say() -> None:
    assert isinstance(_built(rerank_architecture()), BST)
    assert isinstance(_built(rerank_architecture("din")), DIN)
    deep = _built(rerank_architecture("bst", blocks=3, readout="mean"))
    assert isinstance(deep, DeepBST)
    assert len(deep.blocks) == 3
    assert str(rerank_architecture("bst", blocks=3)) == "bst, 3 blocks, read-out target"
    assert isinstance(build_edge(edge_architecture("mlp"), SCHEMA), EdgeMLP)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"name": "dien"}, "reranker: 'dien' is unknown; give bst, din, or package.module:factory"),
        ({"name": "din", "blocks": 2}, "blocks: only bst has it; leave it out with din"),
        ({"name": "din", "readout": "mean"}, "readout: only bst has it; leave it out with din"),
        ({"name": "my.module:make", "blocks": 1}, "blocks: only bst has it; leave it out with my.module:make"),
        ({"blocks": 0}, "blocks: 0 is out of range; give 1 to 8"),
        ({"blocks": 9}, "blocks: 9 is out of range; give 1 to 8"),
        ({"readout": "max"}, "readout: 'max' is unknown; give one of target, mean, concat"),
    ],
)
def test_what_means_nothing_is_refused_by_name(given: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        rerank_architecture(**given)  # type: ignore[arg-type]
    assert str(refused.value).startswith(error)


def test_an_unknown_edge_ranker_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="edge: 'bst' is unknown; give mlp, or "):
        edge_architecture("bst")


OWN = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, token_dim, user_dim):
        super().__init__()
        self.own = nn.Linear(token_dim, 1)
    def forward(self, hist, target, mask, user):
        return self.own(target).squeeze(2)

class Crowded(Mine):
    def forward(self, hist, target, mask, user):
        return super().forward(hist, target, mask, user).softmax(1)

def number(token_dim, user_dim):
    return 7

def positional(a, b):
    return Mine(a, b)

def raises(token_dim, user_dim):
    raise RuntimeError("my own bug")
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_rankers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rankers", raising=False)
    return "own_rankers"


def test_a_model_of_ones_own_is_made_by_its_factory(own_module: str) -> None:
    for model in (
        build_rerank(rerank_architecture(f"{own_module}:Mine"), SCHEMA),
        build_edge(edge_architecture(f"{own_module}:Mine"), SCHEMA),
    ):
        assert type(model).__name__ == "Mine"
        assert model.own.in_features == TOKEN  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no_such_module_here:make", "reranker: no_such_module_here cannot be imported .* PYTHONPATH"),
        ("own_rankers:nothing", "reranker: own_rankers has no nothing"),
        ("own_rankers:number", "reranker: own_rankers:number gives int, not a torch.nn.Module"),
        ("own_rankers:positional", r"reranker: own_rankers:positional cannot be called with \(token_dim, user_dim\)"),
        ("own_rankers:Crowded", "reranker own_rankers:Crowded: a candidate's logit depends on the other candidates"),
        ("own_rankers:", "reranker: own_rankers has no factory after the colon"),
        ("own_rankers:raises", "reranker: own_rankers:raises raises RuntimeError: my own bug"),
    ],
)
def test_a_factory_that_makes_no_model_is_refused_with_the_reason(own_module: str, name: str, error: str) -> None:
    with pytest.raises((InvalidInput, ModelRefused), match=error):
        build_rerank(Architecture(name), SCHEMA)
