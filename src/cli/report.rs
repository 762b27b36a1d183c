//! `ringstow report`: only names the Python package, which has this command.

use super::Exit;
use crate::error::{Error, Result};
use clap::Args;

/// Write one page of a run, as HTML: sizes, metrics, tensors, changes, health (Python package)
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Report {
    /// Arguments of the Python package: DIRECTORY -o FILE and options
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

pub fn run(report: &Report) -> Result<Exit> {
    Err(Error::Unsupported {
        what: format!("report {} is not in this program", report.args.join(" ")),
        remedy:
            "install the Python package (pip install ringstow), whose `ringstow` program has it"
                .into(),
    })
}
