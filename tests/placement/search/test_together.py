"""Whether models should share GPUs: the fewest groups that keep all targets, and how far rates may grow there."""

from __future__ import annotations

import pytest

from placement.catalogs.roofline import open_catalog
from placement.goodput.runner import open_runner
from placement.goodput.targets import Targets
from placement.plan import Slo
from placement.search import together as module
from placement.search.together import Tenant, Together, find_together
from placement.workload.requests import from_rows
from placement.workload.traffic import Traffic

pytestmark = pytest.mark.unit

SLO = Slo(ttft_s=0.5, tpot_s=0.05)
LENGTHS = from_rows([[0.0, 256, 32], [0.1, 768, 64], [0.2, 512, 48]])


@pytest.fixture(autouse=True)
def _few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_REQUESTS", 60)
    monkeypatch.setattr(module, "MOST_REQUESTS", 600)
    monkeypatch.setattr(module, "GROWTHS", 4)


def tenant(name: str, rate: float, model: str = "llama-3.1-8b", burstiness: float = 1.0) -> Tenant:
    return Tenant(
        name=name,
        catalog=open_catalog(model, "h100-sxm"),
        traffic=Traffic(source=LENGTHS, burstiness=burstiness),
        targets=Targets(slo=SLO),
        rate=rate,
    )


def found(most_gpus: int, *tenants: Tenant) -> Together | str:
    with open_runner(0) as runner:
        return find_together(tenants, most_gpus, runner)


def test_little_asked_of_three_fits_on_one_gpu_with_memory_by_what_each_holds() -> None:
    answer = found(3, tenant("a", 2.0), tenant("b", 1.0), tenant("c", 1.0))
    assert isinstance(answer, Together)
    assert (answer.gpus, answer.growth_gpus) == (1, 3)
    assert answer.growth > 2, "on three times as many"
    first, second, _ = (share.pool.num_pages * share.pool.page_size - 2048 for share in answer.shares)
    assert first == pytest.approx(2 * second, rel=0.02), "beyond what each has in any case"
    assert sum(share.memory for share in answer.shares) == pytest.approx(0.9, abs=0.01)
    assert all(share.point.attainment.value >= 0.9 for share in answer.shares)


def test_more_is_asked_and_more_groups_are_found() -> None:
    few, many = (found(8, tenant("a", rate), tenant("b", rate)) for rate in (2.0, 25.0))
    assert isinstance(few, Together)
    assert isinstance(many, Together)
    assert many.gpus > few.gpus


def test_a_model_with_hardly_anything_to_do_has_room_for_a_request_all_the_same() -> None:
    answer = found(3, tenant("a", 0.5), tenant("b", 30.0))
    assert isinstance(answer, Together)
    assert answer.shares[0].pool.num_pages * answer.shares[0].pool.page_size >= 2048


def test_what_cannot_be_shared_is_said_in_a_sentence() -> None:
    big = [tenant(name, 1.0, "llama-3.1-70b") for name in "ab"]
    assert found(3, *big) == (
        "the weights of all, 282 GB, with KV beside them do not fit on a group of 3 NVIDIA H100 SXM 80 GB or fewer"
    )
    assert found(1, tenant("a", 40.0), tenant("b", 40.0)) == (
        "on 1 GPU, as many as they take apart, they miss their targets together"
    )
