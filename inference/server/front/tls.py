"""TLS from certificate files, for servers and for their clients."""

from __future__ import annotations

import ssl

from heads.api.errors import UserError


def server_context(group: str, certfile: str, keyfile: str) -> ssl.SSLContext | None:
    """The TLS context of a server with `<group>.ssl_certfile` and `<group>.ssl_keyfile`; None
    without them. keyfile: empty if the certificate's file also holds the key. Raises `UserError`
    for files that are no such pair."""
    if not certfile:
        if keyfile:
            raise UserError(
                f"{group}.ssl_keyfile is set, but {group}.ssl_certfile is not: TLS needs both."
            )
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # OpenSSL would ask a terminal for the password of an encrypted key
        context.load_cert_chain(certfile, keyfile or None, password="")
    except (OSError, ValueError) as error:
        given = f"{group}.ssl_certfile '{certfile}'"
        if keyfile:
            given += f" and {group}.ssl_keyfile '{keyfile}'"
        raise UserError(
            f"{given} cannot be used for TLS ({_reason(error)}). They must be PEM files of a "
            "certificate, with its chain, and of its unencrypted private key."
        ) from error
    return context


def client_context(setting: str, cafile: str) -> ssl.SSLContext:
    """The TLS context that a client checks servers with: the authorities in `cafile`, or the
    system's if it is empty. setting: the setting that named the file. Raises `UserError` for a file
    without certificates."""
    try:
        return ssl.create_default_context(cafile=cafile or None)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{setting} '{cafile}' cannot be used ({_reason(error)}). It must be a PEM file with "
            "the certificates of the authorities that servers are checked by."
        ) from error


def _reason(error: Exception) -> str:
    """OpenSSL's reason for an error, without its source lines."""
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return getattr(error, "strerror", None) or str(error)
