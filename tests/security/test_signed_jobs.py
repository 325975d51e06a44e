"""Jobs to a worker that has signing keys: its own ones are served, all others are refused with a reason."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis.asyncio
from support.processes import start_worker
from support.queue import KEYS, MODEL, answer_to, arq_payload, left_over, put_plain, scripted_worker
from support.streams import until_ended
from support.waiting import wait_until

from inferq.producer import InferenceClient, Keys, RequestRefused, SigningKeys, SyncInferenceClient, Unsigned, connect
from inferq.worker.settings import InvalidSettings, WorkerSettings, read_settings

OLD_SECRET, NEW_SECRET = "hush-0123456789abcdef0123456789abcdef", "hush-fedcba9876543210fedcba9876543210"
OLD, NEW = f"old:{OLD_SECRET}", f"new:{NEW_SECRET}"
OLD_KEYS, NEW_KEYS = SigningKeys.parse(OLD), SigningKeys.parse(NEW)
REQUEST = {"prompt": "hello", "sampling": {"max_tokens": 4, "seed": 1}}
SIGNED = {"environment": {"INFERQ_SIGNING_KEY": NEW}}


def client_with(url: str, keys: SigningKeys | None = NEW_KEYS) -> InferenceClient:
    return InferenceClient.from_url(url, model=MODEL, signing_keys=keys)


async def set_aside(client: redis.asyncio.Redis, request_id: str) -> None:
    """Take a waiting job out of the queue, so that it can be tampered with before a worker sees it."""
    assert await client.zrem(KEYS.queue, request_id) == 1


async def put_back(client: redis.asyncio.Redis, request_id: str) -> None:
    await client.zadd(KEYS.queue, {request_id: 1})


async def refusal(client: redis.asyncio.Redis, request_id: str) -> str:
    """The message of a job that was refused as unsigned, of which nothing is left."""
    events = await until_ended(client, KEYS, request_id)
    assert [event.type for event in events] == ["queued", "started", "failed"]
    assert events[-1].code == "unsigned"
    assert not await client.exists(KEYS.job(request_id), KEYS.payload(request_id), KEYS.dead_payload(request_id))
    return str(events[-1].message)


async def test_only_what_is_signed_is_served(redis_url: str, client: redis.asyncio.Redis) -> None:
    async with client_with(redis_url) as signing, client_with(redis_url, None) as plain:
        ids = {name: await signing.submit(REQUEST) for name in ("good", "altered", "stripped", "swapped", "donor")}
        ids["unsigned"] = await plain.submit(REQUEST)
        ids["plain"] = await put_plain(client, arq_payload(args=[REQUEST]))
        async with client_with(redis_url, OLD_KEYS) as other:
            ids["other key"] = await other.submit(REQUEST)
        async with client_with(redis_url, SigningKeys.parse(f"new:{OLD_SECRET}")) as liar:
            ids["other secret"] = await liar.submit(REQUEST)
        altered = arq_payload(args=[{**REQUEST, "prompt": "hellp"}])
        await client.set(KEYS.payload(ids["altered"]), altered, keepttl=True)
        await client.hdel(KEYS.job(ids["stripped"]), "signature")
        donor = await client.hget(KEYS.job(ids["donor"]), "signature")
        await client.hset(KEYS.job(ids["swapped"]), "signature", donor)
        async with scripted_worker(redis_url, **SIGNED) as worker:
            assert (await signing.result(ids["good"])).text == answer_to("hello", 4)
            assert (await signing.result(ids["donor"])).text == answer_to("hello", 4)
            for name, reason in {
                "unsigned": "no signature",
                "plain": "no signature",
                "stripped": "no signature",
                "altered": "'new' does not match",
                "swapped": "'new' does not match",
                "other secret": "'new' does not match",
                "other key": "not known here: 'old'",
            }.items():
                assert reason in await refusal(client, ids[name]), name
                with pytest.raises(RequestRefused, match="unsigned"):
                    await plain.result(ids[name])
            assert await plain.dead_letters() == []
            assert await left_over(client) == set()
            assert "hush" not in worker.log


async def test_a_job_that_was_moved_is_refused(redis_url: str, client: redis.asyncio.Redis) -> None:
    """To another id, from the queue of another model, from another prefix: every byte of it is as it was signed."""
    async with client_with(redis_url) as producer:
        original = await producer.submit(REQUEST)
        payload, job = await client.get(KEYS.payload(original)), await client.hgetall(KEYS.job(original))
        copies = {"another-id": job}
        for name, elsewhere in {"other-model": Keys("other"), "other-prefix": Keys(MODEL, "team")}.items():
            signature = NEW_KEYS.sign(name, queue=elsewhere.queue, payload=payload)
            copies[name] = job | {b"signature": signature.encode()}
        for name, fields in copies.items():
            async with client.pipeline() as pipe:
                pipe.set(KEYS.payload(name), payload, px=60_000)
                pipe.hset(KEYS.job(name), mapping=fields)
                pipe.pexpire(KEYS.job(name), 60_000)
                pipe.copy(KEYS.events(original), KEYS.events(name))
                pipe.zadd(KEYS.queue, {name: 5})
                await pipe.execute()
        async with scripted_worker(redis_url, **SIGNED):
            for name in copies:
                assert "does not match" in await refusal(client, name)
            assert (await producer.result(original)).text == answer_to("hello", 4)


async def test_what_is_signed_is_checked_again_by_whoever_takes_it_over(
    redis_url: str, client: redis.asyncio.Redis
) -> None:
    """A payload that changes while its worker is away is not what the next one goes on with."""
    flags, engine = ("--lease-seconds", "1"), ["--step-ms", "20"]
    async with client_with(redis_url) as producer:
        async with scripted_worker(redis_url, *flags, engine=engine, **SIGNED) as first:
            request_id = await producer.submit("x", sampling={"max_tokens": 20_000, "ignore_eos": True})
            await wait_until(lambda: client.exists(KEYS.lease(request_id)))
            first.send(signal.SIGKILL)
            await first.wait()
        await client.set(KEYS.payload(request_id), arq_payload(args=[REQUEST]), keepttl=True)
        async with scripted_worker(redis_url, *flags, **SIGNED):
            events = await until_ended(client, KEYS, request_id)
    assert (events[-1].code, "does not match" in events[-1].message) == ("unsigned", True)


async def test_keys_are_changed_without_losing_a_job(
    redis_url: str, client: redis.asyncio.Redis, tmp_path: Path
) -> None:
    """First the workers learn the new key, then producers sign with it, then the workers forget the old one."""
    file = tmp_path / "keys"
    file.write_text(f"{OLD}\n")
    environment = {"INFERQ_SIGNING_KEY_FILE": str(file)}
    async with client_with(redis_url, OLD_KEYS) as before, client_with(redis_url) as after:
        async with scripted_worker(redis_url, environment=environment):
            early = await before.submit(REQUEST)
            assert (await before.result(early)).text == answer_to("hello", 4)
        waiting = await before.submit(REQUEST)
        file.write_text(f"{NEW}\n{OLD}\n")
        async with scripted_worker(redis_url, environment=environment):
            for request_id in (waiting, await before.submit(REQUEST), await after.submit(REQUEST)):
                assert (await after.result(request_id)).text == answer_to("hello", 4)
        late = await before.submit(REQUEST)
        file.write_text(f"{NEW}\n")
        async with scripted_worker(redis_url, environment=environment):
            assert "not known here: 'old'" in await refusal(client, late)
            assert (await after.result(await after.submit(REQUEST))).text == answer_to("hello", 4)


async def test_a_worker_without_keys_takes_signed_jobs(redis_url: str) -> None:
    async with client_with(redis_url) as producer, scripted_worker(redis_url):
        assert (await producer.result(await producer.submit(REQUEST))).text == answer_to("hello", 4)


class TestRequeue:
    async def died(self, url: str, producer: InferenceClient) -> str:
        engine = ["--exit-on-text", "hello"]
        async with scripted_worker(url, engine=engine, **SIGNED):
            request_id = await producer.submit(REQUEST)
            with pytest.raises(Exception, match="engine_crashed"):
                await producer.result(request_id)
        return request_id

    async def test_a_dead_letter_is_signed_for_its_new_id(self, redis_url: str, client: redis.asyncio.Redis) -> None:
        async with client_with(redis_url) as producer:
            again = await producer.requeue(await self.died(redis_url, producer))
            async with scripted_worker(redis_url, **SIGNED):
                assert (await producer.result(again)).text == answer_to("hello", 4)

    async def test_one_that_somebody_has_altered_is_not_signed(
        self, redis_url: str, client: redis.asyncio.Redis
    ) -> None:
        """Else whoever writes to Redis would have his own job signed by the operator who looks after the dead."""
        async with client_with(redis_url) as producer:
            request_id = await self.died(redis_url, producer)
            await client.set(KEYS.dead_payload(request_id), arq_payload(args=[REQUEST]), keepttl=True)
            with pytest.raises(Unsigned, match="does not match"):
                await producer.requeue(request_id)
            forged = {"id": "forged", "reason": "engine_crashed", "attempts": 1}
            await client.xadd(KEYS.dead, forged)
            await client.set(KEYS.dead_payload("forged"), arq_payload(args=[REQUEST]), px=60_000)
            with pytest.raises(Unsigned, match="no signature"):
                await producer.requeue("forged")
            assert [letter.request_id for letter in await producer.dead_letters()] == ["forged", request_id]
            assert await client.zcard(KEYS.queue) == 0


class TestKeysOfAClient:
    async def test_they_come_from_the_environment_too(
        self, redis_url: str, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("INFERQ_SIGNING_KEY", NEW)
        async with InferenceClient.from_url(redis_url, model=MODEL) as producer:
            request_id = await producer.submit(REQUEST)
        async with InferenceClient(arq := connect(redis_url), model=MODEL) as producer:
            second = await producer.submit(REQUEST, durable=False, idempotency_key="k")
        await arq.aclose()
        with SyncInferenceClient.from_url(redis_url, model=MODEL) as threaded:
            third = await asyncio.to_thread(threaded.submit, REQUEST)
        for each in (request_id, second, third):
            payload, signature = await client.get(KEYS.payload(each)), await client.hget(KEYS.job(each), "signature")
            NEW_KEYS.verify(signature.decode(), each, queue=KEYS.queue, payload=payload)
        await client.flushdb()

    async def test_no_repr_and_no_log_has_them(
        self, redis_url: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        caplog.set_level(logging.DEBUG)
        async with client_with(redis_url) as producer:
            await producer.cancel(await producer.submit(REQUEST))
            assert "hush" not in repr(vars(producer)) + repr(vars(producer._submitter))
        assert "hush" not in caplog.text + "".join(capfd.readouterr())


class TestKeysOfAWorker:
    @pytest.fixture(autouse=True)
    def environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("INFERQ_SIGNING_KEY", NEW)

    def test_settings_do_not_show_them(self) -> None:
        settings = read_settings([])
        assert repr(settings.signing_keys) == "<SigningKeys new>"
        assert settings.signing_keys is settings.signing_keys
        assert "hush" not in repr(settings) + str(settings) + settings.model_dump_json()

    @pytest.mark.parametrize("flag", [["--signing-key", NEW], [f"--signing-key={NEW}"], [f"--signing_key={NEW}"]])
    def test_they_are_no_flag(self, flag: list[str], capfd: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(InvalidSettings) as refused:
            read_settings(flag)
        assert "hush" not in str(refused.value) + "".join(capfd.readouterr())
        assert "signing" in str(refused.value)

    def test_help_speaks_of_the_file_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            read_settings(["--help"])
        words = capsys.readouterr().out.split()
        assert "--signing-key-file" in words and "--signing-key" not in words

    def test_wrong_ones_are_refused_without_being_shown(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for text in ("hush-a-bare-secret-of-many-characters", "a:hush", f"{NEW},{NEW}"):
            monkeypatch.setenv("INFERQ_SIGNING_KEY", text)
            with pytest.raises(InvalidSettings, match=r"key [12]") as refused:
                read_settings([])
            assert "hush" not in str(refused.value)
        monkeypatch.setenv("INFERQ_SIGNING_KEY", NEW)
        with pytest.raises(InvalidSettings, match="not both"):
            read_settings(["--signing-key-file", str(tmp_path)])
        monkeypatch.delenv("INFERQ_SIGNING_KEY")
        with pytest.raises(InvalidSettings, match="cannot be read"):
            read_settings(["--signing-key-file", str(tmp_path / "absent")])
        assert WorkerSettings().signing_keys is None

    async def test_a_worker_that_runs_shows_them_to_nobody(self, redis_url: str, client: redis.asyncio.Redis) -> None:
        """Not to `ps`, not in its log at any level, not in what it says of itself, and its engine has none of them."""
        async with scripted_worker(redis_url, "--log-level", "debug", **SIGNED) as worker, client_with(redis_url) as c:
            await c.result(await c.submit(REQUEST))
            family = worker.family()
            assert len(family) > 1
            for process in family:
                assert "hush" not in " ".join(process.cmdline())
            for child in family[1:]:
                assert "INFERQ_SIGNING_KEY" not in psutil.Process(child.pid).environ()
            said: list[Any] = [await client.dump(key) async for key in client.scan_iter()]
            assert not any(NEW_SECRET.encode() in each for each in said)
            assert "hush" not in worker.log

    async def test_one_with_wrong_keys_does_not_start(self, redis_url: str) -> None:
        with start_worker(redis_url, environment={"INFERQ_SIGNING_KEY": "a:hush"}) as worker:
            assert await worker.wait() == 2
            assert "signing" in worker.log and "32" in worker.log
            assert "hush" not in worker.log and json.dumps("Traceback") not in worker.log
