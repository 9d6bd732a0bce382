"""The limits of control groups, of both versions, and the caches, as the kernel's files say them."""

import os

import pytest

from funccoll.job import host

pytestmark = pytest.mark.covers("launch")

GiB = 1 << 30


@pytest.fixture
def control_groups(monkeypatch, tmp_path):
    """Write what /proc/self/cgroup says, and files below the mount of the control groups."""
    monkeypatch.setattr(host, "_CGROUPS", tmp_path / "mount")
    monkeypatch.setattr(host, "_OWN_CGROUPS", tmp_path / "self")

    def write(own, files):
        (tmp_path / "self").write_text(own)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    return write


def test_the_lowest_limit_of_version_2_counts(control_groups):
    control_groups(
        "0::/job/step\n",
        {
            "job/memory.max": 3 * GiB,
            "job/memory.current": 3 * GiB - 5000,
            "job/memory.stat": "anon 7\ninactive_file 4000\nactive_file 9",
            "job/step/memory.max": "max",
            "job/step/memory.current": GiB,
            "job/cpu.max": "max 100000",
            "job/step/cpu.max": "50000 100000",
        },
    )
    assert (host.memory_limit(), host.available_memory(), host.cores()) == (3 * GiB, 9000, 1)


def test_the_controllers_of_version_1_have_folders_of_their_own(control_groups):
    control_groups(
        "2:cpu,cpuacct:/\n1:memory:/of/the/host\n",
        {
            "memory/memory.limit_in_bytes": GiB,
            "memory/memory.usage_in_bytes": GiB + 1,
            "cpu/cpu.cfs_quota_us": 150000,
            "memory.max": 1,
            "cpu.max": "1 1",
        },
    )
    assert (host.memory_limit(), host.available_memory()) == (GiB, 0)
    assert host.cores() == min(2, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("own", ["", "0::/\n", "3:memory,cpu:/\n"])
def test_without_limits_the_host_counts(control_groups, own):
    control_groups(own, {"memory/memory.limit_in_bytes": 2**63 - 4096, "cpu/cpu.cfs_quota_us": -1})
    assert host.memory_limit() is None and host.cores() == len(os.sched_getaffinity(0))
    assert 1 << 20 < host.available_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("processes", "caches"), [(1, 1), (2, 2), (3, 2), (8, 2)])
def test_caches_are_counted_once_and_only_as_many_as_there_are_processes(monkeypatch, tmp_path, processes, caches):
    for cpu in range(8):
        for index, size, shared in ((0, "32K", str(cpu)), (2, "1024K", str(cpu)), (3, "32768K", "0-3" if cpu < 4 else "4-7")):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
    monkeypatch.setattr(host, "_CPUS", tmp_path)
    host.cache_bytes.cache_clear()
    try:
        assert host.cache_bytes(processes) == caches * 32 << 20
        monkeypatch.setattr(host, "_CPUS", tmp_path / "elsewhere")
        host.cache_bytes.cache_clear()
        assert host.cache_bytes(processes) is None
    finally:
        host.cache_bytes.cache_clear()
