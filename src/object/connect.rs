//! Connections to stores. The client retries every failure to connect, for minutes. We return an untrusted certificate, or a server
//! without TLS, as an error immediately: a retry would fail in the same way.

use super::answer;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};
use std::pin::Pin;

/// Makes the client's own connections.
#[derive(Debug)]
pub(super) struct Connector;

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Service(client)))
    }
}

#[derive(Debug)]
struct Service(HttpClient);

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
            self.0.execute(request).await.map_err(|error| match is_final(&error) {
                true => HttpError::new(HttpErrorKind::Unknown, error), // is not tried again
                false => error,
            })
        })
    }
}

/// Whether the TLS of the server is refused, or missing.
fn is_final(error: &HttpError) -> bool {
    answer::is_about_tls(&answer::deepest(error))
}
