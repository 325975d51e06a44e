"""Memory for the KV cache: what the host's files say, and how many blocks that makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferq.cuda import memory
from inferq.cuda.memory import MemoryShortageError, host_available_bytes, num_blocks_for

GIB = 1024**3


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(available: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n"}


def test_without_a_control_group_it_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert host_available_bytes(write(tmp_path, meminfo(8 * GIB))) == 8 * GIB


def test_version_2_limits_count_at_every_level(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kube/pod"
    write(
        tmp_path,
        meminfo(64 * GIB)
        | {
            "proc/self/cgroup": "0::/kube/pod/box\n",
            f"{group}/box/memory.max": "max\n",
            f"{group}/box/memory.current": f"{1 * GIB}\n",
            f"{group}/memory.max": f"{4 * GIB}\n",
            f"{group}/memory.current": f"{3 * GIB}\n",
            f"{group}/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
        },
    )
    assert host_available_bytes(tmp_path) == 3 * GIB // 2


def test_version_2_inside_a_container_reads_its_own_root(tmp_path: Path) -> None:
    write(
        tmp_path,
        meminfo(64 * GIB)
        | {
            "proc/self/cgroup": "0::/not/visible/from/here\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{1 * GIB}\n",
        },
    )
    assert host_available_bytes(tmp_path) == 1 * GIB


def test_version_1_limits(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory/docker/abc"
    write(
        tmp_path,
        meminfo(64 * GIB)
        | {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n",
            f"{mount}/memory.limit_in_bytes": f"{6 * GIB}\n",
            f"{mount}/memory.usage_in_bytes": f"{5 * GIB}\n",
            f"{mount}/memory.stat": f"cache 3\ntotal_inactive_file {2 * GIB}\n",
        },
    )
    assert host_available_bytes(tmp_path) == 3 * GIB


def test_over_its_limit_nothing_is_available(tmp_path: Path) -> None:
    write(
        tmp_path,
        meminfo(64 * GIB)
        | {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100\n",
            "sys/fs/cgroup/memory.current": "200\n",
        },
    )
    assert host_available_bytes(tmp_path) == 0


def test_a_host_without_these_files_still_answers(tmp_path: Path) -> None:
    assert host_available_bytes(tmp_path) > 0


def test_a_kv_cache_takes_half_and_no_more_than_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 6 * GIB)
    assert memory.host_kv_bytes() == 3 * GIB
    monkeypatch.setattr(memory, "host_available_bytes", lambda: 600 * GIB)
    assert memory.host_kv_bytes() == memory.HOST_CAP_BYTES


def test_this_host_has_memory() -> None:
    assert 0 < host_available_bytes() < 2**50


def test_blocks_fill_the_budget_up_to_what_can_be_used() -> None:
    assert num_blocks_for(1000, 100, min_blocks=1, max_blocks=99, advice="") == 10
    assert num_blocks_for(1099, 100, min_blocks=10, max_blocks=99, advice="") == 10
    assert num_blocks_for(100_000, 100, min_blocks=1, max_blocks=99, advice="") == 99


def test_too_little_says_how_much_and_what_to_do() -> None:
    with pytest.raises(
        MemoryShortageError, match=r"5 MiB for the KV cache hold 2 blocks of 2\.00 MiB; at least 8 are needed: raise it"
    ):
        num_blocks_for(5 * 2**20, 2 * 2**20, min_blocks=8, max_blocks=99, advice="raise it")
