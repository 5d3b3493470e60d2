"""Errors that a machine, a cluster or a request for devices can cause.

PlacementError
├── TopologyError      the machine's description cannot be read or makes no sense
├── LayoutError        the request asks for ranks that the devices cannot give
├── ReservationError   Ray could not give the bundles in time
├── ClaimError         a socket is held by another process, or its lock cannot be taken
├── DoesNotFitError    weights, KV cache and activations exceed a rank's memory
└── NativeError        the native module is missing or the kernel refused a call
"""


class PlacementError(Exception):
    """Base of all errors of this package; the message is complete and meant for the user."""


class TopologyError(PlacementError):
    """The machine's description cannot be read or makes no sense."""


class LayoutError(PlacementError):
    """The request asks for ranks that the devices cannot give."""


class ReservationError(PlacementError):
    """Ray could not give the bundles in time."""


class ClaimError(PlacementError):
    """A socket is held by another process, or its lock cannot be taken."""


class DoesNotFitError(PlacementError):
    """Weights, KV cache and activations exceed a rank's memory."""


class NativeError(PlacementError):
    """The native module is missing or the kernel refused a call."""
