"""Process groups (axes), collectives, p2p messages and the launcher of ranks; no other package sends messages."""

from shardwright.comm.backends.message_blocks import Link

__all__ = ["Link"]  # for ``launch(..., link=Link(...))``
