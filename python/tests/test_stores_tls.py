"""Stores behind TLS: what is not trusted is refused at once, and the error says what to do."""

import datetime

import pytest
import torch
from stores.tls import Authority, Front

import ringstow

STATE = {"w": torch.arange(100_000)}


@pytest.fixture
def saved(tmp_path):
    ringstow.save(STATE, tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture(autouse=True)
def no_other_authorities(monkeypatch):
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "authority")


@pytest.fixture
def fronted(bucket, monkeypatch):
    """Return a function that puts a certificate before the bucket's server."""
    fronts = []

    def start(certificate):
        front = Front(bucket.server.url, certificate)
        fronts.append(front)
        monkeypatch.setenv("AWS_ENDPOINT_URL", front.url)
        monkeypatch.delenv("AWS_ALLOW_HTTP")
        return front

    yield start
    for front in fronts:
        front.__exit__()


def test_certificate_of_an_unknown_authority_is_refused_at_once(saved, bucket, authority, fronted):
    front = fronted(authority.certify())
    with pytest.raises(OSError, match="set SSL_CERT_FILE to a PEM file") as caught:
        ringstow.promote(saved, f"{bucket.url}/x")
    assert "UnknownIssuer" in str(caught.value)
    assert "s3://" in str(caught.value)
    assert front.connections == 1  # no second try would go better
    with pytest.raises(OSError, match="set SSL_CERT_FILE to a PEM file"):
        ringstow.load(f"{bucket.url}/x")
    assert bucket.keys() == []


def test_authority_in_ssl_cert_file_is_trusted(saved, bucket, authority, fronted, monkeypatch):
    """Also after a refusal in the same process."""
    fronted(authority.certify())
    with pytest.raises(OSError, match="not trusted"):
        ringstow.promote(saved, f"{bucket.url}/x")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    ringstow.promote(saved, f"{bucket.url}/x")
    assert torch.equal(ringstow.load(f"{bucket.url}/x")["w"], STATE["w"])


def test_authority_in_ssl_cert_dir_is_trusted(saved, bucket, authority, fronted, monkeypatch):
    fronted(authority.certify())
    monkeypatch.setenv("SSL_CERT_DIR", str(authority.file.parent))
    ringstow.promote(saved, f"{bucket.url}/x")
    assert torch.equal(ringstow.load(f"{bucket.url}/x")["w"], STATE["w"])


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"host": "elsewhere.test"}, "write that name in the endpoint"),
        ({"valid": -datetime.timedelta(days=1)}, "renew it"),
    ],
    ids=["name", "expired"],
)
def test_wrong_certificate_of_a_trusted_authority_says_what_to_do(
    saved, bucket, authority, fronted, monkeypatch, options, fix
):
    front = fronted(authority.certify(**options))
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with pytest.raises(OSError, match=fix):
        ringstow.promote(saved, f"{bucket.url}/x")
    assert front.connections == 1


@pytest.mark.parametrize("content", [None, ""], ids=["missing", "empty"])
def test_unusable_ssl_cert_file_is_named(saved, bucket, monkeypatch, tmp_path, content):
    file = tmp_path / "authorities.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(ringstow.InvalidStateError, match="SSL_CERT_FILE"):
        ringstow.promote(saved, f"{bucket.url}/x")


def test_endpoint_without_tls_needs_a_word(saved, bucket, monkeypatch):
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(OSError, match="AWS_ALLOW_HTTP=true"):
        ringstow.promote(saved, f"{bucket.url}/x")
    assert bucket.keys() == []


def test_https_to_a_server_without_tls_says_so(saved, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.server.url.replace("http:", "https:"))
    with pytest.raises(OSError, match="speaks no TLS"):
        ringstow.promote(saved, f"{bucket.url}/x")
