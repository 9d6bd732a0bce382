"""The rules of MSCCL's XML, checked strictly, and an executor of its thread blocks, both written from the runtimes' sources.

Sources: msccl_parser.cc, msccl_parser.h, msccl_struct.h and msccl_kernel.cu of Azure/msccl-executor-nccl and ROCm/rccl, and the
simulator MSCCL-XML-Verifier (threadblock.cpp, instructions.cpp, mailbox.cpp). Nothing here imports funccoll.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from xml.etree import ElementTree

COLLS = {"allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "reduce", "gather", "scatter"}
ALGO = ("name", "proto", "nchannels", "nchunksperloop", "ngpus", "coll", "inplace", "outofplace", "minBytes", "maxBytes")
GPU = ("id", "i_chunks", "o_chunks", "s_chunks")
TB = ("id", "send", "recv", "chan")
STEP = ("s", "type", "srcbuf", "srcoff", "dstbuf", "dstoff", "cnt", "depid", "deps", "hasdep")
TAG = re.compile(r'<(/?)([a-z]+)((?: [A-Za-z_]+="[^"<>&]{0,255}")*)(/?)>')
"""What the runtimes' reader takes: one space before each attribute, double quotes, short values, no entities."""
READS_SRC, READS_DST, WRITES = {"s", "rrs", "rrc", "rrcs", "cpy", "re"}, {"re"}, {"r", "rcs", "rrc", "rrcs", "cpy", "re"}
RECEIVES, SENDS = {"r", "rcs", "rrs", "rrc", "rrcs"}, {"s", "rcs", "rrs", "rrcs"}


def check(condition: object, *what: object) -> None:
    if not condition:
        raise AssertionError(" ".join(map(str, what)))


def check_rules(text: str, most_steps: int = 64) -> ElementTree.Element:
    """Raise AssertionError for XML that a runtime would refuse, or wait forever in; `most_steps` is Azure's limit."""
    for line in text.splitlines():
        check(TAG.fullmatch(line.strip()), "the runtimes' reader does not take", line)
    algo = ElementTree.fromstring(text)
    names = [name for name in algo.attrib if name != "root"]
    check(algo.tag == "algo" and tuple(names) == ALGO and len(algo.attrib) <= 16, "algo", algo.attrib)
    check(algo.get("coll") in COLLS and algo.get("proto") in ("Simple", "LL", "LL128"), algo.attrib)
    n, channels = int(algo.attrib["ngpus"]), int(algo.attrib["nchannels"])
    check(1 <= channels <= 32 and {algo.get("inplace"), algo.get("outofplace")} == {"0", "1"}, algo.attrib)
    check([gpu.tag for gpu in algo] == ["gpu"] * n and len(algo) == n, "gpus")
    sizes = []
    connections: dict[str, defaultdict] = {"send": defaultdict(list), "recv": defaultdict(list)}
    for rank, gpu in enumerate(algo):
        check(tuple(gpu.attrib) == GPU and int(gpu.attrib["id"]) == rank, "gpu", gpu.attrib)
        sizes.append({b: int(gpu.attrib[f"{b}_chunks"]) for b in "ios"})
        check(1 + n + len(gpu) + sum(map(len, gpu)) <= 4096, "too many nodes")
        check(len(gpu) <= 128, "depid is an int8")
        per_channel: Counter = Counter()
        for number, tb in enumerate(gpu):
            check(tb.tag == "tb" and tuple(tb.attrib) == TB and int(tb.attrib["id"]) == number, "tb", tb.attrib)
            send, recv, chan = (int(tb.attrib[k]) for k in ("send", "recv", "chan"))
            check(0 <= chan < channels and rank not in (send, recv), tb.attrib)
            check(-1 <= send < n and -1 <= recv < n and 0 < len(tb) <= most_steps, tb.attrib, len(tb))
            per_channel.update([("send", chan)] * (send >= 0) + [("recv", chan)] * (recv >= 0))
            for side, ends in (("send", (rank, send, chan)), ("recv", (recv, rank, chan))):
                if min(ends) >= 0:
                    check(ends not in connections[side], "two thread blocks on one connection", ends)
                    connections[side][ends] = []
            for index, step in enumerate(tb):
                _check_step(gpu, tb, step, index, sizes[rank])
                if step.get("type") in SENDS:
                    check(send >= 0, "a send without a peer", step.attrib)
                    connections["send"][rank, send, chan].append(step)
                if step.get("type") in RECEIVES:
                    check(recv >= 0, "a receive without a peer", step.attrib)
                    connections["recv"][recv, rank, chan].append(step)
        check(all(count <= 32 for count in per_channel.values()), "too many peers on a channel", per_channel)
        awaited = {(int(s.attrib["depid"]), int(s.attrib["deps"])) for tb in gpu for s in tb if s.get("depid") != "-1"}
        marked = {(t, i) for t, tb in enumerate(gpu) for i, s in enumerate(tb) if s.get("hasdep") == "1"}
        check(awaited == marked, "hasdep and depid disagree on gpu", rank, awaited ^ marked)
    check({int(tb.attrib["chan"]) for gpu in algo for tb in gpu} <= set(range(channels)), "channels")
    check(connections["send"].keys() == connections["recv"].keys(), "a connection has one end only")
    for ends, sent in connections["send"].items():
        received = connections["recv"][ends]
        check(len(sent) == len(received), "sends without receives", ends)
        for s, r in zip(sent, received, strict=True):
            check(s.get("cnt") == r.get("cnt"), "counts differ", ends)
            # The verifier wants both sides to name one destination, and of a plain receive one source.
            same = ("dstbuf", "dstoff", "srcbuf", "srcoff") if r.get("type") == "r" else ("dstbuf", "dstoff")
            check(s.get("type") != "s" or all(s.get(k) == r.get(k) for k in same), "sides differ", s.attrib, r.attrib)
    return algo


