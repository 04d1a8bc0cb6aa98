"""Decoding: propose, verify, accept, commit; sampling, stopping, streaming; the proof that it is exact."""

from slipstream.decode.accept import Proposal, Verdict
from slipstream.decode.engine import Engine
from slipstream.decode.lookup import LookupProposer
from slipstream.decode.lossless import Report, RequestReport, check
from slipstream.decode.propose import DraftProposer, NullProposer, Proposer

__all__ = [
    "DraftProposer",
    "Engine",
    "LookupProposer",
    "NullProposer",
    "Proposal",
    "Proposer",
    "Report",
    "RequestReport",
    "Verdict",
    "check",
]
