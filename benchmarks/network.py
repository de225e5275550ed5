"""Network namespaces joined by slow links, which vanish with the process that made them.

    with Network(4) as network:
        subprocess.Popen([*network.enter(0), "python", ...])   # sees 10.77.0.1 and nothing else

Each member is a namespace of its own, one veth pair away from a bridge in a further namespace; a
token bucket limits what each sends. Nothing is made in the host's own namespace, so nothing there
can be left over but the names. They go when the block ends, when the process is killed (a watchdog
holds the other end of a pipe), and, had the watchdog been killed too, before the next network.

Needs root, ``ip`` and ``tc``; ``why_not`` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

PREFIX = "collmm"
SUBNET = "10.77.0"


def why_not() -> str | None:
    """Return what is missing to make a network, in one line, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root; run it as root"
    for tool in ("ip", "tc", "sysctl", "unshare", "taskset"):
        if shutil.which(tool) is None:
            return f"the command {tool!r} is not here: install iproute2, procps and util-linux"
    probe = f"{owner_name(os.getpid())}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"a network namespace cannot be made here: {made.stderr.strip()}"
    run("ip", "netns", "delete", probe)
    return None


class NetworkError(Exception):
    """The network could not be made."""


def run(*command: str) -> str:
    """Run a command that must succeed; return what it printed. Raises ``NetworkError``."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """``size`` members on one switch; member k has the address ``10.77.0.(k+1)``.

    Attributes:
      rate: what each member can send, as ``tc`` writes it, such as ``"600mbit"``.
    """

    def __init__(self, size: int, rate: str = "600mbit") -> None:
        self.size = size
        self.rate = rate
        self._name = owner_name(os.getpid())
        self._watchdog: subprocess.Popen | None = None

    def __enter__(self) -> Network:
        for owner in _owners():
            if _dead(owner):
                remove(owner)
        # Before the first namespace is there, so that it cannot be left behind.
        command = [sys.executable, __file__, self._name]
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._watchdog is not None
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()

    def address(self, member: int) -> str:
        """Return the IPv4 address of a member."""
        return f"{SUBNET}.{member + 1}"

    def enter(self, member: int) -> list[str]:
        """Return the words to put before a command for it to run as this member.

        It gets a host name of its own too, its address: gloo asks for the host name to find out
        on which address to listen.
        """
        rename = 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"'
        space = self._space(str(member))
        return [
            *("ip", "netns", "exec", space, "unshare", "--uts"),
            *("sh", "-c", rename, self.address(member)),
        ]

    def _space(self, part: str) -> str:
        return f"{self._name}-{part}"

    def _make(self) -> None:
        switch = self._space("switch")
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "switch", "up")
        for member in range(self.size):
            self._join(member, switch)

    def _join(self, member: int, switch: str) -> None:
        space, port = self._space(str(member)), f"port{member}"
        run("ip", "netns", "add", space)
        pair = ("type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "-n", switch, "link", "add", port, *pair)
        run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
        run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "-n", space, "addr", "add", f"{self.address(member)}/24", "dev", "eth0")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        # gloo stalls on delayed acknowledgements, on bbr's pacing, and on small writes held back.
        run(
            *("ip", "-n", space, "route", "change", f"{SUBNET}.0/24", "dev", "eth0"),
            *("proto", "kernel", "scope", "link", "src", self.address(member), "quickack", "1"),
        )
        settings = ("net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_autocorking=0")
        run("ip", "netns", "exec", space, "sysctl", "-q", "-w", *settings)
        # A burst below one segmentation-offloaded packet of 64 kB would drop all of them.
        run(
            *("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", "tbf"),
            *("rate", self.rate, "burst", "256kb", "limit", "20mb"),
        )


# --- going away ---


def remove(owner: str) -> None:
    """Kill what runs in the namespaces of ``owner`` and delete them."""
    for space in spaces():
        if space.startswith(f"{owner}-"):
            for _ in range(3):  # what it had just started may not have been in the list
                pids = members(space)
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                if not pids:
                    break
                time.sleep(0.1)
            run("ip", "netns", "delete", space)


def members(space: str) -> list[int]:
    """Return the processes in a namespace."""
    return [int(pid) for pid in run("ip", "netns", "pids", space).split()]


def spaces() -> list[str]:
    """Return the name of every network namespace that has one."""
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.strip()]


def _owners() -> set[str]:
    """Return ``collmm-<pid>-<start time>`` of every network there is."""
    names = [space.split("-") for space in spaces() if space.startswith(f"{PREFIX}-")]
    return {"-".join(parts[:3]) for parts in names if len(parts) == 4}


def owner_name(pid: int) -> str:
    """Return what the namespaces of a process are called; a number given again is another name."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return f"{PREFIX}-{pid}-{fields[19]}"


def _dead(owner: str) -> bool:
    try:
        return owner_name(int(owner.split("-")[1])) != owner
    except (OSError, ValueError):
        return True


def _watch(owner: str) -> None:
    """Wait until the other end of the pipe is closed, by intent or by death; then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remove(owner)


if __name__ == "__main__":
    _watch(sys.argv[1])
