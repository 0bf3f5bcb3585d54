"""Audits before anything is trained: what a code means, and what a policy covers over many rounds."""

from fedcover.audit.code import Audit, audit_code
from fedcover.audit.rounds import LayerCover, RoundsAudit, audit_rounds

__all__ = ["Audit", "LayerCover", "RoundsAudit", "audit_code", "audit_rounds"]
