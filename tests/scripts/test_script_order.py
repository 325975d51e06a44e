"""The order in which waiting jobs start: shared between tenants, raised by priority, cut to what fits."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.wire import Wire, following

BOOST = 10_000_000  # tokens that one level of priority is worth


async def serve(wire: Wire, slots: int) -> list[str]:
    """Start so many jobs, and end them."""
    jobs = await wire.claim(slots=slots)
    for job in jobs:
        assert await wire.worker.finish(following(job, kind="finished")) == "ok"
    return [job.request_id for job in jobs]


async def flood(wire: Wire, tenant: str, count: int, **options: object) -> None:
    pipeline = [wire.enqueue(f"{tenant}-{n:05}", tenant=tenant, max_backlog=100_000, **options) for n in range(count)]
    for submission in pipeline:
        await submission


class TestTenants:
    @pytest.mark.timeout(120)
    @pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
    async def test_a_flood_of_one_holds_up_nobody_else(self, wire: Wire, count: int) -> None:
        """So many jobs wait; ten of another tenant are among the next 2 x slots that start."""
        slots = 16
        await flood(wire, "flood", count, cost=500)
        assert len(await serve(wire, slots)) == slots
        await flood(wire, "quiet", 10, cost=500)
        started = await serve(wire, slots) + await serve(wire, slots)
        assert [each for each in started if each.startswith("quiet")] == [f"quiet-{n:05}" for n in range(10)]
        await wire.redis.flushdb()  # to look at each key of each job takes longer than all of this

    async def test_each_has_the_same_share_while_all_wait(self, wire: Wire) -> None:
        for tenant in "abc":
            await flood(wire, tenant, 20)
        started = await serve(wire, 30)
        assert [sum(each.startswith(tenant) for each in started) for tenant in "abc"] == [10, 10, 10]

    async def test_shares_are_of_work_not_of_jobs(self, wire: Wire) -> None:
        await flood(wire, "long", 10, cost=3000)
        await flood(wire, "short", 30, cost=1000)
        started = await serve(wire, 20)
        assert sum(each.startswith("long") for each in started) == 5

    async def test_a_weight_is_a_larger_share(self, wire: Wire) -> None:
        await flood(wire, "heavy", 30, weight=3.0)
        await flood(wire, "light", 30)
        started = await serve(wire, 20)
        assert sum(each.startswith("heavy") for each in started) == 15

    @pytest.mark.parametrize("weight", [0.0, -1.0, 1e-3, 1e3, float("nan"), float("inf")])
    async def test_a_weight_that_is_none_or_too_much_is_refused(self, wire: Wire, weight: float) -> None:
        with pytest.raises(ValueError, match="weight"):
            await wire.enqueue("a", weight=weight)
        assert await wire.redis.keys("*") == []

    async def test_the_jobs_of_one_stay_in_their_order(self, wire: Wire) -> None:
        costs = [7, 1, 100_000, 0, 3, 50, 1, 1]
        for number, cost in enumerate(costs):
            await wire.enqueue(f"job-{number}", tenant="a", cost=cost)
        assert await wire.order() == [f"job-{number}" for number in range(len(costs))]

    async def test_who_was_away_has_saved_nothing_up(self, wire: Wire) -> None:
        """Else it could hold up the others for as long as it was away."""
        await wire.enqueue("first", tenant="late")
        await flood(wire, "busy", 40)
        await serve(wire, 21)
        await flood(wire, "late", 10)
        started = await serve(wire, 10)
        assert sum(each.startswith("late") for each in started) == 5

    async def test_work_that_is_cancelled_is_given_back(self, wire: Wire) -> None:
        """Else who cancels a flood waits behind everybody who comes later."""
        await flood(wire, "fickle", 50)
        await wire.enqueue("running", tenant="other")
        for number in range(50):
            await wire.producer.cancel(f"fickle-{number:05}")
        await wire.enqueue("again", tenant="fickle")
        await flood(wire, "other", 10)
        assert (await wire.order()).index("again") <= 1

    async def test_work_that_is_given_back_late_is_no_advantage(self, wire: Wire) -> None:
        """What others were served meanwhile is not made up for."""
        await wire.enqueue("fickle", tenant="fickle", cost=100_000)
        await flood(wire, "other", 60, cost=1000)
        await serve(wire, 50)
        await wire.producer.cancel("fickle")
        await wire.enqueue("again-1", tenant="fickle", cost=1000)
        await wire.enqueue("again-2", tenant="fickle", cost=1000)
        assert sum(each.startswith("again") for each in (await wire.order())[:2]) == 1

    async def test_what_is_known_of_tenants_stays_small_and_goes_with_the_jobs(self, wire: Wire) -> None:
        for number in range(100):
            await wire.enqueue(f"job-{number}", tenant=f"tenant-{number}")
        await wire.enqueue("last", tenant="tenant-0")
        assert await wire.redis.zcard(wire.keys.vtime) == 100
        await serve(wire, 100)
        assert await wire.redis.zcard(wire.keys.vtime) <= 3
        await serve(wire, 1)
        assert await wire.redis.exists(wire.keys.vtime) == 0

    async def test_places_stay_far_below_every_clock(self, wire: Wire) -> None:
        await flood(wire, "huge", 1000, cost=2_000_000, priority=-100)
        assert (await wire.redis.zrange(wire.keys.queue, -1, -1, withscores=True))[0][1] < 10**8

    @pytest.mark.parametrize("tenant", ["", "now", "tenant:", "ü" * 128, '"; return'])
    async def test_any_name_is_only_a_name(self, wire: Wire, tenant: str) -> None:
        await flood(wire, "other", 3)
        await serve(wire, 1)
        await wire.enqueue("a", tenant=tenant)
        await wire.enqueue("b", tenant=tenant)
        assert [each for each in await wire.order() if len(each) == 1] == ["a", "b"]
        assert (await wire.order()).index("a") <= 1


class TestPriorities:
    async def test_the_higher_goes_first(self, wire: Wire) -> None:
        for priority in (0, -1, 2, 1, 0, -100, 100):
            await wire.enqueue(f"p{priority}-{len(await wire.order())}", priority=priority)
        expected = ["p100-6", "p2-2", "p1-3", "p0-0", "p0-4", "p-1-1", "p-100-5"]
        assert await wire.order() == expected

    async def test_it_holds_over_a_whole_backlog_of_the_same_tenant(self, wire: Wire) -> None:
        await flood(wire, "a", 1000, cost=1000)
        await wire.enqueue("urgent", tenant="a", priority=1, max_backlog=100_000)
        assert (await wire.order())[0] == "urgent"

    async def test_it_is_worth_a_bounded_amount_of_work(self, wire: Wire) -> None:
        """So that what is lower does not wait for ever."""
        await wire.enqueue("low", tenant="a", cost=1)
        await wire.enqueue("high", tenant="b", priority=1, cost=BOOST - 1000)
        await wire.enqueue("next", tenant="b", priority=1, cost=2000)
        assert await wire.order() == ["high", "low", "next"]

    async def test_a_high_one_that_is_served_does_not_put_others_behind_a_flood(self, wire: Wire) -> None:
        await flood(wire, "flood", 100)
        await wire.enqueue("urgent", tenant="flood", priority=5)
        assert await serve(wire, 1) == ["urgent"]
        await wire.enqueue("other", tenant="other")
        assert (await wire.order()).index("other") <= 1

    async def test_a_high_one_that_is_served_first_does_not_turn_time_back(self, wire: Wire) -> None:
        await wire.enqueue("early", tenant="a", cost=1)
        await wire.enqueue("urgent", tenant="a", priority=1)
        assert await serve(wire, 1) == ["urgent"]
        await wire.enqueue("late", tenant="b", cost=1000)
        assert await wire.order() == ["early", "late"]

    async def test_a_low_one_that_is_served_does_not_make_others_as_low(self, wire: Wire) -> None:
        await flood(wire, "batch", 5, priority=-3)
        assert await serve(wire, 1) == ["batch-00000"]
        await wire.enqueue("usual", tenant="other")
        assert (await wire.order())[0] == "usual"


class TestBlocks:
    async def test_a_claim_takes_what_fits(self, wire: Wire) -> None:
        for number in range(4):
            await wire.enqueue(f"job-{number}", estimate=33)
        jobs = await wire.claim(slots=9, free_blocks=7, block_size=16, running_here=1)
        assert [job.request_id for job in jobs] == ["job-0", "job-1"], "three blocks each"

    async def test_nobody_overtakes_one_that_does_not_fit(self, wire: Wire) -> None:
        await wire.enqueue("big", estimate=1000)
        await wire.enqueue("small", estimate=1)
        assert await wire.claim(slots=9, free_blocks=5, block_size=16, running_here=1) == []
        assert await wire.order() == ["big", "small"]

    async def test_on_an_empty_engine_one_always_runs(self, wire: Wire) -> None:
        for number in range(2):
            await wire.enqueue(f"big-{number}", estimate=10**6)
        (job,) = await wire.claim(slots=9, free_blocks=5, block_size=16, running_here=0)
        assert job.request_id == "big-0"

    async def test_without_a_count_of_blocks_slots_alone_bound(self, wire: Wire) -> None:
        for number in range(3):
            await wire.enqueue(f"big-{number}", estimate=10**6)
        assert len(await wire.claim(slots=2, running_here=7)) == 2

    async def test_one_that_was_left_and_does_not_fit_is_not_overtaken_by_what_waits(self, wire: Wire) -> None:
        await wire.claimed("left", estimate=1000)
        await wire.lapse("left")
        await wire.enqueue("small", estimate=1)
        assert await wire.claim(slots=9, free_blocks=5, block_size=16, running_here=1) == []
        claimed = await wire.claim(slots=9, free_blocks=5, block_size=16, running_here=0)
        assert [job.request_id for job in claimed] == ["left"]

    async def test_a_plain_arq_job_is_estimated_by_its_length(self, wire: Wire) -> None:
        await wire.enqueue_plain("plain", b"x" * 4000)
        await wire.enqueue_plain("after", b"x")
        assert await wire.claim(slots=9, free_blocks=62, block_size=16, running_here=1) == []
        assert len(await wire.claim(slots=9, free_blocks=64, block_size=16, running_here=1)) == 2

    @pytest.mark.parametrize("plain", [False, True])
    async def test_one_that_seems_larger_than_any_request_is_taken_at_once(self, wire: Wire, plain: bool) -> None:
        """The worker tells from its tokens whether it is, and refuses it; the engine need not be empty for that."""
        if plain:
            await wire.enqueue_plain("huge", b"x" * 4 * 101)
        else:
            await wire.enqueue("huge", estimate=101)
        (job,) = await wire.claim(slots=9, free_blocks=1, block_size=16, largest_request=100, running_here=1)
        assert (job.request_id, job.estimate) == ("huge", 101)

    @pytest.mark.parametrize(("free_blocks", "taken"), [(1, 1), (7, 1), (8, 2), (14, 2), (15, 3)])
    async def test_one_that_seems_too_large_has_the_blocks_of_the_largest(
        self, wire: Wire, free_blocks: int, taken: int
    ) -> None:
        """Seven. It may have them in truth: a flood of wrong estimates must not get in on a block each."""
        for number in range(9):
            await wire.enqueue(f"huge-{number}", estimate=10**9)
        room = {"block_size": 16, "largest_request": 100, "running_here": 1}
        assert len(await wire.claim(slots=9, free_blocks=free_blocks, **room)) == taken

    async def test_one_that_may_be_the_largest_request_is_waited_for(self, wire: Wire) -> None:
        await wire.enqueue("large", estimate=100)
        assert await wire.claim(slots=9, free_blocks=6, block_size=16, largest_request=100, running_here=1) == []
        assert len(await wire.claim(slots=9, free_blocks=7, block_size=16, largest_request=100, running_here=1)) == 1

    async def test_where_nothing_is_free_one_that_seems_too_large_waits_like_all(self, wire: Wire) -> None:
        await wire.enqueue("huge", estimate=101)
        room = {"block_size": 16, "largest_request": 100, "running_here": 1}
        assert await wire.claim(slots=9, free_blocks=0, **room) == []

    async def test_one_that_was_left_and_seems_too_large_is_taken_over_at_once(self, wire: Wire) -> None:
        """It has run: its estimate was wrong."""
        await wire.claimed("left", estimate=101)
        await wire.lapse("left")
        (job,) = await wire.claim(slots=9, free_blocks=1, block_size=16, largest_request=100, running_here=1)
        assert job.request_id == "left"

    async def test_what_a_call_without_a_reply_took_has_its_blocks(self, wire: Wire) -> None:
        for number in range(3):
            await wire.enqueue(f"job-{number}", estimate=33)
        await wire.claim(slots=1, token="lost")
        jobs = await wire.claim(slots=3, free_blocks=7, block_size=16, lost_tokens=["lost"])
        assert [job.request_id for job in jobs] == ["job-0", "job-1"], "three blocks each"

    async def test_others_are_woken_for_what_did_not_fit(self, wire: Wire) -> None:
        for number in range(2):
            await wire.enqueue(f"job-{number}", estimate=100)
        await wire.redis.delete(wire.keys.bell)
        assert len(await wire.claim(slots=9, free_blocks=7, block_size=16, running_here=1)) == 1
        assert await wire.redis.llen(wire.keys.bell) == 1
        await wire.redis.delete(wire.keys.bell)
        assert await wire.claim(slots=9, free_blocks=0, block_size=16, running_here=2) == []
        assert not await wire.redis.exists(wire.keys.bell), "this worker would only wake itself"


submissions = st.tuples(st.sampled_from("abc"), st.integers(0, 5000), st.integers(-2, 2))
steps = st.lists(st.one_of(submissions, st.integers(1, 4)), min_size=1, max_size=40)


class Model:
    """Fair queueing with nothing but numbers: what the scripts must agree with."""

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.last: dict[str, float] = {}
        self.waiting: dict[str, tuple[float, float]] = {}

    def enqueue(self, request_id: str, tenant: str, cost: int, priority: int) -> None:
        finish = max(self.virtual_time, self.last.get(tenant, 0.0)) + max(cost, 1)
        self.last[tenant] = finish
        self.waiting[request_id] = (round(finish - priority * BOOST), finish)

    def order(self) -> list[str]:
        return sorted(self.waiting, key=lambda each: (self.waiting[each][0], each))

    def serve(self, slots: int) -> list[str]:
        started = self.order()[:slots]
        for each in started:
            self.virtual_time = max(self.virtual_time, min(self.waiting.pop(each)))
        if not self.waiting:
            self.virtual_time, self.last = 0.0, {}
        return started


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(steps=steps)
async def test_any_submissions_start_in_the_order_of_virtual_time(wire: Wire, steps: list) -> None:
    await wire.redis.flushdb()
    model = Model()
    for number, step in enumerate(steps):
        if isinstance(step, int):
            assert await serve(wire, step) == model.serve(step)
        else:
            tenant, cost, priority = step
            await wire.enqueue(f"job-{number:03}", tenant=tenant, cost=cost, priority=priority)
            model.enqueue(f"job-{number:03}", tenant, cost, priority)
        assert await wire.order() == model.order()
