"""A strict fake of `cupy.cuda.nccl` (CuPy 14.2) between real processes: NumPy arrays stand for memory of a GPU.

It has that module's names, constants and positional arguments, and refuses what NCCL leaves undefined: counts, types or roots
that differ between ranks, sends that meet no receive of their group, and a communicator that is used after its end. One
thread is the stream. Groups wait for it, unless `_asynchronous`, because NumPy does not.

As in NCCL, an error in a group ends the group, of which nothing is enqueued. The end of a communicator in a group frees its
memory where the group ends, and to free memory waits for all that is enqueued on the GPU, whose communicator it may be. As in
CuPy, neither `abort` nor `destroy` raises, and a communicator that is garbage is destroyed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import pickle
import queue
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress

import ml_dtypes
import numpy as np

from funccoll.platforms.array_library import NUMPY

NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64 = range(6)
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = range(6, 10)
NCCL_CHAR, NCCL_INT, NCCL_HALF, NCCL_FLOAT, NCCL_DOUBLE = 0, 2, 6, 7, 8
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
available = True

_DTYPES = [
    np.dtype(t)
    for t in (
        np.int8,
        np.uint8,
        np.int32,
        np.uint32,
        np.int64,
        np.uint64,
        np.float16,
        np.float32,
        np.float64,
        ml_dtypes.bfloat16,
    )
]
_OPS = {NCCL_SUM: np.add, NCCL_PROD: np.multiply, NCCL_MAX: np.maximum, NCCL_MIN: np.minimum}
_STREAM = 0x57AEA3
_PATIENCE = 100.0
_STATUS = {
    1: "UNHANDLED_CUDA_ERROR",
    2: "SYSTEM_ERROR",
    3: "INTERNAL_ERROR",
    4: "INVALID_ARGUMENT",
    5: "INVALID_USAGE",
    6: "REMOTE_ERROR",
}
_asynchronous = False
_version = 23203
_calls: list[str] = []
"""The names of the functions of NCCL that were called."""


class NcclError(RuntimeError):
    def __init__(self, status):
        self.status = status
        name = _STATUS[status]  # a KeyError for those that CuPy has no name for: 7 (in progress), 8 (timeout)
        super().__init__(f"NCCL_ERROR_{name}: {name.lower()}")


class NcclConfig:
    def __init__(self, split_share=0):
        self.split_share = split_share


def get_version():
    return _version


def get_build_version():
    return 22707


def get_unique_id():
    return secrets.token_bytes(128)


# ---------------------------------------------------------------- the stream


class _Stream(threading.Thread):
    """What is put runs in order, in this thread."""

    def __init__(self):
        super().__init__(daemon=True)
        self.todo: queue.Queue = queue.Queue()
        self.failure: BaseException | None = None
        self.fault: BaseException | None = None
        """The exception of every question to the GPU after it has failed."""
        self.start()

    def run(self):
        while True:
            work, done = self.todo.get()
            try:
                work()
            except BaseException as error:  # told to the thread that waits
                self.failure = error
            done.set()

    def put(self, work=lambda: None):
        done = threading.Event()
        self.todo.put((work, done))
        return done

    def synchronize(self):
        assert self.put().wait(_PATIENCE), "the stream never came to its end"
        if self.failure is not None:
            raise self.failure


@functools.cache
def _stream():
    return _Stream()


_watching: set[int] = set()


class FakeGpu:
    """Memory of the host that stands for that of a GPU."""

    def __init__(self, bus_id):
        self.bus_id = bus_id

    def allocate(self, shape, dtype):
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xA5  # what is never written shows
        return array

    def zeros(self, shape, dtype):
        return np.zeros(shape, dtype)

    def contiguous(self, value):
        return np.ascontiguousarray(value)

    def address(self, array):
        assert array.flags.c_contiguous
        return array.ctypes.data

    library = NUMPY

    def wait(self):
        _stream().synchronize()

    def stream(self):
        return _STREAM

    def record(self):
        return _FakeEvent(_stream().put())

    def begin_watch(self):
        _watching.add(threading.get_ident())


class _FakeEvent:
    def __init__(self, reached):
        self.reached = reached

    @property
    def done(self):
        assert threading.get_ident() in _watching, "this thread may ask for events while another captures"
        if _stream().fault is not None:
            raise _stream().fault
        return self.reached.is_set()


# ---------------------------------------------------------------- groups


class _Groups(threading.local):
    depth = error = 0

    def __init__(self):
        self.calls = []
        self.ends = []


_groups = _Groups()


def groupStart():
    _calls.append("groupStart")
    _groups.depth += 1


def groupEnd():
    if _groups.depth == 0:
        raise NcclError(5)
    _groups.depth -= 1
    if _groups.depth == 0:
        calls, _groups.calls = _groups.calls, []
        ends, _groups.ends = _groups.ends, []
        error, _groups.error = _groups.error, 0
        if error:
            raise NcclError(error)
        if calls:
            _enqueue(calls)
        for communicator in ends:
            communicator._free()


def _enqueue(calls):
    by_communicator = {}
    for communicator, call in calls:
        by_communicator.setdefault(communicator, []).append(call)
    assert len(by_communicator) <= 1, "NCCL promises no order between the communicators of a group"
    for communicator, its in by_communicator.items():
        _stream().put(functools.partial(communicator._execute, its))
    if not _asynchronous:
        _stream().synchronize()


def _integers(*values):
    for value in values:
        if type(value) is not int:
            raise TypeError("an integer is required")
        if value < 0:
            raise OverflowError("can't convert negative value to size_t")


def _read(address, count, dtype):
    return ctypes.string_at(address, count * _DTYPES[dtype].itemsize)


# ---------------------------------------------------------------- communicators


class NcclCommunicator:
    def __init__(self, ndev, commId, rank, config=None):
        _integers(ndev, rank)
        if type(commId) is not bytes:
            raise TypeError(f"Argument 'commId' has incorrect type (expected bytes, got {type(commId).__name__})")
        if len(commId) != 128:
            raise ValueError(f"commId length {len(commId)} != 128.")
        assert rank < ndev
        _calls.append("NcclCommunicator")
        self._name, self._ranks, self._rank, self._splits = hashlib.sha256(commId).hexdigest(), ndev, rank, 0
        self._state, self._reports, self._polls = "alive", 0, 0
        self._ended, self._freed = threading.Event(), False
        self._peers = _meet(self._name, ndev, rank)

    def _check(self):
        if self._state != "alive":
            raise NcclError(4)

    # ---------------- calls

    def _call(self, name, count, dtype, op, root, stream, source, output, sent, received):
        """`sent` and `received` are multiples of `count`: the elements that this rank's addresses must have."""
        if self._state != "alive" and _groups.depth:
            _groups.error = 4
        self._check()
        _integers(count, dtype, root, source, output, stream)
        assert dtype < len(_DTYPES) and root < self._ranks and (op is None or op in _OPS)
        assert stream == _STREAM, "not the current stream"
        assert not count or ((source or not sent) and (output or not received)), "a null address"
        _calls.append(name)
        call = (name, count, dtype, op, root), source, output, sent, received
        if _groups.depth:
            _groups.calls.append((self, call))
        else:
            _enqueue([(self, call)])

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._call("allReduce", count, datatype, op, 0, stream, sendbuf, recvbuf, 1, 1)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        self._call("reduce", count, datatype, op, root, stream, sendbuf, recvbuf, 1, int(root == self._rank))

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        self._call("broadcast", count, datatype, None, root, stream, sendbuff, recvbuff, int(root == self._rank), 1)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):
        self._call("reduceScatter", recvcount, datatype, op, 0, stream, sendbuf, recvbuf, self._ranks, 1)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        self._call("allGather", count, datatype, None, 0, stream, sendbuf, recvbuf, 1, self._ranks)

    def send(self, sendbuf, count, datatype, peer, stream):
        self._call("send", count, datatype, None, peer, stream, sendbuf, 0, 1, 0)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._call("recv", count, datatype, None, peer, stream, 0, recvbuf, 0, 1)

    def rank_id(self):
        self._check()
        return self._rank

    def size(self):
        self._check()
        return self._ranks

    def commSplit(self, color, key, config=None):
        self._check()
        for value in (color, key):
            assert type(value) is int
        assert _stream().todo.empty(), "something is outstanding"
        _calls.append("commSplit")
        self._splits += 1
        found = self._exchange(dict.fromkeys(range(self._ranks), (color, key)))
        if color == -1:
            return None
        members = sorted((k, rank) for rank, (c, k) in found.items() if c == color)
        part = NcclCommunicator.__new__(NcclCommunicator)
        part._name = hashlib.sha256(f"{self._name} {self._splits} {color}".encode()).hexdigest()
        part._ranks, part._rank, part._splits = len(members), members.index((key, self._rank)), 0
        part._state, part._reports, part._polls = "alive", 0, 0
        part._ended, part._freed = threading.Event(), False
        part._peers = _meet(part._name, part._ranks, part._rank)
        return part

    def check_async_error(self):
        self._check()
        self._polls += 1
        if self._reports:
            raise NcclError(self._reports)

    def __del__(self):
        if hasattr(self, "_state"):
            self.destroy()  # as CuPy's does

    def abort(self):
        self._end("abort")

    def destroy(self):
        if self._state == "alive":
            assert _stream().todo.empty(), "destroyed while something is outstanding"
        self._end("destroy")

    def _end(self, how):
        if self._state == "alive":
            _calls.append(how)
            self._state = how
            self._ended.set()
            for peer in self._peers.values():
                peer.close(how)
            if _groups.depth:
                _groups.ends.append(self)
            else:
                self._free()

    def _free(self):
        """Free memory: cudaFree waits for all kernels of the GPU."""
        assert _stream().put().wait(_PATIENCE), "memory is freed while what another communicator has enqueued never ends"
        self._freed = True

    # ---------------- execution, in the stream's thread

    def _execute(self, calls):
        try:
            self._run(calls)
        except OSError:  # the peer is gone, and a GPU waits for it until the abort
            self._ended.wait()

    def _run(self, calls):
        together = [call for call in calls if call[0][0] not in ("send", "recv")]
        one_to_one = [call for call in calls if call[0][0] in ("send", "recv")]
        peers = range(self._ranks) if together else {call[0][4] for call in one_to_one}
        data = [_read(source, count * sent, dtype) for (_, count, dtype, *_), source, _, sent, _ in together]
        messages = {}
        for peer in peers:
            sends = [
                (what[1:3], _read(source, *what[1:3]))
                for what, source, *_ in one_to_one
                if what[0] == "send" and what[4] == peer
            ]
            receives = [what[1:3] for what, *_ in one_to_one if what[0] == "recv" and what[4] == peer]
            messages[peer] = [call[0] for call in together], data, sends, receives
        found = self._exchange(messages)
        for peer, (theirs, _, sends, receives) in found.items():
            mine = messages[peer]
            assert theirs == mine[0], f"rank {self._rank} calls {mine[0]}, and rank {peer} {theirs}"
            assert [what for what, _ in sends] == mine[3], f"rank {peer} sends {sends}, rank {self._rank} receives {mine[3]}"
            assert [what for what, _ in mine[2]] == receives, f"rank {self._rank} sends {mine[2]}, rank {peer} takes {receives}"
            into = [call for call in one_to_one if call[0][0] == "recv" and call[0][4] == peer]
            for (_, payload), (_, _, output, *_) in zip(sends, into, strict=True):
                ctypes.memmove(output, payload, len(payload))
        for i, (what, _, output, _, received) in enumerate(together):
            payload = self._result(what, [found[rank][1][i] for rank in range(self._ranks)])
            if received:
                ctypes.memmove(output, payload, len(payload))

    def _result(self, what, data):
        name, count, dtype, op, root = what
        if name == "broadcast":
            return data[root]
        if name == "allGather":
            return b"".join(data)
        with np.errstate(all="ignore"):
            total = functools.reduce(_OPS[op], [np.frombuffer(part, _DTYPES[dtype]) for part in data])
        assert total.dtype == _DTYPES[dtype]
        return (total[self._rank * count :][:count] if name == "reduceScatter" else total).tobytes()

    def _exchange(self, messages):
        """What each of these ranks has for this one; each gets what is for it."""
        own = {self._rank: messages[self._rank]} if self._rank in messages else {}
        for peer, message in messages.items():
            if peer != self._rank:
                self._peers[peer].send(pickle.dumps(message))
        return own | {peer: pickle.loads(self._peers[peer].receive()) for peer in messages if peer != self._rank}


