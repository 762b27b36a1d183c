//! Commands of the Python package, which this program only names: `convert`, since only torch reads and writes torch's
//! formats, and `report`.

use super::Exit;
use crate::error::{Error, Result};
use clap::Args;

/// The arguments of a command of the Python package.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub struct Python {
    /// Arguments of the Python package
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Says that the Python package has the command, and `why`.
pub fn run(command: &str, Python { args }: &Python, why: &str) -> Result<Exit> {
    Err(Error::Unsupported {
        what: format!("{command} {} {why}", args.join(" ")),
        remedy:
            "install the Python package (pip install ringstow), whose `ringstow` program has it"
                .into(),
    })
}
