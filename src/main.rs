//! The `ringstow` program; see [`ringstow::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    ringstow::cli::run(std::env::args_os()).into()
}
