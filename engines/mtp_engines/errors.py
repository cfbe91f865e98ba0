"""Errors that a user can cause; every text says what was found, what was expected and what to do."""


class MtpError(Exception):
    """Base of everything that the command line prints as one line."""


class CheckpointError(MtpError):
    """A checkpoint directory is incomplete, damaged, contradictory or of an unknown kind."""


class BuildError(MtpError):
    """A build option cannot be honoured, or the built graphs fail their check."""


class BundleError(MtpError):
    """A bundle is incomplete, damaged, too new, or does not fit this machine."""


class RequestError(MtpError):
    """A generation request asks for something that this bundle or this release cannot do."""


class ContractError(MtpError):
    """A caller of the Python API passed arrays of the wrong kind, shape or order."""


class NumericsError(MtpError):
    """The model produced a value that is not a number."""


class EngineBusyError(MtpError):
    """A set of sequences was used by two threads at once."""
