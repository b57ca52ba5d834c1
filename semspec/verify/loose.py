"""The former name of `lossy`, for rules of other packages."""

from semspec.verify.lossy import conclude, normalised_entropy, partial_entropy

__all__ = ["conclude", "normalised_entropy", "partial_entropy"]
