"""The suites of the scripts once more, with each side's commands under its own user of the ACL file.

They know nothing of it: the plugin `support/least_rights.py` puts the users in, and fails a test for any refusal.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from asyncio.subprocess import PIPE, STDOUT

import pytest
from support.acl import Secured
from support.tree import ROOT

#: These need another prefix, a user or a server of their own.
ELSEWHERE = "keys_as_the_contract_does or server_refuses_to_everybody or full_server"


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_every_command_has_the_rights_that_it_needs(secured_session: Secured) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", "tests/scripts", "-q", "-x", "-p", "support.least_rights",
        "-p", "no:cacheprovider", "-k", f"not ({ELSEWHERE})",
        cwd=ROOT, env={**os.environ, "INFERQ_TEST_REDIS_URL": secured_session.url("admin")}, stdout=PIPE, stderr=STDOUT,
    )  # fmt: skip
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output[-4000:]
    assert int(re.findall(r"(\d+) passed", output)[0]) > 300
