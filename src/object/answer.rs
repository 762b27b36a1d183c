//! What a store's answer says, taken out of the client's text: `Server returned non-2xx status code: 403 Forbidden: <xml>`.

use std::io::ErrorKind;

const STATUS: &str = "status code: ";
const NO_TLS: &str = "scheme is not allowed";
const NOBODY: &str = "Connection refused";
const CERTIFICATE: &str = "invalid peer certificate";

/// The text of the error that the others were made of. They repeat it with the path, which the caller names.
pub(super) fn deepest(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(cause) = deepest.source() {
        deepest = cause;
    }
    deepest.to_string()
}

/// What the status means, where the client has no error of its own for it: lists are answered so.
pub(super) fn kind(text: &str) -> ErrorKind {
    // Nothing that passes.
    if text.contains(NO_TLS) || is_about_tls(text) || text.contains("redirect without LOCATION") {
        return ErrorKind::InvalidInput;
    }
    if text.contains(NOBODY) {
        return ErrorKind::ConnectionRefused;
    }
    match status(text).and_then(|(status, _)| status.get(..3)) {
        Some("401" | "403") => ErrorKind::PermissionDenied,
        Some("404") => ErrorKind::NotFound,
        // Worth another try: too early, too many, and conflicts.
        Some("408" | "409" | "425" | "429") => ErrorKind::Other,
        Some(status) if status.starts_with('4') => ErrorKind::InvalidInput,
        _ => ErrorKind::Other,
    }
}

/// The text in words; as it is, if it tells of no answer.
pub(super) fn plain(text: &str) -> String {
    if text.contains(NO_TLS) {
        return "the endpoint has no TLS, which AWS_ALLOW_HTTP=true (AZURE_ALLOW_HTTP, GOOGLE_ALLOW_HTTP) allows"
            .into();
    }
    if is_about_tls(text) {
        return tls(text);
    }
    let Some((status, body)) = status(text) else {
        let nobody = text.contains(NOBODY);
        let hint = if nobody { ": nobody listens at the endpoint (AWS_ENDPOINT_URL)" } else { "" };
        return format!("{text}{hint}");
    };
    let tell = |tag| between(body, tag).filter(|text| !text.is_empty());
    let code = tell("Code").map(|code| format!(", {code}")).unwrap_or_default();
    let message = tell("Message").map(|text| format!(": {text}")).unwrap_or_default();
    format!("the store answers {status}{code}{message}")
}

/// Why no store can be made of a URL and the environment.
pub(super) fn unmade(error: &object_store::Error) -> String {
    match deepest(error).contains("No CA certificates") {
        true => "there is no certificate of an authority, by which a store's own is checked: let SSL_CERT_FILE (SSL_CERT_DIR) \
                 name a PEM file (a directory) with one, or install ca-certificates"
            .into(),
        false => error.to_string(),
    }
}

/// Whether it says that the server's certificate is refused, or that the server speaks no TLS.
pub(super) fn is_about_tls(text: &str) -> bool {
    text.contains(CERTIFICATE) || text.contains("received corrupt message")
}

/// What to do about the TLS of a server.
fn tls(text: &str) -> String {
    let fix = match text {
        _ if !text.contains(CERTIFICATE) => {
            "the endpoint speaks no TLS: write http:// for https://, which AWS_ALLOW_HTTP=true (AZURE_ALLOW_HTTP, GOOGLE_ALLOW_HTTP) allows"
        }
        _ if text.contains("for name") => {
            "the endpoint's certificate is for another name: write that name in the endpoint's URL"
        }
        _ if text.contains("expired") || text.contains("not valid yet") => {
            "the endpoint's certificate is not valid now: renew it, or set this machine's clock"
        }
        _ => {
            "the endpoint's certificate is not trusted: set SSL_CERT_FILE to a PEM file with the certificate of the authority \
             that has signed it, or install that for this machine"
        }
    };
    format!("{fix} ({text})")
}

/// The status, such as `403 Forbidden`, and the answer's body.
fn status(text: &str) -> Option<(&str, &str)> {
    let (_, rest) = text.split_once(STATUS)?;
    Some(rest.split_once(": ").unwrap_or((rest, "")))
}

fn between<'a>(body: &'a str, tag: &str) -> Option<&'a str> {
    let (_, rest) = body.split_once(&format!("<{tag}>"))?;
    Some(rest.split_once(&format!("</{tag}>"))?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "Error performing PUT http://h/b/k in 1ms - Server returned non-2xx status code: 403 Forbidden: \
                        <Error><Code>AccessDenied</Code><Message>not you</Message></Error>";

    #[test]
    fn answer_is_told_in_words() {
        assert_eq!(plain(TEXT), "the store answers 403 Forbidden, AccessDenied: not you");
        assert_eq!(
            plain("x status code: 500 Internal Server Error: "),
            "the store answers 500 Internal Server Error"
        );
        assert_eq!(plain("reset by peer"), "reset by peer");
        assert!(plain("Connection refused (os error 111)").contains("nobody listens"));
        for (text, fix) in [
            ("invalid peer certificate: UnknownIssuer", "SSL_CERT_FILE"),
            ("invalid peer certificate: certificate not valid for name \"a\"", "that name"),
            ("invalid peer certificate: certificate expired: verification time 1", "renew it"),
            ("received corrupt message of type InvalidContentType", "http://"),
        ] {
            let told = plain(text);
            assert!(told.contains(fix) && told.contains(text), "{told}");
        }
    }

    #[test]
    fn status_has_a_meaning() {
        assert_eq!(kind(TEXT), ErrorKind::PermissionDenied);
        assert_eq!(kind("status code: 404 Not Found"), ErrorKind::NotFound);
        assert_eq!(kind("status code: 500 x"), ErrorKind::Other);
        assert_eq!(kind("nothing"), ErrorKind::Other);
        assert_eq!(kind("Connection refused (os error 111)"), ErrorKind::ConnectionRefused);
        assert_eq!(kind("URL scheme is not allowed"), ErrorKind::InvalidInput);
        assert_eq!(kind("invalid peer certificate: Expired"), ErrorKind::InvalidInput);
    }
}
