"""Errors that a user, a configuration or a running cluster can cause.

RayHeteroError
├── ConfigError        a key, a value or a combination of values is wrong
├── UnsupportedError   vLLM, Ray, the model or a feature cannot work with this backend
├── CpuSiteError       the CPU kernels are missing or do not match the installed vLLM
├── AgreementError     ranks disagree on something that all of them must share
├── StartupError       an actor did not start, or a start-up step ran out of time
└── RankError          a rank died, hangs or answered with an error

Errors about devices and room on them are `placement.errors.PlacementError`.
"""


class RayHeteroError(Exception):
    """Base of all errors of this package; the message is complete and meant for the user."""


class ConfigError(RayHeteroError, ValueError):
    """A key, a value or a combination of values is wrong."""


class UnsupportedError(RayHeteroError):
    """vLLM, Ray, the model or a feature cannot work with this backend."""


class CpuSiteError(RayHeteroError):
    """The CPU kernels are missing or do not match the installed vLLM."""


class AgreementError(RayHeteroError):
    """Ranks disagree on something that all of them must share."""


class StartupError(RayHeteroError):
    """An actor did not start, or a start-up step ran out of time."""


class RankError(RayHeteroError):
    """A rank died, hangs or answered with an error."""
