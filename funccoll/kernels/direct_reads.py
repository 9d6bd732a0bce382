"""Direct reads: the system reads private memory of another process of the host (`process_vm_readv`) for the CPU's kernel.

Every read also fetches its owner's cookie, a number that no other process has. A process may get the number of one that died.
The cookie shows that its data are not the owner's.
"""

from __future__ import annotations

from errno import EFAULT, ESTALE
from typing import Any

from numba import njit, types

from .intrinsics import call, load, store
from .kernel_context import CONTEXT, OWNER_BITS, PEER, PIECES_BYTES

__all__ = ["can_be_read", "combine_pieces", "read_directly"]

_readv = types.ExternalFunction("process_vm_readv", types.int64(types.int32, *[types.int64] * 5))
_errno = types.ExternalFunction("__errno_location", types.int64())
_MOST = 1 << 30
"""Bytes of one read. The system reads less than twice as many."""
_ADDRESS = (1 << OWNER_BITS) - 1
_LINE = 64


@njit
def read_directly(context: Any, to: Any, source: Any, nbytes: Any) -> Any:
    """Copy from a peer's private memory. Returns 0, or an error number. PEER is then its rank."""
    rank = (source >> OWNER_BITS) - 1
    peer, source = load(context + CONTEXT.peers) + PEER.size * rank, source & _ADDRESS
    mine, theirs, cookie = context + CONTEXT.read_to, context + CONTEXT.read_from, context + CONTEXT.read_cookie
    while nbytes > 0:
        count = min(nbytes, _MOST)
        store(mine, to)
        store(mine + 8, count)
        store(mine + 16, cookie)
        store(mine + 24, 8)
        store(theirs, source)
        store(theirs + 8, count)
        store(theirs + 16, load(peer + PEER.cookie_address))
        store(theirs + 24, 8)
        done = _readv(load(peer + PEER.pid), mine, 2, theirs, 2, 0)
        error = 0
        if done < 0:
            error = load(_errno()) & 0xFFFFFFFF
        elif done != count + 8:  # a part of it was not there
            error = EFAULT
        elif load(cookie) != load(peer + PEER.cookie):
            error = ESTALE
        if error != 0:
            store(context + CONTEXT.peer, rank)
            return error
        to += count
        source += count
        nbytes -= count
    return 0


@njit
def can_be_read(context: Any, data: Any) -> Any:
    """True if peers can read private memory of this process: the system reads it for this one.

    Memory of devices cannot be read, nor what the system does not keep in pages.
    """
    return (
        data >> OWNER_BITS == 0
        and read_directly(context, context + CONTEXT.read_byte, data + load(context + CONTEXT.owner), 1) == 0
    )


@njit
def combine_pieces(context: Any, function: Any, ndst: Any, nsrc: Any, count: Any, itemsize: Any, divisor: Any) -> Any:
    """Call a combine on OPERANDS if some sources are private memory of peers. These are read first, piece by piece.

    Every element is combined as in one call. Returns 0, or an error number.
    """
    operands, pieces = load(context + CONTEXT.operands), load(context + CONTEXT.pieces)
    accumulator = load(context + CONTEXT.accumulator)
    direct, places = 0, operands + 8 * (ndst + nsrc)
    for j in range(ndst, ndst + nsrc):
        direct += load(operands + 8 * j) >> OWNER_BITS != 0
    most = PIECES_BYTES // direct // _LINE * _LINE
    rest = abs(count) * itemsize
    while rest > 0:
        nbytes, used = min(rest, most), 0
        for j in range(ndst + nsrc):
            place = load(operands + 8 * j)
            store(operands + 8 * j, place + nbytes)
            if place >> OWNER_BITS != 0:
                error = read_directly(context, pieces + used, place, nbytes)
                if error != 0:
                    return error
                place = pieces + used
                used += most
            store(places + 8 * j, place)
        number = nbytes // itemsize
        call(function, places, ndst, places + 8 * ndst, nsrc, number if count > 0 else -number, divisor, accumulator)
        rest -= nbytes
    return 0