class _Peer:
    """A connection to another rank; sending never blocks."""

    def __init__(self, channel):
        self.channel, self.outgoing = channel, queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, daemon=True)
        self._sender.start()

    def _send(self):
        while (data := self.outgoing.get()) is not None:
            with suppress(OSError):
                self.channel.sendall(struct.pack("<q", len(data)) + data)

    def send(self, data):
        self.outgoing.put(data)

    def receive(self):
        return self._take(struct.unpack("<q", self._take(8))[0])

    def _take(self, size):
        data = bytearray()
        while len(data) < size:
            part = self.channel.recv(min(size - len(data), 1 << 20))
            if not part:
                raise ConnectionResetError
            data += part
        return bytes(data)

    def close(self, how):
        with suppress(OSError):  # the peer may have ended
            self.channel.shutdown(socket.SHUT_RDWR if how == "abort" else socket.SHUT_RD)
        self.outgoing.put(None)
        self._sender.join()
        self.channel.close()


def _meet(name, ranks, rank):
    """The connections of a rank to all others."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0fake-nccl-{name}-{rank}")
    listener.listen(ranks)
    found, end = {}, time.monotonic() + _PATIENCE
    for peer in range(rank):
        channel = socket.socket(socket.AF_UNIX)
        while channel.connect_ex(f"\0fake-nccl-{name}-{peer}"):
            assert time.monotonic() < end, f"rank {peer} does not come"
            time.sleep(0.001)
        channel.sendall(struct.pack("<q", rank))
        found[peer] = _Peer(channel)
    for _ in range(rank + 1, ranks):
        channel, _ = listener.accept()
        found[struct.unpack("<q", channel.recv(8))[0]] = _Peer(channel)
    listener.close()
    return found
