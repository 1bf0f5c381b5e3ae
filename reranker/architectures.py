"""Which models there are for each ranking tier, behind one interface: rows in, logits out.

Every model takes `hist` f32[B, L, T], `target` f32[B, N, T], `mask` f32[B, L], `user` f32[B, U] and returns logits
f32[B, N]; `infra.engine.ranker_contract` says what else it keeps. A model of one's own is named
`package.module:factory`.
Refuses names and combinations that mean nothing. Invariant: an `Architecture` is all it takes to make the model again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from torch import nn

from edge_ranker.model import EdgeMLP
from feature_service.schema import FeatureSchema
from infra.engine.ranker_contract import check_ranker
from infra.errors import InvalidInput
from infra.release import Role
from reranker.deep import DeepBST, Readout
from reranker.din import DIN
from reranker.model import BST

# Beyond this a step takes longer than the sum of its uses; no published BST is deeper than three.
MOST_BLOCKS = 8
READOUTS: tuple[Readout, ...] = get_args(Readout)


@dataclass(frozen=True, slots=True)
class Architecture:
    """`name` of a model for one tier; `blocks` and `readout` are the BST's, None for all others."""

    name: str
    blocks: int | None = None
    readout: Readout | None = None

    @property
    def own(self) -> bool:
        """Whether it is the user's own, named `package.module:factory`."""
        return ":" in self.name

    def __str__(self) -> str:
        if self.blocks is None:
            return self.name
        return f"{self.name}, {self.blocks} block{'s' if self.blocks > 1 else ''}, read-out {self.readout}"


EDGE = Architecture("mlp")
RERANK = Architecture("bst", 1, "target")


def edge_architecture(name: str | None = None) -> Architecture:
    """`mlp` (the default) or `package.module:factory`. Raises InvalidInput."""
    if name is None or name == EDGE.name:
        return EDGE
    if ":" in name:
        return Architecture(name)
    raise InvalidInput("edge", f"{name!r} is unknown; give mlp, or package.module:factory for a model of your own")


def rerank_architecture(name: str | None = None, blocks: int | None = None, readout: str | None = None) -> Architecture:
    """`bst` (the default; one block and read-out `target` unless given), `din`, or `package.module:factory`.

    Raises InvalidInput for a name, a number of blocks or a read-out that means nothing, or nothing here.
    """
    name = name or RERANK.name
    if name != RERANK.name:
        for field, value in (("blocks", blocks), ("readout", readout)):
            if value is not None:
                raise InvalidInput(field, f"only bst has it; leave it out with {name}, or choose bst")
        if name == "din" or ":" in name:
            return Architecture(name)
        known = "bst, din, or package.module:factory for a model of your own"
        raise InvalidInput("reranker", f"{name!r} is unknown; give {known}")
    blocks = 1 if blocks is None else blocks
    if not 1 <= blocks <= MOST_BLOCKS:
        raise InvalidInput("blocks", f"{blocks} is out of range; give 1 to {MOST_BLOCKS}")
    for known_readout in READOUTS:
        if readout in (None, known_readout):
            return Architecture(name, blocks, known_readout)
    raise InvalidInput("readout", f"{readout!r} is unknown; give one of {', '.join(READOUTS)}")


def build_edge(architecture: Architecture, schema: FeatureSchema) -> nn.Module:
    """A new model for the edge tier. Raises what `own_model` raises."""
    if architecture.own:
        return own_model("edge", architecture.name, schema)
    return EdgeMLP(schema.token_dim, schema.user_dim)


def build_rerank(architecture: Architecture, schema: FeatureSchema) -> nn.Module:
    """A new reranker. Raises what `own_model` raises."""
    if architecture.own:
        return own_model("rerank", architecture.name, schema)
    if architecture.name == "din":
        return DIN(schema.token_dim, schema.user_dim)
    if architecture.readout is None or architecture == RERANK:
        return BST(schema.token_dim, schema.user_dim)
    return DeepBST(
        schema.token_dim,
        schema.user_dim,
        blocks=architecture.blocks or 1,
        readout=architecture.readout,
        max_history=schema.max_history,
    )


def own_model(role: Role, name: str, schema: FeatureSchema) -> nn.Module:
    """What the user's `package.module:factory` makes of `(token_dim=..., user_dim=...)`, checked.

    Raises InvalidInput when it makes no model, ModelRefused when the model does not keep the contract.
    """
    field = "edge" if role == "edge" else "reranker"
    module, _, attribute = name.partition(":")
    try:
        factory: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise InvalidInput(field, f"{module} cannot be imported ({error}); is its folder on PYTHONPATH?") from error
    except (AttributeError, ValueError) as error:
        raise InvalidInput(
            field, f"{module or 'the empty name'} has no {attribute or 'factory after the colon'}"
        ) from error
    except Exception as error:  # the user's code; whatever it raises
        raise InvalidInput(field, f"{module} raises {type(error).__name__} when imported: {error}") from error
    try:
        model = factory(token_dim=schema.token_dim, user_dim=schema.user_dim)
    except TypeError as error:
        raise InvalidInput(field, f"{name} cannot be called with (token_dim, user_dim) by name: {error}") from error
    except Exception as error:  # the user's code; whatever it raises
        raise InvalidInput(field, f"{name} raises {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise InvalidInput(field, f"{name} gives {type(model).__name__}, not a torch.nn.Module")
    check_ranker(model, f"{field} {name}", token_dim=schema.token_dim, user_dim=schema.user_dim)
    return model
