"""One step: mean gradients, half precision that stays close, a scaled loss that survives an overflow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from edge_ranker.samples import Batch
from feature_service.timeline import Timeline, cut
from reranker.amp import choose_precision
from reranker.descent import Descent, Precision
from reranker.recipe import Recipe
from tests.logs_of_events import small_dataset
from tests.unit.reranker.small_log import RECIPE, small_rankers, small_samples

pytestmark = pytest.mark.usefixtures("one_thread_per_operation")


@pytest.fixture
def timeline() -> Timeline:
    return cut(small_dataset())


def _batches(timeline: Timeline, n: int) -> list[Batch]:
    return list(small_samples(timeline).batches(0, 0, n, 1))


def _dense(gradients: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([g.to_dense().ravel() for g in gradients if g is not None])


def test_accumulated_gradients_are_the_mean_of_those_of_each_batch(timeline: Timeline) -> None:
    rankers, batches = small_rankers(timeline), _batches(timeline, 6)
    with Descent(rankers, RECIPE, "fp32") as descent:
        losses, together = descent.gradients(batches)
        alone = [descent.gradients([batch]) for batch in batches]
    torch.testing.assert_close(losses, torch.stack([found for found, _ in alone]).mean(dim=0))
    torch.testing.assert_close(
        _dense(together), torch.stack([_dense(gradients) for _, gradients in alone]).mean(dim=0), atol=1e-6, rtol=1e-4
    )


def test_gradients_in_bf16_point_where_those_in_fp32_point(timeline: Timeline) -> None:
    rankers, batches = small_rankers(timeline), _batches(timeline, 2)
    found = {}
    for precision in ("fp32", "bf16"):
        with Descent(rankers, RECIPE, precision) as descent:  # type: ignore[arg-type]
            found[precision] = descent.gradients(batches)
    (losses, exact), (half_losses, half) = found["fp32"], found["bf16"]
    torch.testing.assert_close(half_losses, losses, atol=0.02, rtol=0.01)
    assert not torch.equal(half_losses, losses)
    assert torch.cosine_similarity(_dense(exact), _dense(half), dim=0) > 0.99
    assert all(g is None or g.dtype == torch.float32 for g in half)


def test_a_scaled_loss_gives_the_step_of_an_unscaled_one(timeline: Timeline) -> None:
    batches, moved = _batches(timeline, 2), []
    precisions: tuple[Precision, ...] = ("fp32", "fp16")
    for precision in precisions:
        rankers = small_rankers(timeline)
        before = rankers.edge.own.weight.detach().clone()
        with Descent(rankers, RECIPE, precision) as descent:
            descent.step(batches, 1e-3)
            scale = descent.state()["scaler"].get("scale")
        moved.append(rankers.edge.own.weight.detach() - before)
    assert scale == 65536.0
    assert moved[0].abs().max() > 0
    assert torch.cosine_similarity(moved[0].ravel(), moved[1].ravel(), dim=0) > 0.95


@pytest.mark.parametrize("sparse", [(), ("item", "user")])
def test_an_overflow_skips_the_step_and_halves_the_scale(timeline: Timeline, sparse: tuple[str, ...]) -> None:
    rankers, batches = small_rankers(timeline, sparse=sparse), _batches(timeline, 2)
    if sparse:
        batches = [replace(batch, recall_sample=torch.arange(20)) for batch in batches]
    with Descent(rankers, RECIPE, "fp16") as descent:
        descent.step(batches, 1e-3)
        before = {name: value.clone() for name, value in rankers.state_dict().items()}
        broken = [replace(batch, weight=batch.weight * torch.inf) for batch in batches]
        descent.step(broken, 1e-3)
        assert descent.state()["scaler"]["scale"] == 32768.0
    for name, value in rankers.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_state_of_the_optimisers_is_counted_in_bytes(timeline: Timeline) -> None:
    rankers, batches = small_rankers(timeline), _batches(timeline, 2)
    with Descent(rankers, RECIPE, "fp32") as descent:
        assert descent.state_bytes() == 0
        descent.step(batches, 1e-3)
        parameters = sum(p.numel() for p in rankers.parameters())
        # Two moments of each parameter, and a step count per tensor.
        assert 8 * parameters <= descent.state_bytes() <= 8 * parameters + 8 * len(list(rankers.parameters()))


@pytest.mark.parametrize(
    ("amp", "device", "bf16", "batch_size", "expected"),
    [
        ("off", "cuda", True, 128, "fp32"),
        ("on", "cuda", False, 128, "fp16"),
        ("auto", "cuda", False, 8, "fp16"),
        ("on", "cpu", False, 8, "bf16"),
        ("auto", "cpu", True, 512, "bf16"),
        ("auto", "cpu", True, 128, "fp32"),
        ("auto", "cpu", False, 512, "fp32"),
    ],
)
def test_half_precision_is_chosen_where_it_pays(
    amp: str, device: str, bf16: bool, batch_size: int, expected: str
) -> None:
    recipe = replace(Recipe(), amp=amp, device=device, batch_size=batch_size)
    assert choose_precision(recipe, bf16=bf16) == expected


@pytest.mark.parametrize("sampled", [False, True])
def test_on_another_device_nothing_of_a_step_stays_behind(timeline: Timeline, sampled: bool) -> None:
    """Shapes and devices alone, on torch's meta device: it refuses to mix with tensors of the CPU, as CUDA does."""
    rankers, (batch,) = small_rankers(timeline).to("meta"), _batches(timeline, 1)
    batch = replace(batch, recall_sample=torch.arange(20) if sampled else None).to(torch.device("meta"))
    losses = rankers.losses(batch)
    gradients = torch.autograd.grad(sum(losses), list(rankers.parameters()), allow_unused=True)
    assert {found.device.type for found in (*losses, *gradients) if found is not None} == {"meta"}
