//! Connections to stores: reqwest over rustls, with ring for the cryptography.
//!
//! The store's client retries every failure to connect, for minutes. We return an untrusted certificate, or a server without
//! TLS, as an error immediately: a retry would fail in the same way.

use super::answer;
use http_body_util::BodyExt;
use object_store::client::{
    ClientConfigKey, HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest,
    HttpRequestBody, HttpResponse, HttpResponseBody, HttpService,
};
use object_store::{ClientOptions, Error};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Body, Client, Request};
use rustls::ClientConfig;
use rustls_platform_verifier::BuilderVerifierExt;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use std::{error, io};

/// How long a request may take, its body included: a part of 256 MiB at 1 MB/s. A silent store has no limit here: the HTTP client
/// counts the time in which a body is sent as silence.
const REQUEST: Duration = Duration::from_secs(300);

/// Makes connections.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    /// A client with two of the options: whether it may do without TLS, and how long a connection may take. The services that
    /// hand out a machine's credentials get different values of both.
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let option = |key| options.get_config_value(&key);
        let allows_http = option(ClientConfigKey::AllowHttp).is_some_and(|text| text == "true");
        let mut builder = Client::builder()
            .user_agent(concat!("ringstow/", env!("CARGO_PKG_VERSION")))
            .https_only(!allows_http)
            .http1_only()
            // A program may have them on in reqwest, which is one crate for all; the store's client needs lengths as they are.
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .timeout(REQUEST)
            .dns_resolver(Arc::new(AnyAddress))
            .tls_backend_preconfigured(tls().map_err(not_made)?);
        if let Some(limit) = option(ClientConfigKey::ConnectTimeout) {
            builder = builder.connect_timeout(humantime::parse_duration(&limit).map_err(not_made)?);
        }
        Ok(HttpClient::new(Service(builder.build().map_err(not_made)?)))
    }
}

fn not_made(why: impl error::Error + Send + Sync + 'static) -> Error {
    Error::Generic { store: "HTTP", source: Box::new(why) }
}

/// TLS that trusts what this machine trusts. Its cryptography is named here: a program's own choice for the process is left alone.
fn tls() -> Result<ClientConfig, rustls::Error> {
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(ring).with_safe_default_protocol_versions()?;
    Ok(builder.with_platform_verifier()?.with_no_client_auth())
}

/// Resolves a name to its addresses in random order: a store has many servers, and the system would give all ranks the same first one.
#[derive(Debug)]
struct AnyAddress;

impl Resolve for AnyAddress {
    fn resolve(&self, name: Name) -> Resolving {
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let mut found: Vec<SocketAddr> = found.collect();
            fastrand::shuffle(&mut found);
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

#[derive(Debug)]
struct Service(Client);

impl HttpService for Service {
    fn call<'client, 'call>(
        &'client self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'call>>
    where
        'client: 'call,
        Self: 'call,
    {
        Box::pin(async move {
            let mut request = request.map(body);
            let is_conditional = condition(&mut request);
            let request = Request::try_from(request).map_err(failed)?;
            let answer = self.0.execute(request).await.map_err(failed)?;
            let (mut head, body) = http::Response::<Body>::from(answer).into_parts();
            if is_conditional && head.status == http::StatusCode::NOT_IMPLEMENTED {
                head.status = http::StatusCode::BAD_REQUEST; // for good: the client would retry
            }
            let body = HttpResponseBody::new(body.map_err(failed));
            Ok(HttpResponse::from_parts(head, body))
        })
    }
}

/// A header that makes a request conditional: its name and value.
pub(super) type Condition = (&'static str, String);

tokio::task_local! {
    /// The condition of the removal that this task makes.
    static ONLY_IF: Option<Condition>;
}

/// Runs the removal of an object on a condition. The store's client has no such call, so its request gets the header here.
pub(super) async fn only_if<T>(
    condition: Option<Condition>,
    removal: impl Future<Output = T>,
) -> T {
    ONLY_IF.scope(condition, removal).await
}

/// Adds the condition to a request that removes an object; tells whether it has one.
fn condition<T>(request: &mut http::Request<T>) -> bool {
    let found = ONLY_IF.try_with(Clone::clone).ok().flatten();
    let Some((name, value)) = found.filter(|_| request.method() == http::Method::DELETE) else {
        return false;
    };
    let Ok(value) = http::HeaderValue::try_from(value) else { return false };
    request.headers_mut().insert(name, value);
    true
}

/// The body of a request. Bytes can be sent again where the store redirects to.
fn body(of: HttpRequestBody) -> Body {
    match of.as_bytes() {
        Some(bytes) => bytes.clone().into(),
        None => Body::wrap(of),
    }
}

/// The error without its URL, which callers name, and whether the store's client may try again.
fn failed(error: reqwest::Error) -> HttpError {
    HttpError::new(kind(&error), error.without_url())
}

fn kind(error: &reqwest::Error) -> HttpErrorKind {
    // The TLS of the server is refused, or missing.
    if answer::is_about_tls(&answer::deepest(error)) {
        return HttpErrorKind::Unknown;
    }
    if error.is_timeout() {
        return HttpErrorKind::Timeout;
    }
    if error.is_connect() {
        return HttpErrorKind::Connect;
    }
    if error.is_decode() {
        return HttpErrorKind::Decode;
    }
    let causes = std::iter::successors(error::Error::source(error), |cause| cause.source());
    causes.filter_map(kind_of_cause).next().unwrap_or(HttpErrorKind::Unknown)
}

/// What a cause says of whether the request may be sent again: the connection broke before an answer, or in the middle of one.
fn kind_of_cause(cause: &(dyn error::Error + 'static)) -> Option<HttpErrorKind> {
    use io::ErrorKind as K;
    if let Some(hyper) = cause.downcast_ref::<hyper::Error>() {
        if hyper.is_closed() || hyper.is_incomplete_message() || hyper.is_body_write_aborted() {
            return Some(HttpErrorKind::Request);
        }
        return hyper.is_timeout().then_some(HttpErrorKind::Timeout);
    }
    match cause.downcast_ref::<io::Error>()?.kind() {
        K::TimedOut => Some(HttpErrorKind::Timeout),
        K::ConnectionAborted | K::ConnectionReset | K::BrokenPipe | K::UnexpectedEof => {
            Some(HttpErrorKind::Interrupted)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_alone_gets_the_condition_of_its_task() {
        let made = |method: http::Method| {
            let mut request = http::Request::builder().method(method).body(()).unwrap();
            let is_conditional = condition(&mut request);
            (is_conditional, request.headers().get("if-match").map(|value| value.len()))
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let in_task = |method| {
            let seen = Some(("if-match", "\"tag\"".to_owned()));
            runtime.block_on(only_if(seen, async { made(method) }))
        };
        assert_eq!(in_task(http::Method::DELETE), (true, Some(5)));
        assert_eq!(in_task(http::Method::GET), (false, None));
        assert_eq!(made(http::Method::DELETE), (false, None));
    }
}
