"""Hosts on this machine, for tests of jobs over several of them: namespaces that one network joins.

Each host has a network, a host name, processes, IPC and a /dev/shm of its own, with TMPDIR in it. One more, the *head*, has the
bridge that joins them, and is where launchers run; so launchers reach every host alike, by `enter_host.sh` in the place of ssh.
The hosts' process namespaces lie inside the head's, whose first process dies with the process that made it: the kernel then
ends all that runs there, and every namespace goes with its last process. So nothing is left behind, even by a killed test.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funccoll.job.host import dying_with_parent
from tests.support.ranks import mpi_vendors

AGENT = Path(__file__).with_name("enter_host.sh")
"""The command that runs another one on a host, as ssh does."""
NETWORK = "10.77.0"
"""The first three numbers of every address. Networks of several tests never meet."""
PATIENCE = 300.0
"""Seconds until a command is ended: a watchdog, not an expectation."""

_NEW = ("unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_TEMPORARY = "/dev/shm/tmp"
# A host's first process inherits those whose parents have ended. It ignores SIGCHLD, so that the kernel waits for them.
_BOOT = f"""
trap '' CHLD
echo "$0" > /proc/sys/kernel/hostname && mount -t tmpfs tmpfs /dev/shm && mkdir {_TEMPORARY} && ip link set lo up || exit
echo "$1" > /dev/shm/hosts && mount --bind /dev/shm/hosts /etc/hosts && echo up && exec sleep infinity
"""


@functools.cache
def why_not() -> str:
    """The reason why hosts cannot be made here, for `pytest.skip`; "" where they can."""
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"hosts need {' and '.join(missing)} (apt install iproute2 util-linux)"
    if os.geteuid():
        return "only root can make hosts (network namespaces)"
    try:
        with NetworkHosts(1) as hosts:
            hosts.run(0, "true")
    except subprocess.CalledProcessError as error:
        return f"hosts (network namespaces) cannot be made here: {error.stderr.strip()}"
    return ""


class NetworkHosts:
    """`number` hosts, from 0. A context manager: afterwards nothing of them is left.

    names: their host names, which may be equal; "host0", "host1", ... unless given.
    """

    def __init__(self, number: int, names: Sequence[str] = ()):
        self.names = list(names) or [f"host{i}" for i in range(number)]
        self.addresses = [f"{NETWORK}.{i + 1}" for i in range(number)]
        self._holders: list[subprocess.Popen[str]] = []
        self._pids: list[int] = []  # the first process of the head, and of each host

    def __enter__(self) -> NetworkHosts:
        try:
            self._boot("head", [])
            self.on_head("sh", "-c", f"ip link add bridge type bridge && ip addr add {NETWORK}.254/24 dev bridge")
            self.on_head("ip", "link", "set", "bridge", "up")
            for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
                self._boot(name, self.entering(-1))
                port, there = f"port{i}", str(self._known_to_head(i))
                self.on_head("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", there)
                self.on_head("ip", "link", "set", port, "master", "bridge", "up")
                self.run(i, "sh", "-c", f"ip addr add {address}/24 dev eth0 && ip link set eth0 up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for holder in self._holders:
            holder.kill()  # whose child, the first process of a host, is then killed, and with it all others there
        for holder in self._holders:
            holder.communicate()

    def _boot(self, name: str, enter: Sequence[str]) -> None:
        """Start the first process of the head, or of a host inside it."""
        known = zip(["127.0.0.1", f"{NETWORK}.254", *self.addresses], ["localhost", "head", *self.names], strict=True)
        command = [*enter, *_NEW, "sh", "-c", _BOOT, name, "\n".join(map(" ".join, known))]
        holder = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=dying_with_parent(os.getpid()),
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline() != "up\n":
            raise subprocess.CalledProcessError(holder.wait(), command, stderr=holder.communicate()[1])
        first = holder.pid
        while children := Path(f"/proc/{first}/task/{first}/children").read_text().split():  # of nsenter, and of unshare
            first = int(children[0])
        self._pids.append(first)

    def _known_to_head(self, host: int) -> int:
        """The process number by which the head's processes know the first process of a host."""
        lines = Path(f"/proc/{self._pids[1 + host]}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("NSpid")).split()[-2])

    def run(self, host: int, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, as `subprocess.run` does; it must succeed unless check=False."""
        options = {"capture_output": True, "text": True, "timeout": PATIENCE, "check": True, **options}
        return subprocess.run([*self.entering(host), *command], **options)

    def on_head(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the head."""
        return self.run(-1, *command, **options)

    def first_process(self, host: int) -> int:
        """The process whose namespaces are a host's."""
        return self._pids[1 + host]

    def entering(self, host: int) -> list[str]:
        """The beginning of a command that runs on a host, or on the head, -1, in the folder of this process."""
        return [
            "nsenter",
            "-t",
            str(self._pids[1 + host]),
            "-n",
            "-u",
            "-i",
            "-m",
            "-p",
            f"--wd={os.getcwd()}",
            "--",
            "env",
            f"TMPDIR={_TEMPORARY}",
        ]

    def mpi(self, vendor: str) -> dict[str, str]:
        """The environment of a launcher on the head: this vendor's, and what `enter_host.sh` needs."""
        known = [f"{name}={self._known_to_head(i)}" for i, name in enumerate(self.addresses)]
        return {**mpi_vendors.variables(vendor), "NETWORK_HOSTS": " ".join(known)}

    def mpirun(
        self,
        vendor: str,
        counts: Sequence[int],
        program: Sequence[str],
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a program with mpirun, in the folder of this process: on host i with counts[i] processes, if any.

        variables: further environment of the ranks. options: those of `mpi_vendors.start`.
        """
        hosts = [(address, count) for address, count in zip(self.addresses, counts, strict=True) if count]
        launcher, before = self.mpi(vendor), self.entering(-1)
        return mpi_vendors.start(vendor, hosts, program, variables, launcher, before, str(AGENT), **options)

    def link(self, host: int, state: str) -> None:
        """Set the link of a host "down", as if its cable were pulled, or "up"."""
        self.on_head("ip", "link", "set", f"port{host}", state)

    def rate(self, megabits: float, burst: int = 1 << 14) -> None:
        """Limit every link to a rate in each direction. What is sent in one go is cut into bursts, of this many bytes."""
        shape = f"root tbf rate {megabits}mbit burst {burst} latency 100ms".split()
        for host in range(len(self.names)):
            self.run(host, "tc", "qdisc", "replace", "dev", "eth0", *shape)
            self.on_head("tc", "qdisc", "replace", "dev", f"port{host}", *shape)
