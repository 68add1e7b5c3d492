"""Certificates for tests of TLS."""

import subprocess
from pathlib import Path


def authority(folder: Path) -> Path:
    """A folder with a new authority, a key, and a certificate that it has signed."""
    folder.mkdir()

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2")
    openssl("req", *new, "-subj", "/CN=machine", "-keyout", "key.pem", "-out", "cert.csr")
    openssl("x509", "-req", "-in", "cert.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-out", "cert.pem", "-days", "2")
    return folder
