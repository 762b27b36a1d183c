//! The `ringstow` program; see [`ringstow::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    print_warnings();
    ringstow::cli::run(std::env::args_os()).into()
}

/// Prints the library's warnings on stderr.
fn print_warnings() {
    let format = tracing_subscriber::fmt::format().without_time().with_target(false).compact();
    tracing_subscriber::fmt()
        .event_format(format)
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
}
