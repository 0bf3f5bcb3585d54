"""Audits without training: the coverage and costs of a code, and the coverage of a policy over many rounds."""

from fedcover.audit.code import Audit, audit_code
from fedcover.audit.rounds import LayerCover, RoundsAudit, audit_rounds

__all__ = ["Audit", "LayerCover", "RoundsAudit", "audit_code", "audit_rounds"]