def _check_step(gpu: ElementTree.Element, tb: ElementTree.Element, step: ElementTree.Element, index: int, sizes: dict) -> None:
    a = step.attrib
    check(step.tag == "step" and tuple(a) == STEP and int(a["s"]) == index, "step", a)
    check(a["type"] in READS_SRC | RECEIVES | {"nop"} and a["srcbuf"] in sizes and a["dstbuf"] in sizes, a)
    count, depid, deps = int(a["cnt"]), int(a["depid"]), int(a["deps"])
    check(count == 0 if a["type"] == "nop" else 1 <= count < 72, "count", a)
    for side, kinds in (("src", READS_SRC), ("dst", WRITES)):
        if a["type"] in kinds:
            first = int(a[f"{side}off"])
            check(first >= 0 and first + count <= min(sizes[a[f"{side}buf"]], 32768), "out of bounds", a, sizes)
    check((depid < 0) == (deps < 0) and depid >= -1 and a["hasdep"] in ("0", "1"), a)
    if depid >= 0:
        check(depid != int(tb.attrib["id"]) and depid < len(gpu) and deps < len(gpu[depid]), "no such step", a)
        check(gpu[depid][deps].get("type") != "nop", "a nop tells nobody that it is done", a)
    if a["type"] == "nop":
        # A chain of nops ends in a step that waits as well: there the runtime attaches all their dependencies.
        follower = tb[index + 1] if index + 1 < len(tb) else None
        check(depid >= 0 and a["hasdep"] == "0", "a nop is there to wait", a)
        check(follower is not None and follower.get("depid") != "-1", "a nop without a waiting step behind it", a)


def execute(algo: ElementTree.Element, inputs: Sequence[list[int]], seed: int, buffered: bool = True) -> list[dict[str, list]]:
    """Run the thread blocks in a random order on integers; returns the buffers of each gpu.

    Without `buffered` a send waits until its receive takes it, as with no memory between the two. Reads of what nothing has
    written raise AssertionError, and so does a state in which no thread block can go on.
    """
    chance = random.Random(seed)
    memory: list[dict[str, list]] = [
        {b: [None] * int(gpu.attrib[f"{b}_chunks"]) for b in "os"} | {"i": list(x)} for gpu, x in zip(algo, inputs, strict=True)
    ]
    at = {(r, t): 0 for r, gpu in enumerate(algo) for t, _ in enumerate(gpu)}
    wires: defaultdict[tuple, list] = defaultdict(list)
    receiver = {(int(tb.attrib["recv"]), r, tb.get("chan")): t for r, gpu in enumerate(algo) for t, tb in enumerate(gpu)}

    def ready(r: int, t: int) -> bool:
        tb = algo[r][t]
        if at[r, t] == len(tb):
            return False
        step, chan = tb[at[r, t]], tb.get("chan")
        if step.get("depid") != "-1" and at[r, int(step.attrib["depid"])] <= int(step.attrib["deps"]):
            return False
        if step.get("type") in RECEIVES and not wires[int(tb.attrib["recv"]), r, chan]:
            return False
        if step.get("type") in SENDS and not buffered:  # its receiver must stand at the receive, with its waits over
            peer = int(tb.attrib["send"])
            there = receiver[r, peer, chan]
            k = at[peer, there]
            if wires[r, peer, chan] or k == len(algo[peer][there]) or algo[peer][there][k].get("type") not in RECEIVES:
                return False
            depid, deps = (int(algo[peer][there][k].attrib[name]) for name in ("depid", "deps"))
            return depid < 0 or at[peer, depid] > deps
        return True

    def run(r: int, t: int) -> None:
        tb = algo[r][t]
        step, chan, mine = tb[at[r, t]], tb.get("chan"), memory[r]
        a, count, kind = step.attrib, int(step.attrib["cnt"]), step.attrib["type"]

        def load(side: str) -> list[int]:
            first = int(a[f"{side}off"])
            values = mine[a[f"{side}buf"]][first : first + count]
            check(len(values) == count and None not in values, "reads what nothing has written", r, a)
            return values

        values = load("src") if kind in READS_SRC else [0] * count
        if kind in RECEIVES:
            values = [x + y for x, y in zip(values, wires[int(tb.attrib["recv"]), r, chan].pop(0), strict=True)]
        if kind in READS_DST:
            values = [x + y for x, y in zip(values, load("dst"), strict=True)]
        if kind in WRITES:
            first = int(a["dstoff"])
            check(first + count <= len(mine[a["dstbuf"]]), "writes out of bounds", r, a)
            mine[a["dstbuf"]][first : first + count] = values
        if kind in SENDS:
            wires[r, int(tb.attrib["send"]), chan].append(values)
        at[r, t] += 1

    keys = list(at)

    def next_one() -> tuple[int, int] | None:
        first = chance.randrange(len(keys)) if keys else 0
        return next((key for key in (*keys[first:], *keys[:first]) if ready(*key)), None)

    while (key := next_one()) is not None:
        run(*key)
    left = {key: n for key, n in at.items() if n < len(algo[key[0]][key[1]])}
    check(not left and not any(wires.values()), "stuck at", left)
    return memory
