"""The former name of `semspec.verify.lossy`: rules of one's own import it for one more release."""

import warnings

from semspec.verify.lossy import conclude, normalised_entropy, partial_entropy, relaxable

__all__ = ["conclude", "normalised_entropy", "partial_entropy", "relaxable"]

warnings.warn("semspec.verify.loose is now semspec.verify.lossy", DeprecationWarning, stacklevel=2)
