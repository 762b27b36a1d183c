//! The `ringstow` program: inspects, verifies and cleans up checkpoints, and checks machines. It calls the
//! library and prints the result; it can do nothing that the library cannot.
//!
//! One file per command. Each gathers its facts first, then prints a table or JSON.

mod bench;
mod clearing;
mod config;
mod diff;
mod doctor;
mod ls;
mod output;
mod place;
mod places;
mod progress;
mod promote;
mod prune;
mod retain;
mod show;
mod slim;
mod table;
mod text;
mod top;
mod values;
mod verify;

use crate::engine::io_mode::EngineKind;
use crate::error::{Error, Result};
use clap::{Args, Parser, Subcommand};
use output::Output;
use std::ffi::OsString;
use std::sync::LazyLock;
use table::WIDTH_MAX;

const EXAMPLES: &str = "\
Examples:
  ringstow ls checkpoints                 list checkpoints and whether they can be loaded
  ringstow top checkpoints                show the saves and copies in progress
  ringstow show checkpoints/step-1000     show the tensors and values of one checkpoint
  ringstow verify checkpoints             read every byte and compare every checksum
  ringstow diff run/step-900 run/step-1000
                                          show which tensors and values differ
  ringstow retain checkpoints --keep 3    remove all but the newest 3
  ringstow slim checkpoints/step-1000 --drop optimizer
                                          drop the optimizer's state, free its space
  ringstow promote run/step-1000 --to s3://bucket/run/step-1000
                                          copy it to a store or another disk
  ringstow doctor /mnt/nvme               check this machine and this directory
  ringstow bench /mnt/nvme --gb 4         measure saves and loads there, beside fio
  ringstow convert run/step-1000 hf       convert to and from torch.save, DCP, Hugging Face
  ringstow report run -o report.html      one page of a run: sizes, metrics, changes, health

Exit codes:
  0  success
  1  verify found damage, diff a difference, doctor a failed check; or retain,
     prune or slim could not remove something
  2  failure: no such path, no checkpoint there, wrong arguments";

/// The version, the engines of this build, and what else it has.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let engines = EngineKind::ALL.into_iter().filter(|kind| kind.is_built()).map(EngineKind::name);
    let has = [(cfg!(feature = "cuda"), "CUDA"), (cfg!(feature = "object-store"), "object stores")];
    let has = has.into_iter().filter_map(|(is_built, what)| is_built.then_some(what));
    let parts: Vec<&str> = engines.chain(has).collect();
    format!("{} ({})", env!("CARGO_PKG_VERSION"), parts.join(", "))
});

/// Inspect, verify and clean up training checkpoints written by ringstow.
#[derive(Debug, Parser)]
#[command(name = "ringstow", bin_name = "ringstow", version = VERSION.as_str(), after_help = EXAMPLES)]
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
    Diff(diff::Diff),
    Top(top::Top),
    Prune(prune::Prune),
    Retain(retain::Retain),
    Slim(slim::Slim),
    Promote(promote::Promote),
    Doctor(doctor::Doctor),
    Bench(bench::Bench),
    /// Convert a checkpoint to or from torch.save, DCP or Hugging Face safetensors (Python package)
    Convert(PythonArgs),
    /// Write one page of a run, as HTML: sizes, metrics, tensors, changes, health (Python package)
    Report(PythonArgs),
}

/// How the program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Exit {
    /// All is well.
    Success = 0,
    /// The command found damage or a failed check, or could not do all of its work.
    Found = 1,
    /// The command failed.
    Failed = 2,
    /// Ctrl-C or SIGTERM stopped the command.
    Interrupted = 130,
}

/// Runs the program with these arguments, the first of which is its name, and returns its exit code.
/// The library's warnings go to the process's `tracing` subscriber.
pub fn run(args: impl IntoIterator<Item = OsString>) -> u8 {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(usage) => {
            // clap prints help to stdout and errors to stderr; a closed pipe does not matter.
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
        Command::Diff(args) => diff::run(&args, out),
        Command::Top(args) => top::run(&args, out),
        Command::Prune(args) => prune::run(&args, out),
        Command::Retain(args) => retain::run(&args, out),
        Command::Slim(args) => slim::run(&args, out),
        Command::Promote(args) => promote::run(&args, out),
        Command::Doctor(args) => doctor::run(&args, out),
        Command::Bench(args) => bench::run(&args, out),
        Command::Convert(args) => {
            python_only("convert", &args, "needs PyTorch to read and write its formats")
        }
        Command::Report(args) => python_only("report", &args, "is not in this program"),
    }
}

/// Prints an error on stderr: on one line, except an error in a file, which shows the line concerned.
fn complain(error: &Error) -> Exit {
    match error {
        Error::Cancelled { .. } => {
            output::note("interrupted");
            return Exit::Interrupted;
        }
        // A line break in the path must not break the message.
        Error::Format { path, reason } => {
            output::say(&format!("{}: {}", text::path(path), text::lines(reason)));
        }
        error => output::note(&error.to_string()),
    }
    Exit::Failed
}

/// The arguments of a command of the Python package, which this program only names: `convert`, since only torch reads and
/// writes torch's formats, and `report`.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
struct PythonArgs {
    /// Arguments of the Python package
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Says that the Python package has the command, and `why`.
fn python_only(command: &str, PythonArgs { args }: &PythonArgs, why: &str) -> Result<Exit> {
    Err(Error::Unsupported {
        what: format!("{command} {} {why}", args.join(" ")),
        remedy:
            "install the Python package (pip install ringstow), whose `ringstow` program has it"
                .into(),
    })
}
