"""Proves to the other side of a connection that this side has the token, which never crosses the network.

Each side sends a random nonce. The proof is HMAC-SHA256 of the token over the side's role, the leader's nonce and a
digest of the agent's first frame, which contains the agent's nonce (a challenge-response protocol, as in ISO/IEC
9798-4). So a proof is worth nothing in another connection or in the other direction, and nothing of the first frame can
be changed.
"""

import hashlib
import hmac

MIN_TOKEN_BYTES = 32

AGENT, LEADER = b"agent", b"leader"


def prove(token: bytes, role: bytes, first_frame: bytes, leader_nonce: bytes) -> bytes:
    """Returns the proof of a role."""
    digest = hashlib.sha256(first_frame).digest()
    return hmac.digest(token, b"penstock join\0" + role + b"\0" + leader_nonce + digest, "sha256")


def is_proven(token: bytes, role: bytes, first_frame: bytes, leader_nonce: bytes, proof: bytes) -> bool:
    """Whether ``proof`` is that of the role. Takes the same time wherever they differ."""
    return hmac.compare_digest(prove(token, role, first_frame, leader_nonce), proof)
