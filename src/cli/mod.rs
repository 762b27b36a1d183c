//! The `ringstow` program: looks at checkpoints, checks them, clears up, and tells what a machine
//! can do. It calls the library and prints; it knows nothing that the library does not.
//!
//! One file a command: each gathers first, then prints a table or JSON.

mod bench;
mod clearing;
mod config;
mod convert;
mod doctor;
mod ls;
mod output;
mod place;
mod progress;
mod prune;
mod retain;
mod show;
mod table;
mod text;
mod values;
mod verify;

use crate::error::{Error, Result};
use clap::{Parser, Subcommand};
use output::Output;
use std::ffi::OsString;
use table::WIDTH_MAX;

const EXAMPLES: &str = "\
Examples:
  ringstow ls checkpoints                 what is there, and what can be loaded
  ringstow show checkpoints/step-1000     tensors and values of one checkpoint
  ringstow verify checkpoints             read every byte, compare every checksum
  ringstow retain checkpoints --keep 3    remove all but the newest three
  ringstow doctor /mnt/nvme               what this machine and this directory can do
  ringstow bench /mnt/nvme --gb 4         how fast saves and loads are there
  ringstow convert run/step-1000 hf       to and from torch.save, DCP and Hugging Face

Exit codes:
  0  all is well
  1  damage was found (verify), or a check failed (doctor)
  2  it could not be done: no such path, no checkpoint there, wrong arguments";

/// Looks at, checks and clears up training checkpoints written by ringstow.
#[derive(Debug, Parser)]
#[command(name = "ringstow", bin_name = "ringstow", version, after_help = EXAMPLES)]
#[command(max_term_width = WIDTH_MAX as usize)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Ls(ls::Ls),
    Show(show::Show),
    Verify(verify::Verify),
    Prune(prune::Prune),
    Retain(retain::Retain),
    Doctor(doctor::Doctor),
    Bench(bench::Bench),
    Convert(convert::Convert),
}

/// How the program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exit {
    /// All is well.
    Ok = 0,
    /// What was looked at is not well.
    Found = 1,
    /// It could not be looked at.
    Failed = 2,
    /// Stopped by Ctrl-C or SIGTERM.
    Interrupted = 130,
}

/// Runs the program with these arguments, the first of which is its name, and returns its exit code.
/// What the library warns of goes wherever the process has it go.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(usage) => {
            // Help goes to stdout, anything else to stderr; a closed pipe is nobody's problem.
            let _ = usage.print();
            return usage.exit_code() as u8;
        }
    };
    let mut out = Output::stdout();
    let outcome = execute(cli.command, &mut out).and_then(|exit| {
        out.finish()?;
        Ok(exit)
    });
    outcome.unwrap_or_else(|error| complain(&error)) as u8
}

fn execute(command: Command, out: &mut Output) -> Result<Exit> {
    match command {
        Command::Ls(args) => ls::run(&args, out),
        Command::Show(args) => show::run(&args, out),
        Command::Verify(args) => verify::run(&args, out),
        Command::Prune(args) => prune::run(&args, out),
        Command::Retain(args) => retain::run(&args, out),
        Command::Doctor(args) => doctor::run(&args, out),
        Command::Bench(args) => bench::run(&args, out),
        Command::Convert(args) => convert::run(&args),
    }
}

/// Says on stderr what went wrong: in one line, but for a file that shows the line in question.
fn complain(error: &Error) -> Exit {
    match error {
        Error::Cancelled { .. } => {
            output::note("interrupted");
            return Exit::Interrupted;
        }
        // A line break in the path is no line break of the message's.
        Error::Format { path, reason } => {
            output::say(&format!("{}: {}", text::path(path), text::lines(reason)));
        }
        error => output::note(&error.to_string()),
    }
    Exit::Failed
}
